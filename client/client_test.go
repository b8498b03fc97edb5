package client

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// refusing fails every call with err for the first n times.
type refusing struct {
	dsecv1connect.UnimplementedSandboxServiceHandler
	dsecv1connect.UnimplementedProcessServiceHandler
	err   error
	n     int64
	calls atomic.Int64
	start func(*connect.ServerStream[dsecv1.ProcessEvent]) error

	// Where set, Exec calls break off once the number of their command was asked for.
	numbered <-chan struct{}
	attached func(*dsecv1.AttachRequest, *connect.ServerStream[dsecv1.ProcessEvent]) error
	tag      atomic.Value
}

func (r *refusing) refuse() error {
	if r.calls.Add(1) <= r.n {
		return r.err
	}
	return nil
}

func (r *refusing) Create(context.Context, *connect.Request[dsecv1.CreateRequest]) (*connect.Response[dsecv1.CreateResponse], error) {
	return connect.NewResponse(&dsecv1.CreateResponse{Sandbox: &dsecv1.Sandbox{Id: "x"}, Launch: "warm"}), r.refuse()
}

func (r *refusing) Exec(_ context.Context, req *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	if r.numbered != nil {
		r.calls.Add(1)
		r.tag.Store(req.Msg.Tag)
		<-r.numbered
		panic(http.ErrAbortHandler)
	}
	return connect.NewResponse(&dsecv1.ExecResponse{Outcome: &dsecv1.Outcome{End: &dsecv1.Outcome_ExitCode{ExitCode: 3}}, Stdout: []byte("out")}), r.refuse()
}

func (r *refusing) Start(_ context.Context, _ *connect.Request[dsecv1.StartRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	return r.start(out)
}

// Attach knows of no more than Start has told.
func (r *refusing) Attach(_ context.Context, req *connect.Request[dsecv1.AttachRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	if r.attached != nil {
		return r.attached(req.Msg, out)
	}
	return apierr.Encode(&dsec.Error{Code: dsec.CodeNotFound, Field: "process_id", Message: "no process 7"})
}

// ListProcesses tells of one command that ended and one that may go on.
func (r *refusing) ListProcesses(context.Context, *connect.Request[dsecv1.ListProcessesRequest]) (*connect.Response[dsecv1.ListProcessesResponse], error) {
	return connect.NewResponse(&dsecv1.ListProcessesResponse{Processes: []*dsecv1.Process{
		{ProcessId: 7, Fault: "process 7 ended while the disk was full"}, {ProcessId: 8}, {ProcessId: 9, Tag: tagOf(r)},
	}}), nil
}

func tagOf(r *refusing) string {
	tag, _ := r.tag.Load().(string)
	return tag
}

func serve(t *testing.T, r *refusing) *Client {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(r))
	mux.Handle(dsecv1connect.NewProcessServiceHandler(r))
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	c, err := New(Options{URL: srv.URL, APIKey: "e2b_x", Attempts: 3})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func refusal(code dsec.Code) error { return apierr.Encode(dsec.Errorf(code, "no")) }

func TestOnlyWhatWasNotAcceptedIsSentAgain(t *testing.T) {
	for code := range dsec.Codes {
		r := &refusing{err: refusal(code), n: 2}
		_, err := serve(t, r).CreateSandbox(t.Context(), SandboxOptions{})
		want := int64(1)
		if dsec.Codes[code].Retry {
			want = 3
		}
		if got := r.calls.Load(); got != want || (err == nil) != (want == 3) {
			t.Errorf("%s: %d calls, %v", code, got, err)
		}
		if err != nil && dsec.CodeOf(err) != code {
			t.Errorf("%s became %s", code, dsec.CodeOf(err))
		}
	}
	// With a request id a lost answer is asked for again.
	r := &refusing{err: refusal(dsec.CodeOutcomeUnknown), n: 2}
	if sb, err := serve(t, r).CreateSandbox(t.Context(), SandboxOptions{RequestID: "k"}); err != nil || sb.ID() != "x" || !sb.Warm {
		t.Errorf("%v after %d calls", err, r.calls.Load())
	}
	// Attempts are bounded.
	r = &refusing{err: refusal(dsec.CodeExhausted), n: 100}
	if _, err := serve(t, r).CreateSandbox(t.Context(), SandboxOptions{}); err == nil || r.calls.Load() != 3 {
		t.Errorf("%v after %d calls", err, r.calls.Load())
	}
}

func TestCommandsAreNeverSentAgain(t *testing.T) {
	r := &refusing{err: refusal(dsec.CodeUnavailable), n: 1}
	sb := serve(t, r).Sandbox("x")
	if _, _, err := sb.Command("true").Output(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable || r.calls.Load() != 1 {
		t.Errorf("%v after %d calls", err, r.calls.Load())
	}
	out, o, err := sb.Command("true").Output(t.Context())
	if err != nil || o.Code != 3 || string(out) != "out" {
		t.Errorf("control: %q %+v %v", out, o, err)
	}
}

// TestOutputThatBreaksOffGoesOn: what a command has written is asked for by its
// number, which was learned while the call lasted, and the command is not sent again.
func TestOutputThatBreaksOffGoesOn(t *testing.T) {
	output := func(seq uint64, s dsecv1.Stream, text string) *dsecv1.ProcessEvent {
		return &dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Output{Output: &dsecv1.Output{Stream: s, Seq: seq, Data: []byte(text)}}}
	}
	gap := &dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Gap{Gap: &dsecv1.Gap{To: 6}}}
	exited := &dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: &dsecv1.Outcome{
		Started: timestamppb.Now(), End: &dsecv1.Outcome_ExitCode{ExitCode: 4},
	}}}}
	rest := []*dsecv1.ProcessEvent{output(6, dsecv1.Stream_STREAM_STDERR, "err"), output(9, dsecv1.Stream_STREAM_STDOUT, "after"), exited}
	for name, tc := range map[string]struct {
		events []*dsecv1.ProcessEvent
		want   string
		err    string
	}{
		"whole": {append([]*dsecv1.ProcessEvent{output(0, dsecv1.Stream_STREAM_STDOUT, "before")}, rest...), "beforeafter", ""},
		"lost":  {append([]*dsecv1.ProcessEvent{gap}, rest...), "after", "6 bytes of the output of process 9 were lost while the server was away"},
	} {
		listed := testutil.NewAnswered(dsecv1connect.ProcessServiceListProcessesProcedure, "")
		r := &refusing{numbered: listed.Done(), attached: func(req *dsecv1.AttachRequest, out *connect.ServerStream[dsecv1.ProcessEvent]) error {
			if req.ProcessId != 9 || req.FromSeq != 0 || !req.Own {
				t.Errorf("%s: attached to %v", name, req)
			}
			for _, ev := range tc.events {
				if err := out.Send(ev); err != nil {
					return err
				}
			}
			return nil
		}}
		c, err := New(Options{URL: serve(t, r).url, APIKey: "e2b_x", Transport: listed})
		if err != nil {
			t.Fatal(err)
		}
		var stderr strings.Builder
		cmd := c.Sandbox("x").Command("true")
		cmd.Stderr = &stderr
		out, o, err := cmd.Output(t.Context())
		if string(out) != tc.want || stderr.String() != "err" || o.Code != 4 || r.calls.Load() != 1 {
			t.Errorf("%s: %q, %q, %+v, %d calls", name, out, stderr.String(), o, r.calls.Load())
		}
		if tc.err == "" && err != nil || tc.err != "" && (err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || err.Error() != tc.err) {
			t.Errorf("%s: %v, want %q", name, err, tc.err)
		}
	}
}

