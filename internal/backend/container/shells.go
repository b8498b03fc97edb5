package container

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/hostos"
)

// shells starts containers: a fork, a list of system calls, an exec of
// chronus. It works in a mount namespace of its own, whose root is the
// platform: what a container gets of its host. A container begins with a copy
// of it and leaves it behind when chronus moves to the sandbox's root.
//
//	/chronus, /chronus-files   mode 0111, of an owner that no container maps
//	/dev         shared devices, read-only
//	/mask/dir, /mask/file   what covers the entries of /proc
//	/newroot, /proc         mount points
//	/hostproc    proc of the host: an unprivileged mount of proc is allowed only
//	             where one that is not covered can be seen; also used by us
type shells struct {
	conn  *packetSocket
	ended chan error // what each forker ended with
	slots *netSlots
	files filesParts
	debug bool
	// commandNamespaces: chronus stays in the cgroup namespace of the host.
	commandNamespaces bool

	mu        sync.Mutex
	masks     *maskList
	masksRead time.Time
}

// maskList is what must be covered in /proc.
type maskList struct{ all []confine.Mask }

// forkers is how many threads fork. More would only wait for each other.
const forkers = 2

// openShells starts the forkers, which serve the socket until it closes.
func openShells(h *helloRequest, conn *packetSocket, watch *confine.SocketWatch, chronus, files *os.File) (*shells, error) {
	platform, err := makePlatform(chronus, files)
	if err != nil {
		return nil, err
	}
	defer unix.Close(platform)
	parts, err := openFilesParts(platform)
	if err != nil {
		return nil, err
	}
	s := &shells{conn: conn, ended: make(chan error, forkers), slots: newNetSlots(h.NetSlots, watch), files: parts, debug: h.Debug, commandNamespaces: h.CommandNamespaces}
	first := make(chan int)
	failed := make(chan error)
	hostos.OnThread(func() {
		ns, err := enterPlatform(platform)
		if err != nil {
			failed <- err
			return
		}
		first <- ns
		s.ended <- newForker(s).serve()
	})
	var ns int
	select {
	case err := <-failed:
		return nil, err
	case ns = <-first:
	}
	defer unix.Close(ns)
	for range forkers - 1 {
		hostos.OnThread(func() {
			err := unix.Unshare(unix.CLONE_FS)
			if err == nil {
				err = unix.Setns(ns, unix.CLONE_NEWNS)
			}
			failed <- err
			if err == nil {
				s.ended <- newForker(s).serve()
			}
		})
	}
	for range forkers - 1 {
		if err := <-failed; err != nil {
			return nil, fmt.Errorf("setns: %w", err)
		}
	}
	return s, nil
}

// makePlatform makes the tmpfs of what containers share.
func makePlatform(chronus, files *os.File) (int, error) {
	umask := unix.Umask(0)
	defer unix.Umask(umask)
	fd, err := newMount("tmpfs", unix.MOUNT_ATTR_NOSUID, option{Key: "source", Value: "dsec"}, option{Key: "mode", Value: "0755"})
	if err != nil {
		return -1, err
	}
	for _, dir := range []string{"newroot", "proc", "hostproc", "mask", "mask/dir", "dev"} {
		if err := makeDir(fd, dir); err != nil {
			return -1, err
		}
	}
	if err := errors.Join(writeFile(fd, "mask/file", nil, 0o444), writeFile(fd, "mask/loadavg", []byte(confine.Loadavg), 0o444)); err != nil {
		return -1, err
	}
	if err := copyFile(fd, "chronus", chronus, 0o111); err != nil {
		return -1, err
	}
	if err := copyFile(fd, "chronus-files", files, 0o111); err != nil {
		return -1, err
	}
	for _, d := range confine.DevNodes() {
		if err := unix.Mknodat(fd, "dev/"+d.Name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.Major, d.Minor))); err != nil {
			return -1, fmt.Errorf("%s: %w", d.Name, err)
		}
	}
	if err := writeFiles(fd, "dev/", confine.DevFiles()); err != nil {
		return -1, err
	}
	return fd, nil
}

// enterPlatform moves the calling thread into a new mount namespace with the
// platform as its root, and returns a descriptor of the namespace.
func enterPlatform(platform int) (int, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return -1, fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return -1, fmt.Errorf("private: %w", err)
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/self/task/%d/ns/mnt", unix.Gettid()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	proc, err := newMount("proc", attrPlain|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(proc)
	if err := enterAlone(platform, "/proc"); err != nil {
		return -1, err
	}
	if err := attach(proc, unix.AT_FDCWD, "/hostproc"); err != nil {
		return -1, err
	}
	// Of the platform only /dev has devices.
	dev, err := cloneMount(unix.AT_FDCWD, "/dev", unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dev)
	if err := attach(dev, unix.AT_FDCWD, "/dev"); err != nil {
		return -1, err
	}
	// Containers' copies of this mount are read-only and cannot be made otherwise.
	return ns, unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: attrReadOnly})
}

// maskAge bounds how long the list of what to cover in /proc is kept: a module
// may bring a new entry.
const maskAge = 5 * time.Second

// procMasks lists what must be covered in /proc.
func (s *shells) procMasks() (*maskList, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.masks != nil && time.Since(s.masksRead) < maskAge {
		return s.masks, nil
	}
	masks, err := confine.ProcMasks("/hostproc")
	if err != nil {
		return nil, err
	}
	if s.masks == nil || !slices.Equal(masks, s.masks.all) { // programs are made anew where these are
		s.masks = &maskList{masks}
	}
	s.masksRead = time.Now()
	return s.masks, nil
}
