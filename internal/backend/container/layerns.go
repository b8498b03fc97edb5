package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/hostos"
)

// layerNS is the mount namespace in which layers are mounted and roots are
// composed: overlayfs takes only what its caller's namespace holds, or what is
// detached. No other process sees it. A bind mount of the namespace keeps it,
// and with it the page cache of every layer, when the backend's process ends;
// the next one enters it.
type layerNS struct {
	pin  string
	log  *slog.Logger
	said sync.Once   // that layers are mounted without loop devices
	jobs chan func() // run on the threads that are inside
	done sync.WaitGroup
}

// nsThreads is how many threads are inside.
const nsThreads = 2

func openLayerNS(pin string, log *slog.Logger) (*layerNS, error) {
	l := &layerNS{pin: pin, log: log, jobs: make(chan func())}
	if err := l.addThread(pin, true); err != nil {
		return nil, err
	}
	for range nsThreads - 1 {
		if err := l.addThread(pin, false); err != nil {
			l.close()
			return nil, err
		}
	}
	return l, nil
}

// close ends the threads. The namespace stays for as long as it is pinned.
func (l *layerNS) close() {
	close(l.jobs)
	l.done.Wait()
}

// addThread puts one more thread into the namespace, which the first makes if
// there is none.
func (l *layerNS) addThread(pin string, first bool) error {
	made, pinned, ready := make(chan int), make(chan error), make(chan error)
	l.done.Add(1)
	hostos.OnThread(func() {
		defer l.done.Done()
		err := enter(pin)
		if first && errors.Is(err, errNotPinned) {
			if err = makeLayerNS(); err == nil {
				made <- unix.Gettid()
				err = <-pinned
			}
		}
		ready <- err
		if err != nil {
			return
		}
		for job := range l.jobs {
			job()
		}
	})
	select {
	case err := <-ready:
		return err
	case tid := <-made:
		// A namespace is pinned from outside of it.
		pinned <- pinNamespace(fmt.Sprintf("/proc/self/task/%d/ns/mnt", tid), pin)
		return <-ready
	}
}

func pinNamespace(ns, pin string) error {
	f, err := os.OpenFile(pin, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return err
	}
	_ = f.Close()
	if err := unix.Mount(ns, pin, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pin %s: %w", pin, err)
	}
	return nil
}

var errNotPinned = errors.New("no namespace is pinned")

// enter moves the calling thread into the pinned namespace.
func enter(pin string) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	fd, err := unix.Open(pin, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return errNotPinned
	}
	if err != nil {
		return fmt.Errorf("%s: %w", pin, err)
	}
	defer unix.Close(fd)
	switch err := unix.Setns(fd, unix.CLONE_NEWNS); err {
	case nil:
		return nil
	case unix.EINVAL: // a plain file: a crash came before the pin
		return errNotPinned
	default:
		return fmt.Errorf("setns: %w", err)
	}
}

