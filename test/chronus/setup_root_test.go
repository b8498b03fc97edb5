package chronus_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

func TestSetupMakesASandbox(t *testing.T) {
	s := newSandbox(t, 2, func(r *chronusapi.SetupRequest) {
		r.Rlimits = []chronusapi.Rlimit{{Resource: unix.RLIMIT_CORE}, {Resource: unix.RLIMIT_NOFILE, Soft: 999, Hard: 1000}}
		r.Filter = bpf(deny(unix.SYS_MKDIR, unix.EXDEV))
		r.ChildFilter = bpf(deny(unix.SYS_MKDIRAT, unix.ENOTBLK))
	})
	r := s.run(t, shell("hostname; ulimit -c; ulimit -n; ulimit -Hn; echo $$; grep -E '^(Cap|NoNewPrivs|Seccomp:|SigBlk|SigIgn|Groups)' /proc/self/status; ls /proc/self/fd; id -u; ls -d /newroot /proc/1/root; touch /x; touch /tmp/x && echo writable"))
	keep := fmt.Sprintf("%016x", 1<<unix.CAP_SETUID|1<<unix.CAP_SETGID|1<<unix.CAP_KILL|1<<unix.CAP_CHOWN)
	for _, want := range []string{
		"sandbox\n0\n999\n1000\n", "CapInh:\t0000000000000000\n", "CapPrm:\t" + keep, "CapEff:\t" + keep, "CapBnd:\t" + keep,
		"CapAmb:\t0000000000000000\n", "NoNewPrivs:\t1\n", "Seccomp:\t2\n", "SigBlk:\t0000000000000000\n", "Groups:\t \n", "\n0\n1\n2\n3\n0\n", "writable\n",
	} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in %s\n%s", want, r.stdout, r.stderr)
		}
	}
	if strings.Contains(r.stdout, "/newroot") {
		t.Error("the old root is still there")
	}
	// Each of the two filters is in force for commands; chronus has the first.
	py := s.run(t, argv("python3", "-c", `
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for nr, args in (83, (b"/tmp/a", 0o755)), (258, (-100, b"/tmp/b", 0o755)):
    libc.syscall(nr, *args); print(ctypes.get_errno())
`))
	if py.stdout != fmt.Sprintf("%d\n%d\n", unix.EXDEV, unix.ENOTBLK) {
		t.Errorf("got %q %q", py.stdout, py.stderr)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.pid))
	if err != nil || !strings.Contains(string(status), "CapBnd:\t"+keep) || !strings.Contains(string(status), "Seccomp:\t2\n") || !strings.Contains(string(status), "Seccomp_filters:\t1\n") {
		t.Errorf("chronus: %v\n%s", err, status)
	}
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", s.pid, task.Name()))
		if err != nil || !strings.Contains(string(status), "CapEff:\t"+keep) || !strings.Contains(string(status), "Seccomp:\t2\n") {
			t.Errorf("thread %s: %v\n%s", task.Name(), err, status)
		}
	}
	root, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	wantError(t, s.Setup(t.Context(), chronusapi.SetupRequest{Root: root}), dsec.CodeConflict, "")
}

// deny is a filter that answers one system call with an errno.
func deny(nr uint32, errno unix.Errno) []unix.SockFilter {
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0x00050000 | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000},
	}
}

func bpf(list []unix.SockFilter) (b []byte) {
	for _, i := range list {
		b = append(b, byte(i.Code), byte(i.Code>>8), i.Jt, i.Jf, byte(i.K), byte(i.K>>8), byte(i.K>>16), byte(i.K>>24))
	}
	return b
}

