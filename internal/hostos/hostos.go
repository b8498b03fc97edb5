// Package hostos is what several packages ask of the machine in the same words:
// a file that one process holds, names that outlive the node's power, which boot
// this is, and a thread for one function.
package hostos

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked means that another process, or this one by another call, holds the file.
var ErrLocked = errors.New("held by another process")

// Lock makes the file at path, if it is missing, and holds it until it is
// closed: the kernel lets go of it with the process, however that ends. Its
// error is ErrLocked where somebody else holds it.
func Lock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", path, ErrLocked)
	case err != nil:
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// SyncDir returns once the names in dir would be found again after a loss of
// power: a file's own Sync does not promise that of its name.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// BootID names this run of the kernel: what only memory holds is gone once it differs.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(b)), err
}
