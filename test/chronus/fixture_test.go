package chronus_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
	"golang.org/x/sys/unix"
)

// Tests without privileges run chronus --ready: it is no PID 1 and needs no
// Setup, and runs commands of the host in temporary directories, without
// control groups.

// fixture is a running chronus and a client of it.
type fixture struct {
	*chronusapi.Client
	pid    int
	socket string
	done   <-chan struct{} // closed when chronus has ended
}

// each runs a test with every build.
func each(t *testing.T, run func(t *testing.T, f *fixture)) {
	for _, b := range builds {
		t.Run(b.name, func(t *testing.T) { run(t, newFixture(t, b)) })
	}
}

func newFixture(t testing.TB, b build, env ...string) *fixture {
	t.Helper()
	cmd := exec.Command(b.path(t), "--ready", "--listen", "3")
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	f := startFixture(t, cmd)
	t.Cleanup(func() { f.killAll(t) })
	return f
}

// startFixture starts chronus with a listening socket as descriptor 3. Its end
// before that of the test is a failure.
func startFixture(t testing.TB, cmd *exec.Cmd) *fixture {
	t.Helper()
	socket := filepath.Join(testutil.Dir(t), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	lf, err := l.File()
	l.Close()
	if err != nil {
		t.Fatal(err)
	}
	var said output
	cmd.ExtraFiles = []*os.File{lf}
	cmd.Stderr = &said
	err = cmd.Start()
	lf.Close()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var ended error
	go func() {
		ended = cmd.Wait()
		close(done)
	}()
	client := chronusapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	})
	t.Cleanup(func() {
		client.Close()
		select {
		case <-done:
			t.Errorf("chronus ended: %v", ended)
		default:
			_ = cmd.Process.Kill()
			<-done
		}
		if text := said.String(); text != "" {
			t.Errorf("chronus said:\n%s", text)
		}
	})
	return &fixture{Client: client, pid: cmd.Process.Pid, socket: socket, done: done}
}

// output is what a process writes to stderr.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// killAll ends what the test's commands left.
func (f *fixture) killAll(t testing.TB) {
	ctx := context.Background()
	eventually(t, "every command ends", func() bool {
		list, err := f.Processes(ctx)
		for _, p := range list {
			if p.Outcome == nil || p.Lingering {
				_ = f.Signal(ctx, p.ID, 9, true) // a conflict where it has just ended
			}
		}
		info, ierr := f.Info(ctx)
		if err != nil || ierr != nil {
			t.Errorf("at the end of the test: %v, %v", err, ierr)
			return true
		}
		return info.Processes == 0
	})
}

// result is all that a stream gave.
type result struct {
	process        uint64
	stdout, stderr string
	pty            string
	gaps           int
	outcome        dsec.Outcome
	first, next    uint64
}

// collect reads a stream to its end.
func collect(t testing.TB, s *chronusapi.Events, err error) result {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	r, err := drainEvents(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func drainEvents(s *chronusapi.Events) (r result, err error) {
	seq := uint64(0)
	started, exited := false, false
	for {
		ev, err := s.Next()
		if err != nil {
			if errors.Is(err, io.EOF) && started && exited {
				err = nil
			}
			r.next = seq
			return r, err
		}
		switch ev.Kind {
		case chronusapi.EventStarted:
			r.process = ev.Process
			started = true
		case chronusapi.EventOutput:
			if seq == 0 {
				seq, r.first = ev.Seq, ev.Seq
			}
			if ev.Seq != seq {
				return r, errors.New("a hole in the sequence numbers")
			}
			seq += uint64(len(ev.Data))
			switch ev.Stream {
			case chronusapi.Stdout:
				r.stdout += string(ev.Data)
			case chronusapi.Stderr:
				r.stderr += string(ev.Data)
			case chronusapi.PTY:
				r.pty += string(ev.Data)
			}
		case chronusapi.EventGap:
			r.gaps++
			seq = ev.To
		case chronusapi.EventExited:
			r.outcome = ev.Outcome
			exited = true
		}
	}
}

func (f *fixture) run(t testing.TB, req chronusapi.StartRequest) result {
	t.Helper()
	s, err := f.Start(t.Context(), req)
	return collect(t, s, err)
}

func shell(text string) chronusapi.StartRequest {
	return chronusapi.StartRequest{Command: chronusapi.Command{Shell: text}}
}

func argv(args ...string) chronusapi.StartRequest {
	return chronusapi.StartRequest{Command: chronusapi.Command{Argv: args}}
}

// wantError checks code and field of an error.
func wantError(t testing.TB, err error, code dsec.Code, field string) {
	t.Helper()
	var de *dsec.Error
	if !errors.As(err, &de) || de.Code != code || de.Field != field {
		t.Errorf("got %v (%T), want %s of %q", err, err, code, field)
	}
}

// eventually waits for what another process does.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testutil.WaitFor(t, time.Minute, what, func() error {
		if ok() {
			return nil
		}
		return errors.New("not yet")
	})
}

// children lists the children of chronus.
func (f *fixture) children(t testing.TB) []string {
	t.Helper()
	tasks, err := filepath.Glob("/proc/" + strconv.Itoa(f.pid) + "/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatal(tasks, err)
	}
	var all []string
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for pid := range bytes.FieldsSeq(text) {
			all = append(all, string(pid))
		}
	}
	return all
}

// only returns the one process of the fixture.
func (f *fixture) only(t testing.TB) chronusapi.Process {
	t.Helper()
	list, err := f.Processes(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("%d processes, %v", len(list), err)
	}
	return list[0]
}