// TestWhatIsNotCountedIsNotZero: a node may know how much is written, but not in
// how many files.
func TestWhatIsNotCountedIsNotZero(t *testing.T) {
	zero := int64(0)
	for want, u := range map[int64]*dsecv1.Usage{dsec.NotCounted: {DiskBytes: 1}, 0: {DiskBytes: 1, DiskInodes: &zero}} {
		if got := usageOf(u); got.DiskInodes != want || got.DiskBytes != 1 {
			t.Errorf("%v: %+v, want %d files", u, got, want)
		}
	}
}

// TestOneWordOnAnUnknownEnd: whose input was not sent whole is not attached to
// again; it is told that the command may go on only where that is so.
func TestOneWordOnAnUnknownEnd(t *testing.T) {
	for id, want := range map[uint64]string{
		7: "process 7 ended while the disk was full",
		8: "process 8 of sandbox x may go on; `dsec logs -f -from 4 x 8` attaches to it: no",
	} {
		r := &refusing{start: func(out *connect.ServerStream[dsecv1.ProcessEvent]) error {
			err := out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: id}}})
			output := &dsecv1.Output{Stream: dsecv1.Stream_STREAM_STDOUT, Data: []byte("part")}
			err = errors.Join(err, out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Output{Output: output}}))
			return errors.Join(err, refusal(dsec.CodeOutcomeUnknown))
		}}
		cmd := serve(t, r).Sandbox("x").Command("true")
		open, w := io.Pipe()
		cmd.Stdin = open
		_, err := cmd.Run(t.Context())
		if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || err.Error() != want {
			t.Errorf("%d: %v, want %s", id, err, want)
		}
		_ = w.Close()
	}
}

