package edge_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// crash is a death of the edge at one step: the state as it was on disk then,
// while the world goes on. The goroutine that got there stays where it is
// until the test ends.
type crash struct {
	step    string
	reached chan struct{}
	release chan struct{}
	done    atomic.Bool
	state   string
	run     string
}

// arm makes an edge of this configuration die when it first reaches step.
func arm(t *testing.T, c *edge.Config, step string) *crash {
	k := &crash{step: step, reached: make(chan struct{}), release: make(chan struct{}), state: t.TempDir(), run: t.TempDir()}
	t.Cleanup(func() { close(k.release) })
	stateDir, runDir := c.StateDir, c.RunDir
	c.Crash = func(at string) {
		if at != step || k.done.Swap(true) {
			return
		}
		copyDir(t, stateDir, k.state)
		copyDir(t, runDir, k.run)
		close(k.reached)
		<-k.release
	}
	return k
}

func copyDir(t *testing.T, from, to string) {
	if err := os.RemoveAll(to); err != nil {
		t.Error(err)
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Error(err)
	}
}

// after is an edge's configuration on what the crash left.
func (k *crash) after(c edge.Config) edge.Config {
	c.StateDir, c.RunDir, c.Crash = k.state, k.run, nil
	return c
}

// until runs f aside and waits for the crash. ok is false where f came to its
// end without one.
func (k *crash) until(f func()) (ok bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-k.reached:
		return true
	case <-done:
		return k.done.Load()
	}
}

// lead brings a node to a step of the create, the kill or the failure of one
// sandbox with request id "r", or of the kill of its command.
func lead(n *node, k *crash) {
	req := &dsecv1.CreateRequest{RequestId: "r", Labels: map[string]string{"crash": k.step}}
	s, err := n.tryCreate(req)
	if err != nil || strings.HasPrefix(k.step, "create.") {
		return
	}
	if strings.HasPrefix(k.step, "fail.") {
		n.opts.World.Kill(dsec.SandboxID(s.Id), "shot")
		<-k.reached
		return
	}
	if strings.HasPrefix(k.step, "cut.") {
		leaveCommand(n, s.Id)
		<-k.reached
		return
	}
	if strings.HasPrefix(k.step, "pause.") || strings.HasPrefix(k.step, "resume.") {
		_, _ = n.PauseSandbox(context.Background(), connect.NewRequest(&dsecv1.PauseRequest{SandboxId: s.Id}))
		_, _ = n.ResumeSandbox(context.Background(), connect.NewRequest(&dsecv1.ResumeRequest{SandboxId: s.Id}))
		return
	}
	if strings.HasPrefix(k.step, "pack.") || strings.HasPrefix(k.step, "redirect.") {
		packed, err := n.PackSandbox(context.Background(), connect.NewRequest(&dsecv1.PackSandboxRequest{SandboxId: s.Id, Pause: true}))
		if err == nil {
			to := string(dsec.NewSandboxID(dsec.SandboxID(s.Id).Edge()))
			_, _ = n.RedirectSandbox(context.Background(), connect.NewRequest(&dsecv1.RedirectSandboxRequest{SandboxId: s.Id, MovedTo: to, PauseToken: packed.Msg.PauseToken}))
		}
		return
	}
	_, _ = n.KillSandbox(context.Background(), connect.NewRequest(&dsecv1.KillRequest{SandboxId: s.Id}))
}

// leaveCommand starts a command of a sandbox and goes away from it.
func leaveCommand(n *node, id string) (process uint64) {
	ctx, leave := context.WithCancel(n.t.Context())
	defer leave()
	s, err := n.process.Start(ctx, connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "sleep 1000"}}))
	if err != nil || !s.Receive() {
		n.t.Errorf("start: %v", err)
		return 0
	}
	return s.Msg().GetStarted().GetProcessId()
}