// makeLayerNS moves the calling thread into a new namespace that holds nothing
// but room for layers, and /proc.
func makeLayerNS() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private: %w", err)
	}
	root, err := newTmpfs(attrPlain | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	for _, dir := range []string{"proc", "layers", "facts", "compose"} {
		if err := unix.Mkdirat(root, dir, 0o700); err != nil {
			return err
		}
	}
	proc, err := newMount("proc", attrPlain|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(proc)
	if err := enterAlone(root, "/proc"); err != nil {
		return err
	}
	return attach(proc, unix.AT_FDCWD, "/proc")
}

// do runs f on a thread inside the namespace.
func (l *layerNS) do(f func() error) error {
	ch := make(chan error, 1)
	l.jobs <- func() { ch <- f() }
	return <-ch
}

// layerPath is where a layer is mounted. The backend has checked the digest.
func layerPath(digest string) string { return "/layers/" + strings.TrimPrefix(digest, "sha256:") }

// mount returns a descriptor (O_PATH) of a layer's root directory. The layer is
// mounted if it was not, from what open gives.
//
// A mount that this process makes comes back detached where copies can be made
// of it from outside of the namespace (free): no thread has to go inside for a
// create. What an earlier process mounted can only be copied inside.
func (l *layerNS) mount(digest string, open func() (backend.Devices, error)) (fd int, free bool, err error) {
	path := layerPath(digest)
	var found bool
	err = l.do(func() error {
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil {
			return err
		}
		found = st.Type == unix.EROFS_SUPER_MAGIC_V1
		return nil
	})
	if err != nil {
		return -1, false, err
	}
	outside := -1
	if !found {
		m, err := l.mountImage(open)
		if err != nil {
			return -1, false, errors.Join(err, l.do(func() error { return os.Remove(path) }))
		}
		if outside, free = detachedCopy(m); !free {
			outside = -1
		}
		err = l.do(func() error { return attach(m, unix.AT_FDCWD, path) })
		_ = unix.Close(m)
		if err != nil {
			closeAll([]int{outside})
			return -1, false, err
		}
	}
	if free {
		return outside, true, nil
	}
	err = l.do(func() error {
		fd, err = unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	return fd, false, err
}

// detachedCopy copies a detached mount, if copies of copies can be made too:
// since Linux 6.15, by threads of the namespace that the mount was made in.
func detachedCopy(mount int) (fd int, ok bool) {
	fd, err := cloneMount(mount, "", 0)
	if err != nil {
		return -1, false
	}
	return fd, true
}

// mountImage mounts an EROFS image.
//
// One with data on another device is mounted through loop devices. From a file the
// kernel reads each page by a call of its own, and keeps it twice, as the file's and
// as EROFS's. From a loop device it reads as far as it reads ahead at once, past the
// cache of the file.
//
// What is filled on read must be read as a file. Small images need no device.
func (l *layerNS) mountImage(open func() (backend.Devices, error)) (int, error) {
	d, err := open()
	if err != nil {
		return -1, err
	}
	defer d.Close()
	if len(d.Files) > 1 && !d.OnRead {
		fd, err := mountLoops(d)
		if err == nil {
			return fd, nil
		}
		l.said.Do(func() { // no loop devices here, or too many
			l.log.Warn("layers are mounted from files, and not through loop devices: their reads are small, and kept twice in memory", "err", err)
		})
	}
	paths := make([]string, len(d.Files))
	for i, f := range d.Files {
		paths[i] = procPath(int(f.Fd()))
	}
	fd, err := mountErofs(paths)
	if errors.Is(err, unix.ENOTBLK) && !d.OnRead { // before Linux 6.12, or from a tmpfs
		return mountLoops(d)
	}
	return fd, err
}

func mountLoops(d backend.Devices) (int, error) {
	var paths []string
	for _, f := range d.Files {
		loop, path, err := attachLoop(int(f.Fd()))
		if err != nil {
			return -1, err
		}
		defer unix.Close(loop) // autoclear: the mount holds the device from here on
		paths = append(paths, path)
	}
	return mountErofs(paths)
}

func mountErofs(devices []string) (int, error) {
	options := []option{{Key: "source", Value: devices[0]}, {Key: "ro"}}
	for _, d := range devices[1:] {
		options = append(options, option{Key: "device", Value: d})
	}
	return newMount("erofs", attrReadOnly, options...)
}

// layerReadAhead is how many bytes of a layer the kernel reads at once around what
// is asked for. A store that answers after 1 ms gives `go version` in 250 ms with
// the usual 128 KiB, in 140 with 512 and, of a tenth more bytes, with 1024.
const layerReadAhead = 512 << 10

// attachLoop makes a read-only loop device of a file, which frees itself. It reads
// past the file's page cache where the file's system can.
func attachLoop(image int) (fd int, path string, err error) {
	control, err := openDevice("loop-control", unix.S_IFCHR, 10, 237)
	if err != nil {
		return -1, "", err
	}
	defer unix.Close(control)
	for range 16 { // another process may take the free one first
		n, err := unix.IoctlRetInt(control, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return -1, "", fmt.Errorf("loop: %w", err)
		}
		loop, err := openDevice(fmt.Sprintf("loop%d", n), unix.S_IFBLK, 7, uint32(n))
		if err != nil {
			return -1, "", err
		}
		config := unix.LoopConfig{Fd: uint32(image)}
		config.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
		err = unix.IoctlLoopConfigure(loop, &config)
		if err == nil {
			// A hint: where it fails reads are smaller.
			_ = unix.IoctlSetInt(loop, unix.BLKRASET, layerReadAhead/512)
			return loop, procPath(loop), nil
		}
		_ = unix.Close(loop)
		if err != unix.EBUSY {
			return -1, "", fmt.Errorf("loop: %w", err)
		}
	}
	return -1, "", errors.New("loop: no free device")
}

// ProbeLoop reports whether layers can be mounted through loop devices, and whether
// these read files below dir past the page cache.
func ProbeLoop(dir string) (direct bool, err error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return false, fmt.Errorf("%s: %w", dir, err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 1<<20); err != nil {
		return false, err
	}
	loop, _, err := attachLoop(fd)
	if err != nil {
		return false, err
	}
	defer unix.Close(loop)
	info, err := unix.IoctlLoopGetStatus64(loop)
	if err != nil {
		return false, fmt.Errorf("loop: %w", err)
	}
	return info.Flags&unix.LO_FLAGS_DIRECT_IO != 0, nil
}

// openDevice opens a device by its number: no /dev is mounted here.
func openDevice(name string, kind, major, minor uint32) (int, error) {
	dir, err := newMount("tmpfs", unix.MOUNT_ATTR_NOSUID)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	if err := unix.Mknodat(dir, name, kind|0o600, int(unix.Mkdev(major, minor))); err != nil {
		return -1, err
	}
	fd, err := unix.Openat(dir, name, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", name, err)
	}
	return fd, nil
}

// drop unmounts a layer. Containers that use it keep it: they have copies. The end
// of a mount waits for what is read ahead from its store, for as long as that takes:
// on a thread of its own, which the caller need not wait for. gone is called when it
// has ended, however late.
func (l *layerNS) drop(ctx context.Context, digest string, gone func()) error {
	done := make(chan error, 1)
	hostos.OnThread(func() {
		err := enter(l.pin)
		if err == nil {
			err = dropLayer(layerPath(digest))
		}
		if err == nil {
			gone()
		}
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// dropLayer frees the path before the mount ends: whoever did not wait may have
// mounted the layer there again by then.
func dropLayer(path string) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil
	} else if err != nil {
		return err
	}
	// The last descriptor waits for the end.
	defer unix.Close(fd)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
