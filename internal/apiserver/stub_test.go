package apiserver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// stubEdge is an edge without sandboxes, for what an apiserver does with the
// answers of one: it can refuse, misbehave and go away. The real edge is run
// behind the real apiserver by the stories in test/.
type stubEdge struct {
	dsecv1connect.UnimplementedEdgeServiceHandler
	dsecv1connect.UnimplementedProcessServiceHandler
	dsecv1connect.UnimplementedSessionServiceHandler
	dsecv1connect.UnimplementedFileServiceHandler

	id       dsec.EdgeID
	kind     dsec.Kind
	draining bool
	unable   string // why its backend cannot run, where it cannot

	mu       sync.Mutex
	down     bool
	refuse   error                     // what a create answers
	fail     error                     // what Exec and RunCommand answer
	output   []byte                    // of Exec
	keys     map[string]dsec.SandboxID // project + request id
	bodies   map[dsec.SandboxID][]byte // body digests
	projects map[dsec.SandboxID]string
	creates  []*dsecv1.CreateSandboxesItem
	dropped  []string
	inUse    string // a layer that a sandbox has
	lists    []*dsecv1.ListRequest
	broken   error // how the last Write ended, where not with EOF
	wrote    chan struct{}
	gone     chan error // of a command that hangs
	digest   string
	parents  []string
	headers  []http.Header
	owner    string      // unit that its store belongs to; empty: to who claims it
	claimed  string      // unit that did last
	badBuild error       // what an import answers to its first message
	badDrop  error       // what DropLayer and ForgetLayer answer
	images   *stubImages // nil: it knows no registry
	checked  *dsecv1.CheckLayersRequest
	damage   string // what CheckLayers answers
	moving   stubMoving
	job      string // of its sandboxes
	applied  []*dsecv1.ApplyToJobRequest
	watched  []*dsecv1.WatchNodeRequest

	instead dsecv1connect.EdgeServiceHandler // of the stub itself; nil: none
}

func newStub(kind dsec.Kind) *stubEdge {
	return &stubEdge{
		id: dsec.NewEdgeID(), kind: kind, keys: map[string]dsec.SandboxID{}, bodies: map[dsec.SandboxID][]byte{},
		projects: map[dsec.SandboxID]string{}, wrote: make(chan struct{}, 8), gone: make(chan error, 8),
	}
}

func (e *stubEdge) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewEdgeServiceHandler(cmp.Or[dsecv1connect.EdgeServiceHandler](e.instead, e), connect.WithReadMaxBytes(16<<20)))
	mux.Handle(dsecv1connect.NewProcessServiceHandler(e))
	mux.Handle(dsecv1connect.NewSessionServiceHandler(e))
	mux.Handle(dsecv1connect.NewFileServiceHandler(e))
	return mux
}

func (e *stubEdge) endpoint(t *testing.T) watcher.Endpoint {
	srv := httptest.NewUnstartedServer(e.handler())
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	addr := srv.Listener.Addr().String()
	return watcher.Endpoint{Name: string(e.id), Dial: func(ctx context.Context) (net.Conn, error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.down {
			return nil, errors.New("down")
		}
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}}
}

func (e *stubEdge) Info(context.Context, *connect.Request[dsecv1.InfoRequest]) (*connect.Response[dsecv1.InfoResponse], error) {
	return connect.NewResponse(&dsecv1.InfoResponse{
		EdgeId: string(e.id), ApiVersion: watcher.APIVersion, Draining: e.draining,
		Backends: []*dsecv1.BackendInfo{{Kind: string(e.kind), Available: e.unable == "", Notes: []string{e.unable}}},
	}), nil
}

