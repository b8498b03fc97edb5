package edge_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func (n *node) pause(id string, o *dsecv1.PauseOptions) (*dsecv1.Sandbox, error) {
	res, err := n.PauseSandbox(n.t.Context(), connect.NewRequest(&dsecv1.PauseRequest{SandboxId: id, Options: o}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

func (n *node) mustPause(id string, o *dsecv1.PauseOptions) *dsecv1.Sandbox {
	n.t.Helper()
	s, err := n.pause(id, o)
	if err != nil {
		n.t.Fatal(err)
	}
	if s.State != "paused" || s.Pause == nil {
		n.t.Fatalf("state %s, pause %v: want paused", s.State, s.Pause)
	}
	return s
}

func (n *node) resume(id string) (*dsecv1.Sandbox, error) {
	res, err := n.ResumeSandbox(n.t.Context(), connect.NewRequest(&dsecv1.ResumeRequest{SandboxId: id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// TestCallsResume: whatever works in a paused sandbox has it go on first, by itself;
// looking at it does not.
func TestCallsResume(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	n.shell(id, "echo before > /tmp/f")
	for name, act := range map[string]func() error{
		"exec": func() error { _, err := n.exec(id, "cat", "/tmp/f"); return err },
		"stat": func() error {
			_, err := n.file.Stat(t.Context(), connect.NewRequest(&dsecv1.StatRequest{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/f"}}))
			return err
		},
		"processes": func() error {
			_, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
			return err
		},
		"open session": func() error {
			_, err := n.session.OpenSession(t.Context(), connect.NewRequest(&dsecv1.OpenSessionRequest{SandboxId: id}))
			return err
		},
		"resume": func() error { _, err := n.resume(id); return err },
	} {
		n.mustPause(id, nil)
		n.mustPause(id, nil) // again: a success
		if _, err := n.GetUsage(t.Context(), connect.NewRequest(&dsecv1.UsageRequest{SandboxId: id})); err != nil {
			t.Fatalf("usage of a paused sandbox: %v", err)
		}
		if s := n.get(id); s.State != "paused" {
			t.Fatalf("looked at: %s, want paused", s.State)
		}
		if err := act(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if s := n.get(id); s.State != "running" || s.Pause != nil {
			t.Errorf("after %s: %s, %v, want running", name, s.State, s.Pause)
		}
		if _, err := n.resume(id); err != nil {
			t.Errorf("resume of a running one: %v", err)
		}
	}
	n.mustPause(id, nil)
	if got := n.kill(id); got != "stopped" {
		t.Errorf("killed: %s, want stopped", got)
	}
	if _, err := n.pause(id, nil); dsec.CodeOf(typedError(err)) != dsec.CodeConflict {
		t.Errorf("pause of an ended one: %v, want a conflict", err)
	}
	if _, err := n.resume(id); dsec.CodeOf(typedError(err)) != dsec.CodeConflict {
		t.Errorf("resume of an ended one: %v, want a conflict", err)
	}
}

// TestManyCallsResumeOnce: of all that come at once, one resumes it, and all are served.
func TestManyCallsResumeOnce(t *testing.T) {
	var resumes, pauses atomic.Int64
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnResume = func(context.Context, dsec.SandboxID) error { resumes.Add(1); return nil }
		o.OnPause = func(context.Context, dsec.SandboxID) error { pauses.Add(1); return nil }
	})
	id := n.create(&dsecv1.CreateRequest{})
	for round := int64(1); round <= 5; round++ {
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { n.mustPause(id, nil) })
		}
		wg.Wait()
		for range 20 {
			wg.Go(func() {
				if _, err := n.exec(id, "true"); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if p, r := pauses.Load(), resumes.Load(); p != round || r != round {
			t.Fatalf("round %d: paused %d times and resumed %d times", round, p, r)
		}
	}
}

// TestPausedTimeDoesNotCount: neither for the lifetime nor for idleness, unless asked to.
func TestPausedTimeDoesNotCount(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(time.Minute), MaxLifetime: durationpb.New(10 * time.Minute)})
		counts := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(time.Minute), MaxLifetime: durationpb.New(10 * time.Minute)})
		in(30 * time.Second)
		n.mustPause(id, nil)
		n.mustPause(counts, &dsecv1.PauseOptions{CountLifetime: true})
		in(9 * time.Minute)
		if s := n.get(counts); s.State != "paused" {
			t.Fatalf("within its lifetime: %s (%s), want paused", s.State, s.Reason)
		}
		in(time.Minute)
		if s := n.get(counts); s.State != "stopped" || s.Reason != "maximum lifetime" {
			t.Errorf("whose lifetime counts: %s (%s), want stopped by it", s.State, s.Reason)
		}
		in(5 * time.Hour)
		left := time.Until(n.get(id).Deadline.AsTime())
		if _, err := n.resume(id); err != nil {
			t.Fatal(err)
		}
		if got := time.Until(n.get(id).Deadline.AsTime()); got != left || got != 9*time.Minute+30*time.Second {
			t.Errorf("%v of its lifetime are left, told before: %v; want 9m30s", got, left)
		}
		in(59 * time.Second)
		if s := n.get(id); s.State != "running" {
			t.Fatalf("59s after it was resumed: %s (%s)", s.State, s.Reason)
		}
		in(2 * time.Second)
		if s := n.get(id); s.State != "stopped" || s.Reason != "idle timeout" {
			t.Errorf("%s (%s), want stopped by the idle timeout", s.State, s.Reason)
		}
	})
}

// TestCommandTimeoutStandsStill: a command whose sandbox is paused has the time left
// that it had.
func TestCommandTimeoutStandsStill(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		var res *dsecv1.ExecResponse
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{
				Shell: "echo begun; sleep 50", Timeout: durationpb.New(time.Minute),
			}}))
			if err != nil {
				t.Error(err)
				return
			}
			res = r.Msg
		}()
		in(10 * time.Second)
		n.mustPause(id, nil)
		in(time.Hour)
		if s := n.get(id); s.State != "paused" {
			t.Fatalf("its call in progress is no reason to resume it: %s", s.State)
		}
		if _, err := n.resume(id); err != nil {
			t.Fatal(err)
		}
		<-ended
		if res.GetOutcome().GetTimedOut() || res.GetOutcome().GetExitCode() != 0 || string(res.GetStdout()) != "begun\n" {
			t.Errorf("outcome %v, output %q", res.GetOutcome(), res.GetStdout())
		}
	})
}

