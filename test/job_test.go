package test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// TestJobsBelongToTheirProject: another's cannot be seen, kept, or have anything done to
// its sandboxes; and may have the same name.
func TestJobsBelongToTheirProject(t *testing.T) {
	s := up(t)
	owner, _ := s.project(t, "owner")
	other, _ := s.project(t, "other")
	j, err := owner.CreateJob(t.Context(), "train", client.JobOptions{Labels: map[string]string{"a": "b"}})
	check(t, err)
	sb, err := owner.CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake, Job: "train"})
	check(t, err)
	_, err = other.Job("train").Info(t.Context())
	wantCodeOf(t, "another's job", err, dsec.CodeNotFound)
	_, err = other.Job("train").Heartbeat(t.Context())
	wantCodeOf(t, "heartbeat of another's job", err, dsec.CodeNotFound)
	_, err = other.Job("train").End(t.Context())
	wantCodeOf(t, "end of another's job", err, dsec.CodeNotFound)
	for name, act := range map[string]func(context.Context) ([]client.JobResult, error){
		"pause": func(ctx context.Context) ([]client.JobResult, error) {
			return other.Job("train").Pause(ctx, client.PauseOptions{})
		},
		"kill": other.Job("train").Kill,
	} {
		if results, err := act(t.Context()); err != nil || len(results) > 0 {
			t.Errorf("%s of another's job: %v, %v; want nothing", name, results, err)
		}
	}
	for range other.Jobs(t.Context(), client.JobListOptions{}) {
		t.Error("another's jobs are listed")
	}
	_, err = other.CreateJob(t.Context(), "train", client.JobOptions{})
	check(t, err)
	_, err = other.Job("train").End(t.Context())
	check(t, err)
	if info, err := sb.Info(t.Context()); err != nil || info.State != dsec.StateRunning {
		t.Errorf("%v, %v; want it running", info, err)
	}
	if results, err := j.Pause(t.Context(), client.PauseOptions{Wait: true}); err != nil || len(results) != 1 || results[0].State != dsec.StatePaused {
		t.Errorf("its own: %v, %v", results, err)
	}
}

// TestJobThatNobodyKeeps: its sandboxes end, and no more are made.
func TestJobThatNobodyKeeps(t *testing.T) {
	s := up(t)
	c := s.client(t)
	j, err := c.CreateJob(t.Context(), "train", client.JobOptions{Lease: 5 * time.Second, KillOnExpiry: true})
	check(t, err)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake, Job: j.Name()})
	check(t, err)
	info, err := j.Info(t.Context())
	check(t, err)
	if info.State != dsec.JobActive || info.Lease != 5*time.Second || info.OnExpiry != "kill" {
		t.Fatalf("job %+v", info)
	}
	testutil.WaitFor(t, time.Minute, "the end of its sandbox", func() error {
		info, err := sb.Info(t.Context())
		if err == nil && info.State != dsec.StateStopped {
			err = errors.New(string(info.State))
		}
		return err
	})
	_, err = j.Heartbeat(t.Context())
	wantCodeOf(t, "heartbeat of what has ended", err, dsec.CodeConflict)
	_, err = c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake, Job: j.Name()})
	wantCodeOf(t, "create in what has ended", err, dsec.CodeConflict)
}

// TestCreatesAndTheEndOfTheirJob at once: nothing is left running in a job that ended.
func TestCreatesAndTheEndOfTheirJob(t *testing.T) {
	c := up(t).client(t)
	j, err := c.CreateJob(t.Context(), "train", client.JobOptions{})
	check(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake, Job: j.Name()})
				if err != nil {
					if dsec.CodeOf(err) != dsec.CodeConflict {
						t.Error(err)
					}
					return
				}
			}
		})
	}
	_, err = j.End(t.Context())
	check(t, err)
	wg.Wait()
	testutil.WaitFor(t, time.Minute, "the end of its sandboxes", func() error {
		for s, err := range c.Sandboxes(t.Context(), client.ListOptions{Job: j.Name()}) {
			if err == nil {
				err = fmt.Errorf("%s is %s", s.ID, s.State)
			}
			return err
		}
		return nil
	})
}

func wantCodeOf(t *testing.T, what string, err error, code dsec.Code) {
	t.Helper()
	if err == nil || dsec.CodeOf(err) != code {
		t.Errorf("%s: %v, want %s", what, err, code)
	}
}
