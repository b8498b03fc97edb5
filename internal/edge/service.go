package edge

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// service serves EdgeService.
type service struct{ e *Edge }

// enter checks what every request of this service needs, and counts it in.
func (v service) enter(project string) error {
	if project == "" {
		return errNoProject
	}
	return v.e.begin()
}

// Info tells what the edge offers. It is the one call without a project.
func (v service) Info(context.Context, *connect.Request[dsecv1.InfoRequest]) (*connect.Response[dsecv1.InfoResponse], error) {
	e := v.e
	if !e.ready.Load() {
		return nil, errStarting
	}
	e.mu.RLock()
	live := e.live
	e.mu.RUnlock()
	out := &dsecv1.InfoResponse{
		EdgeId: string(e.id), ApiVersion: apiVersion, Version: e.cfg.Version,
		DefaultLimits: limitsProto(e.cfg.DefaultLimits), MaxLimits: limitsProto(e.cfg.MaxLimits),
		Sandboxes: int64(live), MaxSandboxes: int64(e.cfg.MaxSandboxes), Draining: e.draining.Load(),
	}
	for _, kind := range e.kinds {
		info := e.backends[kind].info.Load()
		out.Backends = append(out.Backends, &dsecv1.BackendInfo{Kind: string(kind), Available: info.Available, Notes: info.Notes, Features: info.Features})
	}
	return connect.NewResponse(out), nil
}

// maxBatch bounds the items of one CreateSandboxes.
const maxBatch = 1000

// CreateSandboxes makes sandboxes, with one result for each item.
func (v service) CreateSandboxes(ctx context.Context, req *connect.Request[dsecv1.CreateSandboxesRequest]) (*connect.Response[dsecv1.CreateSandboxesResponse], error) {
	project := req.Header().Get(projectHeader)
	if err := v.enter(project); err != nil {
		return nil, err
	}
	defer v.e.end()
	items := req.Msg.Items
	if len(items) < 1 || len(items) > maxBatch {
		return nil, dsec.Invalid("items", "want 1 to %d, got %d", maxBatch, len(items))
	}
	out := &dsecv1.CreateSandboxesResponse{Items: make([]*dsecv1.BatchCreateItem, len(items))}
	if len(items) == 1 {
		out.Items[0] = v.createItem(ctx, req.Header(), items[0])
		return connect.NewResponse(out), nil
	}
	// The edge bounds the creates under way; these are only those that wait.
	var wg sync.WaitGroup
	turns := make(chan struct{}, 2*v.e.cfg.CreateConcurrency)
	for i, item := range items {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			out.Items[i] = v.createItem(ctx, req.Header(), item)
		})
	}
	wg.Wait()
	return connect.NewResponse(out), nil
}

func (v service) createItem(ctx context.Context, h http.Header, item *dsecv1.CreateSandboxesItem) *dsecv1.BatchCreateItem {
	var s *sandbox
	c, err := v.e.parseCreate(ctx, h.Get(projectHeader), item)
	if err == nil {
		c.caller = h.Get(callerHeader)
		s, err = v.e.create(ctx, c)
	}
	if err == nil { // what the request id leads to may have been moved since
		s.mu.Lock()
		err = s.moved()
		s.mu.Unlock()
	}
	if err != nil {
		safe := apierr.Safe(err)
		v.e.metrics.errors.WithLabelValues(string(safe.Code)).Inc()
		if safe.Code == dsec.CodeInternal {
			v.e.log.Error("create failed", "err", err, "cause", safe.Err)
		}
		return &dsecv1.BatchCreateItem{Result: &dsecv1.BatchCreateItem_Error{Error: &dsecv1.ItemError{Detail: apierr.Detail(safe), Message: safe.Error()}}}
	}
	s.mu.Lock()
	warm := s.warm
	s.mu.Unlock()
	return &dsecv1.BatchCreateItem{Result: &dsecv1.BatchCreateItem_Created{Created: &dsecv1.CreateResponse{Sandbox: v.e.proto(s), Launch: launch(warm)}}}
}

