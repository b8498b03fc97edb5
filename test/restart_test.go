package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// kept starts containers whose server may be killed and started again, and a
// layer named base.
func kept(t *testing.T, c *containerServer) *client.Client {
	t.Helper()
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	c.name, c.dir = testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, c.name, filepath.Base(c.dir))
	t.Cleanup(func() { c.destroy(t) })
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	cl := c.client(t)
	_, _, err := cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	return cl
}

// restart kills the server, and starts another at its address.
func restart(t *testing.T, c *containerServer) {
	t.Helper()
	c.kill()
	again(t, c)
}

// again starts another server at the address of one that has ended.
func again(t *testing.T, c *containerServer) {
	t.Helper()
	c.listen = strings.TrimPrefix(c.url, "http://")
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
}

// TestStoppingServerTurnsCallersAway: while a server that is to stop waits for calls in
// progress, others are refused a connection, as by one that is not there, and wait for the
// next. None is answered that the server stops.
func TestStoppingServerTurnsCallersAway(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	cmd := sb.Shell("until [ -e /tmp/go ]; do sleep 0.05; done; exit 5")
	check(t, cmd.Start(t.Context()))
	key, err := os.ReadFile(c.keyFile)
	check(t, err)
	ask := func() (answer string, err error) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+"/dsec.v1.ProcessService/Exec", strings.NewReader(`{"sandboxId":"`+string(sb.ID())+`","command":{"argv":["true"]}}`))
		check(t, err)
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(key)))
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return "", err
		}
		defer func() { _ = res.Body.Close() }()
		b, err := io.ReadAll(res.Body)
		return string(b), err
	}
	if answer, err := ask(); err != nil || !strings.Contains(answer, "outcome") {
		t.Fatalf("%q, %v", answer, err)
	}
	check(t, c.cmd.Process.Signal(syscall.SIGTERM))
	for err = nil; !errors.Is(err, syscall.ECONNREFUSED); {
		var answer string
		if answer, err = ask(); err == nil && !strings.Contains(answer, "outcome") {
			t.Fatalf("answered: %s", answer)
		}
	}
	check(t, <-c.done)
	again(t, c)
	check(t, sb.WriteFile(t.Context(), "/tmp/go", nil, 0))
	if o, err := cmd.Wait(); err != nil || o.Code != 5 {
		t.Errorf("%+v, %v", o, err)
	}
}

// TestRunGoesOnOverAKilledServer: who waits for a command while the server is
// killed and started again gets its whole output and its own exit code, and it
// ran once.
func TestRunGoesOnOverAKilledServer(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	type end struct {
		o   dsec.Outcome
		err error
	}
	var out strings.Builder
	cmd := sb.Shell("echo ran >> /tmp/ran; echo before; until [ -e /tmp/go ]; do sleep 0.05; done; echo after; exit 5")
	cmd.Stdout = &out
	check(t, cmd.Start(t.Context()))
	ended, canceled := make(chan end, 1), make(chan end, 1)
	go func() {
		o, err := cmd.Wait()
		ended <- end{o, err}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	forever := sb.Shell("sleep 1000")
	check(t, forever.Start(ctx))
	go func() {
		o, err := forever.Wait()
		canceled <- end{o, err}
	}()
	restart(t, c)
	check(t, sb.WriteFile(t.Context(), "/tmp/go", nil, 0))
	if e := <-ended; e.err != nil || e.o.Code != 5 || e.o.Claimed || out.String() != "before\nafter\n" {
		t.Errorf("%+v, %v, %q", e.o, e.err, out.String())
	}
	if log, err := sb.ReadFile(t.Context(), "/tmp/ran"); err != nil || string(log) != "ran\n" {
		t.Errorf("ran %q, %v; want once", log, err)
	}
	// It still ends with its caller.
	cancel()
	if e := <-canceled; !errors.Is(e.err, context.Canceled) {
		t.Errorf("canceled: %+v, %v", e.o, e.err)
	}
	testutil.WaitFor(t, 30*time.Second, "the end of the command that was canceled", func() error {
		list, err := sb.Processes(t.Context())
		for _, p := range list {
			if p.ID == forever.Process().ID && !p.Ended() {
				err = errors.New("it runs")
			}
		}
		return err
	})
}

// restarts are the ways in which a server leaves.
var restarts = map[string]func(*containerServer){
	"killed":  func(c *containerServer) { c.kill() },
	"stopped": func(c *containerServer) { c.stop() },
}

// TestOutputGoesOnOverARestart: the same for who has asked for the output in one
// answer.
func TestOutputGoesOnOverARestart(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	for how, leave := range restarts {
		listed := testutil.NewAnswered(dsecv1connect.ProcessServiceListProcessesProcedure, "echo ran")
		seen, err := client.New(client.Options{URL: c.url, KeyFile: c.keyFile, Transport: listed})
		check(t, err)
		t.Cleanup(seen.Close)
		script := fmt.Sprintf("echo ran >> /tmp/ran.%[1]s; echo before; echo err >&2; until [ -e /tmp/go.%[1]s ]; do sleep 0.05; done; echo after; exit 5", how)
		var stderr strings.Builder
		cmd := seen.Sandbox(string(sb.ID())).Shell(script)
		cmd.Stderr = &stderr
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			out, o, err := cmd.Output(t.Context())
			if err != nil || o.Code != 5 || o.Claimed || string(out) != "before\nafter\n" || stderr.String() != "err\n" {
				t.Errorf("%s: %+v, %v, %q, %q", how, o, err, out, stderr.String())
			}
		}()
		<-listed.Done() // it knows its command's number now
		leave(c)
		again(t, c)
		check(t, sb.WriteFile(t.Context(), "/tmp/go."+how, nil, 0))
		<-ended
		if log, err := sb.ReadFile(t.Context(), "/tmp/ran."+how); err != nil || string(log) != "ran\n" {
			t.Errorf("%s: ran %q, %v; want once", how, log, err)
		}
	}
}

