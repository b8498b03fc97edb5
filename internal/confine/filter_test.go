package confine

import (
	"encoding/binary"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write the golden files")

// call is what a filter sees of a system call.
type call struct {
	nr   uint32
	arch uint32
	args [6]uint64
}

func x86(nr uint32, args ...uint64) call {
	c := call{nr: nr, arch: unix.AUDIT_ARCH_X86_64}
	copy(c.args[:], args)
	return c
}

// vm runs a program on a struct seccomp_data. The interpreter reads words as a
// network does, first byte highest, so they are laid out that way for it.
type vm struct{ *bpf.VM }

func newVM(t testing.TB, prog []unix.SockFilter) vm {
	t.Helper()
	var ins []bpf.Instruction
	for _, i := range prog {
		ins = append(ins, bpf.RawInstruction{Op: i.Code, Jt: i.Jt, Jf: i.Jf, K: i.K}.Disassemble())
	}
	m, err := bpf.NewVM(ins)
	if err != nil {
		t.Fatal(err)
	}
	return vm{m}
}

func (m vm) run(t testing.TB, c call) action {
	t.Helper()
	b := binary.BigEndian.AppendUint32(nil, c.nr)
	b = binary.BigEndian.AppendUint32(b, c.arch)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 1) // instruction pointer
	for _, a := range c.args {
		b = binary.BigEndian.AppendUint32(b, uint32(a)) // low half first
		b = binary.BigEndian.AppendUint32(b, uint32(a>>32))
	}
	n, err := m.Run(b)
	if err != nil {
		t.Fatal(err)
	}
	return action(uint32(n))
}

// want is the policy's answer, by its definition: no spans, no search.
func (p *policy) want(c call) action {
	switch {
	case c.arch != unix.AUDIT_ARCH_X86_64:
		return killProcess
	case c.nr == skipped:
		return errno(unix.ENOSYS)
	case c.nr >= x32:
		return killProcess
	case c.nr > p.newest:
		return errno(unix.ENOSYS)
	}
rules:
	for _, r := range p.rules[c.nr] {
		for _, cond := range r.conds {
			if uint32(c.args[cond.arg])&cond.mask != cond.value {
				continue rules
			}
		}
		return r.do
	}
	return p.other
}