// FindRequest tells which sandbox holds a request id.
func (v service) FindRequest(_ context.Context, req *connect.Request[dsecv1.FindRequestRequest]) (*connect.Response[dsecv1.FindRequestResponse], error) {
	project := req.Header().Get(projectHeader)
	if err := v.enter(project); err != nil {
		return nil, err
	}
	defer v.e.end()
	if req.Msg.RequestId == "" {
		return nil, dsec.Invalid("request_id", "want a request id")
	}
	v.e.mu.RLock()
	defer v.e.mu.RUnlock()
	out := new(dsecv1.FindRequestResponse)
	if s := v.e.keys[requestKey{project, req.Msg.RequestId}]; s != nil {
		out.SandboxId = string(s.id)
	}
	return connect.NewResponse(out), nil
}

// GetSandbox tells the state of a sandbox.
func (v service) GetSandbox(_ context.Context, req *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	s, err := v.find(req.Header().Get(projectHeader), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetResponse{Sandbox: v.e.proto(s)}), nil
}

// find is for calls that are served while the edge drains too. Of a sandbox that was
// moved it tells where to.
func (v service) find(project, id string) (*sandbox, error) {
	s, err := v.findAny(project, id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s, s.moved()
}

func (v service) findAny(project, id string) (*sandbox, error) {
	if !v.e.ready.Load() {
		return nil, errStarting
	}
	return v.e.find(project, id)
}

// The size of a page of ListSandboxes.
const (
	defaultPage = 100
	maxPage     = 1000
)

// ListSandboxes lists the project's sandboxes by ID.
func (v service) ListSandboxes(_ context.Context, req *connect.Request[dsecv1.ListRequest]) (*connect.Response[dsecv1.ListResponse], error) {
	m, project := req.Msg, req.Header().Get(projectHeader)
	if project == "" {
		return nil, errNoProject
	}
	if !v.e.ready.Load() {
		return nil, errStarting
	}
	size := int(m.PageSize)
	if size == 0 {
		size = defaultPage
	}
	if size < 1 || size > maxPage {
		return nil, dsec.Invalid("page_size", "want 1 to %d, or 0 for %d; got %d", maxPage, defaultPage, size)
	}
	for i, st := range m.States {
		if !dsec.State(st).Valid() {
			return nil, dsec.Invalid(fmt.Sprintf("states[%d]", i), "want a state of a sandbox, got %.32q", st)
		}
	}
	if m.PageToken != "" {
		if _, err := dsec.ParseSandboxID(m.PageToken); err != nil {
			return nil, dsec.Invalid("page_token", "want the token of the page before")
		}
	}
	found := v.e.match(project, m)
	slices.SortFunc(found, func(a, b *sandbox) int { return strings.Compare(string(a.id), string(b.id)) })
	out := new(dsecv1.ListResponse)
	bytes := 0
	for i, s := range found {
		if i == size || bytes > v.e.cfg.texts.page {
			out.NextPageToken = string(found[i-1].id)
			break
		}
		item := v.e.proto(s)
		bytes += proto.Size(item)
		out.Sandboxes = append(out.Sandboxes, item)
	}
	return connect.NewResponse(out), nil
}

// match is the sandboxes after the page token that m asks for, in any order.
func (e *Edge) match(project string, m *dsecv1.ListRequest) []*sandbox {
	e.mu.RLock()
	defer e.mu.RUnlock()
	var found []*sandbox
	for id, s := range e.sandboxes {
		if s.project != project || string(id) <= m.PageToken {
			continue
		}
		s.mu.Lock()
		spec, state := s.spec, s.state
		s.mu.Unlock()
		wanted := !state.Terminal()
		if len(m.States) > 0 {
			wanted = slices.Contains(m.States, string(state))
		}
		if !wanted || m.Job != "" && m.Job != spec.Job {
			continue
		}
		for k, want := range m.Labels {
			if got, ok := spec.Labels[k]; !ok || got != want {
				wanted = false
			}
		}
		if wanted {
			found = append(found, s)
		}
	}
	return found
}

// KillSandbox ends a sandbox. It is served while the edge drains too.
func (v service) KillSandbox(ctx context.Context, req *connect.Request[dsecv1.KillRequest]) (*connect.Response[dsecv1.KillResponse], error) {
	s, err := v.find(req.Header().Get(projectHeader), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	if err := v.e.beginEnd(); err != nil {
		return nil, err
	}
	defer v.e.end()
	// The kill goes on where its caller leaves.
	if err := v.e.stop(s, reasonKilled, req.Header().Get(callerHeader)); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.KillResponse{State: string(s.waitReaped(ctx))}), nil
}

// ExtendSandbox sets new deadlines, counted from now.
func (v service) ExtendSandbox(_ context.Context, req *connect.Request[dsecv1.ExtendRequest]) (*connect.Response[dsecv1.ExtendResponse], error) {
	m := req.Msg
	s, err := v.find(req.Header().Get(projectHeader), m.SandboxId)
	if err != nil {
		return nil, err
	}
	if err := v.e.beginEnd(); err != nil {
		return nil, err
	}
	defer v.e.end()
	idle, err := lifetime("idle_timeout", m.IdleTimeout, 0)
	if err != nil {
		return nil, err
	}
	life, err := lifetime("max_lifetime", m.MaxLifetime, 0)
	if err != nil {
		return nil, err
	}
	if err := v.e.extend(s, m.IdleTimeout != nil, idle, m.MaxLifetime != nil, life); err != nil {
		return nil, err
	}
	v.e.tell(s, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXTEND, Caller: req.Header().Get(callerHeader), Reason: extension(m)})
	return connect.NewResponse(&dsecv1.ExtendResponse{Sandbox: v.e.proto(s)}), nil
}

