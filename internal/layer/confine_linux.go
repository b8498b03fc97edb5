package layer

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"github.com/landlock-lsm/go-landlock/landlock"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// landlockAll takes all access to files, sockets and signals that this
// kernel's Landlock knows. A kernel without Landlock is told as a finding: the
// system call filter refuses the same calls.
func landlockAll() ([]string, error) {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno == unix.ENOSYS || errno == unix.EOPNOTSUPP {
		return []string{"this node's kernel has no Landlock: the import was confined without it"}, nil
	}
	if errno != 0 {
		return nil, errno
	}
	if int(abi) < 1 {
		return nil, fmt.Errorf("version %d", abi)
	}
	return nil, landlock.V11.BestEffort().Restrict()
}

// helperCalls are the system calls that Go's runtime and reading and writing
// open descriptors take. Everything that names something, makes a process or a
// socket, or touches another process is missing.
var helperCalls = []uint32{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_LSEEK,
	unix.SYS_FSTAT, unix.SYS_FTRUNCATE, unix.SYS_CLOSE, unix.SYS_COPY_FILE_RANGE, unix.SYS_FCNTL,
	unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_BRK, unix.SYS_MINCORE,
	unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME,
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_GETPID, unix.SYS_GETTID,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK,
	unix.SYS_RESTART_SYSCALL, unix.SYS_GETRANDOM, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2,
	unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE, unix.SYS_RSEQ,
	unix.SYS_SET_ROBUST_LIST,
}

// Offsets in struct seccomp_data.
const (
	dataNr      = 0
	dataArch    = 4
	dataArg0    = 16
	dataArg2    = 32
	x32Bit      = 0x40000000
	actionKill  = unix.SECCOMP_RET_KILL_PROCESS
	actionAllow = unix.SECCOMP_RET_ALLOW
	actionEPERM = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	actionNoSys = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
)

// threadFlags are those of a clone(2) that makes a thread of this process.
const threadFlags = unix.CLONE_THREAD | unix.CLONE_VM | unix.CLONE_SIGHAND

// filter is the program: calls of another architecture kill, those of the list
// pass, clone passes for threads, mprotect and tgkill as the runtime needs
// them, all others fail with EPERM.
func filter() []bpf.Instruction {
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: dataArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: auditArch, SkipTrue: 1},
		bpf.RetConstant{Val: actionKill},
		bpf.LoadAbsolute{Off: dataNr, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32Bit, SkipTrue: 1},
		bpf.RetConstant{Val: actionKill},
	}
	calls := slices.Clone(helperCalls)
	slices.Sort(calls)
	for _, nr := range calls {
		prog = append(prog,
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: nr, SkipTrue: 1},
			bpf.RetConstant{Val: actionAllow})
	}
	prog = append(prog,
		// Its flags are behind a pointer: glibc, in a build with cgo, falls
		// back to clone where there is no clone3.
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE3, SkipTrue: 1},
		bpf.RetConstant{Val: actionNoSys},
		// Threads, no processes.
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_CLONE, SkipTrue: 5},
		bpf.LoadAbsolute{Off: dataArg0, Size: 4},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: threadFlags},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: threadFlags, SkipTrue: 1},
		bpf.RetConstant{Val: actionAllow},
		bpf.RetConstant{Val: actionEPERM},
		// The runtime's own memory, none of it executable.
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SYS_MMAP, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_MPROTECT, SkipTrue: 3},
		bpf.LoadAbsolute{Off: dataArg2, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: unix.PROT_EXEC, SkipTrue: 1},
		bpf.RetConstant{Val: actionAllow},
		// The runtime preempts its threads with signals to itself.
		bpf.LoadAbsolute{Off: dataNr, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_TGKILL, SkipTrue: 3},
		bpf.LoadAbsolute{Off: dataArg0, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(os.Getpid()), SkipTrue: 1},
		bpf.RetConstant{Val: actionAllow},
		bpf.RetConstant{Val: actionEPERM},
	)
	return prog
}

// seccompAll puts the filter on all threads, those to come among them.
func seccompAll() error {
	raw, err := bpf.Assemble(filter())
	if err != nil {
		return err
	}
	insns := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		insns[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	prog := unix.SockFprog{Len: uint16(len(insns)), Filter: &insns[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	if r != 0 {
		return errors.New("a thread could not be given the filter")
	}
	return nil
}
