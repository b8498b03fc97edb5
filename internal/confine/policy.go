package confine

import (
	"fmt"
	"maps"
	"slices"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// A policy says what happens to each system call: the action of the first rule
// of the call whose conditions all hold, and else the policy's own.
type policy struct {
	rules map[uint32][]rule
	other action // calls without a rule that applies
	// newest is the highest call known when the policy was written. Later ones
	// get ENOSYS, on which C libraries fall back, where EPERM is taken for an answer.
	newest uint32
}

type action uint32

const (
	allow       action = unix.SECCOMP_RET_ALLOW
	killProcess action = unix.SECCOMP_RET_KILL_PROCESS
)

func errno(e unix.Errno) action { return unix.SECCOMP_RET_ERRNO | action(e) }

type rule struct {
	conds []cond // all must hold; none always does
	do    action
}

// cond compares the low 32 bits of one argument: arg&mask == value. The kernel
// takes no more of any argument that a rule here looks at, whatever a caller
// puts in the upper half; a comparison of all 64 bits would let a refused
// ioctl through.
type cond struct {
	arg   int
	mask  uint32
	value uint32
}

const allBits = 1<<32 - 1

func is(arg int, value uint32) cond { return cond{arg, allBits, value} }

func masked(arg int, mask, value uint32) cond { return cond{arg, mask, value} }

// refused are calls that the moby profile allows and we do not. Names that it
// does not allow need no mention; the filter's tests list both.
var refused = []string{
	"fanotify_mark",     // fanotify_init is refused anyway
	"name_to_handle_at", // the half that open_by_handle_at needs
}

// absent are calls that it allows and that get ENOSYS here, as from a kernel that
// was built without them. The contexts of aio come out of one count for the whole
// host (fs.aio-max-nr), all of which one sandbox could take from a database
// elsewhere. Programs that use it do without: see docs/security.md.
var absent = []string{"io_cancel", "io_destroy", "io_getevents", "io_pgetevents", "io_setup", "io_submit"}

// added are calls that it allows on conditions of its own, or not at all, and
// that we allow: debuggers and leak checkers are daily tools. Among processes
// of one user namespace only, which the kernel sees to; chronus is none of them.
var added = []string{"kcmp", "process_vm_readv", "process_vm_writev", "ptrace"}

// newPolicy is the moby profile for KeepCaps, tightened.
func newPolicy() (*policy, error) {
	p := &policy{rules: map[uint32][]rule{}, other: errno(unix.EPERM)}
	for _, s := range seccomp.DefaultProfile().Syscalls {
		if !selected(s.Includes, true) || !selected(s.Excludes, false) {
			continue
		}
		for _, name := range s.Names {
			nr, ok := syscallNumbers[name]
			if !ok { // of another architecture
				continue
			}
			p.newest = max(p.newest, nr)
			if special[name] != nil || slices.Contains(refused, name) {
				continue
			}
			if len(s.Args) != 0 || s.Action != specs.ActAllow {
				return nil, fmt.Errorf("confine: the profile has a rule for %s that is not understood", name)
			}
			p.rules[nr] = []rule{{do: allow}}
		}
	}
	for _, name := range added {
		p.rules[syscallNumbers[name]] = []rule{{do: allow}}
	}
	for _, name := range absent {
		p.rules[syscallNumbers[name]] = []rule{{do: errno(unix.ENOSYS)}}
	}
	for name, rules := range special {
		p.rules[syscallNumbers[name]] = rules()
	}
	return p, nil
}

// selected tells whether a rule's condition is met (includes) or not met
// (excludes) by x86-64, KeepCaps, and a kernel newer than any that the profile asks for.
func selected(f *seccomp.Filter, includes bool) bool {
	if f == nil {
		return true
	}
	if includes {
		if f.Arches != nil && !slices.Contains(f.Arches, "amd64") {
			return false
		}
		for _, c := range f.Caps {
			if !slices.Contains(CapNames(), c) {
				return false
			}
		}
		return true
	}
	if slices.Contains(f.Arches, "amd64") || f.MinKernel != nil {
		return false
	}
	for _, c := range f.Caps {
		if slices.Contains(CapNames(), c) {
			return false
		}
	}
	return true
}

// special are the calls whose arguments decide.
var special = map[string]func() []rule{
	// clone3's flags are in memory, where a filter cannot look. chronus needs it;
	// ChildFilter refuses it to everything else.
	"clone3":      func() []rule { return []rule{{do: allow}} },
	"clone":       cloneRules,
	"ioctl":       ioctlRules,
	"personality": personalityRules,
	"socket":      socketRules,
	// A pipe is locked while what is spliced into it is waited for, and chronus,
	// which has the other end, cannot say that it does not want to wait. Programs
	// copy by themselves where the kernel does not.
	"splice":   func() []rule { return []rule{{do: errno(unix.EINVAL)}} },
	"sendfile": func() []rule { return []rule{{[]cond{is(2, 0)}, errno(unix.EINVAL)}, {do: allow}} },
	// The kernel lets root inside change limits and priorities of any process of
	// the same IDs that it has a number for, and PID 1 is one.
	"prlimit64":          func() []rule { return []rule{{[]cond{is(0, 0)}, allow}} },
	"setpriority":        func() []rule { return notPID1(1, is(0, unix.PRIO_USER)) },
	"ioprio_set":         func() []rule { return notPID1(1, is(0, ioprioWhoUser)) },
	"sched_setaffinity":  func() []rule { return notPID1(0) },
	"sched_setattr":      func() []rule { return notPID1(0) },
	"sched_setparam":     func() []rule { return notPID1(0) },
	"sched_setscheduler": func() []rule { return notPID1(0) },
	// sync writes out what the whole host has not written, and looks at each of
	// its file systems. A sandbox's own root is mounted so that syncing it, by
	// fsync too, writes nothing: to do nothing is what sync would do there.
	"sync": func() []rule { return []rule{{do: errno(0)}} },
	// Programs that the kernel compiles for a socket come out of what the host has
	// for all of them, seccomp programs as well, without which no command starts.
	"setsockopt": func() (rules []rule) {
		for _, name := range []uint32{unix.SO_ATTACH_FILTER, unix.SO_ATTACH_REUSEPORT_CBPF} {
			rules = append(rules, rule{[]cond{is(1, unix.SOL_SOCKET), is(2, name)}, errno(unix.ENOPROTOOPT)})
		}
		return append(rules, rule{do: allow})
	},
	// msync comes to the file system below the overlay, which fsync does not.
	// MS_ASYNC, which does nothing, still tells what is not mapped.
	"msync": func() []rule { return []rule{{[]cond{masked(2, unix.MS_SYNC, unix.MS_SYNC)}, errno(0)}, {do: allow}} },
	// A listener keeps the programs of a process that has ended, and so a process
	// would be no bound on how many there are. Kernels before 5.0 have none.
	"seccomp": func() []rule {
		return []rule{{[]cond{masked(1, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)}, errno(unix.EINVAL)}, {do: allow}}
	},
	"fcntl":     fcntlRules,
	"fallocate": fallocateRules,
	"socketpair": func() []rule {
		return []rule{{[]cond{is(0, unix.AF_UNIX)}, allow}, {do: errno(unix.EAFNOSUPPORT)}}
	},
}

const ioprioWhoUser = 3

// notPID1 allows a call unless an argument names PID 1, or one of the others holds.
func notPID1(arg int, others ...cond) (rules []rule) {
	for _, c := range append(others, is(arg, 1)) {
		rules = append(rules, rule{[]cond{c}, errno(unix.EPERM)})
	}
	return append(rules, rule{do: allow})
}

// fcntlRules refuse locks of an open file as kernels before 3.15 do. They are
// the kernel's memory, which is charged to nobody, and last as long as the open
// file, also where no process has a descriptor of it whose locks could be
// counted: in a message of a socket, or under a mapping.
func fcntlRules() (rules []rule) {
	for _, c := range []uint32{unix.F_OFD_GETLK, unix.F_OFD_SETLK, unix.F_OFD_SETLKW} {
		rules = append(rules, rule{[]cond{is(1, c)}, errno(unix.EINVAL)})
	}
	return append(rules, rule{do: allow})
}

// fallocateRules allow to give blocks back, and nothing that takes some without
// writing them: a call takes gigabytes of the disk that sandboxes share sooner
// than anyone looks. The answer is that of a file system which cannot, on which
// posix_fallocate of glibc writes. Python, SQLite, git and dpkg were tried and do
// without; fallocate(1) of util-linux fails and says why.
func fallocateRules() []rule {
	return []rule{
		{[]cond{is(1, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE)}, allow},
		{do: errno(unix.EOPNOTSUPP)},
	}
}

const cloneNew = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

func cloneRules() []rule { return []rule{{[]cond{masked(0, cloneNew, 0)}, allow}} }

// personalityRules allow what moby does (PER_LINUX, PER_LINUX32, UNAME26, both,
// and the query) and ADDR_NO_RANDOMIZE, which gdb sets for what it starts.
func personalityRules() (rules []rule) {
	for _, persona := range []uint32{0, 0x8, 0x20000, 0x20008, 0x40000, 0xffffffff} {
		rules = append(rules, rule{[]cond{is(0, persona)}, allow})
	}
	return rules
}

// socketRules allow local, IPv4, IPv6 and rtnetlink sockets. The errors are
// those of a kernel without the rest, with which programs can live: useradd
// gives up when an audit socket fails in any other way.
func socketRules() (rules []rule) {
	for _, family := range []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6} {
		rules = append(rules, rule{[]cond{is(0, family)}, allow})
	}
	return append(rules,
		rule{[]cond{is(0, unix.AF_NETLINK), is(2, unix.NETLINK_ROUTE)}, allow},
		rule{[]cond{is(0, unix.AF_NETLINK)}, errno(unix.EPROTONOSUPPORT)},
		rule{do: errno(unix.EAFNOSUPPORT)},
	)
}

