package container

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/rawexec"
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
	jobs  chan startJob
	slots *netSlots
	debug bool

	mu        sync.Mutex
	masks     []confine.Mask
	masksRead time.Time
}

type startJob struct {
	req              *startRequest
	listener, cgroup int
	done             func(pid int, fds []int, err error)
}

// forkers is how many threads fork. More would only wait for each other.
const forkers = 2

func openShells(h *helloRequest, chronus, files *os.File) (*shells, error) {
	platform, err := makePlatform(chronus, files)
	if err != nil {
		return nil, err
	}
	defer unix.Close(platform)
	s := &shells{jobs: make(chan startJob, 256), slots: newNetSlots(h.NetSlots), debug: h.Debug}
	first := make(chan int)
	failed := make(chan error)
	onThread(func() {
		ns, err := enterPlatform(platform)
		if err != nil {
			failed <- err
			return
		}
		first <- ns
		s.serve()
	})
	var ns int
	select {
	case err := <-failed:
		return nil, err
	case ns = <-first:
	}
	defer unix.Close(ns)
	for range forkers - 1 {
		onThread(func() {
			err := unix.Unshare(unix.CLONE_FS)
			if err == nil {
				err = unix.Setns(ns, unix.CLONE_NEWNS)
			}
			failed <- err
			if err == nil {
				s.serve()
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
	if err := writeFile(fd, "mask/file", nil, 0o444); err != nil {
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

// serve starts containers until the process ends.
func (s *shells) serve() {
	for job := range s.jobs {
		s.start(job)
		_ = unix.Close(job.listener)
		_ = unix.Close(job.cgroup)
	}
}

// start starts a container, and answers its job once the container's IDs are
// mapped: it goes on to make its mounts. start itself returns once it has
// exec'd chronus, because the child borrows this process's memory: a copy of
// it would make every later write of this process a page fault.
func (s *shells) start(job startJob) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		job.done(0, nil, err)
		return
	}
	pid := new(int32)
	answered := make(chan error, 1)
	go func() { answered <- handshake(job, pair[0], pid) }()
	err = s.clone(job, pair[1], pid)
	_ = unix.Close(pair[1])
	switch herr := <-answered; {
	case herr != nil:
		job.done(0, nil, errors.Join(err, herr))
	case err != nil:
		// The backend learns of it by the pidfd; this is for the log.
		fmt.Fprintf(os.Stderr, "dsec launcher: container: %v\n", err)
	}
}

// clone returns when the child has exec'd or has failed to.
func (s *shells) clone(job startJob, goFD int, pid *int32) error {
	masks, err := s.procMasks()
	if err != nil {
		return err
	}
	slot, err := s.slots.take()
	if err != nil {
		return err
	}
	// The child is born in the slot's namespace; this thread does nothing else with it.
	if err := unix.Setns(slot.fd, unix.CLONE_NEWNET); err != nil {
		_ = unix.Close(slot.fd)
		return fmt.Errorf("network slot: %w", err)
	}
	child, err := shellProgram(job.listener, goFD, masks, s.debug).Start(rawexec.Options{
		Flags: unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID |
			unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		PID:    pid,
		Cgroup: job.cgroup,
	})
	if err != nil {
		_ = unix.Close(slot.fd)
		return err
	}
	s.slots.began(slot, child.PID)
	return child.Wait()
}

// handshake waits for the child, maps its IDs, answers the job and lets the
// child go on. An error means that no answer was given.
func handshake(job startJob, child int, pid *int32) error {
	defer unix.Close(child) // the end of it ends a child that still waits
	b := make([]byte, 1)
	if n, err := unix.Read(child, b); n != 1 || err != nil {
		return fmt.Errorf("the child ended before it was ready: %w", err)
	}
	n := int(atomic.LoadInt32(pid))
	userns, err := mapIDs(n, job.req.Base)
	if err != nil {
		return err
	}
	pidfd, err := unix.PidfdOpen(n, 0) // it waits, so that n is still its own
	if err != nil {
		_ = unix.Close(userns)
		return fmt.Errorf("pidfd: %w", err)
	}
	if _, err := unix.Write(child, b); err != nil {
		closeAll([]int{userns, pidfd})
		return err
	}
	job.done(n, []int{pidfd, userns}, nil)
	return nil
}

// mapIDs maps the container's IDs to its range of the host's, and returns a
// descriptor of its user namespace.
func mapIDs(pid int, base uint32) (userns int, err error) {
	dir := "/proc/" + strconv.Itoa(pid)
	ids := []byte(fmt.Sprintf("0 %d %d", base, idsPerSlot))
	for _, name := range []string{"/uid_map", "/gid_map"} {
		fd, err := unix.Open(dir+name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("%s: %w", name, err)
		}
		_, err = unix.Write(fd, ids)
		_ = unix.Close(fd)
		if err != nil {
			return -1, fmt.Errorf("%s: %w", name, err)
		}
	}
	return unix.Open(dir+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// maskAge bounds how long the list of what to cover in /proc is kept: a module
// may bring a new entry.
const maskAge = 5 * time.Second

// procMasks lists what must be covered in /proc.
func (s *shells) procMasks() ([]confine.Mask, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.masksRead) < maskAge {
		return s.masks, nil
	}
	masks, err := confine.ProcMasks("/hostproc")
	if err != nil {
		return nil, err
	}
	s.masks, s.masksRead = masks, time.Now()
	return masks, nil
}
