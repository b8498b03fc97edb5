package edge_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

const actionHeader, replayedHeader = "Dsec-Action-Id", "Dsec-Replayed"

// named is a request with an action ID.
func named[T any](msg *T, action string) *connect.Request[T] {
	req := connect.NewRequest(msg)
	req.Header().Set(actionHeader, action)
	return req
}

func wasReplayed(h http.Header) bool { return h.Get(replayedHeader) == "1" }

func (n *node) trajectory(id string) []*dsecv1.TrajectoryEntry {
	n.t.Helper()
	client := n.trajectories()
	var all []*dsecv1.TrajectoryEntry
	for from := uint64(1); from > 0; {
		res, err := client.List(n.t.Context(), connect.NewRequest(&dsecv1.ListTrajectoryRequest{SandboxId: id, FromSeq: from, PageSize: 7}))
		if err != nil {
			n.t.Fatal(err)
		}
		all, from = append(all, res.Msg.Entries...), res.Msg.NextSeq
	}
	return all
}

// told is what a trajectory says, in short.
func told(entries []*dsecv1.TrajectoryEntry) (out []string) {
	for _, e := range entries {
		text := strings.ToLower(strings.TrimPrefix(e.Kind.String(), "TRAJECTORY_KIND_") + " " + strings.TrimPrefix(e.Phase.String(), "TRAJECTORY_PHASE_"))
		if e.Outcome != nil {
			text += fmt.Sprintf(" %d", e.Outcome.GetExitCode())
		}
		if e.Error != nil {
			text += " " + e.Error.Detail.GetCode()
		}
		for _, p := range e.Output.GetHead() {
			text += fmt.Sprintf(" %q", p.Data)
		}
		out = append(out, text)
	}
	return out
}