func TestPausedForTooLong(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		s := n.mustPause(id, &dsecv1.PauseOptions{MaxPaused: durationpb.New(time.Hour)})
		if got := time.Until(s.Pause.Until.AsTime()); got != time.Hour {
			t.Errorf("is killed in %v, want 1h", got)
		}
		in(59 * time.Minute)
		if _, err := n.exec(id, "true"); err != nil {
			t.Fatal(err)
		}
		n.mustPause(id, &dsecv1.PauseOptions{MaxPaused: durationpb.New(time.Hour)})
		in(59 * time.Minute)
		if s := n.get(id); s.State != "paused" {
			t.Fatalf("%s (%s), want paused", s.State, s.Reason)
		}
		in(2 * time.Minute)
		if s := n.get(id); s.State != "stopped" || s.Reason != "paused for too long" {
			t.Errorf("%s (%s), want stopped", s.State, s.Reason)
		}
		if ids := n.opts.World.IDs(); len(ids) != 0 {
			t.Errorf("left in the world: %v", ids)
		}
	})
}

func TestIdlePause(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(time.Minute), IdleAction: "pause"})
		for range 3 {
			in(61 * time.Second)
			if s := n.get(id); s.State != "paused" || s.Reason != "idle timeout" {
				t.Fatalf("%s (%s), want paused by the idle timeout", s.State, s.Reason)
			}
			in(time.Hour)
			if _, err := n.exec(id, "true"); err != nil {
				t.Fatal(err)
			}
			if s := n.get(id); s.State != "running" || s.Reason != "" {
				t.Fatalf("used: %s (%s), want running", s.State, s.Reason)
			}
		}
	})
	n := newNode(t, nil)
	_, err := n.tryCreate(&dsecv1.CreateRequest{IdleAction: "sleep"})
	wantError(t, err, dsec.CodeInvalid, "idle_action")
}

// TestPausedSandboxesSurviveARestart, with what was left of their time.
func TestPausedSandboxesSurviveARestart(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	n.shell(id, "echo kept > /tmp/f")
	since := n.mustPause(id, &dsecv1.PauseOptions{MaxPaused: durationpb.New(time.Hour)}).Pause
	for range 3 {
		n.restart()
		s := n.get(id)
		if s.State != "paused" || !s.Pause.Since.AsTime().Equal(since.Since.AsTime()) || s.Pause.Until == nil {
			t.Fatalf("after a restart: %s, %v; want paused since %v", s.State, s.Pause, since)
		}
		if !n.opts.World.Paused(dsec.SandboxID(id)) {
			t.Fatal("its processes run")
		}
	}
	if got := string(n.shell(id, "cat /tmp/f").Stdout); got != "kept\n" {
		t.Errorf("output %q", got)
	}
	n.restart()
	if s := n.get(id); s.State != "running" {
		t.Errorf("resumed, and after a restart: %s, want running", s.State)
	}
}

