package edge_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// bubble runs f with an edge on a clock that stands still but for sleeps.
func bubble(t *testing.T, change func(*edge.Config, *fake.Options), f func(t *testing.T, n *node)) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		n := newNode(t, func(c *edge.Config, o *fake.Options) {
			*c = edge.WithClock(*c, func() time.Duration { return time.Hour + time.Since(begun) })
			if change != nil {
				change(c, o)
			}
		})
		f(t, n)
		n.close()
	})
}

// in sleeps, and lets everything that this sets off come to rest.
func in(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // of the bubble's clock
	synctest.Wait()
}

func TestIdleTimeout(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(time.Minute), MaxLifetime: durationpb.New(0)})
		in(59 * time.Second)
		if s := n.get(id); s.State != "running" {
			t.Fatalf("after 59s: %s, want running", s.State)
		}
		if _, err := n.exec(id, "sleep", "600"); err != nil {
			t.Fatalf("a command of ten minutes: %v", err)
		}
		in(59 * time.Second)
		if s := n.get(id); s.State != "running" {
			t.Fatalf("59s after the command: %s, want running: looking is no activity", s.State)
		}
		in(2 * time.Second)
		if s := n.get(id); s.State != "stopped" || s.Reason != "idle timeout" {
			t.Errorf("61s after the command: %s (%s), want stopped by the idle timeout", s.State, s.Reason)
		}
		if len(n.opts.World.IDs()) != 0 {
			t.Error("the sandbox is not freed")
		}
		_, err := n.exec(id, "true")
		if e := wantError(t, err, dsec.CodeConflict, ""); !strings.Contains(e.Message, "idle timeout") {
			t.Errorf("message %q, want the reason", e.Message)
		}
	})
}

func TestDetachedCommandIsNoActivity(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(time.Minute)})
		stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"sleep", "600"}}, Detach: true})
		if _, err := readAll(stream); err != nil {
			t.Fatal(err)
		}
		in(61 * time.Second)
		if s := n.get(id); s.State != "stopped" {
			t.Errorf("%s, want stopped", s.State)
		}
	})
}

func TestMaxLifetimeAndExtend(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(0), MaxLifetime: durationpb.New(time.Hour)})
		never := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(0), MaxLifetime: durationpb.New(0)})
		in(59 * time.Minute)
		res, err := n.ExtendSandbox(t.Context(), connect.NewRequest(&dsecv1.ExtendRequest{SandboxId: id, MaxLifetime: durationpb.New(2 * time.Hour)}))
		if err != nil || time.Until(res.Msg.Sandbox.Deadline.AsTime()) != 2*time.Hour {
			t.Fatalf("extended: %v, %v", res, err)
		}
		in(119 * time.Minute)
		if s := n.get(id); s.State != "running" {
			t.Errorf("within the new lifetime: %s", s.State)
		}
		// A command in progress does not hold off the end.
		done := make(chan error, 1)
		go func() {
			_, err := n.exec(id, "sleep", "86400")
			done <- err
		}()
		in(2 * time.Minute)
		if s := n.get(id); s.State != "stopped" || s.Reason != "maximum lifetime" {
			t.Errorf("after it: %s (%s)", s.State, s.Reason)
		}
		if err := <-done; err == nil {
			t.Log("the command's kill was still told")
		}
		in(365 * 24 * time.Hour)
		if s := n.get(never); s.State != "running" {
			t.Errorf("without timeouts after a year: %s", s.State)
		}
		_, err = n.ExtendSandbox(t.Context(), connect.NewRequest(&dsecv1.ExtendRequest{SandboxId: never, IdleTimeout: durationpb.New(-1)}))
		wantError(t, err, dsec.CodeInvalid, "idle_timeout")
	})
}

func TestDeadlinesOutliveARestart(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(0), MaxLifetime: durationpb.New(time.Hour)})
		idle := n.create(&dsecv1.CreateRequest{IdleTimeout: durationpb.New(30 * time.Minute), MaxLifetime: durationpb.New(0)})
		in(29 * time.Minute)
		n.restart()
		in(29 * time.Minute)
		if s := n.get(idle); s.State != "running" {
			t.Errorf("the time without activity begins anew at a restart, but it is %s", s.State)
		}
		in(2*time.Minute + time.Second)
		if s := n.get(id); s.State != "stopped" || s.Reason != "maximum lifetime" {
			t.Errorf("after its hour: %s (%s)", s.State, s.Reason)
		}
		if s := n.get(idle); s.State != "stopped" || s.Reason != "idle timeout" {
			t.Errorf("30 minutes after the restart: %s (%s)", s.State, s.Reason)
		}
	})
}

func TestKeepaliveOfASilentStream(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"sleep", "40"}}})
		alive := 0
		for stream.Receive() {
			if stream.Msg().GetKeepalive() != nil {
				alive++
			}
		}
		if err := stream.Err(); err != nil || alive != 2 {
			t.Errorf("%d keepalives in 40 silent seconds, %v; want 2", alive, err)
		}
	})
}