func (e *stubEdge) CreateSandboxes(_ context.Context, req *connect.Request[dsecv1.CreateSandboxesRequest]) (*connect.Response[dsecv1.CreateSandboxesResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.headers = append(e.headers, req.Header().Clone())
	res := &dsecv1.CreateSandboxesResponse{}
	for _, item := range req.Msg.Items {
		res.Items = append(res.Items, e.create(req.Header().Get(projectHeader), item))
	}
	return connect.NewResponse(res), nil
}

func (e *stubEdge) create(project string, item *dsecv1.CreateSandboxesItem) *dsecv1.BatchCreateItem {
	if e.refuse != nil {
		return failed(e.refuse)
	}
	e.creates = append(e.creates, item)
	key := project + "\x00" + item.Request.RequestId
	id, held := e.keys[key]
	switch {
	case item.Request.RequestId == "" || !held:
		id = dsec.NewSandboxID(e.id)
		e.keys[key], e.bodies[id], e.projects[id] = id, item.BodyDigest, project
		if e.moving.loseCreate {
			return failed(dsec.Errorf(dsec.CodeOutcomeUnknown, "the node did not answer"))
		}
	case !bytes.Equal(e.bodies[id], item.BodyDigest):
		return failed(&dsec.Error{Code: dsec.CodeConflict, Field: "request_id", Message: "was used with another body"})
	}
	return &dsecv1.BatchCreateItem{Result: &dsecv1.BatchCreateItem_Created{Created: &dsecv1.CreateResponse{Sandbox: &dsecv1.Sandbox{Id: string(id)}}}}
}

func (e *stubEdge) FindRequest(_ context.Context, req *connect.Request[dsecv1.FindRequestRequest]) (*connect.Response[dsecv1.FindRequestResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := e.keys[req.Header().Get(projectHeader)+"\x00"+req.Msg.RequestId]
	return connect.NewResponse(&dsecv1.FindRequestResponse{SandboxId: string(id)}), nil
}

func (e *stubEdge) ListSandboxes(_ context.Context, req *connect.Request[dsecv1.ListRequest]) (*connect.Response[dsecv1.ListResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lists = append(e.lists, proto.CloneOf(req.Msg))
	var ids []string
	for id := range e.projects {
		if e.projects[id] == req.Header().Get(projectHeader) && string(id) > req.Msg.PageToken {
			ids = append(ids, string(id))
		}
	}
	res := &dsecv1.ListResponse{}
	for len(ids) > 0 && len(res.Sandboxes) < int(req.Msg.PageSize) {
		least := 0
		for i := range ids {
			if ids[i] < ids[least] {
				least = i
			}
		}
		res.Sandboxes = append(res.Sandboxes, &dsecv1.Sandbox{Id: ids[least]})
		ids = append(ids[:least], ids[least+1:]...)
	}
	if len(ids) > 0 {
		res.NextPageToken = res.Sandboxes[len(res.Sandboxes)-1].Id
	}
	return connect.NewResponse(res), nil
}

func (e *stubEdge) Exec(ctx context.Context, _ *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	e.mu.Lock()
	err := e.fail
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ExecResponse{Outcome: done(), Stdout: e.output}), nil
}

func (e *stubEdge) Start(ctx context.Context, _ *connect.Request[dsecv1.StartRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	if err := out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: 1}}}); err != nil {
		return err
	}
	<-ctx.Done()
	e.wrote <- struct{}{}
	return ctx.Err()
}

// done is the outcome of a command that succeeded.
func done() *dsecv1.Outcome {
	return &dsecv1.Outcome{End: &dsecv1.Outcome_ExitCode{}, Started: timestamppb.Now()}
}

// RunCommand echoes the command; "hang" is one that ends when its client goes.
func (e *stubEdge) RunCommand(ctx context.Context, req *connect.Request[dsecv1.RunCommandRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	e.mu.Lock()
	err := e.fail
	e.mu.Unlock()
	if err != nil {
		return err
	}
	for _, ev := range []*dsecv1.ProcessEvent{
		{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: 1}}},
		{Event: &dsecv1.ProcessEvent_Output{Output: &dsecv1.Output{Data: []byte(req.Msg.Command)}}},
		{Event: &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: done()}}},
	} {
		if err := out.Send(ev); err != nil {
			return err
		}
		if req.Msg.Command == "hang" && ev.GetOutput() != nil {
			<-ctx.Done()
			e.gone <- ctx.Err()
			return ctx.Err()
		}
	}
	return nil
}

// InterruptCommand knows one session.
func (e *stubEdge) InterruptCommand(_ context.Context, req *connect.Request[dsecv1.InterruptCommandRequest]) (*connect.Response[dsecv1.InterruptCommandResponse], error) {
	if p := req.Header().Get(projectHeader); req.Msg.SessionId != "s" || p == "" {
		return nil, apierr.Encode(&dsec.Error{Code: dsec.CodeNotFound, Field: "session_id", Message: "no such session of " + p})
	}
	return connect.NewResponse(new(dsecv1.InterruptCommandResponse)), nil
}

