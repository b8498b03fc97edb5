package edge_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Pack gives each upper directory a digest of its own: that of its names and contents.
func (l *layers) Pack(_ context.Context, opt layer.PackOptions, upper *os.File, _ uint32) (layer.Meta, layer.PackReport, error) {
	h := sha256.New()
	var report layer.PackReport
	root := os.DirFS(fmt.Sprintf("/proc/self/fd/%d", upper.Fd()))
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := fs.ReadFile(root, name)
		fmt.Fprintf(h, "%q %q\n", name, b)
		report.Files++
		report.Bytes += int64(len(b))
		return err
	})
	if err != nil {
		return layer.Meta{}, report, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full {
		return layer.Meta{}, report, dsec.Errorf(dsec.CodeExhausted, "the store of layers is full")
	}
	m := layer.Meta{Digest: fmt.Sprintf("sha256:%x", h.Sum(nil)), About: layer.About{Source: "pack", Origin: opt.Origin}, Manifest: layer.Manifest{
		Kind: dsec.LayerBase, Size: report.Bytes, Files: report.Files, Parents: opt.Parents, Config: opt.Config,
	}}
	l.metas[m.Digest] = m
	return m, report, nil
}

func (n *node) pack(req *dsecv1.PackSandboxRequest) (*dsecv1.PackSandboxResponse, error) {
	res, err := n.PackSandbox(n.t.Context(), connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

func (n *node) mustPack(req *dsecv1.PackSandboxRequest) *dsecv1.PackSandboxResponse {
	n.t.Helper()
	res, err := n.pack(req)
	if err != nil {
		n.t.Fatal(err)
	}
	return res
}

func withLayers(l *layers) func(*edge.Config, *fake.Options) {
	return func(c *edge.Config, _ *fake.Options) { c.Layers = l }
}

// TestPack: what is made of a sandbox goes on its layers, says of processes what these
// say and nothing of what its creator did, and makes one like it.
func TestPack(t *testing.T) {
	base := layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase, Config: layer.Config{Env: []string{"A=image", "B=image"}, Workdir: "/tmp", Cmd: []string{"sh"}}}}
	tool := layer.Meta{Digest: digest('b'), Manifest: layer.Manifest{Kind: dsec.LayerToolkit, Config: layer.Config{Env: []string{"B=tool"}}}}
	all := newLayers(base, tool)
	n := newNode(t, withLayers(all))
	id := n.create(&dsecv1.CreateRequest{
		Layers: []string{base.Digest, tool.Digest}, Env: map[string]string{"SECRET": "of its creator"}, User: "7:7", Labels: map[string]string{"k": "v"}, Job: "j",
		Limits: &dsecv1.Limits{Pids: 99}, MaxLifetime: durationpb.New(0), IdleTimeout: durationpb.New(100e9), IdleAction: "pause",
	})
	n.shell(id, "echo one > /tmp/one")
	first := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id})
	meta, err := all.Get(t.Context(), first.Layer.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(meta.Parents, meta.Config), fmt.Sprint([]string{base.Digest, tool.Digest}, layer.Config{Env: []string{"A=image", "B=tool"}, Workdir: "/tmp", Cmd: []string{"sh"}}); got != want {
		t.Errorf("the layer is %s, want %s", got, want)
	}
	if first.Report.Files < 1 || first.Report.Bytes < 4 {
		t.Errorf("report: %v", first.Report)
	}
	if c := first.Create; c.Labels["k"] != "v" || c.Job != "j" || c.User != "7:7" || c.Env["SECRET"] == "" || c.Env["B"] != "tool" || c.Limits.Pids != 99 ||
		c.MaxLifetime.AsDuration() != 0 || c.IdleTimeout.AsDuration() != 100e9 || c.IdleAction != "pause" || len(c.Layers) != 1 || c.Layers[0] != meta.Digest || c.RequestId != "" {
		t.Errorf("create: %v", c)
	}
	like := n.get(n.create(first.Create))
	if want := []string{base.Digest, tool.Digest, meta.Digest}; strings.Join(like.Layers, " ") != strings.Join(want, " ") {
		t.Errorf("layers %v, want %v", like.Layers, want)
	}
	n.shell(id, "echo two > /tmp/one")
	if again := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id}); again.Layer.Digest == meta.Digest {
		t.Error("what was written since is not in the second pack")
	}
}