// TestWhoLeavesAPausedCommandKillsIt: as soon as it could go on, also where the edge was
// restarted meanwhile.
func TestWhoLeavesAPausedCommandKillsIt(t *testing.T) {
	for _, restart := range []bool{false, true} {
		n := newNode(t, nil)
		id := n.create(&dsecv1.CreateRequest{})
		ctx, leave := context.WithCancel(t.Context())
		s, err := n.process.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "sleep 1000"}}))
		if err != nil || !s.Receive() {
			t.Fatal(err)
		}
		process := s.Msg().GetStarted().GetProcessId()
		n.mustPause(id, nil)
		leave()
		n.quiet()
		if s := n.get(id); s.State != "paused" {
			t.Fatalf("%s, want paused", s.State)
		}
		if restart {
			n.restart()
		}
		if _, err := n.resume(id); err != nil {
			t.Fatal(err)
		}
		list, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range list.Msg.Processes {
			if p.ProcessId == process && p.Fault == "" {
				t.Errorf("restarted: %v: it goes on: %v", restart, p)
			}
		}
	}
}

// TestPauseThatFailsChangesNothing: nor does a resume.
func TestPauseThatFailsChangesNothing(t *testing.T) {
	var pauseErr, resumeErr error
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnPause = func(context.Context, dsec.SandboxID) error { return pauseErr }
		o.OnResume = func(context.Context, dsec.SandboxID) error { return resumeErr }
	})
	id := n.create(&dsecv1.CreateRequest{})
	pauseErr = errors.New("a process does not stop")
	_, err := n.pause(id, nil)
	wantError(t, err, dsec.CodeUnavailable, "")
	if s := n.get(id); s.State != "running" || s.Pause != nil {
		t.Fatalf("%s, want running", s.State)
	}
	pauseErr = nil
	n.mustPause(id, nil)
	resumeErr = errors.New("it does not go on")
	_, err = n.exec(id, "true")
	wantError(t, err, dsec.CodeUnavailable, "")
	if s := n.get(id); s.State != "paused" || s.Pause == nil {
		t.Fatalf("%s, want paused", s.State)
	}
	resumeErr = nil
	if _, err = n.exec(id, "true"); err != nil {
		t.Error(err)
	}
}

// TestResumeWithoutRoom: it is refused, and the sandbox is not lost.
func TestResumeWithoutRoom(t *testing.T) {
	var free atomic.Int64
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		*c = edge.WithMemory(*c, func() (int64, error) { return free.Load(), nil })
		o.OnPageOut = func(context.Context, dsec.SandboxID) (backend.PagedOut, error) {
			return backend.PagedOut{Before: 300 << 20, After: 10 << 20}, nil
		}
	})
	id := n.create(&dsecv1.CreateRequest{})
	s := n.mustPause(id, &dsecv1.PauseOptions{Wait: true})
	if s.Pause.GetMemoryBeforeBytes() != 300<<20 || s.Pause.GetMemoryBytes() != 10<<20 {
		t.Errorf("pause %v", s.Pause)
	}
	free.Store(400 << 20) // less what the node keeps
	_, err := n.exec(id, "true")
	if e := wantError(t, err, dsec.CodeExhausted, ""); !strings.Contains(e.Message, "290 MiB") {
		t.Errorf("message %q, want what is needed", e.Message)
	}
	if s := n.get(id); s.State != "paused" {
		t.Fatalf("%s, want paused", s.State)
	}
	free.Store(500 << 20)
	if _, err := n.exec(id, "true"); err != nil {
		t.Error(err)
	}
}