func TestPeersInsideAreRefused(t *testing.T) {
	// The socket is below /tmp of the host, which this sandbox keeps.
	s := newSandbox(t, 1, func(r *chronusapi.SetupRequest) { r.Mounts = nil })
	ask := `
import socket
s = socket.socket(socket.AF_UNIX)
s.connect("` + s.socket + `")
try:
    s.sendall(b"dsec\x01\x01\0\0\0\0")
    print(s.recv(100))
except OSError as e:
    print(type(e).__name__)
`
	r := s.run(t, argv("python3", "-c", ask))
	if r.stdout != "b''\n" && r.stdout != "BrokenPipeError\n" && r.stdout != "ConnectionResetError\n" {
		t.Errorf("got %q %q, want no answer", r.stdout, r.stderr)
	}
	// The positive control: from outside the same socket answers the same bytes.
	out, err := exec.Command("python3", "-c", ask).Output()
	if err != nil || !strings.HasPrefix(string(out), "b'\\x80") {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestSignalsFromInsideDoNotEndChronus(t *testing.T) {
	s := newSandbox(t, 1, nil)
	r := s.run(t, shell("for i in $(seq 64); do kill -$i 1 2>/dev/null; done; kill -9 -1; echo still"))
	if r.outcome.Signal != 0 && r.outcome.Signal != 9 {
		t.Errorf("got %+v", r)
	}
	if r := s.run(t, shell("echo alive")); r.stdout != "alive\n" {
		t.Errorf("got %+v", r)
	}
}

func TestGroupsAreForOneCommandAtATime(t *testing.T) {
	s := newSandbox(t, 1, nil)
	// A daemon that left its session and parents still holds the group.
	r := s.run(t, shell("(setsid sh -c 'sleep 1000 >/dev/null 2>&1 </dev/null & exit' &) ; echo done"))
	if r.stdout != "done\n" {
		t.Fatalf("got %+v", r)
	}
	_, err := s.Start(t.Context(), argv("true"))
	if !errors.Is(err, chronusapi.ErrNeedGroup) {
		t.Fatalf("got %v, want ErrNeedGroup", err)
	}
	if err := s.AddGroup(t.Context(), s.groups.add(t)); err != nil {
		t.Fatal(err)
	}
	if r := s.run(t, argv("true")); !r.outcome.OK() {
		t.Errorf("in the second group: %+v", r)
	}
	list, err := s.Processes(t.Context())
	if err != nil || !list[0].Lingering || list[1].Lingering {
		t.Fatalf("got %+v, %v", list, err)
	}
	if err := s.Signal(t.Context(), r.process, 9, true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first group is empty", func() bool {
		list, err := s.Processes(t.Context())
		return err == nil && !list[0].Lingering
	})
	// Two at once now.
	req := argv("cat")
	req.OpenStdin = true
	a, err := s.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if r := s.run(t, argv("true")); !r.outcome.OK() {
		t.Errorf("beside another: %+v", r)
	}
}

func TestTimeoutReachesDaemons(t *testing.T) {
	s := newSandbox(t, 1, nil)
	req := shell("(setsid sh -c 'sleep 1000 & sleep 1000' &) ; echo up; sleep 1000")
	req.Command.Timeout = time.Second
	r := s.run(t, req)
	if !r.outcome.TimedOut || r.stdout != "up\n" || r.outcome.Signal != 9 {
		t.Errorf("got %+v", r)
	}
	eventually(t, "the group is empty", func() bool {
		text, err := os.ReadFile(filepath.Join(s.groups.v2, "0/cgroup.procs"))
		return err == nil && len(text) == 0
	})
}

func TestOOMIsToldPerCommand(t *testing.T) {
	s := newSandbox(t, 0, func(r *chronusapi.SetupRequest) {})
	if s.groups.memory == "" {
		t.Skip("the memory controller is not on v1 here; the backend's tests have the other")
	}
	s.groups.limit = "64M"
	for range 2 {
		if err := s.AddGroup(t.Context(), s.groups.add(t)); err != nil {
			t.Fatal(err)
		}
	}
	hungry := "x = bytearray(500_000_000); print(len(x))"
	for range 2 {
		r := s.run(t, argv("python3", "-c", hungry))
		if !r.outcome.OOM || r.outcome.Signal != 9 || r.outcome.OK() {
			t.Errorf("got %+v", r)
		}
	}
	// A child is killed; the command itself goes on and is marked all the same.
	if r := s.run(t, shell("python3 -c '"+hungry+"'; exit 3")); !r.outcome.OOM || r.outcome.Code != 3 {
		t.Errorf("got %+v", r)
	}
	if r := s.run(t, shell("exit 3")); r.outcome.OOM || r.outcome.Code != 3 {
		t.Errorf("the next one: %+v", r)
	}
}

func TestPID1ReapsOrphans(t *testing.T) {
	s := newSandbox(t, 1, nil)
	r := s.run(t, argv("python3", "-c", `
import os
for _ in range(1000):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
`))
	if !r.outcome.OK() {
		t.Fatalf("got %+v", r)
	}
	eventually(t, "no zombie is left", func() bool { return len(s.children(t)) == 0 })
}

func TestUsersAreThoseOfTheSandbox(t *testing.T) {
	s := newSandbox(t, 1, nil)
	for user, want := range map[string]string{
		"":              "0:0:root:/root:",
		"nobody":        "65534:65534:nobody:/nonexistent:",
		"65534":         "65534:65534:nobody:/nonexistent:",
		"12345":         "12345:0:12345:/:",
		"12345:54321":   "12345:54321:12345:/:",
		"nobody:daemon": "65534:1:nobody:/nonexistent:",
	} {
		req := shell("echo $(id -u):$(id -g):$USER:$HOME:; grep CapEff /proc/self/status")
		req.Command.User = user
		r := s.run(t, req)
		if !strings.HasPrefix(r.stdout, want+"\n") {
			t.Errorf("%q: %q, want %q; %s", user, r.stdout, want, r.stderr)
		}
		if user != "" && !strings.Contains(r.stdout, "CapEff:\t0000000000000000\n") {
			t.Errorf("%q has capabilities: %s", user, r.stdout)
		}
	}
	req := argv("true")
	req.Command.User = "70000" // not in the map
	_, err := s.start(t, req)
	wantError(t, err, dsec.CodeInvalid, "command.user")
	sess, err := s.OpenSession(t.Context(), chronusapi.SessionRequest{User: "nobody"})
	if err != nil {
		t.Fatal(err)
	}
	if r := s.command(t, sess.ID, "id -un"); r.stdout != "nobody\n" {
		t.Errorf("session: %+v", r)
	}
}

// TestIdleMemory bounds what a sandbox costs after 100 commands, at rest: what
// chronus has of its own, once it has given memory back.
func TestIdleMemory(t *testing.T) {
	s := newSandbox(t, 1, nil)
	for range 100 {
		if r := s.run(t, shell("echo hello")); r.stdout != "hello\n" {
			t.Fatalf("got %+v", r)
		}
	}
	const limit = 256 // KiB
	eventually(t, "chronus is small", func() bool { return privateKiB(t, s.pid) <= limit })
	t.Logf("%d KiB private, %d of one that did nothing", privateKiB(t, s.pid), privateKiB(t, newSandbox(t, 1, nil).pid))
}

func privateKiB(t *testing.T, pid int) (sum int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[0], "Private_") {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
	}
	return sum
}
