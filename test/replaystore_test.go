package test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// sealed is a server on the fake backend that seals trajectories to a store, and a sandbox
// that has ended, nothing of whose trajectory is on the node any more.
func sealed(t *testing.T) (s *server, store string, sb *client.Sandbox) {
	t.Helper()
	dir := testutil.Dir(t)
	store = filepath.Join(dir, "store")
	p := startEnv(t, []string{"DSEC_LAYERS_STORE=dir:" + store, "DSEC_EDGE_TRAJECTORY_MAX_BYTES=268435456"},
		"up", "--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run"))
	s = &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
	c, ctx := s.client(t), t.Context()
	sb, err := c.CreateSandbox(ctx, client.SandboxOptions{Backend: dsec.KindFake})
	check(t, err)
	check(t, sb.WriteFile(ctx, "/tmp/big", bytes.Repeat([]byte("0123456789abcdef"), 20_000), 0))
	for i := range 5 {
		_, _, err := sb.Command("echo", fmt.Sprint("step-", i)).Output(ctx)
		check(t, err)
	}
	_, _, err = sb.Shell("cat /tmp/big").Output(ctx)
	check(t, err)
	check(t, sb.Kill(ctx))
	segments := func() []string {
		all, err := filepath.Glob(filepath.Join(dir, "data", "*", "trajectories", "*.seg"))
		check(t, err)
		return all
	}
	first := segments()[0]
	// Over an eighth of the bound the log goes on in another segment, when it is looked
	// after: after each sandbox that has ended.
	testutil.WaitFor(t, 2*time.Minute, "the first segment to go", func() error {
		more, err := c.CreateSandbox(ctx, client.SandboxOptions{Backend: dsec.KindFake})
		check(t, err)
		_, err = more.Shell("yes | head -c 40000000").Run(ctx)
		check(t, err)
		check(t, more.Kill(ctx))
		if _, err := os.Stat(first); err == nil {
			return fmt.Errorf("%v are there", segments())
		}
		return nil
	})
	return s, store, sb
}

// TestReplayOfASealedLog: what the node has no more comes from the store, and what the
// store has lost is never called the same.
func TestReplayOfASealedLog(t *testing.T) {
	s, store, sb := sealed(t)
	sb = s.client(t).Sandbox(string(sb.ID()))
	replay := func() (*client.Replay, error) { return sb.Replay(t.Context(), client.ReplayOptions{}) }
	if r, err := replay(); err != nil || !r.Equal() || r.Steps != 7 {
		t.Fatalf("%+v, %v, %+v", r, err, difference(r))
	}
	var pieces, objects []string
	err := filepath.WalkDir(store, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil || d.IsDir() || !strings.Contains(path, "/trajectories/") || !strings.Contains(path, string(sb.ID())):
		case strings.Contains(path, "/outputs/"):
			objects = append(objects, path)
		default:
			pieces = append(pieces, path)
		}
		return err
	})
	check(t, err)
	if len(pieces) != 1 || len(objects) != 2 {
		t.Fatalf("the store has the pieces %v and the objects %v", pieces, objects)
	}
	hole := func(what string, files []string, want string) {
		t.Helper()
		var back []func() error
		for _, path := range files {
			b, err := os.ReadFile(path)
			check(t, err)
			back = append(back, func() error { return os.WriteFile(path, b, 0o600) })
			check(t, os.Remove(path))
		}
		if r, err := replay(); err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want %q", what, r, err, want)
		}
		for _, f := range back {
			check(t, f())
		}
	}
	hole("without its objects", objects, "is gone")
	// What the node has read it remembers: another process has not.
	s.stop()
	for _, path := range pieces {
		check(t, os.Remove(path))
	}
	p := startEnv(t, []string{"DSEC_LAYERS_STORE=dir:" + store}, "up", "--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(s.dir, "data"), "--run-dir", filepath.Join(s.dir, "run"))
	again := &server{p, p.ready, s.keyFile, s.dir}
	r, err := again.client(t).Sandbox(string(sb.ID())).Replay(t.Context(), client.ReplayOptions{})
	if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		t.Errorf("without its entries: %+v, %v", r, err)
	}
}

// firstEntry is of the create.
func firstEntry(t *testing.T, sb *client.Sandbox) *dsecv1.TrajectoryEntry {
	t.Helper()
	for e, err := range sb.Trajectory(t.Context(), client.TrajectoryOptions{}) {
		check(t, err)
		return e
	}
	t.Fatal("no entry")
	return nil
}

// TestTrajectoriesJoin: what is made of a pack tells whose it is, and where in the other
// trajectory its own goes on.
func TestTrajectoriesJoin(t *testing.T) {
	s, c := containersWith(t)
	ctx := t.Context()
	sb := create(t, c, client.SandboxOptions{Layers: []string{"base"}})
	if o := firstEntry(t, sb).Origin; o != nil {
		t.Errorf("one that was made of an image is of %v", o)
	}
	joins := func(what string, made, of *client.Sandbox) {
		t.Helper()
		e := firstEntry(t, made)
		o := e.GetOrigin()
		if o.GetSandboxId() != string(of.ID()) || !strings.HasPrefix(o.GetLayer(), "sha256:") || !strings.Contains(string(e.Spec), `"`+o.GetLayer()+`"`) {
			t.Fatalf("%s is of %v, want of sandbox %s and the layer of %s", what, o, of.ID(), e.Spec)
		}
		var last *dsecv1.TrajectoryEntry // the pack that was latest
		for e, err := range c.Sandbox(string(of.ID())).Trajectory(ctx, client.TrajectoryOptions{Kinds: []dsecv1.TrajectoryKind{dsecv1.TrajectoryKind_TRAJECTORY_KIND_PACK}}) {
			check(t, err)
			if e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN {
				last = e
			}
		}
		if last == nil || o.Seq != last.Seq {
			t.Errorf("%s goes on after entry %d, want the pack %v", what, o.Seq, last)
		}
	}
	// Two forks of the same content are of one layer, and each of its own pack.
	for range 2 {
		made, _, err := sb.Fork(ctx, 2, client.ForkOptions{})
		check(t, err)
		for i, m := range made {
			check(t, m.Err)
			joins(fmt.Sprint("fork ", i), m.Sandbox, sb)
			check(t, m.Sandbox.Kill(ctx))
		}
	}
	other := create(t, c, client.SandboxOptions{Layers: []string{"base"}})
	for _, of := range []*client.Sandbox{sb, other} { // of the same content, too
		name := "of-" + string(of.ID())
		_, _, err := of.Pack(ctx, name, nil)
		check(t, err)
		joins("one of a name", create(t, c, client.SandboxOptions{Layers: []string{name}}), of)
	}
	moved, _, err := sb.Migrate(ctx, client.MigrateOptions{LoseMemory: true})
	check(t, err)
	t.Cleanup(func() { _ = moved.Kill(context.WithoutCancel(ctx)) })
	e := firstEntry(t, moved)
	if o := e.GetOrigin(); o.GetSandboxId() != string(sb.ID()) || o.GetSeq() == 0 {
		t.Errorf("the sandbox that was moved is of %v", o)
	}
	stdout, stderr, code := s.cli("", "log", "--kind", "create", string(moved.ID()))
	if want := fmt.Sprintf("of sandbox %s, packed by its entry %d", sb.ID(), e.Origin.GetSeq()); code != 0 || !strings.Contains(stdout, want) {
		t.Errorf("dsec log: %d, %s%s; want %q", code, stdout, stderr, want)
	}
}