// TestStreamWithoutAnEndIsAnError: no outcome is ever made up.
func TestStreamWithoutAnEndIsAnError(t *testing.T) {
	started := &dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: 7}}}
	output := &dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Output{Output: &dsecv1.Output{Stream: dsecv1.Stream_STREAM_STDOUT, Data: []byte("part")}}}
	empty := &dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: &dsecv1.Outcome{}}}}
	for name, events := range map[string][]*dsecv1.ProcessEvent{
		"nothing": nil, "started": {started}, "output": {started, output}, "no outcome": {started, output, empty},
	} {
		r := &refusing{start: func(out *connect.ServerStream[dsecv1.ProcessEvent]) error {
			for _, ev := range events {
				if err := out.Send(ev); err != nil {
					return err
				}
			}
			return nil
		}}
		var stdout strings.Builder
		cmd := serve(t, r).Sandbox("x").Command("true")
		cmd.Stdout = &stdout
		o, err := cmd.Run(t.Context())
		if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || o != (dsec.Outcome{}) {
			t.Errorf("%s: %+v, %v", name, o, err)
		}
		if len(events) > 1 && stdout.String() != "part" {
			t.Errorf("%s: the output is lost: %q", name, stdout.String())
		}
	}
}

func TestReaderThatFailsEndsTheCommand(t *testing.T) {
	r := &refusing{start: func(out *connect.ServerStream[dsecv1.ProcessEvent]) error {
		err := out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: 7}}})
		for err == nil { // until the caller is gone
			err = out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Keepalive{Keepalive: &dsecv1.Keepalive{}}})
		}
		return err
	}}
	cmd := serve(t, r).Sandbox("x").Command("cat")
	broken := errors.New("broken")
	cmd.Stdin = failing{broken}
	if _, err := cmd.Run(t.Context()); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

func TestKeyAndURLAreFound(t *testing.T) {
	t.Setenv("DSEC_API_KEY", "")
	t.Setenv("DSEC_URL", "")
	file := filepath.Join(t.TempDir(), "key")
	t.Setenv("DSEC_KEY_FILE", file)
	if _, err := New(Options{}); err == nil || dsec.CodeOf(err) != dsec.CodeUnauthenticated {
		t.Errorf("no key: %v", err)
	}
	if err := os.WriteFile(file, []byte("e2b_file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ option, env, want string }{
		{"", "", "e2b_file"}, {"", "e2b_env", "e2b_env"}, {"e2b_option", "e2b_env", "e2b_option"},
	} {
		t.Setenv("DSEC_API_KEY", tc.env)
		if key, err := findKey(Options{APIKey: tc.option}); err != nil || key != tc.want {
			t.Errorf("%+v: %q, %v", tc, key, err)
		}
	}
	for _, bad := range []string{"127.0.0.1:7321", "ftp://x", "http://", "://"} {
		if _, err := New(Options{URL: bad}); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestUnreachableServerIsUnavailable(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	c, err := New(Options{URL: srv.URL, APIKey: "k", Attempts: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Keys(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeUnsupported {
		t.Errorf("another server: %v", err)
	}
	srv.Close()
	if c, err = New(Options{URL: srv.URL, APIKey: "k", Attempts: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Keys(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Errorf("no server: %v", err)
	}
}

// What is wrong with the URL is said.
func TestTLSThatFailsIsTold(t *testing.T) {
	plain, secret := httptest.NewServer(http.NotFoundHandler()), httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(plain.Close)
	t.Cleanup(secret.Close)
	secret.Config.ErrorLog = log.New(io.Discard, "", 0)
	for url, want := range map[string]string{
		strings.Replace(plain.URL, "http:", "https:", 1): "does not speak TLS",
		secret.URL: "is not trusted",
	} {
		c, err := New(Options{URL: url, APIKey: "k", Attempts: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Keys(t.Context()); dsec.CodeOf(err) != dsec.CodeUnavailable || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want unavailable and %q", url, err, want)
		}
	}
}

// A server that was there is waited for; one that never was is not.
func TestServerIsOutOfReachForAWhile(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	refused := make(chan struct{}, 1)
	d := &dialer{pause: func(ctx context.Context, _ int) error {
		select {
		case refused <- struct{}{}:
		default:
		}
		return ctx.Err()
	}}
	dial := func() error {
		conn, err := d.DialContext(t.Context(), "tcp", address)
		if err == nil {
			err = conn.Close()
		}
		return err
	}
	if err := dial(); err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	ended := make(chan error, 1)
	go func() { ended <- dial() }()
	<-refused
	if l, err = net.Listen("tcp", address); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	_ = l.Close()
	// Whoever has waited does not wait again, as often as the call may be sent.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d.pause = func(context.Context, int) error { return ctx.Err() } // the time is over
	if err := dial(); !errors.As(err, new(outOfReachError)) || !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("waited for: %v", err)
	}
	calls := 0
	_, err = call(t.Context(), &Client{attempts: 5}, func(context.Context, *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
		calls++
		return nil, connect.NewError(connect.CodeUnavailable, dial())
	}, &dsecv1.GetRequest{}, dsec.Retryable)
	if err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
	d.reached.Store(false)
	if err := dial(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a server that never was: %v", err)
	}
}