// settle checks that a node is consistent after whatever happened: one
// sandbox or none of request id "r", a retry makes it one, and all can be ended.
func settle(t *testing.T, n *node) {
	t.Helper()
	world := n.opts.World.IDs()
	res, err := n.ListSandboxes(t.Context(), connect.NewRequest(&dsecv1.ListRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Msg.Sandboxes) != len(world) {
		t.Errorf("%d sandboxes known, %d in the world", len(res.Msg.Sandboxes), len(world))
	}
	for _, s := range res.Msg.Sandboxes {
		if !world[dsec.SandboxID(s.Id)] || s.State != "running" && s.State != "paused" {
			t.Errorf("sandbox %s is %s, in the world: %v", s.Id, s.State, world[dsec.SandboxID(s.Id)])
		}
	}
	s, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r", Labels: res1(res.Msg)})
	if err != nil && typedError(err).Code != dsec.CodeConflict {
		t.Fatalf("retry: %v", err)
	}
	if err == nil && (s.State == "running" || s.State == "paused") {
		if got := n.shell(s.Id, "echo works"); string(got.Stdout) != "works\n" {
			t.Errorf("the sandbox says %q", got.Stdout)
		}
		if len(n.opts.World.IDs()) != 1 {
			t.Errorf("%d in the world after the retry, want 1", len(n.opts.World.IDs()))
		}
		n.kill(s.Id)
	}
	if ids := n.opts.World.IDs(); len(ids) != 0 || n.edge.Live() != 0 {
		t.Errorf("at the end %v in the world and %d places held", ids, n.edge.Live())
	}
}

// res1 repeats the body of the create that is listed.
func res1(l *dsecv1.ListResponse) map[string]string {
	if len(l.Sandboxes) == 1 {
		return l.Sandboxes[0].Labels
	}
	return map[string]string{"retry": "yes"}
}

// TestCrashAtEveryStep kills the edge at each step, and then once more at each
// step of the recovery from it.
func TestCrashAtEveryStep(t *testing.T) {
	var recoverSteps []string
	for _, s := range edge.CrashSteps {
		if strings.HasPrefix(s, "recover.") {
			recoverSteps = append(recoverSteps, s)
		}
	}
	for _, step := range edge.CrashSteps {
		if strings.HasPrefix(step, "recover.") {
			continue
		}
		for _, again := range append([]string{""}, recoverSteps...) {
			t.Run(step+"/"+again, func(t *testing.T) {
				var k *crash
				n := newNode(t, func(c *edge.Config, _ *fake.Options) {
					c.Layers = newLayers()
					k = arm(t, c, step)
				})
				if !k.until(func() { lead(n, k) }) {
					t.Fatalf("step %s was not reached", step)
				}
				cfg := k.after(n.cfg)
				if again != "" {
					k2 := arm(t, &cfg, again)
					k2.until(func() {
						cfg := cfg
						cfg.Backends = []backend.Backend{fake.New(n.opts)}
						if e, err := edge.New(cfg); err != nil {
							t.Error(err)
						} else if err := e.Recover(context.Background()); err == nil {
							_ = e.Close()
						}
					})
					if k2.done.Load() {
						cfg = k2.after(cfg)
					}
					cfg.Crash = nil
				}
				m := newNode(t, func(c *edge.Config, o *fake.Options) {
					*c = cfg
					o.World = n.opts.World
				})
				settle(t, m)
			})
		}
	}
}

func TestRestartKeepsSandboxesAndOrphans(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{Labels: map[string]string{"a": "b"}, Env: map[string]string{"KEPT": "yes"}, IdleTimeout: durationpb.New(time.Hour)})
	before := n.get(id)
	stream := n.startCommand(t.Context(), &dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"cat"}}, OpenStdin: true, Detach: true})
	p := stream.Msg().GetStarted().ProcessId
	if _, err := readAll(stream); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		n.restart()
	}
	after := n.get(id)
	if after.State != "running" || after.Labels["a"] != "b" || !after.Created.AsTime().Equal(before.Created.AsTime()) || after.IdleTimeout.AsDuration() != time.Hour {
		t.Errorf("after the restarts: %v, before: %v", after, before)
	}
	if d := after.Deadline.AsTime().Sub(before.Deadline.AsTime()).Abs(); d > time.Second {
		t.Errorf("the deadline moved by %v", d)
	}
	if got := n.shell(id, "echo $KEPT"); string(got.Stdout) != "yes\n" {
		t.Errorf("environment: %q", got.Stdout)
	}
	if _, err := n.process.WriteStdin(t.Context(), connect.NewRequest(&dsecv1.WriteStdinRequest{SandboxId: id, ProcessId: p, Data: []byte("hello"), Eof: true})); err != nil {
		t.Fatal(err)
	}
	if got := n.attach(id, p, 0); got.stdout != "hello" || got.outcome.GetExitCode() != 0 {
		t.Errorf("the process says %+v", got)
	}
	n.opts.World = fake.NewWorld() // the node loses its power
	n.restart()
	s := n.get(id)
	if s.State != "lost" || s.Reason == "" {
		t.Errorf("after the loss: %s (%s)", s.State, s.Reason)
	}
	_, err := n.exec(id, "true")
	if e := wantError(t, err, dsec.CodeLost, ""); !strings.Contains(e.Message, id) {
		t.Errorf("message %q", e.Message)
	}
	n.restart()
	if s := n.get(id); s.State != "lost" {
		t.Errorf("after another restart: %s", s.State)
	}
}

func TestUnclaimedSandboxesAreSwept(t *testing.T) {
	n := newNode(t, nil)
	kept := n.create(&dsecv1.CreateRequest{})
	stray := dsec.NewSandboxID("aaaaa")
	if _, err := fake.New(n.opts).Create(t.Context(), backend.CreateRequest{ID: stray}); err != nil {
		t.Fatal(err)
	}
	n.restart()
	if ids := n.opts.World.IDs(); len(ids) != 1 || !ids[dsec.SandboxID(kept)] {
		t.Errorf("in the world: %v, want %s alone", ids, kept)
	}
}