func (e *stubEdge) Write(_ context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	n := 0
	for in.Receive() {
		n += len(in.Msg().GetData())
	}
	e.mu.Lock()
	e.broken = in.Err()
	e.mu.Unlock()
	e.wrote <- struct{}{}
	return connect.NewResponse(&dsecv1.WriteResponse{Size: int64(n)}), in.Err()
}

func (e *stubEdge) BuildLayer(_ context.Context, in *connect.ClientStream[dsecv1.ImportLayerRequest]) (*connect.Response[dsecv1.ImportLayerResponse], error) {
	e.mu.Lock()
	bad := e.badBuild
	e.mu.Unlock()
	for in.Receive() {
		if bad != nil {
			return nil, apierr.Encode(bad)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return connect.NewResponse(&dsecv1.ImportLayerResponse{Layer: &dsecv1.Layer{Digest: e.digest, Parents: e.parents, Size: 4096}}), in.Err()
}

func (e *stubEdge) ResolveImage(_ context.Context, req *connect.Request[dsecv1.PullLayerRequest]) (*connect.Response[dsecv1.ResolveImageResponse], error) {
	if e.images == nil {
		return nil, apierr.Encode(dsec.Errorf(dsec.CodeUnsupported, "no registry"))
	}
	res, err := e.images.resolve(req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

func (e *stubEdge) PullLayer(ctx context.Context, req *connect.Request[dsecv1.PullLayerRequest], out *connect.ServerStream[dsecv1.PullLayerResponse]) error {
	return e.images.pull(ctx, req.Msg, out)
}

func (e *stubEdge) CheckLayers(_ context.Context, req *connect.Request[dsecv1.CheckLayersRequest]) (*connect.Response[dsecv1.CheckLayersResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.checked = req.Msg
	return connect.NewResponse(&dsecv1.CheckLayersResponse{Damage: e.damage}), nil
}

func (e *stubEdge) ClaimLayers(_ context.Context, req *connect.Request[dsecv1.ClaimLayersRequest]) (*connect.Response[dsecv1.ClaimLayersResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.claimed = req.Msg.Unit
	if e.owner != "" && e.owner != req.Msg.Unit {
		return nil, apierr.Encode(&dsec.Error{Code: dsec.CodeConflict, Field: "layers.store", Message: "belongs to " + e.owner + ", not " + req.Msg.Unit})
	}
	return connect.NewResponse(&dsecv1.ClaimLayersResponse{}), nil
}

// SweepLayers has one layer, which nothing refers to.
func (e *stubEdge) SweepLayers(_ context.Context, req *connect.Request[dsecv1.SweepLayersRequest]) (*connect.Response[dsecv1.SweepLayersResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.claimed != req.Msg.Unit || e.owner != "" && e.owner != req.Msg.Unit {
		return nil, apierr.Encode(&dsec.Error{Code: dsec.CodeConflict, Field: "layers.store", Message: "belongs to " + e.owner + ", not " + req.Msg.Unit})
	}
	return connect.NewResponse(&dsecv1.SweepLayersResponse{Layers: []*dsecv1.StoredLayer{{Digest: e.digest, Created: timestamppb.New(time.Unix(0, 0))}}}), nil
}

// ForgetLayer refuses what DropLayer does.
func (e *stubEdge) ForgetLayer(_ context.Context, req *connect.Request[dsecv1.ForgetLayerRequest]) (*connect.Response[dsecv1.ForgetLayerResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.badDrop != nil {
		return nil, apierr.Encode(e.badDrop)
	}
	if req.Msg.Digest == e.inUse {
		return nil, apierr.Encode(dsec.Errorf(dsec.CodeConflict, "layer %s is used", e.inUse))
	}
	return connect.NewResponse(&dsecv1.ForgetLayerResponse{}), nil
}

func (e *stubEdge) DropLayer(_ context.Context, req *connect.Request[dsecv1.DropLayerRequest]) (*connect.Response[dsecv1.DropLayerResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.badDrop != nil {
		return nil, apierr.Encode(e.badDrop)
	}
	if req.Msg.Digest == e.inUse {
		return nil, apierr.Encode(dsec.Errorf(dsec.CodeConflict, "layer %s is used", e.inUse))
	}
	e.dropped = append(e.dropped, req.Msg.Digest)
	return connect.NewResponse(&dsecv1.DropLayerResponse{}), nil
}

// WatchNode has no events, and no position: nobody asked from where on.
func (e *stubEdge) WatchNode(ctx context.Context, req *connect.Request[dsecv1.WatchNodeRequest], out *connect.ServerStream[dsecv1.WatchNodeResponse]) error {
	e.set(func() { e.watched = append(e.watched, req.Msg) })
	if err := out.Send(new(dsecv1.WatchNodeResponse)); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (e *stubEdge) set(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// rig is an apiserver before stub edges.
type rig struct {
	t      testing.TB
	url    string
	http   *httptest.Server
	server *Server
	iam    *iam.IAM
	secret string // of project "a"
	other  string // of project "b"
}

func newRig(t *testing.T, edges ...*stubEdge) *rig {
	t.Helper()
	var endpoints []watcher.Endpoint
	for _, e := range edges {
		endpoints = append(endpoints, e.endpoint(t))
	}
	return newRigOver(t, endpoints)
}

func newRigOver(t testing.TB, endpoints []watcher.Endpoint) *rig {
	t.Helper()
	log := testutil.Logger(t)
	s, err := store.Open(t.Context(), store.Config{Dir: t.TempDir(), Log: log})
	check(t, err)
	t.Cleanup(func() { _ = s.Close() })
	keys, err := iam.Open(t.Context(), s, log)
	check(t, err)
	t.Cleanup(keys.Close)
	w, err := watcher.New(t.Context(), s, endpoints, log)
	check(t, err)
	t.Cleanup(w.Close)
	srv, err := New(t.Context(), Config{Store: s, IAM: keys, Edges: w, Log: log, Metrics: prometheus.NewRegistry(), AutoImport: true})
	check(t, err)
	t.Cleanup(srv.Close)
	hs := httptest.NewUnstartedServer(srv.Handler())
	hs.Config.Protocols = new(http.Protocols)
	hs.Config.Protocols.SetHTTP1(true)
	hs.Config.Protocols.SetUnencryptedHTTP2(true)
	hs.Config.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	hs.Start()
	t.Cleanup(hs.Close)
	r := &rig{t: t, url: hs.URL, http: hs, server: srv, iam: keys}
	_, r.secret, err = keys.Create(t.Context(), "a", time.Time{})
	check(t, err)
	_, r.other, err = keys.Create(t.Context(), "b", time.Time{})
	check(t, err)
	return r
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (r *rig) client(secret string) *client.Client {
	r.t.Helper()
	c, err := client.New(client.Options{URL: r.url, APIKey: secret, Attempts: 1})
	check(r.t, err)
	r.t.Cleanup(c.Close)
	return c
}

// post sends a raw body and returns the answer's status and its typed error.
func (r *rig) post(procedure, contentType, secret string, body io.Reader) (int, *dsec.Error) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.url+procedure, body)
	check(r.t, err)
	req.Header.Set("Content-Type", contentType)
	if secret != "" {
		req.Header.Set("Authorization", "Bearer "+secret)
	}
	res, err := http.DefaultClient.Do(req)
	check(r.t, err)
	defer func() { _ = res.Body.Close() }()
	data, err := io.ReadAll(res.Body)
	check(r.t, err)
	if res.StatusCode == http.StatusOK {
		return res.StatusCode, nil
	}
	return res.StatusCode, typedBody(r.t, data)
}

// typedBody is the error of a unary answer; an answer without a detail fails the test.
func typedBody(t testing.TB, data []byte) *dsec.Error {
	t.Helper()
	var wire struct {
		Message string `json:"message"`
		Details []struct {
			Type  string          `json:"type"`
			Debug json.RawMessage `json:"debug"`
		} `json:"details"`
	}
	if err := json.Unmarshal(data, &wire); err != nil {
		t.Fatalf("not a typed error: %q", data)
	}
	for _, d := range wire.Details {
		if d.Type == detailType {
			var detail dsecv1.ErrorDetail
			check(t, protojson.Unmarshal(d.Debug, &detail))
			return apierr.FromDetail(&detail, wire.Message)
		}
	}
	t.Fatalf("error without a detail: %s", data)
	return nil
}

func codeOf(err error) dsec.Code {
	if err == nil {
		return ""
	}
	return dsec.CodeOf(err)
}