// TestPackOfAPausedSandbox: it stays paused, by the pause that it was in.
func TestPackOfAPausedSandbox(t *testing.T) {
	n := newNode(t, withLayers(newLayers()))
	id := n.create(&dsecv1.CreateRequest{})
	running := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id})
	if running.PauseToken != nil || n.get(id).State != "running" {
		t.Errorf("a running one: token %x, %s", running.PauseToken, n.get(id).State)
	}
	n.mustPause(id, nil)
	a := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id})
	b := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id, Pause: true})
	if a.PauseToken == nil || string(a.PauseToken) != string(b.PauseToken) || n.get(id).State != "paused" {
		t.Errorf("tokens %x and %x, %s", a.PauseToken, b.PauseToken, n.get(id).State)
	}
}

// TestPackThatFails: typed, and the sandbox is as it was.
func TestPackThatFails(t *testing.T) {
	all := newLayers()
	n := newNode(t, withLayers(all))
	id := n.create(&dsecv1.CreateRequest{})
	all.full = true
	_, err := n.pack(&dsecv1.PackSandboxRequest{SandboxId: id})
	wantError(t, err, dsec.CodeExhausted, "")
	if out := n.shell(id, "echo on"); string(out.Stdout) != "on\n" {
		t.Errorf("have %q", out.Stdout)
	}
	all.full = false
	n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id})
	_, err = n.pack(&dsecv1.PackSandboxRequest{SandboxId: id, Scrub: &dsecv1.Scrub{Remove: []string{"no/path"}}})
	wantError(t, err, dsec.CodeInvalid, "scrub.remove[0]")
	n.kill(id)
	_, err = n.pack(&dsecv1.PackSandboxRequest{SandboxId: id})
	wantError(t, err, dsec.CodeConflict, "")
	_, err = n.pack(&dsecv1.PackSandboxRequest{SandboxId: string(dsec.NewSandboxID(n.edge.ID()))})
	wantError(t, err, dsec.CodeNotFound, "sandbox_id")
}

// TestPackThatFailsAfterItsPause: one that ran before goes on, whether the pack failed or its
// caller left, and one that was paused stays so.
func TestPackThatFailsAfterItsPause(t *testing.T) {
	all := newLayers()
	began, leave := make(chan struct{}, 1), make(chan struct{})
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		c.Layers = all
		o.OnSnapshot = func(ctx context.Context, _ dsec.SandboxID) error {
			select {
			case <-leave:
				began <- struct{}{}
				<-ctx.Done()
				return context.Cause(ctx)
			default:
				return nil
			}
		}
	})
	id := n.create(&dsecv1.CreateRequest{})
	req := &dsecv1.PackSandboxRequest{SandboxId: id, Pause: true}
	all.full = true
	_, err := n.pack(req)
	wantError(t, err, dsec.CodeExhausted, "")
	if s := n.get(id); s.State != "running" {
		t.Errorf("after a pack that failed it is %s", s.State)
	}
	n.mustPause(id, nil)
	_, err = n.pack(req)
	wantError(t, err, dsec.CodeExhausted, "")
	if s := n.get(id); s.State != "paused" {
		t.Errorf("one that was paused before is %s", s.State)
	}
	n.shell(id, "true")
	close(leave)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	if _, err := n.PackSandbox(ctx, connect.NewRequest(req)); err == nil {
		t.Error("packed for a caller who has left")
	}
	testutil.WaitFor(t, 20*time.Second, "it goes on", func() error {
		if s := n.get(id); s.State != "running" {
			return errors.New(s.State)
		}
		return nil
	})
}

