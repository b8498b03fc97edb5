package apiserver

import (
	"context"
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// stuckEdge does nothing for jobs, and does not say so.
type stuckEdge struct {
	*stubEdge
	asked chan struct{}
}

func (e *stuckEdge) ApplyToJob(ctx context.Context, _ *connect.Request[dsecv1.ApplyToJobRequest]) (*connect.Response[dsecv1.ApplyToJobResponse], error) {
	select {
	case e.asked <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestNodeThatHangsAndLeases: a job whose node does not answer keeps no other one from being ended.
func TestNodeThatHangsAndLeases(t *testing.T) {
	e := &stuckEdge{newStub("fake"), make(chan struct{}, 1)}
	e.instead = e
	s, ctx := newRig(t, e.stubEdge).server, t.Context()
	for _, name := range []string{"stuck", "left"} {
		_, err := s.jobs.create(ctx, "a", name, job{State: jobActive, Lease: time.Hour, OnExpiry: jobPause, Grace: time.Hour})
		check(t, err)
	}
	_, err := s.jobs.end(ctx, "a", "stuck")
	check(t, err)
	<-e.asked
	_, err = s.jobs.store.Delete(ctx, leasePrefix+"a/left")
	check(t, err)
	testutil.WaitFor(t, jobTimeout/3, "the end of the other's lease", func() error {
		j, _, err := s.jobs.get(ctx, "a", "left")
		if err == nil && j.State == jobActive {
			err = errors.New("it is active")
		}
		return err
	})
}

// TestHeartbeatThatCameLast: between a look at a job whose lease is gone and what is done about that
// a heartbeat can come, by another server too. It was answered, so the job goes on.
func TestHeartbeatThatCameLast(t *testing.T) {
	for _, action := range []string{jobPause, jobKill} {
		s, ctx := newRig(t).server, t.Context()
		looked, err := s.jobs.create(ctx, "a", "train", job{State: jobActive, Lease: time.Hour, OnExpiry: action})
		check(t, err)
		kept, err := s.jobs.heartbeat(ctx, "a", "train")
		if err != nil || kept.State != jobActive {
			t.Fatalf("%+v, %v", kept, err)
		}
		state := func() job {
			t.Helper()
			check(t, s.keepJob(ctx, "a", "train", looked))
			j, _, err := s.jobs.get(ctx, "a", "train")
			check(t, err)
			return j
		}
		if j := state(); j.State != jobActive {
			t.Errorf("then %s: kept, and then %s", action, j.State)
		}
		// The control: without its lease it expires.
		_, err = s.jobs.store.Delete(ctx, leasePrefix+"a/train")
		check(t, err)
		if looked = state(); looked.State == jobActive {
			t.Errorf("then %s: without a lease it is %s", action, looked.State)
		}
		// One that has expired is active again by a heartbeat, whoever looked before that.
		kept, err = s.jobs.heartbeat(ctx, "a", "train")
		if action == jobKill && codeOf(err) == dsec.CodeConflict {
			continue // it was to be killed at once
		}
		check(t, err)
		if j := state(); j.State != jobActive || kept.State != jobActive {
			t.Errorf("then %s: after a heartbeat it is %s, and then %s", action, kept.State, j.State)
		}
	}
}