func testPolicy(t testing.TB) *policy {
	t.Helper()
	p, err := newPolicy()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// samples are the arguments at which a rule could turn: each value that a
// condition names, its neighbours, and the same with the upper half set.
func (p *policy) samples(nr uint32) []call {
	calls := []call{x86(nr), x86(nr, allOnes...)}
	for _, r := range p.rules[nr] {
		for _, c := range r.conds {
			for _, v := range []uint64{uint64(c.value), uint64(c.value) + 1, uint64(c.value) - 1, uint64(c.mask), ^uint64(c.mask)} {
				for _, high := range []uint64{0, 1 << 32, 0xffffffff << 32} {
					s := x86(nr)
					s.args[c.arg] = v ^ high
					calls = append(calls, s)
					for _, other := range r.conds { // all of a rule at once, but for this one
						if other.arg != c.arg {
							s.args[other.arg] = uint64(other.value)
						}
					}
					calls = append(calls, s)
				}
			}
		}
	}
	return calls
}

var allOnes = []uint64{1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1, 1<<64 - 1}

func TestProgramIsThePolicy(t *testing.T) {
	p := testPolicy(t)
	m := newVM(t, Filter())
	var n int
	check := func(c call) {
		n++
		if got, want := m.run(t, c), p.want(c); got != want {
			t.Errorf("%+v: %v, want %v", c, got, want)
		}
	}
	for nr := range uint32(601) {
		for _, c := range p.samples(nr) {
			check(c)
			c.arch = unix.AUDIT_ARCH_I386
			check(c)
			c.arch, c.nr = unix.AUDIT_ARCH_X86_64, nr|x32
			check(c)
		}
	}
	for _, nr := range []uint32{x32 - 1, x32, x32 + 1, 1 << 31, skipped - 1, skipped} {
		check(x86(nr))
	}
	if n < 4000 {
		t.Errorf("only %d calls were tried", n)
	}
}

// What the filter must do, whatever the profile that it starts from says.
func TestPolicyHolds(t *testing.T) {
	sys := func(name string, args ...uint64) call {
		nr, ok := syscallNumbers[name]
		if !ok {
			t.Fatalf("no system call %s", name)
		}
		return x86(nr, args...)
	}
	type row struct {
		call call
		want action
	}
	eperm, enotty := errno(unix.EPERM), errno(unix.ENOTTY)
	rows := map[string]row{
		"clone of a process":     {sys("clone", unix.CLONE_VM|unix.CLONE_VFORK|uint64(unix.SIGCHLD)), allow},
		"clone of a thread":      {sys("clone", 0x3d0f00), allow},
		"clone3":                 {sys("clone3"), allow},
		"i386":                   {call{nr: unix.SYS_READ, arch: unix.AUDIT_ARCH_I386}, killProcess},
		"arm64":                  {call{nr: unix.SYS_READ, arch: unix.AUDIT_ARCH_AARCH64}, killProcess},
		"x32":                    {x86(x32 | unix.SYS_READ), killProcess},
		"skipped by a tracer":    {x86(skipped), errno(unix.ENOSYS)},
		"newer than the profile": {x86(500), errno(unix.ENOSYS)},

		"socket unix":            {sys("socket", unix.AF_UNIX, unix.SOCK_STREAM), allow},
		"socket inet":            {sys("socket", unix.AF_INET, unix.SOCK_DGRAM), allow},
		"socket inet6":           {sys("socket", unix.AF_INET6), allow},
		"socket inet, odd upper": {sys("socket", 0xdead<<32|unix.AF_INET), allow},
		"netlink route":          {sys("socket", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE), allow},
		"netlink audit":          {sys("socket", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT), errno(unix.EPROTONOSUPPORT)},
		"socketpair unix":        {sys("socketpair", unix.AF_UNIX), allow},
		"socketpair tipc":        {sys("socketpair", unix.AF_TIPC), errno(unix.EAFNOSUPPORT)},

		"personality of gdb":                  {sys("personality", 0x40000), allow},
		"personality query":                   {sys("personality", 0xffffffff), allow},
		"READ_IMPLIES_EXEC":                   {sys("personality", 0x400000), eperm},
		"personality with ADDR_COMPAT_LAYOUT": {sys("personality", 0x200000), eperm},

		"sync":                     {sys("sync"), errno(0)}, // done, without being run
		"syncfs":                   {sys("syncfs", 3), allow},
		"fsync":                    {sys("fsync", 3), allow},
		"SO_ATTACH_FILTER":         {sys("setsockopt", 3, unix.SOL_SOCKET, 26), errno(unix.ENOPROTOOPT)},
		"SO_ATTACH_FILTER, bit 32": {sys("setsockopt", 3, 1<<32|unix.SOL_SOCKET, 1<<32|26), errno(unix.ENOPROTOOPT)},
		"SO_ATTACH_REUSEPORT_CBPF": {sys("setsockopt", 3, unix.SOL_SOCKET, 51), errno(unix.ENOPROTOOPT)},
		"SO_REUSEADDR":             {sys("setsockopt", 3, unix.SOL_SOCKET, unix.SO_REUSEADDR), allow},
		"26 of IPv6":               {sys("setsockopt", 3, unix.IPPROTO_IPV6, 26), allow},

		"seccomp filter":            {sys("seccomp", 1, 0), allow},
		"seccomp filter, TSYNC":     {sys("seccomp", 1, 1), allow},
		"seccomp listener":          {sys("seccomp", 1, 8), errno(unix.EINVAL)},
		"seccomp listener, TSYNC":   {sys("seccomp", 1, 0x19), errno(unix.EINVAL)},
		"seccomp listener, bit 32":  {sys("seccomp", 1, 1<<32|8), errno(unix.EINVAL)},
		"F_SETLK":                   {sys("fcntl", 3, unix.F_SETLK), allow},
		"F_GETFL":                   {sys("fcntl", 3, unix.F_GETFL), allow},
		"F_DUPFD_CLOEXEC":           {sys("fcntl", 3, unix.F_DUPFD_CLOEXEC), allow},
		"msync async":               {sys("msync", 1<<20, 4096, 1), allow},
		"msync invalidate":          {sys("msync", 1<<20, 4096, 2), allow},
		"msync sync":                {sys("msync", 1<<20, 4096, 4), errno(0)},
		"msync sync, invalidate":    {sys("msync", 1<<20, 4096, 6), errno(0)},
		"msync sync, bit 32":        {sys("msync", 1<<20, 4096, 1<<32|4), errno(0)},
		"msync async, bit 34":       {sys("msync", 1<<20, 4096, 4<<32|1), allow},
		"fallocate punches":         {sys("fallocate", 3, 3), allow},
		"fallocate punches, bit 32": {sys("fallocate", 3, 1<<32|3), allow},

		"FIONREAD": {sys("ioctl", 0, 0x541b), allow},
		"TCGETS":   {sys("ioctl", 0, unix.TCGETS), allow},
		"GETFLAGS": {sys("ioctl", 0, unix.FS_IOC_GETFLAGS), allow},
		"FICLONE":  {sys("ioctl", 0, unix.FICLONE), allow},
	}
	for family := range uint64(47) {
		switch family {
		case unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK:
		default:
			rows[fmt.Sprintf("socket family %d", family)] = row{sys("socket", family, unix.SOCK_RAW), errno(unix.EAFNOSUPPORT)}
			rows[fmt.Sprintf("socket family %d, bit 32", family)] = row{sys("socket", 1<<32|family), errno(unix.EAFNOSUPPORT)}
		}
	}
	for name, cmd := range map[string]uint64{"F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38} {
		rows[name] = row{sys("fcntl", 3, cmd), errno(unix.EINVAL)}
		rows[name+", bit 32"] = row{sys("fcntl", 3, 1<<32|cmd), errno(unix.EINVAL)}
		rows[name+", upper half"] = row{sys("fcntl", 3, 0xffffffff<<32|cmd), errno(unix.EINVAL)}
	}
	for mode := range uint64(256) { // allocate, keep size, punch, collapse, zero, insert, unshare, write zeroes
		if mode != 3 {
			rows[fmt.Sprintf("fallocate %#x", mode)] = row{sys("fallocate", 3, mode), errno(unix.EOPNOTSUPP)}
			rows[fmt.Sprintf("fallocate %#x, bit 33", mode)] = row{sys("fallocate", 3, 1<<33|mode), errno(unix.EOPNOTSUPP)}
		}
	}
	for bit := range 32 {
		flag := uint64(1) << bit
		if flag&cloneNew != 0 {
			rows[fmt.Sprintf("clone with %#x", flag)] = row{sys("clone", flag|uint64(unix.SIGCHLD)), eperm}
		}
	}
	// Values as the headers give them, not as the policy derives them.
	for name, cmd := range map[string]uint64{
		"XFS_IOC_SWAPEXT": 0xc0c0586d, "XFS_IOC_EXCHANGE_RANGE": 0x40285881, "XFS_IOC_GOINGDOWN": 0x8004587d,
		"XFS_IOC_START_COMMIT": 0x80585882, "XFS_IOC_COMMIT_RANGE": 0x40585883,
		"XFS_IOC_OPEN_BY_HANDLE": 0x4038586b, "XFS_IOC_SCRUB_METADATA": 0xc040583c,
		"EXT4_IOC_MOVE_EXT": 0xc028660f, "EXT4_IOC_SWAP_BOOT": 0x6611, "EXT4_IOC_GROUP_ADD": 0x40286608,
		"EXT4_IOC_GROUP_EXTEND": 0x40086607, "EXT4_IOC_RESIZE_FS": 0x40086610, "EXT4_IOC_MIGRATE": 0x6609,
		"EXT4_IOC_CHECKPOINT": 0x4004662b, "BTRFS_IOC_SNAP_CREATE": 0x50009401, "BTRFS_IOC_CLONE_RANGE_like": 0x9480,
		"F2FS_IOC_MOVE_RANGE": 0xc020f509, "FITRIM": 0xc0185879, "FIFREEZE": 0xc0045877, "FITHAW": 0xc0045878,
		"FS_IOC_GETFSMAP": 0xc0c0583b, "FS_IOC_FSSETXATTR": 0x401c5820, "FS_IOC_ENABLE_VERITY": 0x40806685,
		"FS_IOC_SHUTDOWN": 0x8004587d, "FIBMAP": 1, "TIOCSTI": 0x5412, "TIOCLINUX": 0x541c,
	} {
		rows[name] = row{sys("ioctl", 3, cmd), enotty}
		rows[name+", bit 32"] = row{sys("ioctl", 3, 1<<32|cmd), enotty}
		rows[name+", upper half"] = row{sys("ioctl", 3, 0xffffffff<<32|cmd), enotty}
	}
	for _, name := range []string{
		"acct", "add_key", "bpf", "delete_module", "fanotify_init", "fanotify_mark", "finit_module", "fsconfig", "fsmount",
		"fsopen", "fspick", "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "iopl", "ioperm",
		"kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mount", "mount_setattr", "move_mount",
		"name_to_handle_at", "open_by_handle_at", "open_tree", "perf_event_open", "pidfd_getfd", "pivot_root",
		"process_madvise", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname", "sethostname", "setns",
		"settimeofday", "swapoff", "swapon", "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
	} {
		rows[name] = row{sys(name), eperm}
	}
	for _, name := range []string{"io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents"} {
		rows[name] = row{sys(name), errno(unix.ENOSYS)}
	}
	for _, name := range []string{
		"read", "execve", "fork", "vfork", "chroot", "kcmp", "process_vm_readv", "process_vm_writev", "ptrace", "seccomp",
		"landlock_restrict_self", "pidfd_open", "pidfd_send_signal", "openat2", "memfd_create", "rseq", "prctl", "futex_waitv",
		"inotify_init1", "setresuid", "statx", "copy_file_range", "membarrier",
	} {
		rows[name] = row{sys(name), allow}
	}
	m := newVM(t, Filter())
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		if got := m.run(t, rows[name].call); got != rows[name].want {
			t.Errorf("%s: %v, want %v", name, got, rows[name].want)
		}
	}
}

