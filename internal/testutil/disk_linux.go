package testutil

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// SmallDisk returns a directory on a file system of its own, which has no room
// beyond the options of a tmpfs: "size=8m,nr_inodes=16". It needs Root.
func SmallDisk(t testing.TB, options string) string {
	t.Helper()
	dir := filepath.Join(Dir(t), "disk")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("dsec-test", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Fill leaves no room in the file system of dir, and returns the file in it
// that takes it all: whoever removes that has room again.
func Fill(t testing.TB, dir string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "fill")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	chunk := make([]byte, 64<<10)
	for err == nil {
		_, err = f.Write(chunk)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk does not become full: %v", err)
	}
	return path
}
