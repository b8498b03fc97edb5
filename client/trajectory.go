package client

import (
	"context"
	"io"
	"iter"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// TrajectoryOptions say which entries are wanted.
type TrajectoryOptions struct {
	// From is the number of the first; 0 is 1.
	From uint64
	// Kinds are those wanted; none: all. What is gone is always told.
	Kinds []dsecv1.TrajectoryKind
	// Follow goes on with each entry that comes, until the sandbox has ended.
	Follow bool
}

// Trajectory yields what was done to the sandbox and what came of it, in order. An
// error ends it.
func (s *Sandbox) Trajectory(ctx context.Context, o TrajectoryOptions) iter.Seq2[*dsecv1.TrajectoryEntry, error] {
	if o.Follow {
		return s.followTrajectory(ctx, o)
	}
	return func(yield func(*dsecv1.TrajectoryEntry, error) bool) {
		req := &dsecv1.ListTrajectoryRequest{SandboxId: string(s.id), FromSeq: o.From, Kinds: o.Kinds, PageSize: 1000}
		for {
			res, err := call(ctx, s.c, s.c.trajectory.List, req, dsec.Retryable)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, e := range res.Entries {
				if !yield(e, nil) {
					return
				}
			}
			if req.FromSeq = res.NextSeq; req.FromSeq == 0 {
				return
			}
		}
	}
}

// followTrajectory goes on from the next entry where its stream broke.
func (s *Sandbox) followTrajectory(ctx context.Context, o TrajectoryOptions) iter.Seq2[*dsecv1.TrajectoryEntry, error] {
	return func(yield func(*dsecv1.TrajectoryEntry, error) bool) {
		next := o.From
		for attempt := 1; ; attempt++ {
			stream, err := s.c.trajectory.Follow(ctx, connect.NewRequest(&dsecv1.FollowTrajectoryRequest{SandboxId: string(s.id), FromSeq: next, Kinds: o.Kinds}))
			for err == nil && stream.Receive() {
				if e := stream.Msg().Entry; e != nil {
					attempt, next = 1, e.Seq+1
					if !yield(e, nil) {
						_ = stream.Close()
						return
					}
				}
			}
			if err == nil {
				err = stream.Err()
				_ = stream.Close()
			}
			if err == nil {
				return
			}
			err = s.c.typed(err, dsecv1connect.TrajectoryServiceFollowProcedure)
			if ctx.Err() != nil || !brokeOff(err) || attempt > s.c.attempts || pause(ctx, attempt) != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// TrajectoryOutput copies what the action wrote that ended with entry seq, all streams
// together, as far as it is kept.
func (s *Sandbox) TrajectoryOutput(ctx context.Context, seq uint64, w io.Writer) error {
	return s.eachPiece(ctx, seq, false, func(p *dsecv1.TrajectoryOutputPiece) error {
		_, err := w.Write(p.Data)
		return err
	})
}

// TrajectoryInput copies what entry seq says that its action was given: of one that
// began the request, of one that ended what was streamed after it.
func (s *Sandbox) TrajectoryInput(ctx context.Context, seq uint64, w io.Writer) error {
	return s.eachPiece(ctx, seq, true, func(p *dsecv1.TrajectoryOutputPiece) error {
		_, err := w.Write(p.Data)
		return err
	})
}

func (s *Sandbox) eachPiece(ctx context.Context, seq uint64, input bool, f func(*dsecv1.TrajectoryOutputPiece) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.c.trajectory.ReadOutput(ctx, connect.NewRequest(&dsecv1.ReadTrajectoryOutputRequest{SandboxId: string(s.id), Seq: seq, Input: input}))
	if err == nil {
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			if err := f(stream.Msg().Piece); err != nil {
				return err
			}
		}
		err = stream.Err()
	}
	if err != nil {
		return s.c.typed(err, dsecv1connect.TrajectoryServiceReadOutputProcedure)
	}
	return nil
}

func brokeOff(err error) bool {
	code := dsec.CodeOf(err)
	return code == dsec.CodeUnavailable || code == dsec.CodeOutcomeUnknown
}