func (a action) String() string {
	switch {
	case a == allow:
		return "allow"
	case a == killProcess:
		return "kill"
	case a == errno(0):
		return "done"
	case a&unix.SECCOMP_RET_ACTION_FULL == unix.SECCOMP_RET_ERRNO:
		return unix.ErrnoName(unix.Errno(a & unix.SECCOMP_RET_DATA))
	}
	return fmt.Sprintf("%#x", uint32(a))
}

// The whole list, so that a change of it, ours or the profile's, is read by a person.
func TestGoldenPolicy(t *testing.T) {
	names := map[uint32]string{}
	for name, nr := range syscallNumbers {
		names[nr] = name
	}
	p := testPolicy(t)
	var b strings.Builder
	for _, s := range p.ranges() {
		fmt.Fprintf(&b, "%d..: ", s.first)
		for i, r := range s.rules {
			if i > 0 {
				b.WriteString(", ")
			}
			for _, c := range r.conds {
				fmt.Fprintf(&b, "arg%d&%#x==%#x ", c.arg, c.mask, c.value)
			}
			b.WriteString(r.do.String())
		}
		b.WriteByte('\n')
		if len(s.rules) == 1 && s.rules[0].do == allow {
			for nr := s.first; nr <= p.newest && len(p.of(nr)) == 1 && p.of(nr)[0].do == allow; nr++ {
				fmt.Fprintf(&b, "\t%s\n", names[nr])
			}
		}
	}
	file := filepath.Join("testdata", "policy.golden")
	if *update {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), b.String()); d != "" {
		t.Error(d)
	}
}

