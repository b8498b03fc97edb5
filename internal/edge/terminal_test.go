package edge_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestWhatIsTypedIsNotedWithWhatWasSeen: input, signals and changes of size tell how much the
// command had written by then, and a stream of input where it had become more.
func TestWhatIsTypedIsNotedWithWhatWasSeen(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	ctx := t.Context()
	stream, err := n.process.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, Pty: &dsecv1.TerminalSize{Rows: 24, Cols: 80}}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	seen, process := int64(0), uint64(0)
	sees := func(want int64) { // each line twice: the terminal's echo, and cat's
		t.Helper()
		for seen < want {
			if !stream.Receive() {
				t.Fatal(stream.Err())
			}
			seen += int64(len(stream.Msg().GetOutput().GetData()))
		}
	}
	for process == 0 && stream.Receive() {
		process = stream.Msg().GetStarted().GetProcessId()
	}
	if _, err := n.process.WriteStdin(ctx, connect.NewRequest(&dsecv1.WriteStdinRequest{SandboxId: id, ProcessId: process, Data: []byte("ab\n")})); err != nil {
		t.Fatal(err)
	}
	const line = int64(len("ab\r\n") + len("ab\n"))
	sees(line)
	if _, err := n.process.Resize(ctx, connect.NewRequest(&dsecv1.ResizeRequest{SandboxId: id, ProcessId: process, Size: &dsecv1.TerminalSize{Rows: 30, Cols: 90}})); err != nil {
		t.Fatal(err)
	}
	in := n.process.StreamStdin(ctx)
	for i := range 3 {
		if err := in.Send(&dsecv1.WriteStdinRequest{SandboxId: id, ProcessId: process, Data: []byte("cd\n")}); err != nil {
			t.Fatal(err)
		}
		sees(int64(2+i) * line)
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	if _, err := n.process.Signal(ctx, connect.NewRequest(&dsecv1.SignalRequest{SandboxId: id, ProcessId: process, Signal: 9, Tree: true})); err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
	}
	wrote := make(map[dsecv1.TrajectoryKind][]int64)
	var marks []*dsecv1.TrajectoryMark
	for _, e := range n.trajectory(id) {
		if e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN {
			wrote[e.Kind] = append(wrote[e.Kind], e.Request.OutputBytes)
		}
		marks = append(marks, e.Marks...)
	}
	for kind, want := range map[dsecv1.TrajectoryKind][]int64{
		dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN:  {0, line},
		dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESIZE: {line},
		dsecv1.TrajectoryKind_TRAJECTORY_KIND_SIGNAL: {4 * line},
	} {
		if got := wrote[kind]; len(got) != len(want) || got[0] != want[0] || got[len(got)-1] != want[len(want)-1] {
			t.Errorf("%s: the command had written %v, want %v", kind, got, want)
		}
	}
	if len(marks) != 3 || marks[0].InputBytes != 0 || marks[0].OutputBytes != line || marks[2].InputBytes != 6 || marks[2].OutputBytes != 3*line {
		t.Errorf("marks %v", marks)
	}
}

// TestResizeIsAnAction: it is done once, and what cannot be done is told and noted.
func TestResizeIsAnAction(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	req := &dsecv1.ResizeRequest{SandboxId: id, ProcessId: 99, Size: &dsecv1.TerminalSize{Rows: 1, Cols: 2}}
	for range 2 {
		_, err := n.process.Resize(t.Context(), named(req, "one"))
		wantError(t, err, dsec.CodeNotFound, "process_id")
	}
	req.Size.Rows = 3
	_, err := n.process.Resize(t.Context(), named(req, "one"))
	wantError(t, err, dsec.CodeDiverged, "")
	_, err = n.process.Resize(t.Context(), connect.NewRequest(&dsecv1.ResizeRequest{SandboxId: id, ProcessId: 99}))
	wantError(t, err, dsec.CodeInvalid, "size")
	var notes []string
	for _, e := range n.trajectory(id) {
		if e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESIZE && e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN {
			notes = append(notes, e.Request.Note)
		}
	}
	if got := strings.Join(notes, ";"); got != "1 rows, 2 columns" {
		t.Errorf("noted %q", got)
	}
}

// TestCreateTellsItsOrigin: the create's entry has it as the control plane gave it, whoever
// made the same layer before, and after a restart.
func TestCreateTellsItsOrigin(t *testing.T) {
	n := newNode(t, withLayers(newLayers()))
	var origins []*dsecv1.LayerOrigin
	var packed []string
	for range 2 { // of the same content
		id := n.create(&dsecv1.CreateRequest{})
		n.shell(id, "echo one > /tmp/one")
		p := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id})
		if o := p.Layer.Origin; o.Location != id || o.Entry != 4 { // after create and command
			t.Errorf("packed of %s: %v", id, o)
		}
		origins, packed = append(origins, p.Layer.Origin), append(packed, p.Layer.Digest)
	}
	if packed[0] != packed[1] {
		t.Fatalf("the same content is of the layers %v", packed)
	}
	origin := &dsecv1.TrajectoryOrigin{SandboxId: origins[1].Location, Seq: origins[1].Entry, Layer: packed[1]}
	item := &dsecv1.CreateSandboxesItem{Request: &dsecv1.CreateRequest{Backend: "fake", Layers: packed[1:]}, Origin: origin}
	res, err := n.CreateSandboxes(t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{item}}))
	if err != nil {
		t.Fatal(err)
	}
	id := res.Msg.Items[0].GetCreated().GetSandbox().GetId()
	for range 2 {
		if o := n.trajectory(id)[0].Origin; o.GetSandboxId() != origin.SandboxId || o.GetSeq() != 4 || o.GetLayer() != packed[1] {
			t.Errorf("its create is of %v, want %v", o, origin)
		}
		n.restart()
	}
	item.Origin = &dsecv1.TrajectoryOrigin{SandboxId: "?"}
	res, err = n.CreateSandboxes(t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{item}}))
	if d := res.Msg.GetItems()[0].GetError().GetDetail(); err != nil || d.GetCode() != string(dsec.CodeInvalid) || d.GetField() != "origin.sandbox_id" {
		t.Errorf("%v, %v", res, err)
	}
}
