package confine

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/hostos"
)

// The filters are tried where they will run, in a process of their own, which
// needs no privilege: the test binary starts itself again.
const helperEnv = "CONFINE_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperEnv) {
	case "":
		os.Exit(m.Run())
	case "try":
		try()
	case "socket":
		makeSocket()
	case "x32":
		attach(Filter(), unix.SECCOMP_FILTER_FLAG_TSYNC)
		_, _, _ = unix.RawSyscall(x32|unix.SYS_GETPID, 0, 0, 0)
	}
}

func attach(prog []unix.SockFilter, flags uintptr) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	f := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&f)))
	if e != 0 {
		panic(e)
	}
}

// try makes calls before and after the filters, and prints their errors.
func try() {
	file, err := os.CreateTemp("", "")
	if err != nil {
		panic(err)
	}
	defer os.Remove(file.Name())
	fd := file.Fd()
	if err := file.Truncate(4096); err != nil {
		panic(err)
	}
	shared, err := unix.Mmap(int(fd), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	page := uintptr(unsafe.Pointer(&shared[0]))
	none := page + 1<<45 // not mapped
	lock := uintptr(unsafe.Pointer(&unix.Flock_t{Type: unix.F_RDLCK, Len: 1}))
	const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	var arg [256]byte
	p := uintptr(unsafe.Pointer(&arg))
	calls := map[string][5]uintptr{
		"getpid":               {unix.SYS_GETPID},
		"socket unix":          {unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM},
		"socket netlink":       {unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE},
		"socket audit":         {unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT},
		"socket vsock":         {unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM},
		"unshare nothing":      {unix.SYS_UNSHARE, 0},
		"GETFLAGS":             {unix.SYS_IOCTL, fd, unix.FS_IOC_GETFLAGS, p},
		"FIGETBSZ":             {unix.SYS_IOCTL, fd, 2, p},
		"FIGETBSZ, bit 32":     {unix.SYS_IOCTL, fd, 1<<32 | 2, p},
		"FSSETXATTR":           {unix.SYS_IOCTL, fd, 0x401c5820, 0},
		"FSSETXATTR, bit 32":   {unix.SYS_IOCTL, fd, 1<<32 | 0x401c5820, 0},
		"clone3 of no size":    {unix.SYS_CLONE3, 0, 0},
		"personality of gdb":   {unix.SYS_PERSONALITY, 0x40000},
		"personality query":    {unix.SYS_PERSONALITY, 0xffffffff},
		"io_uring_setup":       {unix.SYS_IO_URING_SETUP, 0, 0},
		"a call of tomorrow":   {600},
		"ptrace of no process": {unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1 << 30},
		"sync":                 {unix.SYS_SYNC},
		"filter of a socket":   {unix.SYS_SETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER},
		"option of a socket":   {unix.SYS_SETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_REUSEADDR},
		"lock of a process":    {unix.SYS_FCNTL, fd, unix.F_SETLK, lock},
		"lock of a file":       {unix.SYS_FCNTL, fd, unix.F_OFD_SETLK, lock},
		"lock, waiting":        {unix.SYS_FCNTL, fd, unix.F_OFD_SETLKW, lock},
		"lock, bit 32":         {unix.SYS_FCNTL, fd, 1<<32 | unix.F_OFD_SETLK, lock},
		"whose lock":           {unix.SYS_FCNTL, fd, unix.F_OFD_GETLK, lock},
		"allocate":             {unix.SYS_FALLOCATE, fd, 0, 0, 4096},
		"allocate, bit 32":     {unix.SYS_FALLOCATE, fd, 1 << 32, 0, 4096},
		"allocate behind":      {unix.SYS_FALLOCATE, fd, unix.FALLOC_FL_KEEP_SIZE, 4096, 4096},
		"punch":                {unix.SYS_FALLOCATE, fd, punch, 0, 4096},
		"msync":                {unix.SYS_MSYNC, page, 4096, unix.MS_SYNC},
		"msync of nothing":     {unix.SYS_MSYNC, none, 4096, unix.MS_SYNC},
		"is it mapped":         {unix.SYS_MSYNC, none, 4096, unix.MS_ASYNC},
	}
	result := map[string][3]string{}
	for stage, filter := range [][]unix.SockFilter{nil, Filter(), ChildFilter()} {
		if filter != nil {
			attach(filter, unix.SECCOMP_FILTER_FLAG_TSYNC)
		}
		for name, c := range calls {
			r, _, e := unix.RawSyscall6(c[0], c[1], c[2], c[3], c[4], 0, 0)
			row := result[name]
			if row[stage] = unix.ErrnoName(e); e == 0 {
				row[stage] = "ok"
				if c[0] == unix.SYS_SOCKET {
					_ = unix.Close(int(r))
				}
			}
			result[name] = row
		}
	}
	_ = json.NewEncoder(os.Stdout).Encode(result)
}

func TestFiltersInAProcess(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=try")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	var got map[string][3]string
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	// Without a filter, with Filter, with ChildFilter too. Where the first is
	// "", the host's own answer does not matter.
	want := map[string][3]string{
		"getpid":               {"ok", "ok", "ok"},
		"socket unix":          {"ok", "ok", "ok"},
		"socket netlink":       {"ok", "ok", "ok"},
		"socket audit":         {"", "EPROTONOSUPPORT", "EPROTONOSUPPORT"},
		"socket vsock":         {"", "EAFNOSUPPORT", "EAFNOSUPPORT"},
		"unshare nothing":      {"ok", "EPERM", "EPERM"},
		"GETFLAGS":             {"ok", "ok", "ok"},
		"FIGETBSZ":             {"ok", "ok", "ok"},
		"FIGETBSZ, bit 32":     {"ok", "ok", "ok"}, // the kernel takes 32 bits
		"FSSETXATTR":           {"EFAULT", "ENOTTY", "ENOTTY"},
		"FSSETXATTR, bit 32":   {"EFAULT", "ENOTTY", "ENOTTY"},
		"clone3 of no size":    {"EINVAL", "EINVAL", "ENOSYS"},
		"personality of gdb":   {"ok", "ok", "ok"},
		"personality query":    {"ok", "ok", "ok"},
		"io_uring_setup":       {"", "EPERM", "EPERM"},
		"a call of tomorrow":   {"ENOSYS", "ENOSYS", "ENOSYS"},
		"ptrace of no process": {"ESRCH", "ESRCH", "ESRCH"},
		"sync":                 {"ok", "ok", "ok"},
		"filter of a socket":   {"ENOTSOCK", "ENOPROTOOPT", "ENOPROTOOPT"},
		"option of a socket":   {"ENOTSOCK", "ENOTSOCK", "ENOTSOCK"},
		"lock of a process":    {"ok", "ok", "ok"},
		"lock of a file":       {"ok", "EINVAL", "EINVAL"},
		"lock, waiting":        {"ok", "EINVAL", "EINVAL"},
		"lock, bit 32":         {"ok", "EINVAL", "EINVAL"},
		"whose lock":           {"ok", "EINVAL", "EINVAL"},
		"allocate":             {"ok", "ENOTSUP", "ENOTSUP"},
		"allocate, bit 32":     {"ok", "ENOTSUP", "ENOTSUP"},
		"allocate behind":      {"ok", "ENOTSUP", "ENOTSUP"},
		"punch":                {"ok", "ok", "ok"},
		"msync":                {"ok", "ok", "ok"},
		"msync of nothing":     {"ENOMEM", "ok", "ok"}, // not run
		"is it mapped":         {"ENOMEM", "ENOMEM", "ENOMEM"},
	}
	for name, w := range want {
		for stage, filters := range []string{"no filter", "Filter", "Filter and ChildFilter"} {
			if g := got[name][stage]; w[stage] != "" && g != w[stage] {
				t.Errorf("%s with %s: %s, want %s", name, filters, g, w[stage])
			}
		}
	}
}

func TestX32EndsTheProcess(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=x32")
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGSYS {
		t.Errorf("an x32 call: %v, want killed by SIGSYS", err)
	}
}

// onThread runs f on a thread that ends with it, filters and all.
func onThread(f func()) {
	done := make(chan struct{})
	hostos.OnThread(func() {
		f()
		close(done)
	})
	<-done
}

func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

func BenchmarkAttach(b *testing.B) {
	for name, prog := range map[string][]unix.SockFilter{"filter": Filter(), "child": ChildFilter()} {
		b.Run(name, func(b *testing.B) {
			var total time.Duration // of CPU: a busy machine changes it little
			for b.Loop() {
				onThread(func() {
					start := threadTime()
					attach(prog, 0)
					total += threadTime() - start
				})
			}
			b.ReportMetric(float64(total.Microseconds())/float64(b.N), "cpu-us/attach")
			b.ReportMetric(float64(len(prog)), "instructions")
			b.ReportMetric(0, "ns/op")
		})
	}
}