// TestTrajectoryTellsAll: in order, what was done and what came of it, over a restart.
func TestTrajectoryTellsAll(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	n.shell(id, "echo out; echo err >&2; exit 3")
	ctx := t.Context()
	path := &dsecv1.Path{Path: "/tmp/d"}
	_, err := n.file.Mkdir(ctx, connect.NewRequest(&dsecv1.MkdirRequest{SandboxId: id, Path: path}))
	if err != nil {
		t.Fatal(err)
	}
	_, err = n.file.Remove(ctx, connect.NewRequest(&dsecv1.RemoveRequest{SandboxId: id, Path: &dsecv1.Path{Path: "/none"}}))
	wantError(t, err, dsec.CodeNotFound, "path")
	n.mustPause(id, nil)
	n.restart()
	n.shell(id, "true")
	n.kill(id)
	entries := n.trajectory(id)
	want := []string{
		"create event", "exec begun", `exec ended 3 "out\n" "err\n"`, "file_mkdir begun", "file_mkdir ended", "file_remove begun", "file_remove ended not_found",
		"pause event", "resume event", "exec begun", "exec ended 0", "state event",
	}
	if got := told(entries); !slices.Equal(got, want) {
		t.Errorf("the trajectory says\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for i, e := range entries {
		if e.Seq != uint64(i+1) || e.SandboxId != id || e.Time == nil || e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN && len(e.RequestDigest) != 32 {
			t.Errorf("entry %d: %v", i+1, e)
		}
	}
	if e := entries[1]; e.Request.GetShell() != "echo out; echo err >&2; exit 3" {
		t.Errorf("request %v", e.Request)
	}
	if e := entries[len(entries)-1]; e.State != "stopped" || e.Reason != "killed" {
		t.Errorf("the end: %v", e)
	}
}

// TestActionIsDoneOnce: of all calls with one ID the first is done, and the others get
// what came of it, also after a restart of the edge; and where it is another request,
// nothing.
func TestActionIsDoneOnce(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	ctx := t.Context()
	exec := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo x >> /tmp/count; cat /tmp/count; echo e >&2; exit 5"}}
	written := 0
	write := func(data string) error {
		written++
		s := n.file.Write(ctx)
		s.RequestHeader().Set(actionHeader, "write")
		_ = s.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/w"}, Append: true}}})
		_ = s.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: []byte(data)}})
		res, err := s.CloseAndReceive()
		if err == nil && wasReplayed(res.Header()) != (written > 1) {
			t.Errorf("write %d: replayed %v", written, wasReplayed(res.Header()))
		}
		return err
	}
	read := func() (string, bool) {
		s, err := n.file.Read(ctx, named(&dsecv1.ReadRequest{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/count"}}, "read"))
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		for s.Receive() {
			text += string(s.Msg().Data)
		}
		if err := s.Err(); err != nil {
			t.Fatal(err)
		}
		return text, wasReplayed(s.ResponseHeader())
	}
	for round := range 4 {
		res, err := n.process.Exec(ctx, named(exec, "one"))
		if err != nil {
			t.Fatal(err)
		}
		if got := res.Msg; string(got.Stdout) != "x\n" || string(got.Stderr) != "e\n" || got.Outcome.GetExitCode() != 5 || wasReplayed(res.Header()) != (round > 0) {
			t.Errorf("round %d: %v, replayed %v", round, got, wasReplayed(res.Header()))
		}
		if text, replayed := read(); text != "x\n" || replayed != (round > 0) {
			t.Errorf("round %d: read %q, replayed %v", round, text, replayed)
		}
		if err := write("data\n"); err != nil {
			t.Errorf("round %d: write: %v", round, err)
		}
		mk, err := n.file.Mkdir(ctx, named(&dsecv1.MkdirRequest{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/once"}}, "mkdir"))
		if err != nil || wasReplayed(mk.Header()) != (round > 0) {
			t.Errorf("round %d: mkdir: %v", round, err)
		}
		if round == 1 {
			n.restart()
		}
		// What it would read now is another.
		n.shell(id, "echo more >> /tmp/count")
	}
	if got := string(n.shell(id, "cat /tmp/count /tmp/w").Stdout); got != "x\n"+strings.Repeat("more\n", 4)+"data\n" {
		t.Errorf("done more than once: %q", got)
	}
	other := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "true"}}
	_, err := n.process.Exec(ctx, named(other, "one"))
	if e := wantError(t, err, dsec.CodeDiverged, ""); strings.Count(e.Message, "digest") != 1 {
		t.Errorf("message %q", e.Message)
	}
	wantError(t, write("other\n"), dsec.CodeDiverged, "")
	_, err = n.process.Exec(ctx, named(other, strings.Repeat("a", 129)))
	wantError(t, err, dsec.CodeInvalid, "action_id")
	// Of a sandbox of its own.
	id2 := n.create(&dsecv1.CreateRequest{})
	exec.SandboxId = id2
	if res, err := n.process.Exec(ctx, named(exec, "one")); err != nil || wasReplayed(res.Header()) {
		t.Errorf("the same ID in another sandbox: %v", err)
	}
}

// TestWriteThatBrokeOffIsDoneAgain: nothing was written, and so the action is not done.
func TestWriteThatBrokeOffIsDoneAgain(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	write := func(ctx context.Context, whole bool) error {
		s := n.file.Write(ctx)
		s.RequestHeader().Set(actionHeader, "write")
		_ = s.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/w"}}}})
		_ = s.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: []byte("data")}})
		if !whole {
			return nil
		}
		_, err := s.CloseAndReceive()
		return err
	}
	ctx, leave := context.WithCancel(t.Context())
	_ = write(ctx, false)
	n.waitBegun(id)
	leave()
	n.quiet()
	for range 2 {
		if err := write(t.Context(), true); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"create event", "file_write begun", "file_write ended unavailable", "file_write begun", "file_write ended"}
	if got := told(n.trajectory(id)); !slices.Equal(got, want) {
		t.Errorf("the trajectory says %q, want %q", got, want)
	}
}

// waitBegun waits until an action has begun, by the log.
func (n *node) waitBegun(id string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 20*time.Second)
	defer cancel()
	s, err := n.trajectories().Follow(ctx, connect.NewRequest(&dsecv1.FollowTrajectoryRequest{SandboxId: id}))
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	for s.Receive() {
		if s.Msg().Entry.GetActionId() != "" {
			return
		}
	}
	n.t.Fatalf("no action has begun: %v", s.Err())
}

