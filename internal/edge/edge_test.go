package edge_test

import (
	"context"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// node is one edge on fake sandboxes, reached over HTTP in memory.
type node struct {
	t     testing.TB
	cfg   edge.Config
	opts  fake.Options
	edge  *edge.Edge
	calls *inflight
	serve *http.Server
	http  *http.Client

	dsecv1connect.EdgeServiceClient
	process dsecv1connect.ProcessServiceClient
	session dsecv1connect.SessionServiceClient
	file    dsecv1connect.FileServiceClient
}

// newNode starts an edge. change, where not nil, edits its configuration.
func newNode(t testing.TB, change func(*edge.Config, *fake.Options)) *node {
	t.Helper()
	n := &node{
		t:    t,
		cfg:  edge.Config{Trajectories: trajectory.Options{SegmentBytes: 1 << 20}, StateDir: t.TempDir(), RunDir: t.TempDir(), MinFreeBytes: 1, MinFreeInodes: 1, Logger: testutil.Logger(t)},
		opts: fake.Options{World: fake.NewWorld()},
	}
	t.Cleanup(func() { n.close() })
	if change != nil {
		change(&n.cfg, &n.opts)
	}
	n.start()
	return n
}

func (n *node) start() {
	n.t.Helper()
	n.cfg.Backends = []backend.Backend{fake.New(n.opts)}
	e, err := edge.New(n.cfg)
	if err != nil {
		n.t.Fatal(err)
	}
	n.edge = e
	if err := e.Recover(context.Background()); err != nil {
		n.t.Fatal(err)
	}
	l := newPipeListener()
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	n.calls = newInflight()
	server := &http.Server{Handler: n.calls.count(e.Handler()), Protocols: protocols}
	go func() { _ = server.Serve(l) }()
	n.serve = server
	n.http = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return l.dial(ctx) }, Protocols: protocols,
	}}
	const url = "http://edge"
	project := connect.WithInterceptors(withProject("p1"))
	n.EdgeServiceClient = dsecv1connect.NewEdgeServiceClient(n.http, url, project)
	n.process = dsecv1connect.NewProcessServiceClient(n.http, url, project)
	n.session = dsecv1connect.NewSessionServiceClient(n.http, url, project)
	n.file = dsecv1connect.NewFileServiceClient(n.http, url, project)
}

func (n *node) trajectories() dsecv1connect.TrajectoryServiceClient {
	return dsecv1connect.NewTrajectoryServiceClient(n.http, "http://edge", connect.WithInterceptors(withProject("p1")))
}

// close stops the edge as SIGTERM does; sandboxes go on in their world.
func (n *node) close() {
	if n.edge == nil {
		return
	}
	if err := n.edge.Close(); err != nil {
		n.t.Error(err)
	}
	_ = n.serve.Close()
	n.http.CloseIdleConnections()
	n.edge = nil
}

// restart stops the edge and starts another on the same state.
func (n *node) restart() {
	n.t.Helper()
	n.close()
	n.start()
}

// pipeListener is a listener in memory.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *pipeListener) dial(ctx context.Context) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "memory"} }

// withProject sets the project header unless a test did.
type withProject string

func (p withProject) set(h http.Header) {
	if _, ok := h["Dsec-Project"]; !ok {
		h.Set("Dsec-Project", string(p))
	}
}

func (p withProject) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		p.set(req.Header())
		return next(ctx, req)
	}
}

func (p withProject) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		p.set(c.RequestHeader())
		return c
	}
}

func (p withProject) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// tryCreate asks for one sandbox.
func (n *node) tryCreate(req *dsecv1.CreateRequest) (*dsecv1.Sandbox, error) {
	n.t.Helper()
	if req.Backend == "" {
		req.Backend = "fake"
	}
	res, err := n.CreateSandboxes(n.t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{{Request: req}}}))
	if err != nil {
		return nil, err
	}
	if e := res.Msg.Items[0].GetError(); e != nil {
		return nil, apierr.FromDetail(e.Detail, e.Message)
	}
	return res.Msg.Items[0].GetCreated().Sandbox, nil
}

func (n *node) create(req *dsecv1.CreateRequest) string {
	n.t.Helper()
	s, err := n.tryCreate(req)
	if err != nil {
		n.t.Fatal(err)
	}
	return s.Id
}

