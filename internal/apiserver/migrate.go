package apiserver

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/placement"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

const (
	migrationPrefix = "migrations/" // <request ID of the new sandbox's create>
	// createComes is for how long a create whose answer was lost may still begin.
	createComes = time.Minute
	settleEvery = 2 * time.Second
)

// migration is a sandbox that is to take another's place. It is a document from before
// there is a new one until there is one of the two.
type migration struct {
	RequestID string      `json:"request_id"` // by which its edge finds the new one
	Project   string      `json:"project"`
	From      string      `json:"from"`  // the old one's ID
	Token     []byte      `json:"token"` // of the pause that it was packed in
	At        dsec.EdgeID `json:"at"`    // that was asked for the new one last
	Began     time.Time   `json:"began"`
}

// Migrate has another sandbox take the place of one, on another node where there is one
// that takes it.
func (p snapshotService) Migrate(ctx context.Context, req *connect.Request[dsecv1.MigrateRequest]) (*connect.Response[dsecv1.MigrateResponse], error) {
	if !req.Msg.LoseMemory {
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "lose_memory", Message: "processes and their memory cannot be moved, only the disk: want true where they may be lost"}
	}
	old := &dsecv1.GetRequest{SandboxId: req.Msg.SandboxId}
	res, err := unary(ctx, p.s, connect.NewRequest(old), edgeClient, dsecv1connect.EdgeServiceClient.GetSandbox)
	if err != nil {
		return nil, err
	}
	was := res.Msg.GetSandbox()
	id := was.GetId()
	if id != req.Msg.SandboxId { // it was done, and is not to be done twice
		return connect.NewResponse(&dsecv1.MigrateResponse{Sandbox: was}), nil
	}
	if err := p.s.jobs.admit(principal(ctx).Project, "job", was.GetJob()); err != nil {
		return nil, err
	}
	running := was.GetState() == string(dsec.StateRunning)
	edge, packed, err := p.s.pack(ctx, &dsecv1.PackSandboxRequest{SandboxId: id, Scrub: wholeScrub, Pause: true, Unnamed: true, RefuseActions: !req.Msg.LoseActions})
	if err != nil {
		if running && edge != nil && dsec.CodeOf(err) == dsec.CodeOutcomeUnknown {
			p.s.resumeAfter(ctx, edge, id) // else its node has seen to it
		}
		return nil, err
	}
	m := &migration{RequestID: "migrate/" + rand.Text(), Project: principal(ctx).Project, From: id, Token: packed.Msg.PauseToken, Began: time.Now().UTC()}
	made, err := p.s.move(ctx, m, edge, &dsecv1.CreateSandboxesItem{Request: packed.Msg.Create, Origin: packedFrom(packed.Msg.Layer)})
	if err != nil {
		if running {
			p.s.resumeAfter(ctx, edge, id)
		}
		return nil, err
	}
	return connect.NewResponse(&dsecv1.MigrateResponse{Sandbox: made, Report: packed.Msg.Report}), nil
}

// move makes the new sandbox and has the old one lead to it. Where that fails there is no
// new one, or the error is outcome_unknown, and the rest is done later.
func (s *Server) move(ctx context.Context, m *migration, from *watcher.Edge, create *dsecv1.CreateSandboxesItem) (*dsecv1.Sandbox, error) {
	made, err := s.createElsewhere(ctx, m, from, create)
	if err == nil {
		err = s.redirect(ctx, m, made.Id)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if err != nil && m.At != "" {
		moved, serr := s.settle(ctx, m)
		switch {
		case serr != nil:
			s.unsettled.Store(m.RequestID, *m)
			return nil, &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "a node does not say whether the sandbox was moved", Err: errors.Join(err, serr)}
		case moved != nil:
			made, err = moved, nil
		case dsec.CodeOf(err) == dsec.CodeOutcomeUnknown: // by now it is known
			err = &dsec.Error{Code: dsec.CodeUnavailable, Message: "a node did not answer, and the sandbox stays where it is", Err: err}
		}
	}
	s.settled(ctx, m)
	return made, err
}

