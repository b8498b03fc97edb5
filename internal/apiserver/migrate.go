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
	"github.com/opendsec/dsec/internal/placement"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// migration is a sandbox that is to take another's place.
type migration struct {
	edge  *watcher.Edge // of the old one
	id    string
	token []byte // of the pause that it was packed in

	at        *watcher.Edge // that has the new one, or may have it; nil: none does
	requestID string        // by which that finds it
	to        string        // its ID, where it is known
	told      bool          // the old one's edge may have it lead there
}

// Migrate has another sandbox take the place of one, on another node where there is one
// that takes it.
func (p snapshotService) Migrate(ctx context.Context, req *connect.Request[dsecv1.MigrateRequest]) (*connect.Response[dsecv1.MigrateResponse], error) {
	if !req.Msg.LoseMemory {
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "lose_memory", Message: "processes and their memory cannot be moved, only the disk: want true where they may be lost"}
	}
	old := &dsecv1.GetRequest{SandboxId: req.Msg.SandboxId}
	was, err := unary(ctx, p.s, connect.NewRequest(old), edgeClient, dsecv1connect.EdgeServiceClient.GetSandbox)
	if err != nil {
		return nil, err
	}
	id := was.Msg.GetSandbox().GetId()
	edge, packed, err := p.s.pack(ctx, &dsecv1.PackSandboxRequest{SandboxId: id, Scrub: wholeScrub, Pause: true})
	if err != nil {
		return nil, err
	}
	m := &migration{edge: edge, id: id, token: packed.Msg.PauseToken}
	made, err := p.s.createElsewhere(ctx, m, packed.Msg.Create)
	if err == nil {
		err = p.s.redirect(ctx, m)
	}
	if err != nil {
		if moved, settled := p.s.settle(ctx, m); !settled && m.told {
			err = &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the sandbox's node does not say whether it was moved", Err: err}
		} else if moved {
			err = nil
		}
	}
	if err != nil {
		if was.Msg.GetSandbox().GetState() == string(dsec.StateRunning) {
			p.s.resumeAfter(ctx, edge, id)
		}
		return nil, err
	}
	return connect.NewResponse(&dsecv1.MigrateResponse{Sandbox: made, Report: packed.Msg.Report}), nil
}

// createElsewhere makes the new sandbox, on another node than the old one's if any takes
// it.
func (s *Server) createElsewhere(ctx context.Context, m *migration, create *dsecv1.CreateRequest) (*dsecv1.Sandbox, error) {
	list, err := placement.Pick(s.edges.Nodes(), dsec.Kind(create.Backend), newRand())
	if err != nil {
		return nil, err
	}
	if last := m.edge.ID(); slices.Contains(list, last) {
		list = append(slices.DeleteFunc(list, func(id dsec.EdgeID) bool { return id == last }), last)
	}
	// Not to be asked for again, which would bind it to the edges of that ID, but to be
	// found where the answer is lost.
	m.requestID = "migrate/" + rand.Text()
	create.RequestId = m.requestID
	items := []*dsecv1.CreateSandboxesItem{{Request: create}}
	for _, id := range list {
		r := s.createAt(ctx, id, items, []int{0})[0]
		made, failed := r.GetCreated().GetSandbox(), r.GetError()
		if made == nil && failed.GetDetail().GetRetryable() {
			err = apierr.FromDetail(failed.GetDetail(), failed.GetMessage())
			continue
		}
		m.at, _ = s.edges.Edge(id)
		if made == nil {
			return nil, apierr.FromDetail(failed.GetDetail(), failed.GetMessage())
		}
		m.to = made.Id
		return made, nil
	}
	return nil, err
}

// redirect has calls for the old sandbox go to the new one. It can be repeated.
func (s *Server) redirect(ctx context.Context, m *migration) error {
	_, err := forward(ctx, edgeClient(m.edge), dsecv1connect.EdgeServiceClient.RedirectSandbox,
		&dsecv1.RedirectSandboxRequest{SandboxId: m.id, MovedTo: m.to, PauseToken: m.token})
	m.told = m.told || !errors.Is(err, watcher.ErrDial)
	return err
}

// settle ends a migration of which a step failed, and reports whether it was done after
// all. Where an edge does not answer it goes on until one does: else there may be two, of
// which nobody knows one.
func (s *Server) settle(ctx context.Context, m *migration) (moved, settled bool) {
	try := func(ctx context.Context) (moved, settled bool) {
		ctx, cancel := context.WithTimeout(ctx, dropTimeout)
		defer cancel()
		moved, err := s.trySettle(ctx, m)
		if err != nil {
			s.log.Warn("a sandbox that was to take another's place may be left for now", "sandbox", m.id, "to", m.to, "err", err)
		}
		return moved, err == nil
	}
	if moved, settled = try(context.WithoutCancel(ctx)); settled || s.stopping.Err() != nil {
		return moved, settled
	}
	copied, later := *m, context.WithValue(s.stopping, principalKey{}, principal(ctx))
	m = &copied // the caller goes on with its own
	s.work.Go(func() {
		for {
			select {
			case <-time.After(s.dropPause):
			case <-later.Done():
				return
			}
			if _, settled := try(later); settled {
				return
			}
		}
	})
	return false, false
}

// trySettle ends the new sandbox unless the old one leads to it. An error means that it
// is not known.
func (s *Server) trySettle(ctx context.Context, m *migration) (moved bool, err error) {
	if m.at == nil {
		return false, nil
	}
	if m.told {
		if err := s.redirect(ctx, m); err == nil {
			return true, nil
		} else if !isKnown(err) && dsec.CodeOf(err) != dsec.CodeLost {
			return false, err
		}
	}
	if m.to == "" {
		found, err := forward(ctx, edgeClient(m.at), dsecv1connect.EdgeServiceClient.FindRequest, &dsecv1.FindRequestRequest{RequestId: m.requestID})
		if err != nil || found.Msg.SandboxId == "" {
			return false, err
		}
		m.to = found.Msg.SandboxId
	}
	if _, err := forward(ctx, edgeClient(m.at), dsecv1connect.EdgeServiceClient.KillSandbox, &dsecv1.KillRequest{SandboxId: m.to}); !isKnown(err) {
		return false, err
	}
	return false, nil
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