func (n *node) exec(id string, argv ...string) (*dsecv1.ExecResponse, error) {
	res, err := n.process.Exec(n.t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: argv}}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

func (n *node) shell(id, script string) *dsecv1.ExecResponse {
	n.t.Helper()
	res, err := n.process.Exec(n.t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: script}}))
	if err != nil {
		n.t.Fatalf("shell %q: %v", script, err)
	}
	return res.Msg
}

func (n *node) kill(id string) string {
	n.t.Helper()
	res, err := n.KillSandbox(n.t.Context(), connect.NewRequest(&dsecv1.KillRequest{SandboxId: id}))
	if err != nil {
		n.t.Fatal(err)
	}
	return res.Msg.State
}

func (n *node) get(id string) *dsecv1.Sandbox {
	n.t.Helper()
	res, err := n.GetSandbox(n.t.Context(), connect.NewRequest(&dsecv1.GetRequest{SandboxId: id}))
	if err != nil {
		n.t.Fatal(err)
	}
	return res.Msg.Sandbox
}

// waitState waits until a sandbox is in a state.
func (n *node) waitState(id, state string) *dsecv1.Sandbox {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 20*time.Second)
	defer cancel()
	if err := n.edge.WaitState(ctx, dsec.SandboxID(id), dsec.State(state)); err != nil {
		n.t.Fatalf("want it to become %s, %v", state, err)
	}
	return n.get(id)
}

// quiet waits until no call is in progress.
func (n *node) quiet() {
	n.t.Helper()
	n.left(0)
}

// left waits until so many calls are in progress: the others have ended, or
// the edge has seen their clients leave.
func (n *node) left(want int) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 20*time.Second)
	defer cancel()
	if got := n.calls.wait(ctx, want); got != want {
		n.t.Fatalf("%d calls are in progress, want %d", got, want)
	}
}

// inflight counts the calls that a handler works on.
type inflight struct {
	mu      sync.Mutex
	changed sync.Cond
	n       int
}

func newInflight() *inflight {
	f := new(inflight)
	f.changed.L = &f.mu
	return f
}

func (f *inflight) add(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n += n
	f.changed.Broadcast()
}

func (f *inflight) count(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.add(1)
		defer f.add(-1)
		next.ServeHTTP(w, r)
	})
}

// wait returns how many there are once that is what was wanted, or ctx ended.
func (f *inflight) wait(ctx context.Context, want int) int {
	defer context.AfterFunc(ctx, func() { f.add(0) })()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.n != want && ctx.Err() == nil {
		f.changed.Wait()
	}
	return f.n
}

// wantError checks code and field of an error that crossed the API.
func wantError(t testing.TB, err error, code dsec.Code, field string) *dsec.Error {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %s of %q", code, field)
	}
	e := typedError(err)
	if e.Code != code || e.Field != field {
		t.Fatalf("error %s of %q (%s), want %s of %q", e.Code, e.Field, e.Message, code, field)
	}
	return e
}

func typedError(err error) *dsec.Error {
	if e, ok := apierr.Decode(err); ok {
		return e
	}
	return apierr.Safe(err)
}

func TestCreateExecKill(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{Env: map[string]string{"A": "1"}, Workdir: "/tmp", IdleTimeout: durationpb.New(time.Hour)})
	if got := n.get(id).State; got != "running" {
		t.Fatalf("state %s, want running", got)
	}
	res := n.shell(id, "echo out $A; echo err >&2; pwd; exit 7")
	if got, want := string(res.Stdout), "out 1\n/tmp\n"; got != want {
		t.Errorf("stdout %q, want %q", got, want)
	}
	if got, want := string(res.Stderr), "err\n"; got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
	if got := res.Outcome.GetExitCode(); got != 7 {
		t.Errorf("exit code %d, want 7", got)
	}
	if got := n.kill(id); got != "stopped" {
		t.Errorf("killed: state %s, want stopped", got)
	}
	if got := n.kill(id); got != "stopped" {
		t.Errorf("killed again: state %s, want stopped", got)
	}
	if ids := n.opts.World.IDs(); len(ids) != 0 {
		t.Errorf("left in the world: %v", ids)
	}
	_, err := n.exec(id, "true")
	wantError(t, err, dsec.CodeConflict, "")
}
