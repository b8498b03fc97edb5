package container

import (
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func init() { tries["pid1"] = pid1 }

// pid1 tries to limit PID 1, to make it slow, and to lock a pipe that it reads.
func pid1([]string) {
	call := func(what string, nr uintptr, args ...uintptr) {
		var a [6]uintptr
		copy(a[:], args)
		_, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno != 0 {
			say(what, errno)
		} else {
			say(what, nil)
		}
	}
	limit := uintptr(unsafe.Pointer(&unix.Rlimit{Cur: 1 << 30, Max: 1 << 30}))
	zero := uintptr(unsafe.Pointer(new([16]uint64)))
	mask := uintptr(unsafe.Pointer(&[1]uint64{1}))
	for _, resource := range []uintptr{unix.RLIMIT_CPU, unix.RLIMIT_AS, unix.RLIMIT_DATA, unix.RLIMIT_NOFILE, unix.RLIMIT_NPROC, unix.RLIMIT_STACK, unix.RLIMIT_FSIZE} {
		call("limit", unix.SYS_PRLIMIT64, 1, resource, zero)
	}
	call("limit of its parent", unix.SYS_PRLIMIT64, uintptr(unix.Getppid()), unix.RLIMIT_CPU, zero)
	call("own limit", unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CPU, limit)
	call("priority", unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 1, 19)
	call("priority of the group", unix.SYS_SETPRIORITY, unix.PRIO_PGRP, 1, 19)
	call("priority of the user", unix.SYS_SETPRIORITY, unix.PRIO_USER, 0, 19)
	call("own priority", unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, 19) // the least, which whoever runs the tests may ask for
	call("disk priority", unix.SYS_IOPRIO_SET, 1, 1, 3<<13)
	call("disk priority of the user", unix.SYS_IOPRIO_SET, 3, 0, 3<<13)
	call("affinity", unix.SYS_SCHED_SETAFFINITY, 1, 8, mask)
	call("scheduler", unix.SYS_SCHED_SETSCHEDULER, 1, 5, zero)
	call("scheduler's parameters", unix.SYS_SCHED_SETPARAM, 1, zero)
	call("scheduler's attributes", unix.SYS_SCHED_SETATTR, 1, zero, 0)
	call("own affinity", unix.SYS_SCHED_SETAFFINITY, 0, 8, mask)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	say("socketpair", err)
	call("splice", unix.SYS_SPLICE, uintptr(pair[0]), 0, 1, 0, 1, 0)
	call("sendfile", unix.SYS_SENDFILE, 1, uintptr(pair[0]), 0, 1)
}

// Root inside has PID 1's own IDs, by which the kernel lets it change limits
// and priorities; and it has the other end of the pipes that PID 1 reads, which
// a splice would lock for as long as it waits.
func TestPID1IsNotLimitedOrHeldUp(t *testing.T) {
	s := newHost(t, nil).create()
	lines := s.inside("pid1")
	for what, want := range map[string]string{
		"limit": "EPERM", "limit of its parent": "EPERM", "own limit": "ok",
		"priority": "EPERM", "priority of the group": "EPERM", "priority of the user": "EPERM", "own priority": "ok",
		"disk priority": "EPERM", "disk priority of the user": "EPERM", "affinity": "EPERM", "scheduler": "EPERM",
		"scheduler's parameters": "EPERM", "scheduler's attributes": "EPERM", "own affinity": "ok",
		"socketpair": "ok", "splice": "EINVAL", "sendfile": "EINVAL",
	} {
		if !slices.Contains(lines, what+" "+want) {
			t.Errorf("want %s %s in %q", what, want, lines)
		}
	}
	if slices.Contains(lines, "limit ok") {
		t.Error("a limit of PID 1 was changed")
	}
	if o := s.sh("echo alive; cat /etc/hostname | cat"); o.out != "alive\nsandbox\n" {
		t.Errorf("have %q", o.out)
	}
}
