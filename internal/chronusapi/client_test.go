package chronusapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// stub is a handler whose calls are set one by one; the others panic.
type stub struct {
	Handler
	FileHandler
	// mu orders a test's changes before the calls that follow.
	mu         sync.Mutex
	start      func(ctx context.Context, req StartRequest, sink Sink) error
	processes  func() ([]Process, error)
	writeStdin func(ctx context.Context, data []byte, eof bool) (int, error)
	stat       func(path string) (FileInfo, error)
	list       func() ([]FileInfo, bool, error)
	read       func(ctx context.Context, w io.Writer) error
	write      func(req WriteRequest, r io.Reader) (int64, error)
	interrupt  func(session string) error
}

func (s *stub) Info(context.Context) (Info, error) { return Info{Version: Version, Processes: 3}, nil }
func (s *stub) Start(ctx context.Context, req StartRequest, sink Sink) error {
	return locked(s, &s.start)(ctx, req, sink)
}
func (s *stub) Processes(context.Context) ([]Process, error) { return locked(s, &s.processes)() }
func (s *stub) WriteStdin(ctx context.Context, _ uint64, data []byte, eof bool) (int, error) {
	return locked(s, &s.writeStdin)(ctx, data, eof)
}
func (s *stub) Interrupt(_ context.Context, id string) error { return locked(s, &s.interrupt)(id) }
func (s *stub) Stat(_ context.Context, path string, _ bool) (FileInfo, error) {
	return locked(s, &s.stat)(path)
}
func (s *stub) ListDir(context.Context, string, string, int) ([]FileInfo, bool, error) {
	return locked(s, &s.list)()
}
func (s *stub) Read(ctx context.Context, _ string, _, _ int64, w io.Writer) error {
	return locked(s, &s.read)(ctx, w)
}
func (s *stub) Write(_ context.Context, req WriteRequest, r io.Reader) (int64, error) {
	return locked(s, &s.write)(req, r)
}

func locked[F any](s *stub, f *F) F {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *f
}

func set[F any](s *stub, f *F, v F) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*f = v
}

// serve starts a server for h on a Unix socket. dials counts its connections.
func serve(t *testing.T, h Handler) (c *Client, dials *atomic.Int32) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go Serve(ctx, nc, h)
		}
	}()
	dials = new(atomic.Int32)
	c = NewClient(func(ctx context.Context) (net.Conn, error) {
		dials.Add(1)
		return new(net.Dialer).DialContext(ctx, "unix", path)
	})
	t.Cleanup(func() { c.Close() })
	return c, dials
}

func exited(code int) Event {
	return Event{Kind: EventExited, Outcome: dsec.Outcome{Code: code, Started: time.Unix(1, 2), Duration: 3, CPU: 4, MaxRSS: 5}}
}

func TestStartStreamsEventsInOrder(t *testing.T) {
	req := StartRequest{
		Command: Command{Argv: []string{"a", "", "\xff"}, Env: []string{"A=b\nc"}, Cwd: "/", User: "u:g", Timeout: time.Second, OutputLimit: 7},
		Stdin:   bytes.Repeat([]byte("x"), MaxStdin), OpenStdin: true, Orphan: true, PTY: &WindowSize{24, 80},
	}
	sent := []Event{
		{Kind: EventStarted, Process: 1 << 60, PID: 42},
		{Kind: EventOutput, Stream: Stdout, Seq: 0, Data: []byte("exit code: 0\n\x80")},
		{Kind: EventGap, Seq: 1, To: 1 << 40},
		{Kind: EventOutput, Stream: PTY, Seq: 1 << 40, Data: bytes.Repeat([]byte("y"), MaxChunk)},
		exited(7),
	}
	c, dials := serve(t, &stub{start: func(_ context.Context, got StartRequest, sink Sink) error {
		if !reflect.DeepEqual(got, req) {
			return dsec.Errorf(dsec.CodeInvalid, "another request")
		}
		for _, ev := range sent {
			if err := sink(ev); err != nil {
				return err
			}
		}
		return nil
	}})
	for range 3 {
		s, err := c.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for i := range sent {
			ev, err := s.Next()
			if err != nil || !reflect.DeepEqual(ev, sent[i]) {
				t.Fatalf("event %d: got %+v, %v; want %+v", i, ev, err, sent[i])
			}
		}
		if _, err := s.Next(); err != io.EOF {
			t.Fatalf("after exited: %v", err)
		}
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections for calls in sequence, want 1", n)
	}
}

