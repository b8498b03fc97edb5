package cgroup

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const (
	// stopTimeout bounds how long Freeze waits for processes that cannot be frozen yet.
	stopTimeout = 5 * time.Second
	// killTimeout is the same of a kill.
	killTimeout = time.Second
	// The kernel tells of changes of cgroup.events at most each 10 ms, and most often
	// a freeze takes less: so it is also looked, first after firstLook, and then after
	// twice as long each time, up to lastLook.
	firstLook = 50 * time.Microsecond
	lastLook  = 10 * time.Millisecond
)

var errNotFrozen = dsec.Errorf(dsec.CodeUnavailable,
	"a process of the sandbox cannot be stopped now, since it waits for a disk or for what serves a file; nothing was stopped")

// Freeze stops every process of the sandbox, chronus too, where it is, and returns
// once they all stand still. A process that waits in the kernel for a disk cannot
// be frozen: the error is unavailable then, and all go on.
func (g *Group) Freeze(ctx context.Context) error {
	if err := g.write("", "cgroup.freeze", "1"); err != nil {
		return gone(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, stopTimeout, errNotFrozen)
	defer cancel()
	// A group that has processes of its own counts as frozen when these are.
	for _, dir := range g.processDirs() {
		if err := waitFrozen(ctx, g.tree.v2, dir); err != nil {
			return gone(errors.Join(err, g.Thaw()))
		}
	}
	return nil
}

// Thaw has all processes go on.
func (g *Group) Thaw() error { return gone(g.write("", "cgroup.freeze", "0")) }

// Frozen reports whether the group is frozen, or about to be.
func (g *Group) Frozen() (bool, error) {
	n, err := readInt(g.tree.v2, g.name+"/cgroup.freeze")
	return n != 0, gone(err)
}

// waitFrozen waits until all processes of a cgroup stand still. Its error is the
// cause of the end of ctx where one did not until then.
func waitFrozen(ctx context.Context, v2 int, dir string) error {
	events, err := unix.Openat(v2, dir+"/cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", dir, err)
	}
	defer unix.Close(events)
	b := make([]byte, 256)
	for wait := firstLook; ; wait = min(2*wait, lastLook) {
		n, err := unix.Pread(events, b, 0)
		if err != nil {
			return fmt.Errorf("cgroup %s: %w", dir, err)
		}
		if frozen, _ := lookup(b[:n], "frozen"); frozen != 0 {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		timeout := unix.NsecToTimespec(wait.Nanoseconds())
		_, err = unix.Ppoll([]unix.PollFd{{Fd: int32(events), Events: unix.POLLPRI}}, &timeout, nil)
		if err != nil && err != unix.EINTR {
			return err
		}
	}
}

// waitToKill waits until no process of a frozen cgroup is in a fork, whose child
// would not be seen. One that cannot be frozen does not fork either.
func (g *Group) waitToKill(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	if err := waitFrozen(ctx, g.tree.v2, dir); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// pausedAttr is there from before the time of a sandbox is held until it goes on
// again: who takes the sandbox over finds by it what a crash left half done.
const pausedAttr = "trusted.dsec.paused"

// MarkPaused sets that mark, or takes it away. Both may be done again.
func (g *Group) MarkPaused(paused bool) error {
	path := g.tree.procPath(g.name)
	if paused {
		return gone(unix.Setxattr(path, pausedAttr, []byte("1"), 0))
	}
	if err := unix.Removexattr(path, pausedAttr); err != unix.ENODATA {
		return gone(err)
	}
	return nil
}

// MarkedPaused reports whether the mark is there.
func (g *Group) MarkedPaused() bool {
	_, err := unix.Getxattr(g.tree.procPath(g.name), pausedAttr, nil)
	return err == nil
}

// killAll kills each process of a cgroup.
func killAll(v2 int, dir string) error {
	held, err := holdProcesses(v2, dir)
	if err != nil {
		return err
	}
	defer held.close()
	var errs []error
	for _, fd := range held {
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// pidfds are descriptors of processes, by their numbers.
type pidfds map[int]int

// holdProcesses returns descriptors of the processes of a cgroup that they had
// while they were in it: a number alone may be another's by the time it is used.
func holdProcesses(v2 int, dir string) (pidfds, error) {
	pids, err := readPIDs(v2, dir)
	if err != nil {
		return nil, err
	}
	opened := make(pidfds, len(pids))
	defer func() { opened.close() }()
	for _, pid := range pids {
		if fd, err := unix.PidfdOpen(pid, 0); err == nil {
			opened[pid] = fd
		}
	}
	if pids, err = readPIDs(v2, dir); err != nil {
		return nil, err
	}
	held := make(pidfds, len(pids))
	for _, pid := range pids {
		if fd, ok := opened[pid]; ok {
			held[pid] = fd
			delete(opened, pid)
		}
	}
	return held, nil
}

func (p pidfds) close() {
	for _, fd := range p {
		_ = unix.Close(fd)
	}
}
