//go:build linux && amd64

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
)

// The test binary starts itself as the probe, in namespaces of its own, as it
// is and confined as a sandbox is.
func TestMain(m *testing.M) {
	switch os.Getenv("PROBE_TEST") {
	case "":
		os.Exit(m.Run())
	case "confined":
		confineSelf()
	}
	main()
	os.Exit(0)
}

// confineSelf does what chronus does: everything that the filter covers.
func confineSelf() {
	// The filter hands no_new_privs on to all threads where the thread that
	// sets it has that: it must be the same one.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	for _, prog := range [][]unix.SockFilter{confine.Filter(), confine.ChildFilter()} {
		f := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
		_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&f)))
		if e != 0 {
			panic(e)
		}
	}
}

func probe(t *testing.T, mode string, args ...string) map[string]any {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = []string{"PROBE_TEST=" + mode}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	// fchmod(0, 0) is one of the calls tried: descriptor 0 must not be the
	// host's /dev/null, which os/exec would open.
	cmd.Stdin = strings.NewReader("")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v %s", args, err, &stderr)
	}
	var result map[string]any
	if err := json.Unmarshal(out, &result); err != nil {
		t.Fatalf("%v: %v in %.200q", args, err, out)
	}
	return result
}

func TestRefusesToRunOnTheHost(t *testing.T) {
	if err := run([]string{"syscalls"}); err == nil || !strings.Contains(err.Error(), "host") {
		if text, _ := os.ReadFile("/proc/self/uid_map"); !strings.Contains(string(text), "4294967295") {
			t.Skip("not in the host's user namespace")
		}
		t.Errorf("in the host's user namespace: %v", err)
	}
}

// Every call is tried with and without the filter, so that a refusal that the
// kernel gives anyway does not pass for the filter's.
func TestProbeSeesTheFilter(t *testing.T) {
	free, confined := probe(t, "free", "syscalls"), probe(t, "confined", "syscalls")
	results := func(m map[string]any) map[string]any { return m["results"].(map[string]any) }
	if n := len(results(free)); n != 601 || len(results(confined)) != n {
		t.Fatalf("%d and %d results, want 601", n, len(results(confined)))
	}
	for nr, want := range map[string][2]string{
		"39":  {"ok", "ok"},           // getpid
		"34":  {"blocked", "blocked"}, // pause
		"60":  {"exited", "exited"},   // exit
		"57":  {"ok", "ok"},           // fork
		"272": {"ok", "EPERM"},        // unshare
		"165": {"EFAULT", "EPERM"},    // mount
		"303": {"EFAULT", "EPERM"},    // name_to_handle_at
		"435": {"EINVAL", "ENOSYS"},   // clone3
		"600": {"ENOSYS", "ENOSYS"},
	} {
		if f, c := results(free)[nr], results(confined)[nr]; f != want[0] || c != want[1] {
			t.Errorf("call %s: %v free and %v confined, want %v", nr, f, c, want)
		}
	}
}

func TestProbeTriesSockets(t *testing.T) {
	confined := probe(t, "confined", "sockets")
	for family, r := range confined["native"].(map[string]any) {
		want := "EAFNOSUPPORT"
		switch family {
		case "1", "2", "10", "16":
			want = "ok"
		}
		if r != want {
			t.Errorf("family %s: %v, want %s", family, r, want)
		}
	}
	for protocol, r := range confined["netlink"].(map[string]any) {
		if (r == "ok") != (protocol == "0") {
			t.Errorf("netlink protocol %s: %v", protocol, r)
		}
	}
	for _, name := range []string{"i386_socketcall", "i386_socket", "x32_socket"} {
		if confined[name] != "SIGSYS" {
			t.Errorf("%s: %v, want SIGSYS", name, confined[name])
		}
	}
}

func TestProbeTriesIoctls(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o666); err != nil {
		t.Fatal(err)
	}
	confined := probe(t, "confined", "ioctls", file)
	for name, r := range confined["results"].(map[string]any) {
		for how, got := range r.(map[string]any) {
			if got != "ENOTTY" {
				t.Errorf("%s %s: %v, want ENOTTY", name, how, got)
			}
		}
	}
	for name, r := range confined["controls"].(map[string]any) {
		for how, got := range r.(map[string]any) {
			if name == "FIGETBSZ" && got != "ok" {
				t.Errorf("control %s %s: %v", name, how, got)
			}
		}
	}
}

func TestProbeTriesMounts(t *testing.T) {
	free, confined := probe(t, "free", "mountcalls"), probe(t, "confined", "mountcalls")
	if free["mount"] != "ok" || free["fsopen"] != "ok" {
		t.Errorf("without a filter: mount %v, fsopen %v; want ok", free["mount"], free["fsopen"])
	}
	for name, got := range confined {
		want := "EPERM"
		if name == "chroot" {
			want = "ok"
		}
		if got != want {
			t.Errorf("%s: %v, want %s", name, got, want)
		}
	}
}

func TestProbeLooks(t *testing.T) {
	caps := probe(t, "confined", "caps")
	if caps["NoNewPrivs"] != "1" || caps["Seccomp"] != "2" || caps["threads_alike"] != true {
		t.Errorf("caps: %v", caps)
	}
	links := probe(t, "free", "fds")
	if exe, _ := os.Executable(); links["exe"] != exe {
		t.Errorf("exe %v, want %s", links["exe"], exe)
	}
	for _, fd := range []string{"0", "1", "2"} {
		if links["fds"].(map[string]any)[fd] == nil {
			t.Errorf("no descriptor %s in %v", fd, links["fds"])
		}
	}
	ns := probe(t, "free", "namespaces")
	if own, _ := os.Readlink("/proc/self/ns/user"); ns["ns"].(map[string]any)["user"] == own {
		t.Errorf("user namespace %v is the test's own", own)
	}
	for _, name := range []string{"limits", "mounts", "procwrites"} {
		if r := probe(t, "free", name); len(r) == 0 {
			t.Errorf("%s found nothing", name)
		}
	}
}