// What is being resumed takes its memory while it comes back, which is after the resume:
// until then the kernel's figure of free memory says nothing, and another resume waits.
func TestResumesShareTheRoom(t *testing.T) {
	back := map[dsec.SandboxID]chan struct{}{}
	var mu sync.Mutex
	of := func(id dsec.SandboxID) chan struct{} {
		mu.Lock()
		defer mu.Unlock()
		if back[id] == nil {
			back[id] = make(chan struct{})
		}
		return back[id]
	}
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		*c = edge.WithMemory(*c, func() (int64, error) { return 700 << 20, nil })
		o.OnPageOut = func(context.Context, dsec.SandboxID) (backend.PagedOut, error) {
			return backend.PagedOut{Before: 400 << 20}, nil
		}
		o.CameBack = func(id dsec.SandboxID) <-chan struct{} { return of(id) }
	})
	first, second := n.create(&dsecv1.CreateRequest{}), n.create(&dsecv1.CreateRequest{})
	for _, id := range []string{first, second} {
		n.mustPause(id, &dsecv1.PauseOptions{Wait: true})
	}
	if _, err := n.exec(first, "true"); err != nil {
		t.Fatal(err)
	}
	_, err := n.exec(second, "true")
	wantError(t, err, dsec.CodeExhausted, "")
	if s := n.get(second); s.State != "paused" {
		t.Fatalf("%s, want paused", s.State)
	}
	close(of(dsec.SandboxID(first)))
	testutil.WaitFor(t, 10*time.Second, "room for the second", func() error { _, err := n.exec(second, "true"); return err })
	close(of(dsec.SandboxID(second)))
}

// TestPageOutIsGivenUp by a resume and by a kill, which do not wait for it.
func TestPageOutIsGivenUp(t *testing.T) {
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnPageOut = func(ctx context.Context, _ dsec.SandboxID) (backend.PagedOut, error) {
			<-ctx.Done()
			return backend.PagedOut{}, ctx.Err()
		}
	})
	id := n.create(&dsecv1.CreateRequest{})
	n.mustPause(id, nil)
	if _, err := n.exec(id, "true"); err != nil {
		t.Fatal(err)
	}
	n.mustPause(id, nil)
	if got := n.kill(id); got != "stopped" {
		t.Errorf("killed: %s, want stopped", got)
	}
}

// TestApplyToJob: all of a job's sandboxes, no others, and again with the same end.
func TestApplyToJob(t *testing.T) {
	fail := dsec.SandboxID("")
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnPause = func(_ context.Context, id dsec.SandboxID) error {
			if id == fail {
				return dsec.Errorf(dsec.CodeUnavailable, "not now")
			}
			return nil
		}
	})
	apply := func(job, action string) map[string]*dsecv1.JobItem {
		t.Helper()
		res, err := n.ApplyToJob(t.Context(), connect.NewRequest(&dsecv1.ApplyToJobRequest{Job: job, Action: action}))
		if err != nil {
			t.Fatal(err)
		}
		items := map[string]*dsecv1.JobItem{}
		for _, item := range res.Msg.Items {
			items[item.SandboxId] = item
		}
		return items
	}
	var ids []string
	for range 50 {
		ids = append(ids, n.create(&dsecv1.CreateRequest{Job: "a"}))
	}
	other := n.create(&dsecv1.CreateRequest{Job: "b"})
	for _, c := range []struct{ action, state string }{
		{"pause", "paused"}, {"pause", "paused"}, {"resume", "running"}, {"resume", "running"}, {"pause", "paused"}, {"kill", "stopped"},
	} {
		items := apply("a", c.action)
		if len(items) != len(ids) {
			t.Fatalf("%s: %d items, want %d", c.action, len(items), len(ids))
		}
		for _, id := range ids {
			if item := items[id]; item.GetState() != c.state || item.GetError() != nil {
				t.Errorf("%s: %v, want %s", c.action, item, c.state)
			}
		}
	}
	if s := n.get(other); s.State != "running" {
		t.Errorf("of another job: %s", s.State)
	}
	if items := apply("a", "kill"); len(items) != 0 {
		t.Errorf("killed again: %d items, want none", len(items))
	}
	fail = dsec.SandboxID(other)
	if item := apply("b", "pause")[other]; item.State != "running" || item.Error.GetDetail().GetCode() != "unavailable" {
		t.Errorf("one that cannot be paused: %v", item)
	}
	_, err := n.ApplyToJob(t.Context(), connect.NewRequest(&dsecv1.ApplyToJobRequest{Job: "a", Action: "freeze"}))
	wantError(t, err, dsec.CodeInvalid, "action")
	_, err = n.ApplyToJob(t.Context(), connect.NewRequest(&dsecv1.ApplyToJobRequest{Action: "kill"}))
	wantError(t, err, dsec.CodeInvalid, "job")
}
