package edge_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// input is what an entry says that its action was given.
func (n *node) input(id string, seq uint64) []byte {
	n.t.Helper()
	s, err := n.trajectories().ReadOutput(n.t.Context(), connect.NewRequest(&dsecv1.ReadTrajectoryOutputRequest{SandboxId: id, Seq: seq, Input: true}))
	if err != nil {
		n.t.Fatal(err)
	}
	defer s.Close()
	var all []byte
	for s.Receive() {
		all = append(all, s.Msg().Piece.Data...)
	}
	if err := s.Err(); err != nil {
		n.t.Fatal(err)
	}
	return all
}

// TestInputIsInTheLog: the whole request, and what was streamed to a command and to a file.
func TestInputIsInTheLog(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	ctx := t.Context()
	const size = 300_000
	exec := &dsecv1.ExecRequest{SandboxId: id, Tag: "mine", Command: &dsecv1.Command{Argv: []string{"cat"}, Env: map[string]string{"A": "b"}}, Stdin: []byte(strings.Repeat("i", size))}
	if _, err := n.process.Exec(ctx, connect.NewRequest(exec)); err != nil {
		t.Fatal(err)
	}
	started, err := n.process.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, OpenStdin: true}))
	if err != nil || !started.Receive() {
		t.Fatal(err, started.Err())
	}
	process := started.Msg().GetStarted().GetProcessId()
	in := n.process.StreamStdin(ctx)
	for i, part := range []string{strings.Repeat("x", size), "y", ""} {
		_ = in.Send(&dsecv1.WriteStdinRequest{SandboxId: id, ProcessId: process, Data: []byte(part), Eof: i == 2})
	}
	if res, err := in.CloseAndReceive(); err != nil || res.Msg.Written != size+1 {
		t.Fatal(res, err)
	}
	for started.Receive() { // to its end, which the end of the input is
	}
	file := n.file.Write(ctx)
	_ = file.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/w"}, Mode: 0o600}}})
	_ = file.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: []byte("content")}})
	if _, err := file.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	var requests [][]byte
	var streamed []string
	for _, e := range n.trajectory(id) {
		switch {
		case e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN:
			requests = append(requests, n.input(id, e.Seq))
		case e.Input != nil:
			streamed = append(streamed, string(n.input(id, e.Seq)))
		}
	}
	exec.SandboxId, exec.Tag = "", ""
	var got dsecv1.ExecRequest
	if err := proto.Unmarshal(requests[0], &got); err != nil || !proto.Equal(&got, exec) {
		t.Errorf("the request of a command: %.100v, %v", &got, err)
	}
	var end dsecv1.WriteStdinRequest // begins after the command and the stream
	if err := proto.Unmarshal(requests[3], &end); err != nil || !proto.Equal(&end, &dsecv1.WriteStdinRequest{ProcessId: process, Eof: true}) {
		t.Errorf("the end of the input: %v, %v", &end, err)
	}
	var open dsecv1.WriteOpen
	if err := proto.Unmarshal(requests[4], &open); err != nil || open.Mode != 0o600 || open.Path.GetPath() != "/tmp/w" || open.SandboxId != "" {
		t.Errorf("the request of a write: %v, %v", &open, err)
	}
	if len(requests) != 5 || len(streamed) != 2 || streamed[0] != strings.Repeat("x", size)+"y" || streamed[1] != "content" {
		t.Errorf("%d requests; streamed %d times: %.50q", len(requests), len(streamed), streamed)
	}
}

// TestReplayedSessionCommandSaysSo: each event of an answer from the log.
func TestReplayedSessionCommandSaysSo(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	open, err := n.session.OpenSession(t.Context(), connect.NewRequest(&dsecv1.OpenSessionRequest{SandboxId: id}))
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		s, err := n.session.RunCommand(t.Context(), named(&dsecv1.RunCommandRequest{SandboxId: id, SessionId: open.Msg.SessionId, Command: "echo out"}, "one"))
		if err != nil {
			t.Fatal(err)
		}
		events := 0
		for s.Receive() {
			if events++; s.Msg().Replayed != (round > 0) {
				t.Errorf("round %d: %v", round, s.Msg())
			}
		}
		if s.Err() != nil || events < 2 {
			t.Errorf("round %d: %d events, %v", round, events, s.Err())
		}
	}
}
