package disk

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// DriverStatus tells whether a driver works on a host, for people.
type DriverStatus struct {
	Name string
	Err  error // why not
	// Note is what it does not bound.
	Note string
}

// Probe tells which drivers a Store below dir could use, in the order in which
// Open tries them. It leaves nothing behind; so it does not make an image, and
// the answer for btrfs and ext4 is about what they need.
func Probe(dir string) []DriverStatus {
	return []DriverStatus{
		{Name: "project", Err: probeProject(dir)},
		{
			Name: "btrfs", Err: errors.Join(needKernel("btrfs", 6, 7), needProgram("mkfs.btrfs"), needLoop()),
			Note: "files are bounded by bytes alone",
		},
		{Name: "ext4", Err: errors.Join(needKernel("ext4", 0, 0), needProgram("mkfs.ext4"), needLoop())},
	}
}

func probeProject(dir string) error {
	tmp, err := os.MkdirTemp(dir, ".dsec-probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	root, err := os.OpenRoot(tmp)
	if err != nil {
		return err
	}
	defer root.Close()
	s := &Store{opts: Options{Dir: tmp}, root: root, log: slog.New(slog.DiscardHandler), stop: make(chan struct{})}
	d, err := openProject(s)
	if err != nil {
		return err
	}
	close(s.stop)
	s.wg.Wait()
	return errors.Join(d.close(), d.destroy())
}

func needKernel(fstype string, major, minor int) error {
	fd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC) // loads the module
	if err != nil {
		return fmt.Errorf("no %s: %w", fstype, err)
	}
	_ = unix.Close(fd)
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	var a, b int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b); err != nil {
		return err
	}
	if a < major || a == major && b < minor {
		return fmt.Errorf("want Linux %d.%d or later", major, minor)
	}
	return nil
}

func needProgram(name string) error {
	if _, err := exec.LookPath(name); err != nil {
		return fmt.Errorf("%s is not installed", name)
	}
	return nil
}

// needLoop loads the loop driver where nothing has asked for it yet.
func needLoop() error {
	const control = "/dev/loop-control"
	if _, err := os.Stat(control); err == nil {
		return nil
	}
	// What counts is whether the device is there.
	out, merr := exec.Command("modprobe", "loop").CombinedOutput()
	if _, err := os.Stat(control); err != nil {
		return fmt.Errorf("no loop devices: modprobe: %w %s", cmp.Or(merr, err), bytes.TrimSpace(out))
	}
	return nil
}
