package apiserver

import (
	"context"
	"errors"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/store"
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

// ApplyToJob notes what was asked for.
func (e *stubEdge) ApplyToJob(_ context.Context, req *connect.Request[dsecv1.ApplyToJobRequest]) (*connect.Response[dsecv1.ApplyToJobResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.applied = append(e.applied, req.Msg)
	return connect.NewResponse(new(dsecv1.ApplyToJobResponse)), nil
}

// putJob has project a have a job that is in a state.
func (r *rig) putJob(name string, j job) job {
	r.t.Helper()
	j.Changed = time.Now().UTC()
	rev, err := store.Create(r.t.Context(), r.server.jobs.store, jobPrefix+"a/"+name, j)
	check(r.t, err)
	check(r.t, r.server.jobs.docs.Wait(r.t.Context(), rev))
	return j
}

// TestSandboxesOfAnExpiredJobLastForItsGrace, and are not killed by the node's own bound of
// how long one is paused.
func TestSandboxesOfAnExpiredJobLastForItsGrace(t *testing.T) {
	e := newStub("fake")
	r := newRig(t, e)
	j := r.putJob("train", job{State: jobExpired, OnExpiry: jobPause, Grace: 30 * 24 * time.Hour})
	check(t, r.server.keepJob(t.Context(), "a", "train", j))
	e.set(func() {
		for _, m := range e.applied {
			if most := m.GetPause().GetMaxPaused(); m.Action != jobPause || most == nil || most.AsDuration() != 0 {
				t.Errorf("asked for %v, want a pause that has no end of its own", m)
			}
		}
		if len(e.applied) == 0 {
			t.Error("nothing was asked for")
		}
	})
}

// TestForksAndMigrationsWantAnActiveJob, also where it is that of the sandbox itself.
func TestForksAndMigrationsWantAnActiveJob(t *testing.T) {
	e, other := newStub("fake"), newStub("fake")
	r := newRig(t, e, other)
	sb := r.client(r.secret).Sandbox(string(dsec.NewSandboxID(e.id)))
	r.putJob("ended", job{State: jobEnded})
	r.putJob("active", job{State: jobActive})
	ended := "ended"
	for name, call := range map[string]func() error{
		"fork":                  func() error { _, _, err := sb.Fork(t.Context(), 1, client.ForkOptions{}); return err },
		"fork into another job": func() error { _, _, err := sb.Fork(t.Context(), 1, client.ForkOptions{Job: &ended}); return err },
		"migrate": func() error {
			_, _, err := sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
			return err
		},
	} {
		e.set(func() { e.job = "ended" })
		if err := call(); codeOf(err) != dsec.CodeConflict {
			t.Errorf("%s: %v, want %s", name, err, dsec.CodeConflict)
		}
		e.set(func() {
			if e.job = "active"; len(e.moving.packs) > 0 && name != "fork" { // which learns it from the pack
				t.Errorf("%s: something was packed for it", name)
			}
		})
		if name == "fork into another job" {
			continue
		}
		if err := call(); err != nil {
			t.Errorf("%s of one of an active job: %v", name, err)
		}
		e.set(func() { e.moving = stubMoving{} })
	}
}
