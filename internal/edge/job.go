package edge

import (
	"context"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// jobConcurrency is how many sandboxes of a job are paused, resumed or killed at once.
const jobConcurrency = 32

// ApplyToJob does the same to all sandboxes of a job. It is served while the edge
// drains too.
func (v service) ApplyToJob(ctx context.Context, req *connect.Request[dsecv1.ApplyToJobRequest]) (*connect.Response[dsecv1.ApplyToJobResponse], error) {
	m, project := req.Msg, req.Header().Get(projectHeader)
	if project == "" {
		return nil, errNoProject
	}
	if m.Job == "" {
		return nil, dsec.Invalid("job", "want the name of a job")
	}
	act, err := v.e.action(m, req.Header().Get(callerHeader))
	if err != nil {
		return nil, err
	}
	if err := v.e.beginEnd(); err != nil {
		return nil, err
	}
	defer v.e.end()
	all := v.e.match(project, &dsecv1.ListRequest{Job: m.Job})
	slices.SortFunc(all, func(a, b *sandbox) int { return strings.Compare(string(a.id), string(b.id)) })
	out := &dsecv1.ApplyToJobResponse{Items: make([]*dsecv1.JobItem, len(all))}
	var g errgroup.Group
	g.SetLimit(jobConcurrency)
	for i, s := range all {
		g.Go(func() error {
			item := &dsecv1.JobItem{SandboxId: string(s.id)}
			if err := act(ctx, s); err != nil {
				safe := apierr.Safe(err)
				item.Error = &dsecv1.ItemError{Detail: apierr.Detail(safe), Message: safe.Error()}
			}
			s.mu.Lock()
			item.State = string(s.state)
			s.mu.Unlock()
			out.Items[i] = item
			return nil
		})
	}
	_ = g.Wait() // no function returns an error
	return connect.NewResponse(out), nil
}

// action is what ApplyToJob does to each sandbox.
func (e *Edge) action(m *dsecv1.ApplyToJobRequest, caller string) (func(context.Context, *sandbox) error, error) {
	switch m.Action {
	case "pause":
		o, err := e.pauseOptions("pause.", m.Pause)
		if err != nil {
			return nil, err
		}
		o.caller = caller
		return func(ctx context.Context, s *sandbox) error { return e.pauseFor(ctx, s, o, m.Pause.GetWait()) }, nil
	case "resume":
		return func(ctx context.Context, s *sandbox) error { return e.resume(ctx, s, caller) }, nil
	case "kill":
		return func(ctx context.Context, s *sandbox) error {
			if err := e.stop(s, reasonKilled, caller); err != nil {
				return err
			}
			s.waitReaped(ctx)
			return nil
		}, nil
	}
	return nil, dsec.Invalid("action", "want pause, resume or kill, got %.32q", m.Action)
}

// pauseOptions reads what a request says; field is where in it.
func (e *Edge) pauseOptions(field string, m *dsecv1.PauseOptions) (pauseOptions, error) {
	most, err := lifetime(field+"max_paused", m.GetMaxPaused(), e.cfg.DefaultMaxPaused)
	return pauseOptions{most: most, countLifetime: m.GetCountLifetime()}, err
}

// pauseFor pauses a sandbox, and waits for its memory to be moved out where asked to.
func (e *Edge) pauseFor(ctx context.Context, s *sandbox, o pauseOptions, wait bool) error {
	if err := e.pause(ctx, s, o); err != nil || !wait {
		return err
	}
	s.mu.Lock()
	own := s.paused
	s.mu.Unlock()
	if own == nil {
		return nil // resumed already
	}
	select {
	case <-own.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}