// TestPackRefusesActions that whoever takes the sandbox's place would know nothing of, where
// it is told to: those that were done, over a restart too.
func TestPackRefusesActions(t *testing.T) {
	n := newNode(t, withLayers(newLayers()))
	id := n.create(&dsecv1.CreateRequest{})
	req := &dsecv1.PackSandboxRequest{SandboxId: id, Pause: true, RefuseActions: true}
	n.shell(id, "true")
	n.mustPack(req)
	exec := named(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "true"}}, "a")
	if _, err := n.process.Exec(t.Context(), exec); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := n.pack(req)
		wantError(t, err, dsec.CodeConflict, "lose_actions")
		if s := n.get(id); s.State != "running" {
			t.Errorf("then it is %s", s.State)
		}
		n.restart()
	}
	n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id, Pause: true})
}

// TestRedirect: what is asked of a sandbox that was moved is told where to, also after a
// restart and by a create with its request id; one that was used meanwhile stays.
func TestRedirect(t *testing.T) {
	n := newNode(t, withLayers(newLayers()))
	id := n.create(&dsecv1.CreateRequest{RequestId: "r"})
	packed := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id, Pause: true})
	to := n.create(packed.Create)
	redirect := func(token []byte) error {
		_, err := n.RedirectSandbox(t.Context(), connect.NewRequest(&dsecv1.RedirectSandboxRequest{SandboxId: id, MovedTo: to, PauseToken: token}))
		return err
	}
	n.shell(id, "true") // it is used
	wantError(t, redirect(packed.PauseToken), dsec.CodeConflict, "")
	wantError(t, redirect(nil), dsec.CodeConflict, "")
	packed = n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id, Pause: true})
	for range 2 {
		if err := redirect(packed.PauseToken); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		for name, err := range map[string]error{
			"get":    second(n.GetSandbox(t.Context(), connect.NewRequest(&dsecv1.GetRequest{SandboxId: id}))),
			"exec":   second(n.exec(id, "true")),
			"kill":   second(n.KillSandbox(t.Context(), connect.NewRequest(&dsecv1.KillRequest{SandboxId: id}))),
			"create": second(n.tryCreate(&dsecv1.CreateRequest{RequestId: "r"})),
		} {
			if e := wantError(t, err, dsec.CodeConflict, "sandbox_id"); string(e.MovedTo) != to {
				t.Errorf("%s: moved to %q, want %s", name, e.MovedTo, to)
			}
		}
		if n.get(to).State != "running" {
			t.Fatal("the one that took its place has ended")
		}
		n.restart()
	}
}

// What was under way in a sandbox that is moved has an unknown outcome: an error that led
// to the other sandbox would have it done once more.
func TestRedirectInMidCall(t *testing.T) {
	n := newNode(t, withLayers(newLayers()))
	id := n.create(&dsecv1.CreateRequest{})
	stream, err := n.process.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "sleep 1000"}}))
	if err != nil || !stream.Receive() {
		t.Fatal(err)
	}
	unary := make(chan error, 1)
	go func() { unary <- second(n.exec(id, "sleep", "1000")) }()
	testutil.WaitFor(t, 10*time.Second, "the second command", func() error {
		list, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err == nil && len(list.Msg.Processes) < 2 {
			err = fmt.Errorf("%d commands", len(list.Msg.Processes))
		}
		return err
	})
	packed := n.mustPack(&dsecv1.PackSandboxRequest{SandboxId: id, Pause: true})
	to := n.create(packed.Create)
	_, err = n.RedirectSandbox(t.Context(), connect.NewRequest(&dsecv1.RedirectSandboxRequest{SandboxId: id, MovedTo: to, PauseToken: packed.PauseToken}))
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
		continue
	}
	for what, err := range map[string]error{"a stream": stream.Err(), "a call": <-unary} {
		if e := wantError(t, err, dsec.CodeOutcomeUnknown, ""); e.MovedTo != "" || !strings.Contains(e.Message, to) {
			t.Errorf("%s: %v, moved to %q", what, err, e.MovedTo)
		}
	}
}

func second[T any](_ T, err error) error { return err }
