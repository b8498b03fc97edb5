package container

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/rawexec"
)

// The launcher's part of what serves a sandbox's files. It starts chronus, which
// goes into the sandbox and becomes chronus-files: see chronus/files.c.

// maxJoins is how many tasks files there are to join: of memory and CPU time.
const maxJoins = 2

var _ [lowFDs - fdJoin - maxJoins]struct{} // the low descriptors hold them all

// fdJoin is JOIN_FD of chronus/files.c.
const fdJoin = 7

// filesParts is what every chronus-files is started with.
type filesParts struct {
	program int // of chronus-files, O_PATH
	filter  int // a file with the seccomp program
}

// openFilesParts opens them in the directory of the platform.
func openFilesParts(platform int) (p filesParts, err error) {
	p.program, err = unix.Openat(platform, "chronus-files", unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return p, fmt.Errorf("chronus-files: %w", err)
	}
	p.filter, err = unix.MemfdCreate("filter", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return p, fmt.Errorf("filter: %w", err)
	}
	if _, err = unix.Write(p.filter, confine.Bytes(confine.Filter())); err == nil {
		_, err = unix.FcntlInt(uintptr(p.filter), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		return p, fmt.Errorf("filter: %w", err)
	}
	return p, nil
}

// startFiles starts a chronus-files. The descriptors are PID 1's pidfd, the
// control socket, the v2 cgroup and the tasks files. The answer has its pidfd.
func (f *forker) startFiles(id uint64, fds []int) {
	child, err := f.cloneFiles(fds)
	if err == nil {
		f.s.slots.none(child.PID)
		if err = child.Wait(); err != nil {
			_ = unix.Close(child.Pidfd)
		}
	}
	if err != nil {
		f.answer(reply{ID: id, Error: toWire(fmt.Errorf("chronus-files: %w", err))}, nil)
		return
	}
	f.answer(reply{ID: id, PID: child.PID}, []int{child.Pidfd})
}

func (f *forker) cloneFiles(fds []int) (*rawexec.Child, error) {
	pid1, control, cgroup, joins := fds[0], fds[1], fds[2], fds[3:]
	argv := []string{"chronus", "--files", strconv.FormatUint(confine.KeepCaps, 10), strconv.Itoa(len(joins))}
	if f.s.commandNamespaces {
		argv = append(argv, "own-cgroup-namespace")
	}
	var p rawexec.Program
	first := 3
	for _, fd := range append([]int{control, pid1, f.s.files.program, f.s.files.filter}, joins...) {
		p.Call("descriptor", unix.SYS_DUP3, rawexec.Int(fd), rawexec.Int(first), rawexec.Int(0))
		first++
	}
	p.Call("close", unix.SYS_CLOSE_RANGE, rawexec.Int(first), rawexec.Int(^uint32(0)), rawexec.Int(0))
	p.UnblockSignals()
	p.Call("exec chronus", unix.SYS_EXECVE, rawexec.Str("/chronus"), rawexec.Strs(argv), rawexec.Strs(nil))
	return p.Start(rawexec.Options{Flags: unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_NEWPID, Pidfd: true, Cgroup: cgroup})
}