// ioctlRules refuse commands by which a writable file reaches the file system
// below it, and terminal commands that act on other terminals. The answer is
// that of a file which has no such command.
func ioctlRules() (rules []rule) {
	const typeMask = 0xff << 8
	kept := func(commands ...uint32) {
		for _, c := range commands {
			rules = append(rules, rule{[]cond{is(1, c)}, allow})
		}
	}
	kept(keptIoctls...)
	for _, t := range slices.Sorted(maps.Keys(refusedIoctlTypes)) {
		rules = append(rules, rule{[]cond{masked(1, typeMask, uint32(t)<<8)}, errno(unix.ENOTTY)})
	}
	for _, c := range slices.Sorted(maps.Keys(refusedIoctls)) {
		rules = append(rules, rule{[]cond{is(1, c)}, errno(unix.ENOTTY)})
	}
	return append(rules, rule{do: allow})
}

// refusedIoctlTypes are refused whole, but for keptIoctls.
var refusedIoctlTypes = map[byte]string{
	'X':  "xfs (swapext, exchange_range, handles, scrub, shutdown), FITRIM, FIFREEZE, FSSETXATTR, GETFSMAP",
	'f':  "ext4 (move_ext, swap_boot, resize, migrate, checkpoint), fscrypt, fs-verity",
	0x94: "btrfs",
	0xf5: "f2fs",
}

// keptIoctls are harmless ones of those types that common programs use.
var keptIoctls = []uint32{
	unix.FS_IOC_GETFLAGS, unix.FS_IOC_SETFLAGS, // lsattr, chattr; setting a flag needs what it needs
	0xc020660b,                      // FS_IOC_FIEMAP: filefrag, cp
	0x801c581f,                      // FS_IOC_FSGETXATTR: lsattr -p
	unix.FICLONE, unix.FICLONERANGE, // cp --reflink
	unix.FIDEDUPERANGE, // duperemove
}

// refusedIoctls are refused one by one.
var refusedIoctls = map[uint32]string{
	1:              "FIBMAP: physical blocks",
	unix.TIOCSTI:   "types into another's terminal",
	unix.TIOCLINUX: "pastes the console's selection",
	unix.TIOCSETD:  "loads a line discipline",
	unix.TIOCCONS:  "takes the console's output",
}
