package container

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/rawexec"
)

// forker starts containers on one thread of the launcher, one at a time: it
// reads a request, clones, maps the child's IDs, answers, and waits until the
// child has exec'd chronus. No other thread has a part in it, so that nothing
// is woken but the child.
type forker struct {
	s *shells

	program *shellProgram
	masks   *maskList // that program covers

	net  *netState // of the thread
	slot *netSlot  // for the next container, whose namespace the thread is in; nil if none was found
}

const secbitNoSetuidFixup = 1 << 2 // of linux/securebits.h

func newForker(s *shells) *forker { return &forker{s: s} }

// serve starts containers until the socket closes.
func (f *forker) serve() error {
	// The thread's capabilities stay when its user changes; see asOwner.
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, secbitNoSetuidFixup, 0, 0, 0); err != nil {
		return fmt.Errorf("securebits: %w", err)
	}
	var err error
	if f.net, err = openNetState("/hostproc"); err != nil {
		return err
	}
	buffer := newPacketBuffer()
	for {
		var req request
		fds, err := f.s.conn.recv(buffer, &req)
		if err != nil {
			return err
		}
		if req.Files && len(fds) >= 3 && len(fds) <= maxRights {
			f.startFiles(req.ID, fds)
			closeAll(fds)
			continue
		}
		if req.Start == nil || len(fds) != 2 {
			closeAll(fds)
			f.answer(reply{ID: req.ID, Error: toWire(errors.New("unknown request"))}, nil)
			continue
		}
		f.start(req.ID, req.Start.Base, fds[0], fds[1])
		closeAll(fds)
		f.ahead()
	}
}

// ahead looks for a slot that can be had again. Where there is none, or it takes
// a closer look, that is the work of another thread.
func (f *forker) ahead() {
	if f.slot != nil {
		return
	}
	if slot, ok := f.s.slots.again(f.net); ok {
		f.slot = &slot
	}
}

// enter moves the thread to a slot, in which it does nothing but clone.
func (f *forker) enter() (netSlot, error) {
	if f.slot != nil {
		slot := *f.slot
		f.slot = nil
		return slot, nil
	}
	slot, err := f.s.slots.take()
	if err != nil {
		return netSlot{}, err
	}
	if err := unix.Setns(slot.fd, unix.CLONE_NEWNET); err != nil {
		f.s.slots.drop(slot)
		return netSlot{}, fmt.Errorf("network slot: %w", err)
	}
	return slot, nil
}

func (f *forker) answer(r reply, fds []int) {
	// An error means that the backend is gone; recv sees it too.
	_ = f.s.conn.send(r, fds...)
	closeAll(fds)
}

// start starts a container, and answers once the container's IDs are mapped: it
// goes on to make its mounts. start itself returns once it has exec'd chronus,
// because the child borrows this process's memory: a copy of it would make
// every later write of this process a page fault.
func (f *forker) start(id uint64, base uint32, listener, cgroup int) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		f.answer(reply{ID: id, Error: toWire(err)}, nil)
		return
	}
	defer unix.Close(pair[0])
	child, err := f.clone(base, listener, cgroup, pair[1])
	_ = unix.Close(pair[1])
	if err != nil {
		f.answer(reply{ID: id, Error: toWire(err)}, nil)
		return
	}
	userns, err := mapIDs(child, base)
	if err == nil {
		_, err = unix.Write(pair[0], []byte{1})
	}
	if err != nil {
		closeAll([]int{userns, child.Pidfd})
		_ = unix.Shutdown(pair[0], unix.SHUT_WR) // ends the child, which waits for a byte
		f.answer(reply{ID: id, Error: toWire(err)}, nil)
	} else {
		f.answer(reply{ID: id, PID: child.PID}, []int{child.Pidfd, userns})
	}
	awaitEnd(pair[0])
	if err := child.Wait(); err != nil {
		// The backend learns of it by the pidfd; this is for the log.
		fmt.Fprintf(os.Stderr, "dsec launcher: container: %v\n", err)
	}
}

// awaitEnd returns once the child has exec'd or ended, which closes its end.
func awaitEnd(socket int) {
	for {
		n, err := unix.Read(socket, make([]byte, 1))
		if n == 0 && err == nil || err != nil && err != unix.EINTR {
			return
		}
	}
}

// clone starts the child, which waits for a byte from the other end of goFD.
func (f *forker) clone(base uint32, listener, cgroup, goFD int) (*rawexec.Child, error) {
	masks, err := f.s.procMasks()
	if err != nil {
		return nil, err
	}
	if f.masks != masks {
		f.program, f.masks = newShellProgram(masks.all, f.s.debug), masks
	}
	slot, err := f.enter() // the child is born in its namespace
	if err != nil {
		return nil, err
	}
	var flags uint64 = unix.CLONE_VM | unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	if !f.s.commandNamespaces {
		flags |= unix.CLONE_NEWCGROUP
	}
	program := f.program.with(listener, goFD)
	var child *rawexec.Child
	err = asOwner(base, func() (err error) {
		child, err = program.Start(rawexec.Options{Flags: flags, Pidfd: true, Cgroup: cgroup})
		return err
	})
	if err != nil {
		f.s.slots.drop(slot)
		return nil, err
	}
	f.s.slots.began(slot, child.PID)
	return child, nil
}

// asOwner calls f with the effective user ID owner, and all capabilities. What
// the kernel counts by user (inotify, queued signals, locked memory, user
// namespaces) is charged in the host to the owner of a sandbox's user namespace,
// and that is who made it. Were it root, all sandboxes would share root's limits
// with the host, and one could use them up.
func asOwner(owner uint32, f func() error) error {
	if err := setEUID(owner); err != nil {
		return err
	}
	err := f()
	if rerr := setEUID(0); rerr != nil {
		panic(rerr) // a thread that is nobody it should be starts nothing more
	}
	return err
}

// setEUID is that of this thread alone, which is why it is no call of unix.
func setEUID(id uint32) error {
	const keep = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(id), keep); errno != 0 {
		return fmt.Errorf("set the thread's effective user: %w", errno)
	}
	return nil
}

// mapIDs maps the container's IDs to its range of the host's, and returns a
// descriptor of its user namespace.
func mapIDs(child *rawexec.Child, base uint32) (userns int, err error) {
	dir := "/hostproc/" + strconv.Itoa(child.PID)
	maps := []int{-1, -1}
	defer func() { closeAll(maps) }()
	for i, name := range []string{"/uid_map", "/gid_map"} {
		if maps[i], err = unix.Open(dir+name, unix.O_WRONLY|unix.O_CLOEXEC, 0); err != nil {
			return -1, fmt.Errorf("%s: %w", name, err)
		}
	}
	// Where the child was killed and reaped meanwhile, the number may be another's.
	if err := unix.PidfdSendSignal(child.Pidfd, 0, nil, 0); err != nil {
		return -1, fmt.Errorf("the child ended before it was ready: %w", err)
	}
	ids := []byte("0 " + strconv.FormatUint(uint64(base), 10) + " " + strconv.Itoa(idsPerSlot))
	for _, fd := range maps {
		if _, err := unix.Write(fd, ids); err != nil {
			return -1, fmt.Errorf("map IDs: %w", err)
		}
	}
	// Since Linux 6.11; before, an error of some kind.
	if userns, err = unix.IoctlRetInt(child.Pidfd, unix.PIDFD_GET_USER_NAMESPACE); err == nil {
		return userns, nil
	}
	userns, err = unix.Open(dir+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("user namespace: %w", err)
	}
	return userns, nil
}