func TestChildFilterRefusesClone3Alone(t *testing.T) {
	m := newVM(t, ChildFilter())
	for nr := range uint32(601) {
		want := allow
		if nr == unix.SYS_CLONE3 {
			want = errno(unix.ENOSYS)
		}
		if got := m.run(t, x86(nr, allOnes...)); got != want {
			t.Errorf("call %d: %v, want %v", nr, got, want)
		}
	}
}

// A program with far jumps searches as one without.
func TestLongProgramsSearchToo(t *testing.T) {
	p := &policy{rules: map[uint32][]rule{}, other: errno(unix.EPERM), newest: 1000}
	for nr := uint32(0); nr < 1000; nr += 2 {
		p.rules[nr] = []rule{{[]cond{is(int(nr)%6, nr)}, allow}}
	}
	m := newVM(t, p.compile())
	for nr := range uint32(1010) {
		for _, v := range []uint64{0, uint64(nr)} {
			c := x86(nr, v, v, v, v, v, v)
			if got, want := m.run(t, c), p.want(c); got != want {
				t.Fatalf("%+v: %v, want %v", c, got, want)
			}
		}
	}
}

func FuzzFilter(f *testing.F) {
	p := testPolicy(f)
	m := newVM(f, Filter())
	f.Add(uint32(unix.SYS_IOCTL), uint32(unix.AUDIT_ARCH_X86_64), uint64(1), uint64(1<<32|unix.TIOCSTI), uint64(0))
	f.Add(uint32(unix.SYS_SOCKET), uint32(unix.AUDIT_ARCH_X86_64), uint64(16), uint64(3), uint64(9))
	f.Add(uint32(unix.SYS_CLONE), uint32(unix.AUDIT_ARCH_X86_64), uint64(unix.CLONE_NEWUSER), uint64(0), uint64(0))
	f.Add(uint32(x32|1), uint32(unix.AUDIT_ARCH_I386), uint64(0), uint64(0), uint64(0))
	r := rand.New(rand.NewPCG(1, 2)) // seeds for the ordinary test run
	for range 300 {
		f.Add(r.Uint32N(700), uint32(unix.AUDIT_ARCH_X86_64), r.Uint64()>>r.UintN(64), r.Uint64()>>r.UintN(64), r.Uint64()>>r.UintN(64))
	}
	f.Fuzz(func(t *testing.T, nr, arch uint32, a0, a1, a2 uint64) {
		c := call{nr: nr, arch: arch, args: [6]uint64{a0, a1, a2}}
		if got, want := m.run(t, c), p.want(c); got != want {
			t.Errorf("%+v: %v, want %v", c, got, want)
		}
	})
}