func TestOlderStateDirectoryIsNotBelieved(t *testing.T) {
	n := newNode(t, nil)
	killed := n.create(&dsecv1.CreateRequest{})
	old := t.TempDir()
	copyDir(t, n.cfg.StateDir, old)
	n.kill(killed)
	young := n.create(&dsecv1.CreateRequest{RequestId: "r"})
	n.close()
	copyDir(t, old, n.cfg.StateDir)
	n.start()
	if s := n.get(young); s.State != "running" || !n.opts.World.IDs()[dsec.SandboxID(young)] {
		t.Errorf("the younger sandbox is %s", s.State)
	}
	if s := n.get(killed); s.State != "stopped" {
		t.Errorf("the killed one is %s", s.State)
	}
	if s, err := n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"}); err != nil || s.Id != young {
		t.Errorf("same request id: %v, %v; want %s", s, err, young)
	}
}

func TestDamagedRecordQuarantinesItsSandbox(t *testing.T) {
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.RunDir = "" })
	var ids []string
	for range 5 {
		ids = append(ids, n.create(&dsecv1.CreateRequest{}))
	}
	n.close()
	file := filepath.Join(n.cfg.StateDir, "journal", "journal")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	victim := ids[2]
	at := bytes.LastIndex(data, []byte(victim)) // in the handle of its last record
	at = at + bytes.Index(data[at:], []byte("}"))
	data[at] ^= 0x01
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	n.start()
	for _, id := range ids {
		if id == victim {
			continue
		}
		if got := n.shell(id, "echo ok"); string(got.Stdout) != "ok\n" {
			t.Errorf("%s says %q", id, got.Stdout)
		}
	}
	// Its record of the running state is gone, that of the start is left.
	s := n.get(victim)
	if s.State != "lost" || !strings.Contains(s.Reason, "damaged") {
		t.Errorf("the victim is %s (%s), want lost for its damaged record", s.State, s.Reason)
	}
	if n.opts.World.IDs()[dsec.SandboxID(victim)] {
		t.Error("what nobody can reach is left running")
	}
}

func TestRecordOfARunningSandboxIsDamaged(t *testing.T) {
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.RunDir = "" })
	id := n.create(&dsecv1.CreateRequest{})
	if _, err := n.ExtendSandbox(t.Context(), connect.NewRequest(&dsecv1.ExtendRequest{SandboxId: id, IdleTimeout: durationpb.New(time.Hour)})); err != nil {
		t.Fatal(err)
	}
	n.close()
	file := filepath.Join(n.cfg.StateDir, "journal", "journal")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data[bytes.LastIndex(data, []byte(`"state"`))] ^= 0x01
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it stays so over another restart
		n.start()
		s := n.get(id)
		if s.State != "running" || !slices.Contains(s.Conditions, "quarantined") {
			t.Fatalf("%s %v, want running and quarantined", s.State, s.Conditions)
		}
		_, err = n.exec(id, "true")
		wantError(t, err, dsec.CodeConflict, "")
		n.close()
	}
	n.start()
	if got := n.kill(id); got != "stopped" || len(n.opts.World.IDs()) != 0 {
		t.Errorf("killed: %s, %v in the world", got, n.opts.World.IDs())
	}
}

func TestSandboxThatCannotBeTakenOverIsNotKilledBlindly(t *testing.T) {
	var broken atomic.Bool
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnRecover = func(dsec.SandboxID) error {
			if broken.Load() {
				return errors.New("the launcher does not answer")
			}
			return nil
		}
	})
	id := n.create(&dsecv1.CreateRequest{})
	broken.Store(true)
	n.restart()
	s := n.get(id)
	if s.State != "running" || !slices.Contains(s.Conditions, "quarantined") || !n.opts.World.IDs()[dsec.SandboxID(id)] {
		t.Fatalf("%s %v, want running, quarantined and alive", s.State, s.Conditions)
	}
	_, err := n.exec(id, "true")
	wantError(t, err, dsec.CodeConflict, "")
	broken.Store(false)
	if got := n.kill(id); got != "stopped" || len(n.opts.World.IDs()) != 0 {
		t.Errorf("killed: %s, %v in the world", got, n.opts.World.IDs())
	}
}

func TestStateDirectoryHasOneEdge(t *testing.T) {
	n := newNode(t, nil)
	if e, err := edge.New(n.cfg); err == nil {
		_ = e.Close()
		t.Error("a second edge opened the same state directory")
	}
	id := n.edge.ID()
	n.restart()
	if n.edge.ID() != id {
		t.Errorf("edge %s became %s", id, n.edge.ID())
	}
	if sandbox := n.create(&dsecv1.CreateRequest{}); dsec.SandboxID(sandbox).Edge() != id {
		t.Errorf("sandbox %s does not name edge %s", sandbox, id)
	}
	info, err := n.Info(t.Context(), connect.NewRequest(&dsecv1.InfoRequest{}))
	if err != nil || info.Msg.EdgeId != string(id) || info.Msg.Sandboxes != 1 || fmt.Sprint(info.Msg.Backends[0].Kind) != "fake" {
		t.Errorf("info %v, %v", info, err)
	}
}
