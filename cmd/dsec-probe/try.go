//go:build linux && amd64

package main

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// outcome is what the child of a try writes, in memory that it shares.
type outcome struct {
	result uintptr
	done   uintptr
}

//go:noescape
func forkCall(nr uintptr, args *[6]uintptr, out *outcome) (pid uintptr)

//go:noescape
func forkInt80(nr uintptr, args *[6]uintptr, out *outcome) (pid uintptr)

// deadline is long for a call that only has null arguments to look at.
const deadline = 500 * time.Millisecond

// shared is below 4 GiB, so that 32-bit calls can be given its address too.
var shared = sync.OnceValues(func() ([]byte, error) {
	p, _, e := unix.Syscall6(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_32BIT, ^uintptr(0), 0)
	if e != 0 {
		return nil, fmt.Errorf("mmap: %w", e)
	}
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(nil), p)), 4096), nil // memory that Go does not manage
})

// try makes one call in a child.
func try(nr uintptr, args ...uintptr) (string, error) { return tryWith(forkCall, nr, args) }

func tryWith(fork func(uintptr, *[6]uintptr, *outcome) uintptr, nr uintptr, args []uintptr) (string, error) {
	page, err := shared()
	if err != nil {
		return "", err
	}
	out := (*outcome)(unsafe.Pointer(&page[0]))
	*out = outcome{}
	var all [6]uintptr
	copy(all[:], args)
	// With all signals blocked, one that a call brings on itself ends the child,
	// where it would run this program's handler.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var block, before unix.Sigset_t
	for i := range block.Val {
		block.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &block, &before); err != nil {
		return "", fmt.Errorf("block signals: %w", err)
	}
	pid := fork(nr, &all, out)
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil); err != nil {
		return "", fmt.Errorf("unblock signals: %w", err)
	}
	if pid >= ^uintptr(4094) {
		return "", fmt.Errorf("fork: %w", unix.Errno(-pid))
	}
	status, blocked, err := await(int(pid))
	switch {
	case err != nil:
		return "", err
	case out.done != 0:
		if out.result >= ^uintptr(4094) {
			return errno(unix.Errno(-out.result)), nil
		}
		return "ok", nil
	case blocked:
		return "blocked", nil
	case status.Signaled():
		return unix.SignalName(status.Signal()), nil
	}
	return "exited", nil
}

// await waits for a child until the deadline, and ends it then.
func await(pid int) (status unix.WaitStatus, blocked bool, err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, false, fmt.Errorf("pidfd_open: %w", err)
	}
	defer unix.Close(fd)
	end := time.Now().Add(deadline)
	for {
		left := time.Until(end)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(max(left, 0).Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, false, fmt.Errorf("poll: %w", err)
		}
		blocked = n == 0
		break
	}
	if blocked {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return 0, false, fmt.Errorf("kill: %w", err)
		}
	}
	for {
		// __WALL: a call may have changed what the child's end signals.
		_, err = unix.Wait4(pid, &status, unix.WALL, nil)
		if err != unix.EINTR {
			return status, blocked, err
		}
	}
}

func errno(e unix.Errno) string {
	if name := unix.ErrnoName(e); name != "" {
		return name
	}
	return fmt.Sprintf("errno %d", int(e))
}

// result is of a call that this process may make itself.
func result(err error) string {
	if err == nil {
		return "ok"
	}
	if e, ok := errors.AsType[unix.Errno](err); ok {
		return errno(e)
	}
	return err.Error()
}