func TestErrorsKeepCodeFieldAndMessage(t *testing.T) {
	want := &dsec.Error{Code: dsec.CodeNotFound, Field: "command.argv", Message: "no program \"x\""}
	h := &stub{}
	c, dials := serve(t, h)
	answer := func(err error) {
		set(h, &h.start, func(context.Context, StartRequest, Sink) error { return err })
	}
	req := StartRequest{Command: Command{Argv: []string{"x"}}}

	answer(want)
	_, got := c.Start(t.Context(), req)
	if !reflect.DeepEqual(got, error(want)) {
		t.Errorf("got %#v, want %#v", got, want)
	}
	answer(fmt.Errorf("start: %w", ErrNeedGroup))
	if _, got = c.Start(t.Context(), req); !errors.Is(got, ErrNeedGroup) {
		t.Errorf("got %v, want ErrNeedGroup", got)
	}
	answer(errors.New("secret path"))
	if _, got = c.Start(t.Context(), req); dsec.CodeOf(got) != dsec.CodeInternal || strings.Contains(got.Error(), "secret") {
		t.Errorf("got %v, want internal without its text", got)
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections, want 1: an error leaves the connection usable", n)
	}
}

func TestBrokenStreamIsNeverAnExit(t *testing.T) {
	var nc net.Conn
	c := NewClient(func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		nc = b
		go Serve(context.Background(), b, &stub{start: func(_ context.Context, req StartRequest, sink Sink) error {
			if req.Command.Argv[0] == "started" {
				_ = sink(Event{Kind: EventStarted, Process: 1, PID: 2})
			}
			nc.Close()
			return sink(exited(0))
		}})
		return a, nil
	})
	s, err := c.Start(t.Context(), StartRequest{Command: Command{Argv: []string{"started"}}})
	if err != nil {
		t.Fatal(err)
	}
	if ev, err := s.Next(); err != nil || ev.Kind != EventStarted {
		t.Fatal(ev, err)
	}
	for range 2 {
		if ev, err := s.Next(); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
			t.Fatalf("got %+v, %v; want unavailable", ev, err)
		}
	}
	_, err = c.Start(t.Context(), StartRequest{Command: Command{Argv: []string{"silent"}}})
	if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		t.Fatalf("got %v, want outcome_unknown", err)
	}
}

