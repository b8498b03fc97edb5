//go:build linux && amd64

// Package rawexec starts a process whose path from clone to exec is a list of
// raw system calls, prepared by the parent and run without the Go runtime.
//
// Between clone and exec a child of a Go program may not allocate, grow its
// stack or take a lock: only one thread of the parent came along. std's
// syscall.ForkExec therefore knows a fixed set of things that a child may do
// first. A Program is any list of system calls:
//
//	var p rawexec.Program
//	p.Call("stdin", unix.SYS_DUP2, rawexec.Int(fd), rawexec.Int(0))
//	p.UnblockSignals()
//	p.Call("exec", unix.SYS_EXECVE, rawexec.Str("/bin/true"), rawexec.Strs(argv), rawexec.Strs(envv))
//	child, err := p.Start(rawexec.Options{Flags: unix.CLONE_VM | unix.CLONE_VFORK})
//	err = child.Wait() // nil, or an *Error that names the call that failed
//
// The child borrows the parent's memory: a copy of it would make every later
// write of the parent a page fault. With CLONE_VFORK the calling thread waits
// until the child has exec'd; other goroutines go on meanwhile. Without, Start
// returns at once: the parent can prepare things that the child waits for (user
// id maps, say), and learns by itself when the child has exec'd or ended, by a
// pipe that closes on exec.
//
// The child starts with every signal blocked and every handler set to the
// default; a Program that execs should call UnblockSignals last but one. All
// children are started by clone3, with the arguments of 5.7.
package rawexec

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Arg is one argument of a call.
type Arg struct {
	value uintptr
	keep  unsafe.Pointer // what value points to
}

// Int is a number, such as a descriptor or flags.
func Int[T ~int | ~int32 | ~int64 | ~uint | ~uint32 | ~uint64 | ~uintptr](v T) Arg {
	return Arg{value: uintptr(v)}
}

// Ptr is the address of memory that the call reads or writes. It must be on
// the heap, as what Ptr is called with always is: the Program keeps it alive.
func Ptr(p unsafe.Pointer) Arg { return Arg{value: uintptr(p), keep: p} }

// Str is a NUL-terminated copy of s. A NUL in s ends it there.
func Str(s string) Arg {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return Ptr(unsafe.Pointer(&b[0]))
}