// PauseSandbox pauses one sandbox. It is served while the edge drains too.
func (v service) PauseSandbox(ctx context.Context, req *connect.Request[dsecv1.PauseRequest]) (*connect.Response[dsecv1.PauseResponse], error) {
	s, err := v.find(req.Header().Get(projectHeader), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	o, err := v.e.pauseOptions("options.", req.Msg.Options)
	if err != nil {
		return nil, err
	}
	o.caller = req.Header().Get(callerHeader)
	if err := v.e.beginEnd(); err != nil {
		return nil, err
	}
	defer v.e.end()
	if err := v.e.pauseFor(ctx, s, o, req.Msg.Options.GetWait()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.PauseResponse{Sandbox: v.e.proto(s)}), nil
}

// ResumeSandbox has one sandbox go on.
func (v service) ResumeSandbox(ctx context.Context, req *connect.Request[dsecv1.ResumeRequest]) (*connect.Response[dsecv1.ResumeResponse], error) {
	s, err := v.find(req.Header().Get(projectHeader), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	if err := v.e.beginEnd(); err != nil {
		return nil, err
	}
	defer v.e.end()
	if err := v.e.resume(ctx, s, req.Header().Get(callerHeader)); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ResumeResponse{Sandbox: v.e.proto(s)}), nil
}

// GetUsage tells what a sandbox uses.
func (v service) GetUsage(ctx context.Context, req *connect.Request[dsecv1.UsageRequest]) (*connect.Response[dsecv1.UsageResponse], error) {
	s, err := v.find(req.Header().Get(projectHeader), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	inst, spec, serr := s.instance, s.spec, s.notLive()
	s.mu.Unlock()
	if serr != nil {
		return nil, serr
	}
	u, err := inst.Usage(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.UsageResponse{Usage: usageProto(u, spec), At: timestamppb.Now()}), nil
}