func TestCancelClosesTheConnection(t *testing.T) {
	gone := make(chan struct{})
	c, _ := serve(t, &stub{start: func(ctx context.Context, _ StartRequest, sink Sink) error {
		_ = sink(Event{Kind: EventStarted, Process: 1, PID: 2})
		<-ctx.Done()
		close(gone)
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	s, err := c.Start(ctx, StartRequest{Command: Command{Argv: []string{"x"}}})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	<-gone
	_, _ = s.Next()
	if _, err := s.Next(); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if _, err := c.Info(t.Context()); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

func TestStaleIdleConnectionIsReplaced(t *testing.T) {
	var conns []net.Conn
	h := &stub{}
	c := NewClient(func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		conns = append(conns, b)
		go Serve(context.Background(), b, h)
		return a, nil
	})
	for i := range 3 {
		info, err := c.Info(t.Context())
		if err != nil || info.Processes != 3 {
			t.Fatal(info, err)
		}
		if len(conns) != i+1 {
			t.Fatalf("%d connections after call %d", len(conns), i)
		}
		conns[i].Close()
	}
}

func TestInterruptNamesItsSession(t *testing.T) {
	want := dsec.Errorf(dsec.CodeConflict, "idle")
	c, _ := serve(t, &stub{interrupt: func(id string) error {
		if id == "s7" {
			return nil
		}
		return want
	}})
	if err := c.Interrupt(t.Context(), "s7"); err != nil {
		t.Error(err)
	}
	if err := c.Interrupt(t.Context(), "s8"); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("got %v", err)
	}
	if err := c.Interrupt(t.Context(), ""); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("got %v", err)
	}
}

func TestListsMayBeLongerThanAFrame(t *testing.T) {
	argv := strings.Repeat("a", MaxListedArgv)
	var procs []Process
	for i := range MaxProcesses {
		o := exited(i).Outcome
		procs = append(procs, Process{ID: uint64(i), Argv: []string{argv}, Outcome: &o, Started: time.Unix(9, 9), Session: "s"})
	}
	files := []FileInfo{{Name: "\xff\n", Type: "symlink", Target: "/t", Size: 1, Mode: 0o4755, UID: 1, GID: 2, Modified: time.Unix(-5, 6)}, {Name: "z"}}
	c, _ := serve(t, &stub{
		processes: func() ([]Process, error) { return procs, nil },
		list:      func() ([]FileInfo, bool, error) { return files, true, nil },
	})
	got, err := c.Processes(t.Context())
	if err != nil || !reflect.DeepEqual(got, procs) {
		t.Fatalf("%d processes, %v", len(got), err)
	}
	list, more, err := c.ListDir(t.Context(), "/", "", 10)
	if err != nil || !more || !reflect.DeepEqual(list, files) {
		t.Fatalf("got %+v, %v, %v", list, more, err)
	}
}

func TestWriteStdinIsSentInChunks(t *testing.T) {
	var got []byte
	ends := 0
	c, _ := serve(t, &stub{writeStdin: func(_ context.Context, data []byte, eof bool) (int, error) {
		got = append(got, data...)
		if eof {
			ends++
		}
		return len(data), nil
	}})
	data := bytes.Repeat([]byte("abc"), 100_000)
	n, err := c.WriteStdin(t.Context(), 1, data, true)
	if err != nil || n != len(data) || !bytes.Equal(got, data) || ends != 1 {
		t.Fatalf("took %d of %d, %d ends, %v", n, len(data), ends, err)
	}
}

func TestInvalidRequestsAreRefusedBeforeTheyAreSent(t *testing.T) {
	c := NewClient(func(context.Context) (net.Conn, error) { panic("dialed") })
	argv := []string{"true"}
	for _, tt := range []struct {
		field string
		req   StartRequest
	}{
		{"command.argv", StartRequest{}},
		{"command.argv", StartRequest{Command: Command{Argv: argv, Shell: "x"}}},
		{"command.argv", StartRequest{Command: Command{Argv: []string{""}}}},
		{"command.argv", StartRequest{Command: Command{Argv: []string{"a\x00"}}}},
		{"command.argv", StartRequest{Command: Command{Argv: []string{strings.Repeat("a", 3<<20)}}}},
		{"command.argv", StartRequest{Command: Command{Argv: make([]string, MaxArgs+1)}}},
		{"command.shell", StartRequest{Command: Command{Shell: "\x00"}}},
		{"command.env", StartRequest{Command: Command{Argv: argv, Env: []string{"A"}}}},
		{"command.env", StartRequest{Command: Command{Argv: argv, Env: []string{"=a"}}}},
		{"command.env", StartRequest{Command: Command{Argv: argv, Env: []string{"A\nB=a"}}}},
		{"command.env", StartRequest{Command: Command{Argv: argv, Env: []string{"A=\x00"}}}},
		{"command.cwd", StartRequest{Command: Command{Argv: argv, Cwd: "tmp"}}},
		{"command.cwd", StartRequest{Command: Command{Argv: argv, Cwd: "/" + strings.Repeat("a", MaxPath)}}},
		{"command.user", StartRequest{Command: Command{Argv: argv, User: strings.Repeat("u", 300)}}},
		{"command.timeout", StartRequest{Command: Command{Argv: argv, Timeout: -1}}},
		{"command.timeout", StartRequest{Command: Command{Argv: argv, Timeout: 1 << 62}}},
		{"command.output_limit", StartRequest{Command: Command{Argv: argv, OutputLimit: -1}}},
		{"stdin", StartRequest{Command: Command{Argv: argv}, Stdin: make([]byte, MaxStdin+1)}},
		{"pty", StartRequest{Command: Command{Argv: argv}, PTY: &WindowSize{}}},
	} {
		_, err := c.Start(t.Context(), tt.req)
		wantInvalid(t, tt.field, err)
	}
	wantInvalid(t, "tag", c.ForgetTag(t.Context(), 0))
	wantInvalid(t, "signal", c.Signal(t.Context(), 1, 999, false))
	wantInvalid(t, "path", c.Remove(t.Context(), "a", false))
	_, err := c.Read(t.Context(), "/a", -1, 0)
	wantInvalid(t, "offset", err)
	_, _, err = c.ListDir(t.Context(), "/", "", MaxList+1)
	wantInvalid(t, "limit", err)
}

func wantInvalid(t *testing.T, field string, err error) {
	t.Helper()
	var de *dsec.Error
	if !errors.As(err, &de) || de.Code != dsec.CodeInvalid || de.Field != field {
		t.Errorf("got %v, want invalid %s", err, field)
	}
}

// A chronus of the version before serves all that it has, and says of the rest that
// it does not.
func TestChronusOfTheVersionBefore(t *testing.T) {
	var dials atomic.Int32
	c := NewClient(func(context.Context) (net.Conn, error) {
		dials.Add(1)
		ours, theirs := net.Pipe()
		go func() {
			defer theirs.Close()
			s := &server{conn: newConn(theirs), h: &stub{}}
			var p [len(preface) + 1]byte
			if _, err := io.ReadFull(s.r, p[:]); err != nil {
				return
			}
			if p[4] != Version-1 {
				_ = s.answer(dsec.Errorf(dsec.CodeUnsupported, "chronus speaks version %d, not %d", Version-1, p[4]), nil)
				return
			}
			for {
				typ, payload, err := s.read()
				if err != nil || s.serve(context.Background(), typ, &dec{b: payload}) != nil {
					return
				}
			}
		}()
		return ours, nil
	})
	defer c.Close()
	for range 2 {
		if _, err := c.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Hold(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeUnsupported {
			t.Errorf("Hold: %v, want unsupported", err)
		}
		if _, err := c.Start(t.Context(), StartRequest{Command: Command{Argv: []string{"true"}}, Tag: 1}); err == nil || dsec.CodeOf(err) != dsec.CodeUnsupported {
			t.Errorf("a start with a tag: %v, want unsupported", err)
		}
		if _, err := c.FindTag(t.Context(), 1); err == nil || dsec.CodeOf(err) != dsec.CodeUnsupported {
			t.Errorf("FindTag: %v, want unsupported", err)
		}
	}
	if n := dials.Load(); n > 7 {
		t.Errorf("%d connections", n)
	}
}