// Bytes is the address of the first of b's bytes, or 0 where it has none.
func Bytes(b []byte) Arg { return Ptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Strs is a NULL-terminated array of strings, as execve takes.
func Strs(list []string) Arg {
	size := 0
	for _, s := range list {
		size += len(s) + 1
	}
	text := make([]byte, size) // one block, however many strings
	array := make([]*byte, len(list)+1)
	for i, s := range list {
		array[i] = &text[0]
		text = text[copy(text, s)+1:]
	}
	return Ptr(unsafe.Pointer(&array[0]))
}

// op is one call as run_amd64.s reads it.
type op struct {
	nr    uintptr
	args  [6]uintptr
	flags uint32
}

const (
	flagIgnore   = 1 // a failure is no failure
	flagPositive = 2 // neither is a result of 0 a success
)

// Program is the list of calls that a child runs. It may be started several
// times, one after the other.
type Program struct {
	ops   []op
	names []string
	keep  []unsafe.Pointer
}

// Call appends a call and returns its index. Its failure ends the child: Wait
// then returns an *Error with this name.
func (p *Program) Call(name string, nr uintptr, args ...Arg) int {
	if len(args) > 6 {
		panic("rawexec: a call has at most 6 arguments")
	}
	o := op{nr: nr}
	for i, a := range args {
		o.args[i] = a.value
		if a.keep != nil {
			p.keep = append(p.keep, a.keep)
		}
	}
	p.ops = append(p.ops, o)
	p.names = append(p.names, name)
	return len(p.ops) - 1
}

// Set changes an argument of a call, for the next start.
func (p *Program) Set(call, arg int, a Arg) {
	if a.keep != nil {
		panic("rawexec: Set takes numbers")
	}
	p.ops[call].args[arg] = a.value
}

// Ignore lets the child go on where a call fails.
func (p *Program) Ignore(call int) { p.ops[call].flags |= flagIgnore }

// Positive makes a result of 0 of a call a failure with EPIPE: a read that
// must get a byte from a parent that may have died.
func (p *Program) Positive(call int) { p.ops[call].flags |= flagPositive }

// UnblockSignals appends the call that gives the child an empty signal mask.
func (p *Program) UnblockSignals() {
	p.Call("unblock signals", unix.SYS_RT_SIGPROCMASK, Int(sigSetmask), Ptr(unsafe.Pointer(new(uint64))), Int(0), Int(8))
}

const sigSetmask = 2

// Error says which call failed in the child.
type Error struct {
	Call  string // its name
	Index int
	Errno syscall.Errno
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("%s: %v", e.Call, e.Errno) }

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// Options say how a child is cloned.
type Options struct {
	// Flags are CLONE_* flags, CLONE_VM among them.
	Flags uint64
	// Pidfd asks for a pidfd (CLOEXEC) in Child.Pidfd.
	Pidfd bool
	// Cgroup, where above 0, is a descriptor of the cgroup v2 directory in which
	// the child starts: CLONE_INTO_CGROUP, since 5.7, takes none of the locks
	// that make a later move slow.
	Cgroup int
}

// Child is a started child. The caller reaps it, also where Wait failed.
type Child struct {
	PID   int
	Pidfd int // -1 unless asked for; the caller closes it

	p      *Program
	report *report
}

// report is what a child whose call failed tells.
type report struct {
	offset uintptr // of the op, in bytes
	errno  uintptr // 0: none failed
}

// cloneArgs is struct clone_args of clone3(2).
type cloneArgs struct {
	flags, pidfd uint64
	_            [2]uint64 // where its IDs go
	exitSignal   uint64
	_            [5]uint64 // a stack, its size, TLS, and IDs to choose: none
	cgroup       uint64
}

// Start clones a child that runs the program. An error means that there is no
// child. With CLONE_VFORK it returns once the child has exec'd or ended; without,
// the caller must hold the Child, and neither start the program again nor call
// Wait, until it knows that the child has.
func (p *Program) Start(o Options) (*Child, error) {
	if o.Flags&unix.CLONE_VM == 0 {
		return nil, fmt.Errorf("rawexec: want CLONE_VM: %w", syscall.EINVAL)
	}
	c := &Child{Pidfd: -1, p: p, report: new(report)}
	pidfd := new(int32)
	args := &cloneArgs{flags: o.Flags | unix.CLONE_CLEAR_SIGHAND, exitSignal: uint64(syscall.SIGCHLD)}
	if o.Pidfd {
		args.flags |= unix.CLONE_PIDFD
		args.pidfd = uint64(uintptr(unsafe.Pointer(pidfd)))
	}
	if o.Cgroup > 0 {
		args.flags |= unix.CLONE_INTO_CGROUP
		args.cgroup = uint64(o.Cgroup)
	}
	var first *op
	if len(p.ops) > 0 {
		first = &p.ops[0]
	}
	r := start(args, first, uintptr(len(p.ops)), c.report)
	runtime.KeepAlive(p)
	runtime.KeepAlive(pidfd)
	if r >= ^uintptr(4094) {
		return nil, fmt.Errorf("clone: %w", syscall.Errno(-r))
	}
	c.PID = int(r)
	if o.Pidfd {
		c.Pidfd = int(*pidfd)
	}
	return c, nil
}

// Wait returns nil where the child has exec'd, and an *Error where a call
// failed. It does not block.
func (c *Child) Wait() error {
	if c.report.errno == 0 {
		return nil
	}
	i := int(c.report.offset / unsafe.Sizeof(op{}))
	return &Error{Call: c.p.names[i], Index: i, Errno: syscall.Errno(c.report.errno)}
}

// start runs run as a system call is run: this thread's P goes to another
// thread if the child takes its time, because its exec may wait for a slow
// disk. Nothing from here to the return may grow the stack.
//
//go:nosplit
//go:norace
func start(args *cloneArgs, ops *op, n uintptr, r *report) uintptr {
	entersyscall()
	pid := run(args, ops, n, r)
	exitsyscall()
	return pid
}

// run is in run_amd64.s.
//
//go:noescape
func run(args *cloneArgs, ops *op, n uintptr, r *report) uintptr

//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()