// TestSessionOverARestart: a session goes on with the next command, on the handle
// that was there before; how the one ended that was under way is not known, which
// is what its error says, and it ran once.
func TestSessionOverARestart(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	open := func(sb *client.Sandbox) *client.Session {
		s, err := sb.OpenSession(t.Context(), client.SessionOptions{})
		check(t, err)
		_, err = s.Run(t.Context(), "cd /tmp; KEPT=yes", 0, nil, nil)
		check(t, err)
		return s
	}
	two := &http.Transport{Protocols: new(http.Protocols)}
	two.Protocols.SetUnencryptedHTTP2(true)
	overTwo, err := client.New(client.Options{URL: c.url, KeyFile: c.keyFile, Transport: two})
	check(t, err)
	idle := map[string]*client.Session{"HTTP/1.1": open(sb), "HTTP/2": open(overTwo.Sandbox(string(sb.ID())))}
	busy := open(sb)
	for how, leave := range restarts {
		r, w := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			_, err := busy.Run(t.Context(), fmt.Sprintf("echo ran | tee -a ran.%[1]s; until [ -e go.%[1]s ]; do sleep 0.05; done; echo over >> ran.%[1]s", how), 0, w, nil)
			ended <- err
		}()
		if _, err := io.ReadFull(r, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		leave(c)
		if err := <-ended; dsec.CodeOf(orOK(err)) != dsec.CodeOutcomeUnknown {
			t.Errorf("%s: under way: %v", how, err)
		}
		again(t, c)
		var out strings.Builder
		for over, s := range idle {
			out.Reset()
			if o, err := s.Run(t.Context(), "echo $KEPT $PWD", 0, &out, nil); err != nil || !o.OK() || out.String() != "yes /tmp\n" {
				t.Errorf("%s: idle over %s: %+v, %v, %q", how, over, o, err, out.String())
			}
		}
		check(t, sb.WriteFile(t.Context(), "/tmp/go."+how, nil, 0))
		out.Reset() // in turn, after the one that runs on
		if o, err := busy.Run(t.Context(), "echo $KEPT; cat ran."+how, 0, &out, nil); err != nil || !o.OK() || out.String() != "yes\nran\nover\n" {
			t.Errorf("%s: next: %+v, %v, %q", how, o, err, out.String())
		}
	}
	for _, s := range []*client.Session{idle["HTTP/1.1"], idle["HTTP/2"], busy} {
		check(t, s.Close(t.Context()))
	}
}