// TestFollowBehindTheEnd: whoever goes on behind the last entry of a sandbox that has ended hears that
// there is no more, also of the next edge.
func TestFollowBehindTheEnd(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	n.kill(id)
	all := len(n.trajectory(id))
	for range 2 {
		for from := 1; from <= all+2; from++ {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			s, err := n.trajectories().Follow(ctx, connect.NewRequest(&dsecv1.FollowTrajectoryRequest{SandboxId: id, FromSeq: uint64(from)}))
			if err != nil {
				t.Fatal(err)
			}
			entries := 0
			for s.Receive() {
				if s.Msg().Entry != nil {
					entries++
				}
			}
			if err := s.Err(); err != nil || entries != max(0, all+1-from) {
				t.Errorf("from %d of %d: %d entries, %v", from, all, entries, err)
			}
			cancel()
		}
		n.restart()
	}
}

// TestActionOutlivesItsCaller: who comes again waits for it, and gets all of it.
func TestActionOutlivesItsCaller(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		exec := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo begun >> /tmp/log; echo a; sleep 600; echo b"}}
		start := &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo begun >> /tmp/log; echo c; sleep 600; echo d"}}
		session := &dsecv1.RunCommandRequest{SandboxId: id, Command: "echo begun >> /tmp/log; echo e; sleep 600; echo f"}
		open, err := n.session.OpenSession(t.Context(), named(&dsecv1.OpenSessionRequest{SandboxId: id}, "open"))
		if err != nil {
			t.Fatal(err)
		}
		session.SessionId = open.Msg.SessionId
		outputs := make(chan string, 9)
		stream := func(s *connect.ServerStreamForClient[dsecv1.ProcessEvent], err error) {
			if err != nil {
				outputs <- err.Error()
				return
			}
			if all, err := readAll(s); err != nil {
				outputs <- "left"
			} else {
				outputs <- all.stdout
			}
		}
		calls := func(ctx context.Context) {
			go func() {
				res, err := n.process.Exec(ctx, named(exec, "exec"))
				if err != nil {
					outputs <- "left"
					return
				}
				outputs <- string(res.Msg.Stdout)
			}()
			go func() { stream(n.process.Start(ctx, named(start, "start"))) }()
			go func() { stream(n.session.RunCommand(ctx, named(session, "session"))) }()
		}
		three := func() []string {
			out := []string{<-outputs, <-outputs, <-outputs}
			slices.Sort(out)
			return out
		}
		ctx, leave := context.WithCancel(t.Context())
		calls(ctx)
		in(10 * time.Second)
		leave()
		in(time.Second)
		if out := three(); !slices.Equal(out, []string{"left", "left", "left"}) {
			t.Fatalf("they did not leave: %q", out)
		}
		calls(t.Context()) // while it runs
		in(10 * time.Minute)
		want := []string{"a\nb\n", "c\nd\n", "e\nf\n"}
		if out := three(); !slices.Equal(out, want) {
			t.Errorf("joined: output %q", out)
		}
		calls(t.Context()) // when it has ended
		in(time.Second)
		if out := three(); !slices.Equal(out, want) {
			t.Errorf("replayed: output %q", out)
		}
		if out := string(n.shell(id, "cat /tmp/log").Stdout); out != "begun\nbegun\nbegun\n" {
			t.Errorf("they were run so often: %q", out)
		}
		n.kill(id)
	})
}

// TestActionOutlivesTheEdge: a command goes on over restarts, paused ones too, and who
// comes with its ID gets all of it.
func TestActionOutlivesTheEdge(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		exec := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo begun >> /tmp/log; echo a; sleep 600; echo b; exit 3"}}
		start := &dsecv1.StartRequest{SandboxId: id, Detach: true, Command: &dsecv1.Command{Shell: "echo begun >> /tmp/log; echo c; sleep 600; echo d"}}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if res, err := n.process.Exec(t.Context(), named(exec, "exec")); err == nil {
				t.Errorf("answered by an edge that went away: %v", res)
			}
		}()
		s, err := n.process.Start(t.Context(), named(start, "start"))
		if err == nil {
			_, err = readAll(s)
		}
		if err != nil {
			t.Fatal(err)
		}
		in(10 * time.Second)
		n.restart()
		<-ended
		in(10 * time.Second)
		n.mustPause(id, nil)
		n.restart()
		in(time.Hour)
		for range 2 {
			res, err := n.process.Exec(t.Context(), named(exec, "exec"))
			if err != nil {
				t.Fatal(err)
			}
			if got := res.Msg; string(got.Stdout) != "a\nb\n" || got.Outcome.GetExitCode() != 3 || !wasReplayed(res.Header()) {
				t.Errorf("%v", got)
			}
			n.restart()
		}
		in(time.Second)
		if out := string(n.shell(id, "cat /tmp/log").Stdout); out != "begun\nbegun\n" {
			t.Errorf("they were run so often: %q", out)
		}
		all := told(n.trajectory(id))
		for _, want := range []string{`exec ended 3 "a\nb\n"`, `start ended 0 "c\nd\n"`} {
			if !slices.Contains(all, want) {
				t.Errorf("the trajectory says %q, want %q in it", all, want)
			}
		}
	})
}

