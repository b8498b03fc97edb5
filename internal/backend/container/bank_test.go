package container

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// What the tests of the security bank share: a numbered threat each, see the
// comments that begin with S and its number.

var update = flag.Bool("update", false, "write the golden files")

// golden compares have with a file of testdata.
func golden(t testing.TB, name, have string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		check(t, os.WriteFile(path, []byte(have), 0o644))
	}
	want, err := os.ReadFile(path)
	check(t, err)
	if diff := cmp.Diff(string(want), have); diff != "" {
		t.Errorf("not as in %s (-want +have):\n%s", path, diff)
	}
}

// prober is the path of a static dsec-probe. Where there is no Go (a test
// guest) it was put beside the test binary.
var prober = sync.OnceValues(func() (string, error) {
	if _, err := exec.LookPath("go"); err != nil {
		return filepath.Abs("dsec-probe")
	}
	path := filepath.Join(scratch(), "dsec-probe")
	cmd := exec.Command("go", "build", "-o", path, "../../../cmd/dsec-probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	return path, nil
})

// createProbed makes a sandbox that has /bin/dsec-probe.
func (h *host) createProbed() *sandbox {
	h.Helper()
	path, err := prober()
	check(h, err)
	return h.create(image(h, func(root string) { copyTo(h, path, root+"/bin/dsec-probe") }))
}

// createAs makes a sandbox of a changed request.
func (h *host) createAs(change func(*backend.CreateRequest)) *sandbox {
	h.Helper()
	req := h.request()
	change(&req)
	i, err := h.b.Create(h.Context(), req)
	check(h, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	h.Cleanup(func() {
		_ = s.client.Close()
		check(h, s.i.Destroy(context.Background()))
	})
	return s
}

// probe runs dsec-probe inside and decodes what it found.
func (s *sandbox) probe(result any, args ...string) {
	s.Helper()
	o := s.run(append([]string{"/bin/dsec-probe"}, args...)...)
	if !o.OK() {
		s.Fatalf("dsec-probe %v: %+v\n%s", args, o.Outcome, o.out)
	}
	if err := json.Unmarshal([]byte(o.out), result); err != nil {
		s.Fatalf("dsec-probe %v: %v in %.200q", args, err, o.out)
	}
}

// probeFree runs it in namespaces of its own, as root there, and without a
// filter: the control that tells what the kernel itself would have said.
func probeFree(t testing.TB, result any, args ...string) {
	t.Helper()
	path, err := prober()
	check(t, err)
	cmd := exec.Command(path, args...)
	cmd.Env = []string{}
	// Not the host's /dev/null, on which calls with null arguments would act.
	cmd.Stdin = strings.NewReader("")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{Size: 1}},
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("dsec-probe %v without a sandbox: %v %s", args, err, &stderr)
	}
	check(t, json.Unmarshal(out, result))
}

// pid1 is the host's number of the sandbox's PID 1.
func (s *sandbox) pid1() int { return s.i.(*instance).sh.proc.pid }

// processes are the host's numbers of the sandbox's processes, by those inside.
func (s *sandbox) processes() map[int]int {
	s.Helper()
	ns, err := os.Readlink("/proc/" + strconv.Itoa(s.pid1()) + "/ns/pid")
	check(s, err)
	entries, err := os.ReadDir("/proc")
	check(s, err)
	found := map[int]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if link, err := os.Readlink("/proc/" + e.Name() + "/ns/pid"); err != nil || link != ns {
			continue // or it has ended meanwhile
		}
		for _, line := range statusLines("/proc/" + e.Name()) {
			if f := strings.Fields(line); len(f) == 3 && f[0] == "NSpid:" {
				inside, err := strconv.Atoi(f[2])
				check(s, err)
				found[inside] = pid
			}
		}
	}
	return found
}

// statusLines are those of a process or thread; none where it has ended.
func statusLines(dir string) []string {
	text, err := os.ReadFile(dir + "/status")
	if err != nil {
		return nil
	}
	return strings.Split(string(text), "\n")
}

// held is a command that runs until its stream is closed.
type held struct {
	*chronusapi.Events
	pid int // the host's
}

// hold starts a command with an open input, and waits until it writes "ready".
func (s *sandbox) hold(env []string, argv ...string) held {
	s.Helper()
	start := func() (*chronusapi.Events, error) {
		return s.client.Start(s.Context(), chronusapi.StartRequest{Command: chronusapi.Command{
			Argv: argv, Env: append([]string{"PATH=/bin"}, env...), Cwd: "/",
		}, OpenStdin: true})
	}
	stream, err := start()
	if errors.Is(err, chronusapi.ErrNeedGroup) {
		check(s, s.i.(backend.Grouper).AddGroup(s.Context()))
		stream, err = start()
	}
	check(s, err)
	s.Cleanup(func() { _ = stream.Close() })
	h, out := held{Events: stream}, ""
	for !strings.Contains(out, "ready\n") {
		ev, err := stream.Next()
		if errors.Is(err, io.EOF) || err == nil && ev.Kind == chronusapi.EventExited {
			s.Fatalf("%v ended: %+v %q", argv, ev.Outcome, out)
		}
		check(s, err)
		out += string(ev.Data)
		if ev.Kind == chronusapi.EventStarted {
			h.pid = s.processes()[ev.PID]
		}
	}
	if h.pid == 0 {
		s.Fatalf("the host has no process for %v", argv)
	}
	return h
}

// watchKernel returns a check that the kernel has complained of nothing since:
// no taint is new, and no line of its log that a bug leaves.
func watchKernel(t testing.TB) (quiet func()) {
	t.Helper()
	before := kernelTrouble(t)
	return func() {
		t.Helper()
		for _, line := range kernelTrouble(t) {
			if !slices.Contains(before, line) {
				t.Errorf("the kernel complains: %s", line)
			}
		}
	}
}

func kernelTrouble(t testing.TB) []string {
	t.Helper()
	taint, err := os.ReadFile("/proc/sys/kernel/tainted")
	check(t, err)
	const readAll, size = 3, 10
	n, err := unix.Klogctl(size, nil)
	check(t, err)
	log := make([]byte, n)
	n, err = unix.Klogctl(readAll, log)
	check(t, err)
	all := []string{"taint " + string(taint)}
	for line := range strings.Lines(string(log[:n])) {
		for _, word := range []string{"BUG:", "WARNING:", "Oops", "general protection", "KASAN", "blocked for more than", "BTRFS error", "BTRFS critical", "EXT4-fs error"} {
			if strings.Contains(line, word) {
				all = append(all, line)
				break
			}
		}
	}
	return all
}