// createElsewhere makes the new sandbox, on another node than the old one's if any takes
// it. m.At is empty where it is known that there is none.
func (s *Server) createElsewhere(ctx context.Context, m *migration, from *watcher.Edge, create *dsecv1.CreateSandboxesItem) (*dsecv1.Sandbox, error) {
	list, err := placement.Pick(s.edges.Nodes(), dsec.Kind(create.Request.Backend), newRand())
	if err != nil {
		return nil, err
	}
	if last := from.ID(); slices.Contains(list, last) {
		list = append(slices.DeleteFunc(list, func(id dsec.EdgeID) bool { return id == last }), last)
	}
	create.Request.RequestId = m.RequestID
	for _, m.At = range list {
		if _, err := store.Put(ctx, s.layers.store, migrationPrefix+m.RequestID, m); err != nil {
			m.At = ""
			return nil, err
		}
		r := s.createAt(ctx, m.At, []*dsecv1.CreateSandboxesItem{create}, []int{0})[0]
		if made := r.GetCreated().GetSandbox(); made != nil {
			return made, nil
		}
		failed := r.GetError()
		err = apierr.FromDetail(failed.GetDetail(), failed.GetMessage())
		if !failed.GetDetail().GetRetryable() {
			break
		}
	}
	if code := dsec.CodeOf(err); code != dsec.CodeOutcomeUnknown && code != dsec.CodeInternal {
		m.At = ""
	}
	return nil, err
}

// redirect has calls for the old sandbox go to the new one. It can be repeated.
func (s *Server) redirect(ctx context.Context, m *migration, to string) error {
	edge, err := s.owner("sandbox_id", m.From)
	if err != nil {
		return err
	}
	_, err = forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.RedirectSandbox,
		&dsecv1.RedirectSandboxRequest{SandboxId: m.From, MovedTo: to, PauseToken: m.Token})
	return err
}

// settle ends a migration of which a step failed: with the new sandbox where there is one
// and the old one was not used since, and else with the old one. An error means that it
// is not known yet; all can be repeated, and done by several apiservers.
func (s *Server) settle(ctx context.Context, m *migration) (moved *dsecv1.Sandbox, err error) {
	edge, ok := s.edges.Edge(m.At)
	if !ok {
		return nil, dsec.Errorf(dsec.CodeUnavailable, "no edge %s is known", m.At)
	}
	found, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.FindRequest, &dsecv1.FindRequestRequest{RequestId: m.RequestID})
	if err != nil {
		return nil, err
	}
	id := found.Msg.SandboxId
	if id == "" {
		if time.Since(m.Began) < createComes {
			return nil, dsec.Errorf(dsec.CodeUnavailable, "the create may still come")
		}
		return nil, nil
	}
	got, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.GetSandbox, &dsecv1.GetRequest{SandboxId: id})
	if err != nil {
		if isKnown(err) { // it was moved further, or ended long ago
			return nil, nil
		}
		return nil, err
	}
	switch to := got.Msg.GetSandbox(); dsec.State(to.GetState()) {
	case dsec.StateRunning, dsec.StatePaused:
		switch err := s.redirect(ctx, m, id); {
		case err == nil:
			return to, nil
		case dsec.CodeOf(err) == dsec.CodeNotFound: // nobody knows any more
			return nil, nil
		case !isKnown(err) && dsec.CodeOf(err) != dsec.CodeLost:
			return nil, err
		}
		if _, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.KillSandbox, &dsecv1.KillRequest{SandboxId: id}); !isKnown(err) {
			return nil, err
		}
	case dsec.StatePending, dsec.StateStarting:
		return nil, dsec.Errorf(dsec.CodeUnavailable, "the create goes on")
	}
	return nil, nil
}

// settled forgets a migration. Where that fails it is settled once more, to no effect.
func (s *Server) settled(ctx context.Context, m *migration) {
	if _, err := s.layers.store.Delete(ctx, migrationPrefix+m.RequestID); err != nil {
		s.log.Info("a migration that has ended is not forgotten yet", "sandbox", m.From, "err", err)
	}
}

// keepMigrations settles those that an earlier apiserver began, and those that could not
// be at once, until ctx ends.
func (s *Server) keepMigrations(ctx context.Context) {
	for read := false; ctx.Err() == nil; {
		if !read {
			earlier, err := store.List[migration](ctx, s.layers.store, migrationPrefix)
			for id, m := range earlier {
				s.unsettled.Store(id, m)
			}
			read = err == nil
		}
		s.unsettled.Range(func(id, v any) bool {
			m := v.(migration)
			ctx, cancel := context.WithTimeout(context.WithValue(ctx, principalKey{}, iam.Principal{Project: m.Project}), dropTimeout)
			defer cancel()
			if _, err := s.settle(ctx, &m); err == nil {
				s.settled(ctx, &m)
				s.unsettled.Delete(id)
			}
			return true
		})
		select {
		case <-time.After(settleEvery):
		case <-ctx.Done():
		}
	}
}

// resumeAfter has a sandbox that was not moved after all go on. Where that fails the
// next call for it does.
func (s *Server) resumeAfter(ctx context.Context, edge *watcher.Edge, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if _, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.ResumeSandbox, &dsecv1.ResumeRequest{SandboxId: id}); err != nil {
		s.log.Info("a sandbox that was not moved stays paused", "sandbox", id, "err", err)
	}
}
