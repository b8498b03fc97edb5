package edge_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestOwnedAttach: a command lives as long as who attached to own it, goes on
// where one comes before the other leaves, and is told as killed by the platform
// to a caller who comes too late.
func TestOwnedAttach(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	attach := func(ctx context.Context, process uint64) *connect.ServerStreamForClient[dsecv1.ProcessEvent] {
		t.Helper()
		s, err := n.process.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: process, Own: true}))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	start, leave := context.WithCancel(t.Context())
	s, err := n.process.Start(start, connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo x; sleep 1000"}}))
	if err != nil || !s.Receive() {
		t.Fatal(err, s.Err())
	}
	process := s.Msg().GetStarted().GetProcessId()
	second, leaveSecond := context.WithCancel(t.Context())
	watch := attach(second, process)
	if !watch.Receive() { // attached, or it would say nothing
		t.Fatal(watch.Err())
	}
	leave()
	for s.Receive() { // to its end
	}
	third, leaveThird := context.WithCancel(t.Context())
	again := attach(third, process)
	if !again.Receive() || string(again.Msg().GetOutput().GetData()) != "x\n" {
		t.Fatalf("%v, %v: the command ended with its first caller", again.Msg(), again.Err())
	}
	leaveSecond()
	leaveThird()
	// It is told as the platform's act to all: who lists it, who comes back for it,
	// and who only looks.
	if p := n.listedEnd(id, process); p.Outcome != nil || !strings.Contains(p.Fault, "was killed") {
		t.Errorf("without a caller it ended with %v", p)
	}
	for _, own := range []bool{true, false} {
		late, err := n.process.Attach(t.Context(), connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: process, Own: own}))
		if err != nil {
			t.Fatal(err)
		}
		for late.Receive() {
			if late.Msg().GetExited() != nil {
				t.Error("the platform's kill is told as the command's outcome")
			}
		}
		wantError(t, late.Err(), dsec.CodeOutcomeUnknown, "")
	}
}

// listedEnd waits until a process is listed as one that ended.
func (n *node) listedEnd(id string, process uint64) (ended *dsecv1.Process) {
	n.t.Helper()
	testutil.WaitFor(n.t, 10*time.Second, "the end", func() error {
		res, err := n.process.ListProcesses(n.t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err != nil {
			return err
		}
		for _, p := range res.Msg.Processes {
			if p.ProcessId == process && (p.Outcome != nil || p.Fault != "") {
				ended = p
				return nil
			}
		}
		return errors.New("it runs")
	})
	return ended
}

// TestCutOffIsToldAfterARestart: the next edge knows whose outcome says nothing, and
// kills what the last one had no time to kill. What ended by itself is told as it did.
func TestCutOffIsToldAfterARestart(t *testing.T) {
	for _, killed := range []bool{true, false} {
		var k *crash
		n := newNode(t, func(c *edge.Config, _ *fake.Options) {
			if !killed {
				k = arm(t, c, "cut.kill")
			}
		})
		id := n.create(&dsecv1.CreateRequest{})
		own := n.shell(id, "exit 3").ProcessId
		process := leaveCommand(n, id)
		if killed {
			n.cutOff(id, process)
			n.restart()
		} else {
			<-k.reached
			before := n
			n = newNode(t, func(c *edge.Config, o *fake.Options) { *c, o.World = k.after(before.cfg), before.opts.World })
		}
		if p := n.listedEnd(id, process); p.Outcome != nil || !strings.Contains(p.Fault, "was killed") {
			t.Errorf("killed before: %v; after the restart %v", killed, p)
		}
		n.cutOff(id, process)
		if p := n.listedEnd(id, own); p.Outcome.GetExitCode() != 3 || p.Fault != "" {
			t.Errorf("one that ended by itself: %v", p)
		}
	}
}

// TestOwnedAttachToNothing: who attaches to a number that no process has yet, and
// leaves, does not mark it for the process that gets it later.
func TestOwnedAttachToNothing(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	for range 20 {
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			n.calls.wait(ctx, 1)
			leave() // in the middle of it
		}()
		if s, err := n.process.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: 1, Own: true})); err == nil {
			for s.Receive() { // to its end
			}
		}
		leave()
	}
	n.calls.wait(t.Context(), 0)
	s, err := n.process.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "exit 3"}}))
	if err != nil || !s.Receive() || s.Msg().GetStarted().GetProcessId() != 1 {
		t.Fatalf("%v, %v: not process 1", s.Msg(), err)
	}
	for s.Receive() { // to its end
	}
	late, err := n.process.Attach(t.Context(), connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: 1, Own: true}))
	if err != nil {
		t.Fatal(err)
	}
	code := int32(-1)
	for late.Receive() {
		if e := late.Msg().GetExited(); e != nil {
			code = e.GetOutcome().GetExitCode()
		}
	}
	if code != 3 {
		t.Errorf("exit code %d, %v, want 3", code, late.Err())
	}
}
