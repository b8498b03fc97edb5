package layer

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/testutil"
)

// probeCalls are what a helper in an archive's hands would try.
var probeCalls = []struct {
	name string
	call func() unix.Errno
}{
	{"open", func() unix.Errno {
		return try(unix.SYS_OPENAT, at(unix.AT_FDCWD), str("/etc/passwd"), unix.O_RDONLY, 0)
	}},
	{"create", func() unix.Errno {
		return try(unix.SYS_OPENAT, at(unix.AT_FDCWD), str("/tmp/dsec-probe"), unix.O_CREAT|unix.O_WRONLY, 0o600)
	}},
	{"stat", func() unix.Errno {
		var st unix.Stat_t
		return try(unix.SYS_NEWFSTATAT, at(unix.AT_FDCWD), str("/"), uintptr(unsafe.Pointer(&st)), 0)
	}},
	{"socket inet", func() unix.Errno { return try(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, 0, 0) }},
	{"socket unix", func() unix.Errno { return try(unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_STREAM, 0, 0) }},
	{"socketpair", func() unix.Errno {
		var fds [2]int32
		return try(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM, 0, uintptr(unsafe.Pointer(&fds)))
	}},
	{"memfd", func() unix.Errno { return try(unix.SYS_MEMFD_CREATE, str("m"), 0, 0, 0) }},
	{"executable memory", func() unix.Errno {
		return try6(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON, ^uintptr(0), 0)
	}},
	{"signal the parent", func() unix.Errno { return try(unix.SYS_KILL, uintptr(os.Getppid()), 0, 0, 0) }},
	{"dup", func() unix.Errno { return try(unix.SYS_DUP, 0, 0, 0, 0) }},
	{"umask", func() unix.Errno { return try(unix.SYS_UMASK, 0o77, 0, 0, 0) }},
	{"chdir", func() unix.Errno { return try(unix.SYS_CHDIR, str("/tmp"), 0, 0, 0) }},
	{"prctl", func() unix.Errno { return try(unix.SYS_PRCTL, unix.PR_GET_DUMPABLE, 0, 0, 0) }},
	{"unshare", func() unix.Errno { return try(unix.SYS_UNSHARE, unix.CLONE_NEWUTS, 0, 0, 0) }},
	{"fork", func() unix.Errno { return try(unix.SYS_CLONE, uintptr(unix.SIGCHLD)|unix.CLONE_THREAD, 0, 0, 0) }},
	{"execve", func() unix.Errno { return try(unix.SYS_EXECVE, str("/nonexistent"), 0, 0, 0) }},
}

func try(nr uintptr, a ...uintptr) unix.Errno {
	_, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], 0, 0)
	return errno
}

func try6(nr uintptr, a, b, c, d, e, f uintptr) unix.Errno {
	_, _, errno := unix.Syscall6(nr, a, b, c, d, e, f)
	return errno
}

func at(fd int) uintptr { return uintptr(fd) }

func str(s string) uintptr {
	p, err := unix.BytePtrFromString(s)
	if err != nil {
		panic(err)
	}
	kept = append(kept, p)
	return uintptr(unsafe.Pointer(p))
}

// kept holds what system calls were given pointers to.
var kept []*byte

// probe reports the errno of each call.
func probe(confined bool) {
	if confined {
		if _, err := confineHelper(Limits{}.WithDefaults(), fdImages+1); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	// Threads can be made at any time.
	var wg sync.WaitGroup
	all := make(chan struct{})
	for range 12 {
		wg.Add(1)
		go func() {
			runtime.LockOSThread()
			wg.Done()
			<-all
		}()
	}
	wg.Wait()
	close(all)
	res := &convert.Result{}
	for _, c := range probeCalls {
		res.Findings = append(res.Findings, c.name+": "+unix.ErrnoName(c.call()))
	}
	say(report{Result: res})
}

func runProbe(t *testing.T, verb string) []string {
	t.Helper()
	s := badStore(t, verb, Options{})
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h, err := s.startHelper([]*os.File{f}, f, convert.Options{})
	if err != nil {
		t.Fatal(err)
	}
	_ = h.stdin.Close()
	rep, err := h.wait()
	if err != nil {
		t.Fatal(err)
	}
	return rep.Result.Findings
}

// The confined helper can do nothing to the host; the same program without the
// confinement can.
func TestHelperIsConfined(t *testing.T) {
	got, control := runProbe(t, "probe"), runProbe(t, "probe-control")
	var want []string
	for _, c := range probeCalls {
		want = append(want, c.name+": EPERM")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("confined (-want +got):\n%s", diff)
	}
	for i, c := range control {
		switch probeCalls[i].name {
		case "execve":
			if c != "execve: ENOENT" {
				t.Errorf("control: %s", c)
			}
		case "unshare", "signal the parent", "fork": // not without a right that the helper has not
		default:
			if c != probeCalls[i].name+": " {
				t.Errorf("control: %s", c)
			}
		}
	}
	_ = os.Remove("/tmp/dsec-probe")
}

// What the host sees of a helper at work.
func TestHelperFromOutside(t *testing.T) {
	testutil.Require(t, testutil.Root)
	s := badStore(t, "confined-waits", Options{})
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h, err := s.startHelper([]*os.File{f}, f, convert.Options{})
	if err != nil {
		t.Fatal(err)
	}
	proc := fmt.Sprintf("/proc/%d", h.cmd.Process.Pid)
	var one [1]byte
	if _, err := io.ReadFull(h.report, one[:]); err != nil {
		t.Fatal(err, h.stderr.String())
	}
	status, err := os.ReadFile(proc + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"Uid:\t64535\t64535\t64535\t64535", "Gid:\t64535\t64535\t64535\t64535", "Groups:\t \n", "NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"} {
		if !strings.Contains(string(status), line) {
			t.Errorf("no %q in status:\n%s", line, status)
		}
	}
	for _, ns := range []string{"net", "ipc", "uts", "mnt"} {
		mine, _ := os.Readlink("/proc/self/ns/" + ns)
		theirs, err := os.Readlink(proc + "/ns/" + ns)
		if err != nil || theirs == mine {
			t.Errorf("%s namespace %s, the host's is %s, %v", ns, theirs, mine, err)
		}
	}
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		target, _ := os.Readlink(proc + "/fd/" + fd.Name())
		// Go's runtime reads its cgroup's processor limit from open files.
		if strings.HasPrefix(target, "/sys/fs/cgroup/") {
			continue
		}
		if !strings.HasPrefix(target, "pipe:") && target != "/dev/null" && target != f.Name() && !strings.HasPrefix(target, "anon_inode:[event") {
			t.Errorf("descriptor %s is %s", fd.Name(), target)
		}
	}
	_ = h.stdin.Close()
	_, _ = h.wait()
}

// The helper refuses to run in any way but its own.
func TestHelperRefusesRoot(t *testing.T) {
	testutil.Require(t, testutil.Root)
	if _, err := confineHelper(Limits{}, fdImages+1); err == nil || !strings.Contains(err.Error(), "root") {
		t.Errorf("%v, want a refusal", err)
	}
}
