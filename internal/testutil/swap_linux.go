package testutil

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Swap gives the host so much swap more until the end of the test: compressed
// memory in a zram device of its own or, where the kernel has none, a file. It
// needs Root, and skips the test where neither can be had. What is in it then
// must fit into memory again.
func Swap(t testing.TB, size int64) {
	t.Helper()
	path, err := swapDevice(t, size)
	if err != nil {
		if path, err = swapFile(t, size); err != nil {
			t.Skipf("needs swap: %v", err)
		}
	}
	if err := writeSwapHeader(path, size); err != nil {
		t.Fatal(err)
	}
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		t.Fatal(err)
	}
	call := func(number uintptr) error {
		if _, _, errno := unix.Syscall(number, uintptr(unsafe.Pointer(name)), 0, 0); errno != 0 {
			return errno
		}
		return nil
	}
	if err := call(unix.SYS_SWAPON); err != nil {
		t.Skipf("needs swap: swapon %s: %v", path, err)
	}
	t.Cleanup(func() {
		if err := call(unix.SYS_SWAPOFF); err != nil {
			t.Errorf("swapoff %s: %v", path, err)
		}
	})
}

// swapDevice makes a zram device.
func swapDevice(t testing.TB, size int64) (string, error) {
	const control = "/sys/class/zram-control/"
	if _, err := os.Stat(control); err != nil {
		if out, err := exec.Command("modprobe", "zram", "num_devices=0").CombinedOutput(); err != nil {
			return "", fmt.Errorf("modprobe zram: %w: %s", err, out)
		}
	}
	id, err := os.ReadFile(control + "hot_add")
	if err != nil {
		return "", err
	}
	n := strings.TrimSpace(string(id))
	t.Cleanup(func() {
		if err := os.WriteFile(control+"hot_remove", []byte(n), 0); err != nil {
			t.Errorf("zram%s: %v", n, err)
		}
	})
	return "/dev/zram" + n, os.WriteFile("/sys/block/zram"+n+"/disksize", fmt.Append(nil, size), 0)
}

// swapFile makes a file for swap: all its blocks are there.
func swapFile(t testing.TB, size int64) (string, error) {
	f, err := os.CreateTemp("/var/tmp", Name(t)) // a tmpfs holds no swap
	if err != nil {
		return "", err
	}
	t.Cleanup(func() { _ = os.Remove(f.Name()) })
	zeros := make([]byte, 1<<20)
	for at := int64(0); at < size && err == nil; at += int64(len(zeros)) {
		_, err = f.Write(zeros)
	}
	return f.Name(), errors.Join(err, f.Sync(), f.Close())
}

// writeSwapHeader writes what mkswap(8) does.
func writeSwapHeader(path string, size int64) error {
	page := os.Getpagesize()
	header := make([]byte, page)
	const version, lastPage = 1024, 1028
	binary.NativeEndian.PutUint32(header[version:], 1)
	binary.NativeEndian.PutUint32(header[lastPage:], uint32(size/int64(page)-1))
	copy(header[page-10:], "SWAPSPACE2")
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(header)
	return errors.Join(err, f.Close())
}
