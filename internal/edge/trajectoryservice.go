package edge

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// trajectoryService serves TrajectoryService.
type trajectoryService struct{ e *Edge }

// trace finds a sandbox, which may have ended; over is true where no entry comes any more.
func (t trajectoryService) trace(h http.Header, id string) (over bool, err error) {
	if !t.e.ready.Load() {
		return false, errStarting
	}
	s, err := t.e.find(h.Get(projectHeader), id)
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.noted, nil
}

// List gives a page of entries.
func (t trajectoryService) List(ctx context.Context, req *connect.Request[dsecv1.ListTrajectoryRequest]) (*connect.Response[dsecv1.ListTrajectoryResponse], error) {
	if _, err := t.trace(req.Header(), req.Msg.SandboxId); err != nil {
		return nil, err
	}
	return respond(t.e.trajectories.List(ctx, req.Msg))
}

// Follow streams entries, those that come too.
func (t trajectoryService) Follow(ctx context.Context, req *connect.Request[dsecv1.FollowTrajectoryRequest], stream *connect.ServerStream[dsecv1.FollowTrajectoryResponse]) error {
	m := req.Msg
	over, err := t.trace(req.Header(), m.SandboxId)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(t.e.closing, func() { cancel(context.Cause(t.e.closing)) })()
	out := newFollowed(stream, m.Kinds)
	defer out.close()
	read := t.e.trajectories.Follow
	if over {
		read = t.e.trajectories.Entries
	}
	err = read(ctx, dsec.SandboxID(m.SandboxId), m.FromSeq, nil, out.send)
	switch {
	case errors.Is(err, errFollowed):
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return err
}

// errFollowed: the sandbox has ended, and with it its trajectory.
var errFollowed = errors.New("followed to the end")

// followed is a stream of entries, which says that it lives where none comes.
type followed struct {
	stream *connect.ServerStream[dsecv1.FollowTrajectoryResponse]
	kinds  []dsecv1.TrajectoryKind

	mu     sync.Mutex
	timer  *time.Timer
	closed bool
}

func newFollowed(stream *connect.ServerStream[dsecv1.FollowTrajectoryResponse], kinds []dsecv1.TrajectoryKind) *followed {
	f := &followed{stream: stream, kinds: kinds}
	f.mu.Lock() // alive may run before AfterFunc has returned
	defer f.mu.Unlock()
	f.timer = time.AfterFunc(attachedAfter, f.alive) // the client is to know that it follows
	return f
}

func (f *followed) send(e *dsecv1.TrajectoryEntry) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	gap := e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP
	if gap || len(f.kinds) == 0 || slices.Contains(f.kinds, e.Kind) {
		if err := f.stream.Send(&dsecv1.FollowTrajectoryResponse{Entry: e}); err != nil {
			return err
		}
		f.timer.Reset(keepalive)
	}
	if e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE && dsec.State(e.State).Terminal() {
		return errFollowed
	}
	return nil
}

func (f *followed) alive() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		_ = f.stream.Send(&dsecv1.FollowTrajectoryResponse{}) // who is gone is told of by the context
		f.timer.Reset(keepalive)
	}
}

func (f *followed) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.timer.Stop()
}

// ReadOutput streams what an action wrote, or was given.
func (t trajectoryService) ReadOutput(ctx context.Context, req *connect.Request[dsecv1.ReadTrajectoryOutputRequest], stream *connect.ServerStream[dsecv1.ReadTrajectoryOutputResponse]) error {
	m := req.Msg
	if _, err := t.trace(req.Header(), m.SandboxId); err != nil {
		return err
	}
	read := t.e.trajectories.Output
	if m.Input {
		read = t.e.trajectories.Input
	}
	return read(ctx, dsec.SandboxID(m.SandboxId), m.Seq, func(p *dsecv1.TrajectoryOutputPiece) error {
		return stream.Send(&dsecv1.ReadTrajectoryOutputResponse{Piece: p})
	})
}
