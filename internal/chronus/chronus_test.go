package chronus

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// Tests run commands of the host in temporary directories, without privileges
// and without control groups, through the real protocol over a socket pair.
// They must not use os/exec: the reaper takes the status of every child.

func TestMain(m *testing.M) {
	if path := os.Getenv(stageEnv); path != "" {
		println("stage:", stage(path).Error()) // it returns only an error
		os.Exit(1)
	}
	// Orphans come to this process, as they come to PID 1.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	code := m.Run()
	if builtDir != "" {
		_ = os.RemoveAll(builtDir)
	}
	os.Exit(code)
}

// fixture is a Chronus and a client of it.
type fixture struct {
	*chronusapi.Client
	c *Chronus
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	c, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	client := chronusapi.NewClient(func(context.Context) (net.Conn, error) {
		a, b, err := socketPair()
		if err == nil {
			go chronusapi.Serve(ctx, b, c)
		}
		return a, err
	})
	t.Cleanup(func() {
		client.Close()
		cancel()
		c.mu.Lock()
		var all []*process
		for _, p := range c.processes {
			all = append(all, p)
		}
		c.mu.Unlock()
		for _, p := range all {
			p.killTree()
			<-p.done
		}
	})
	return &fixture{client, c}
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		if conns[i], err = net.FileConn(f); err != nil {
			return nil, nil, err
		}
	}
	return conns[0], conns[1], nil
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
			if err == io.EOF && started && exited {
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

// eventually polls, without a limit of its own, for what another process does.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); !ok(); {
		if time.Since(start) > time.Minute {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestExitCodesAreThoseOfWait(t *testing.T) {
	f := newFixture(t)
	for _, tt := range []struct {
		text   string
		code   int
		signal int
	}{
		{"exit 0", 0, 0},
		{"exit 7", 7, 0},
		{"exit 255", 255, 0},
		{"kill -9 $$", 0, 9},
		{"kill -TERM $$", 0, 15},
		{"echo 'exit code: 0'; printf '\\200\\000\\000\\000\\000'; exit 7", 7, 0},
	} {
		r := f.run(t, shell(tt.text))
		if r.outcome.Code != tt.code || r.outcome.Signal != tt.signal || r.outcome.Claimed || r.outcome.Started.IsZero() {
			t.Errorf("%s: %+v", tt.text, r.outcome)
		}
	}
}

func TestOutputStreamsAndBytes(t *testing.T) {
	f := newFixture(t)
	r := f.run(t, shell(`printf 'a\nb\377\303'; printf 'e' >&2`))
	if r.stdout != "a\nb\377\303" || r.stderr != "e" {
		t.Errorf("stdout %q, stderr %q", r.stdout, r.stderr)
	}
	big := f.run(t, shell(`head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2`))
	if len(big.stdout) != 3000000 || len(big.stderr) != 1000000 || big.gaps != 0 || strings.Trim(big.stdout, "\x00") != "" {
		t.Errorf("stdout %d, stderr %d bytes, %d gaps", len(big.stdout), len(big.stderr), big.gaps)
	}
	if big.outcome.MaxRSS <= 0 || big.outcome.CPU <= 0 {
		t.Errorf("no usage in %+v", big.outcome)
	}
}

// The pid of a command is 0 until it is known, and session 0 is that of
// everything outside: a kill that comes so early must find nobody.
func TestACommandWithoutAPidHasNoFamily(t *testing.T) {
	for _, leader := range []int{-1, 0, 1} {
		if pids := family(leader); len(pids) != 0 {
			t.Errorf("family(%d) has %d processes", leader, len(pids))
		}
	}
	if pids := family(os.Getpid()); len(pids) == 0 {
		t.Error("this process is not of its own family")
	}
}