func TestEndedRecordsAreKeptForTheirTime(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{RequestId: "r"})
		n.kill(id)
		in(23 * time.Hour)
		n.kill(n.create(&dsecv1.CreateRequest{}))
		if s, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"}); err != nil || s.Id != id {
			t.Errorf("after 23h: %v, %v; want the ended one", s, err)
		}
		n.restart()
		in(2 * time.Hour) // in which nothing else ends
		_, err := n.GetSandbox(t.Context(), connect.NewRequest(&dsecv1.GetRequest{SandboxId: id}))
		wantError(t, err, dsec.CodeNotFound, "sandbox_id")
		s, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"})
		if err != nil || s.Id == id {
			t.Errorf("after 25h: %v, %v; want a new one", s, err)
		}
		in(23 * time.Hour)
		if s := n.get(s.Id); s.State != "stopped" {
			t.Errorf("the new one after 23h: %s", s.State)
		}
	})
}

func TestStuckDestroyIsTriedAgain(t *testing.T) {
	bubble(t, func(c *edge.Config, o *fake.Options) {
		var tries atomic.Int32
		o.OnDestroy = func(context.Context, dsec.SandboxID) error {
			if tries.Add(1) < 4 {
				return errors.New("a mount is busy")
			}
			return nil
		}
	}, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		if got := n.kill(id); got != "stopping" {
			t.Fatalf("killed: %s, want stopping", got)
		}
		s := n.get(id)
		if len(s.Conditions) != 1 || s.Conditions[0] != "quarantined" {
			t.Errorf("conditions %v, want quarantined", s.Conditions)
		}
		in(time.Minute)
		if s := n.get(id); s.State != "stopped" || len(s.Conditions) != 0 || n.edge.Live() != 0 {
			t.Errorf("a minute later: %s %v, %d live; want stopped and nothing held", s.State, s.Conditions, n.edge.Live())
		}
	})
}

func TestStuckCreateHasADeadline(t *testing.T) {
	bubble(t, func(c *edge.Config, o *fake.Options) {
		o.OnCreate = func(context.Context, backend.CreateRequest) error {
			time.Sleep(10 * time.Minute) //nolint:forbidigo // of the bubble's clock; deaf to its context
			return nil
		}
	}, func(t *testing.T, n *node) {
		begun := time.Now()
		_, err := n.tryCreate(&dsecv1.CreateRequest{})
		if e := wantError(t, err, dsec.CodeInternal, ""); strings.Contains(e.Message, "/") {
			t.Errorf("message %q", e.Message)
		}
		if d := time.Since(begun); d > 70*time.Second {
			t.Errorf("came back after %v", d)
		}
		if n.edge.Live() != 1 {
			t.Errorf("%d places held, want the stuck one's", n.edge.Live())
		}
		in(10 * time.Minute)
		if n.edge.Live() != 0 || len(n.opts.World.IDs()) != 0 {
			t.Errorf("%d places held and %v in the world after it came back", n.edge.Live(), n.opts.World.IDs())
		}
	})
}

func TestKillWhileItIsMade(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		o.OnCreate = func(ctx context.Context, _ backend.CreateRequest) error {
			close(begun)
			select {
			case <-ctx.Done():
				return dsec.Errorf(dsec.CodeUnavailable, "given up")
			case <-goOn:
				return nil
			}
		}
	})
	created := make(chan error, 1)
	go func() {
		_, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"})
		created <- err
	}()
	<-begun
	found, err := n.FindRequest(t.Context(), connect.NewRequest(&dsecv1.FindRequestRequest{RequestId: "r"}))
	if err != nil {
		t.Fatal(err)
	}
	if got := n.kill(found.Msg.SandboxId); got != "stopped" {
		t.Errorf("killed: %s, want stopped", got)
	}
	wantError(t, <-created, dsec.CodeConflict, "")
	if n.edge.Live() != 0 || len(n.opts.World.IDs()) != 0 {
		t.Errorf("%d places held, %v in the world", n.edge.Live(), n.opts.World.IDs())
	}
}

func TestPID1DeathFailsTheSandbox(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	n.opts.World.Kill(dsec.SandboxID(id), "PID 1 exited with status 2")
	s := n.waitState(id, "failed")
	if !strings.Contains(s.Reason, "status 2") {
		t.Errorf("reason %q", s.Reason)
	}
	if got := n.kill(id); got != "failed" {
		t.Errorf("killed: %s, want failed", got)
	}
	if len(n.opts.World.IDs()) != 0 {
		t.Error("its objects are not reaped")
	}
}

func TestDrainFinishesCallsAndLeavesSandboxes(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, OpenStdin: true})
	p := stream.Msg().GetStarted().ProcessId
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := n.edge.Drain(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("drain with a call in progress: %v, want its context's end", err)
	}
	_, err := n.exec(id, "true")
	wantError(t, err, dsec.CodeUnavailable, "")
	_, err = n.tryCreate(&dsecv1.CreateRequest{})
	wantError(t, err, dsec.CodeUnavailable, "")
	n.close()
	got, err := readAll(stream)
	if err == nil || got.outcome != nil {
		t.Errorf("the stream ended with %+v, %v; want an error and no exit", got, err)
	}
	n.start()
	if _, err := n.process.WriteStdin(t.Context(), connect.NewRequest(&dsecv1.WriteStdinRequest{SandboxId: id, ProcessId: p, Data: []byte("still here"), Eof: true})); err != nil {
		t.Fatal(err)
	}
	if got := n.attach(id, p, 0); got.stdout != "still here" || got.outcome.GetExitCode() != 0 {
		t.Errorf("after the restart: %+v", got)
	}
}
