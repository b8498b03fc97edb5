package edge_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// openSession opens a session in /tmp, which keeps KEPT.
func (n *node) openSession(id string) (session string) {
	n.t.Helper()
	res, err := n.session.OpenSession(n.t.Context(), connect.NewRequest(&dsecv1.OpenSessionRequest{SandboxId: id}))
	if err != nil {
		n.t.Fatal(err)
	}
	n.in(id, res.Msg.SessionId, "cd /tmp; export KEPT=yes")
	return res.Msg.SessionId
}

// in runs a command in a session to its end.
func (n *node) in(id, session, command string) said {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	stream, err := n.session.RunCommand(ctx, connect.NewRequest(&dsecv1.RunCommandRequest{SandboxId: id, SessionId: session, Command: command}))
	if err != nil {
		n.t.Fatal(err)
	}
	got, err := readAll(stream)
	if err != nil {
		n.t.Fatalf("%s: %v", command, err)
	}
	return got
}

// receiver is a stream of events.
type receiver func() (*dsecv1.ProcessEvent, error)

// beginIn begins a command in a session and reads its first output.
func (n *node) beginIn(ctx context.Context, req *dsecv1.RunCommandRequest) receiver {
	n.t.Helper()
	stream, err := n.session.RunCommand(ctx, connect.NewRequest(req))
	if err != nil {
		n.t.Fatal(err)
	}
	next := func() (*dsecv1.ProcessEvent, error) {
		if !stream.Receive() {
			return nil, errors.Join(stream.Err(), io.EOF)
		}
		return stream.Msg(), nil
	}
	for {
		m, err := next()
		if err != nil {
			n.t.Fatal(err)
		}
		if m.GetOutput() != nil {
			return next
		}
	}
}

func TestClientGoneInterruptsItsSessionsCommand(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	sid := n.openSession(id)
	kept := func(what string) {
		t.Helper()
		if got := n.in(id, sid, "pwd; echo $KEPT; echo $BAD"); got.stdout != "/tmp\nyes\n\n" {
			t.Errorf("after %s: %+v", what, got)
		}
	}
	sleep := &dsecv1.RunCommandRequest{SandboxId: id, SessionId: sid, Command: "echo begun; sleep 1000"}
	gone, leave := context.WithCancel(t.Context())
	next := n.beginIn(gone, sleep)
	leave()
	kept("a cancel")
	if m, err := next(); err == nil && m.GetExited() == nil {
		t.Errorf("a stream that was canceled: %v", m)
	}

	// Of two clients only the one that goes loses its command.
	next = n.beginIn(t.Context(), sleep)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		stream, err := n.session.RunCommand(ctx, connect.NewRequest(&dsecv1.RunCommandRequest{SandboxId: id, SessionId: sid, Command: "sleep 1000 && export BAD=yes"}))
		if err == nil {
			_, err = readAll(stream)
		}
		done <- err
	}()
	cancel()
	if err := <-done; err == nil {
		t.Error("a call that was canceled has not failed")
	}
	n.left(1)
	list, err := n.session.ListSessions(t.Context(), connect.NewRequest(&dsecv1.ListSessionsRequest{SandboxId: id}))
	if err != nil || len(list.Msg.Sessions) != 1 || !list.Msg.Sessions[0].Busy {
		t.Errorf("sessions %v, %v; want one that is busy", list, err)
	}
	if err := n.interrupt(id, sid); err != nil {
		t.Fatal(err)
	}
	var got said
	for got.outcome == nil {
		m, err := next()
		if err != nil {
			t.Fatal(err)
		}
		got.add(m)
	}
	if o := got.outcome; !o.Claimed || o.TimedOut || o.GetExitCode() != 137 && o.GetSignal() != 9 {
		t.Errorf("the other's outcome: %v", o)
	}
	kept("a cancel of another")
	wantError(t, n.interrupt(id, sid), dsec.CodeConflict, "session_id")
	wantError(t, n.interrupt(id, "s4242"), dsec.CodeNotFound, "session_id")
	wantError(t, n.interrupt(id, ""), dsec.CodeNotFound, "session_id")
}

func (n *node) interrupt(id, session string) error {
	_, err := n.session.InterruptCommand(n.t.Context(), connect.NewRequest(&dsecv1.InterruptCommandRequest{SandboxId: id, SessionId: session}))
	return err
}

func TestRestartLeavesASessionsCommandRunning(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	sid := n.openSession(id)
	n.beginIn(t.Context(), &dsecv1.RunCommandRequest{SandboxId: id, SessionId: sid, Command: "echo begun; sleep 1000"})
	n.restart()
	n.quiet()
	list, err := n.session.ListSessions(t.Context(), connect.NewRequest(&dsecv1.ListSessionsRequest{SandboxId: id}))
	if err != nil || len(list.Msg.Sessions) != 1 || !list.Msg.Sessions[0].Busy {
		t.Errorf("sessions %v, %v; want one that is busy", list, err)
	}
	if err := n.interrupt(id, sid); err != nil {
		t.Fatal(err)
	}
	if got := n.in(id, sid, "pwd; echo $KEPT"); got.stdout != "/tmp\nyes\n" {
		t.Errorf("after the interrupt: %+v", got)
	}
}