// TestDetachedCommandIsFollowed: how it ends is in the trajectory, whoever looks.
func TestDetachedCommandIsFollowed(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		id := n.create(&dsecv1.CreateRequest{})
		s, err := n.process.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Detach: true, Command: &dsecv1.Command{Shell: "echo a; sleep 60; echo b; exit 4"}}))
		if err != nil {
			t.Fatal(err)
		}
		if all, err := readAll(s); err != nil || all.process == 0 || all.outcome != nil {
			t.Fatalf("%+v, %v", all, err)
		}
		in(2 * time.Minute)
		want := []string{"create event", "start begun", `start ended 4 "a\nb\n"`}
		if got := told(n.trajectory(id)); !slices.Equal(got, want) {
			t.Errorf("the trajectory says %q, want %q", got, want)
		}
	})
}

// TestFollowEndsWithTheSandbox, and tells each entry when it comes.
func TestFollowEndsWithTheSandbox(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	s, err := n.trajectories().Follow(t.Context(), connect.NewRequest(&dsecv1.FollowTrajectoryRequest{SandboxId: id, Kinds: []dsecv1.TrajectoryKind{dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC}}))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		n.shell(id, fmt.Sprintf("exit %d", i))
		for _, phase := range []string{"BEGUN", "ENDED"} {
			for s.Receive() && s.Msg().Entry == nil {
			}
			if !strings.HasSuffix(s.Msg().Entry.GetPhase().String(), phase) {
				t.Fatalf("%v, %v; want %s", s.Msg(), s.Err(), phase)
			}
		}
		if got := s.Msg().Entry.Outcome.GetExitCode(); got != int32(i) {
			t.Errorf("exit code %d, want %d", got, i)
		}
	}
	n.kill(id)
	for s.Receive() && s.Msg().Entry == nil {
	}
	if s.Msg().GetEntry() != nil || s.Err() != nil {
		t.Errorf("at the end: %v, %v", s.Msg(), s.Err())
	}
}

// TestTrajectoryIsTheProjects: another project sees nothing of it.
func TestTrajectoryIsTheProjects(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	req := connect.NewRequest(&dsecv1.ListTrajectoryRequest{SandboxId: id})
	req.Header().Set("Dsec-Project", "p2")
	_, err := n.trajectories().List(t.Context(), req)
	wantError(t, err, dsec.CodeNotFound, "sandbox_id")
}

// TestTrajectoryIsSealed: when its sandbox ends, or after the restart of an edge that had
// not got to it; and goes with the record of the sandbox.
func TestTrajectoryIsSealed(t *testing.T) {
	bubble(t, func(c *edge.Config, _ *fake.Options) {
		store, err := dirblob.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		c.Trajectories.Store = store
	}, func(t *testing.T, n *node) {
		sealed := func() (keys []string) {
			err := n.cfg.Trajectories.Store.List(t.Context(), "trajectories/", func(i blob.Info) error {
				keys = append(keys, i.Key)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return keys
		}
		id := n.create(&dsecv1.CreateRequest{})
		n.shell(id, "echo out")
		if keys := sealed(); len(keys) > 0 {
			t.Errorf("while it runs: %q", keys)
		}
		n.kill(id)
		in(time.Minute)
		if keys := sealed(); len(keys) != 1 || !strings.Contains(keys[0], "p1/"+id) {
			t.Errorf("it has ended: %q", keys)
		}
		n.restart()
		if got := told(n.trajectory(id)); len(got) != 4 {
			t.Errorf("the trajectory says %q", got)
		}
		in(25 * time.Hour)
		if keys := sealed(); len(keys) > 0 {
			t.Errorf("long after: %q", keys)
		}
	})
}
