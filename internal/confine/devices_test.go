package confine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// A cgroup needs a v2 mount; where it is, is internal/cgroup's knowledge, which
// this package is below.
func testCgroup(t testing.TB) int {
	t.Helper()
	testutil.Require(t, testutil.Root, testutil.CgroupV2)
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			dir := filepath.Join(f[1], testutil.Name(t))
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Rmdir(dir); err != nil {
					t.Error(err)
				}
			})
			fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Close(fd) })
			return fd
		}
	}
	t.Fatal("no cgroup2 mount")
	return -1
}

func TestDevicesOpenWhatASandboxHas(t *testing.T) {
	cgroup := testCgroup(t)
	d, err := NewDevices()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	dir := testutil.Dir(t)
	paths := map[string]bool{}
	node := func(name string, kind uint32, major, minor uint32, want bool) {
		path := filepath.Join(dir, name)
		if err := unix.Mknod(path, kind|0o666, int(unix.Mkdev(major, minor))); err != nil {
			t.Fatal(err)
		}
		paths[path] = want
	}
	for _, n := range DevNodes() {
		if n.Name != "tty" { // this process may have none
			node(n.Name, unix.S_IFCHR, n.Major, n.Minor, true)
		}
	}
	node("ptmx", unix.S_IFCHR, 5, 2, true)
	node("kmsg", unix.S_IFCHR, 1, 11, false)
	node("mem", unix.S_IFCHR, 1, 1, false)
	node("loop0", unix.S_IFBLK, 7, 0, false)
	node("loop-control", unix.S_IFCHR, 10, 237, false)
	node("kvm", unix.S_IFCHR, 10, 232, false)
	node("null as a block device", unix.S_IFBLK, 1, 3, false)
	try := func(path string) bool {
		cmd := exec.Command("/bin/sh", "-c", `exec <"$1"`, "sh", path)
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: cgroup}
		var exit *exec.ExitError
		err := cmd.Run()
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return err == nil
	}
	free := map[string]bool{}
	for path := range paths {
		free[path] = try(path)
	}
	if err := d.Attach(cgroup); err != nil {
		t.Fatal(err)
	}
	controls := 0
	for path, want := range paths {
		if got := try(path); got != (want && free[path]) {
			t.Errorf("%s: opens %v, want %v", filepath.Base(path), got, want)
		}
		if !want && free[path] {
			controls++ // it opened before
		}
		if want && !free[path] && filepath.Base(path) != "ptmx" {
			t.Errorf("%s does not open without the program", path)
		}
	}
	if controls < 2 {
		t.Errorf("only %d of the refused devices opened without the program", controls)
	}
}

func BenchmarkDevicesAttach(b *testing.B) {
	cgroup := testCgroup(b)
	d, err := NewDevices()
	if err != nil {
		b.Skip(err)
	}
	defer d.Close()
	// A child each, since a cgroup takes a program once.
	var n int
	for b.Loop() {
		b.StopTimer()
		name := fmt.Sprint("c", n)
		n++
		if err := unix.Mkdirat(cgroup, name, 0o755); err != nil {
			b.Fatal(err)
		}
		fd, err := unix.Openat(cgroup, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if err := d.Attach(fd); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		_ = unix.Close(fd)
		if err := unix.Unlinkat(cgroup, name, unix.AT_REMOVEDIR); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