// TestFullDiskIsNoOutcome: a sandbox that fills the disk of all makes no command
// of another fail, as far as anybody is told: the error says that the platform did.
func TestFullDiskIsNoOutcome(t *testing.T) {
	c := &containerServer{image: 256 << 20, share: 100}
	cl := kept(t, c)
	limits := dsec.Limits{DiskBytes: 1 << 30}
	var sandboxes [2]*client.Sandbox
	for i := range sandboxes {
		sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: limits})
		check(t, err)
		sandboxes[i] = sb
	}
	hog, victim := sandboxes[0], sandboxes[1]
	write := func(n int) *client.Cmd {
		return victim.Shell(fmt.Sprintf("dd if=/dev/zero of=/root/f bs=1M count=%d 2>/dev/null", n))
	}
	if _, o, err := write(1).Output(t.Context()); err != nil || !o.OK() {
		t.Fatalf("with room: %+v, %v", o, err)
	}
	// A limit of its own is the command's to meet.
	small, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: dsec.Limits{DiskBytes: 8 << 20}})
	check(t, err)
	if _, o, err := small.Shell("dd if=/dev/zero of=/root/f bs=1M count=64 2>/dev/null").Output(t.Context()); err != nil || o.OK() {
		t.Errorf("over its own limit: %+v, %v", o, err)
	}
	_, o, err := hog.Shell("dd if=/dev/zero of=/root/all bs=1M 2>/dev/null").Output(t.Context())
	if dsec.CodeOf(orOK(err)) != dsec.CodeOutcomeUnknown {
		t.Errorf("what filled the disk: %+v, %v", o, err)
	}
	cmd := write(64)
	cmd.Stdout = io.Discard
	if o, err := cmd.Run(t.Context()); dsec.CodeOf(orOK(err)) != dsec.CodeOutcomeUnknown || o != (dsec.Outcome{}) || !strings.Contains(err.Error(), "disk was full") {
		t.Errorf("on a full disk: %+v, %v", o, err)
	}
	list, err := victim.Processes(t.Context())
	check(t, err)
	if last := list[len(list)-1]; last.Outcome != nil || last.Fault == "" {
		t.Errorf("listed: %+v", last)
	}
	if _, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: limits, RequestID: "x"}); dsec.CodeOf(orOK(err)) != dsec.CodeExhausted {
		t.Errorf("create on a full disk: %v", err)
	}
	// The server is not worse for it after a restart, and all is well once there is room.
	restart(t, c)
	check(t, hog.Kill(t.Context()))
	testutil.WaitFor(t, time.Minute, "room", func() error {
		_, o, err := write(1).Output(t.Context())
		if err == nil && !o.OK() {
			t.Fatalf("an outcome of a full disk: %+v", o)
		}
		return err
	})
}

// TestHogFillsNoDisk: a limit that the disk of all has no place for is refused, and
// who wants all of the disk is stopped while others can write. Only of that one's
// commands nobody is told how they ended, over a restart, too.
func TestHogFillsNoDisk(t *testing.T) {
	c := &containerServer{image: 1 << 30}
	cl := kept(t, c)
	_, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: dsec.Limits{DiskBytes: 1 << 30}})
	if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Code != dsec.CodeInvalid || e.Field != "limits.disk_bytes" || !strings.Contains(e.Message, "(768 MiB), got 1073741824 (1 GiB)") {
		t.Errorf("a limit of all of the disk: %v", err)
	}
	// As much of the disk as one can have, and so little CPU time, for small writes,
	// that on a small disk, on a fast machine and a busy one, it writes no faster than
	// it is looked at.
	hog, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: dsec.Limits{MilliCPU: 100}})
	check(t, err)
	other, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	if _, o, err := other.Shell("dd if=/dev/zero of=/root/f bs=1M count=100 2>/dev/null").Output(t.Context()); err != nil || !o.OK() {
		t.Fatalf("with room: %+v, %v", o, err)
	}
	filled := hog.Shell("dd if=/dev/zero of=/root/all bs=1k 2>/dev/null")
	if _, o, err := filled.Output(t.Context()); dsec.CodeOf(orOK(err)) != dsec.CodeOutcomeUnknown {
		t.Errorf("what was stopped: %+v, %v", o, err)
	}
	restart(t, c)
	if _, o, err := hog.Shell("echo x > /root/more").Output(t.Context()); dsec.CodeOf(orOK(err)) != dsec.CodeOutcomeUnknown {
		t.Errorf("what cannot write: %+v, %v", o, err)
	}
	late, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	for name, sb := range map[string]*client.Sandbox{"who was there": other, "a new one": late} {
		if _, o, err := sb.Shell("dd if=/dev/zero of=/root/mine bs=1M count=2 2>/dev/null").Output(t.Context()); err != nil || !o.OK() {
			t.Errorf("%s: %+v, %v", name, o, err)
		}
	}
}

// TestStopLeavesNoCgroup: a server that stops without sandboxes leaves the trees
// of the kernel as they were.
func TestStopLeavesNoCgroup(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	mine := func() (found []string) {
		for _, pattern := range []string{"/sys/fs/cgroup/" + c.name, "/sys/fs/cgroup/*/" + c.name} {
			dirs, err := filepath.Glob(pattern)
			check(t, err)
			found = append(found, dirs...)
		}
		return found
	}
	if len(mine()) == 0 {
		t.Fatal("the server has no cgroup: this test looks in the wrong place")
	}
	check(t, sb.Kill(t.Context()))
	c.stop()
	if left := mine(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// orOK is an error of no code of ours where there is none.
func orOK(err error) error {
	if err == nil {
		return errors.New("no error")
	}
	return err
}
