//go:build linux

// Chronus is PID 1 of a container sandbox. Its launcher starts it in all
// namespaces with an empty environment and one descriptor besides the standard
// ones: 3, a listening Unix socket that is bound on the host and that no name
// inside leads to. It waits for the Setup call of its backend.
package main

import (
	"context"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"github.com/opendsec/dsec/internal/chronus"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// listenFD is the descriptor of the socket; with --ready --listen FD, which is
// for tests, another one, and no Setup is needed.
var listenFD = 3

func main() {
	// Nobody reads what PID 1 prints; the status tells the backend.
	if err := run(); err != nil {
		println("chronus:", err.Error())
		os.Exit(1)
	}
}

func run() error {
	runtime.MemProfileRate = 0 // its tables cost memory, and nobody reads them
	runtime.GOMAXPROCS(2)      // one may be in a long system call
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(24 << 20) // spools have 8 MiB of it
	if os.Getpid() == 1 {
		if err := ignoreInside(); err != nil {
			return err
		}
	}
	ready := false
	if len(os.Args) == 4 && os.Args[1] == "--ready" && os.Args[2] == "--listen" {
		var err error
		if listenFD, err = strconv.Atoi(os.Args[3]); err != nil {
			return err
		}
		ready = true
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return err
		}
	}
	f := os.NewFile(uintptr(listenFD), "control")
	l, err := net.FileListener(f)
	if err != nil {
		return err
	}
	f.Close()
	c, err := chronus.New(chronus.Config{Warm: !ready})
	if err != nil {
		return err
	}
	for {
		nc, err := l.Accept()
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of descriptors: others will be closed
			continue
		}
		if !ready && !fromOutside(nc) {
			nc.Close()
			continue
		}
		go chronusapi.Serve(context.Background(), nc, c)
	}
}

// fromOutside reports whether a peer is outside of this PID namespace, which
// is where it has no number.
func fromOutside(nc net.Conn) bool {
	uc, ok := nc.(*net.UnixConn)
	if !ok {
		return false
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return false
	}
	outside := false
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		outside = err == nil && cred.Pid == 0
	})
	return err == nil && outside
}

// ignoreInside gives the signals that Go ends a program on their default
// action again. The kernel does not apply that to PID 1 for a signal from
// inside its namespace, so root inside cannot end chronus by one; a real fault
// still does.
func ignoreInside() error {
	type sigaction struct{ handler, flags, restorer, mask uintptr }
	for _, sig := range []syscall.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS,
		syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGTERM, syscall.SIGSTKFLT, syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGSYS,
	} {
		var sa sigaction
		if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&sa)), 0, 8, 0, 0); errno != 0 {
			return errno
		}
	}
	return nil
}
