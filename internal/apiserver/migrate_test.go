package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// stubMoving is what a stub edge does of migrations.
type stubMoving struct {
	loseCreate   bool // a create is done, and its answer does not come
	loseRedirect int  // so many redirects are done, and their answers do not come
	lostBefore   int  // so many redirects do not come
	used         bool // the sandbox is used before it is redirected

	losePack bool // a pack is done, and its answer does not come

	packs   []*dsecv1.PackSandboxRequest
	was     string // that was moved
	movedTo string
	resumed int
	killed  []string
}

var errLost = connect.NewError(connect.CodeUnavailable, errors.New("connection reset by peer"))

func (e *stubEdge) GetSandbox(_ context.Context, req *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if to := dsec.SandboxID(e.moving.movedTo); to != "" && e.moving.was == req.Msg.SandboxId {
		return nil, apierr.Encode(&dsec.Error{Code: dsec.CodeConflict, Field: "sandbox_id", Message: "it was moved", MovedTo: to})
	}
	return connect.NewResponse(&dsecv1.GetResponse{Sandbox: &dsecv1.Sandbox{Id: req.Msg.SandboxId, State: "running", Job: e.job}}), nil
}

func (e *stubEdge) PackSandbox(_ context.Context, req *connect.Request[dsecv1.PackSandboxRequest]) (*connect.Response[dsecv1.PackSandboxResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.moving.packs = append(e.moving.packs, req.Msg)
	if e.moving.losePack {
		return nil, errLost
	}
	return connect.NewResponse(&dsecv1.PackSandboxResponse{
		Layer: &dsecv1.Layer{Digest: "sha256:" + strings.Repeat("a", 64)}, Create: &dsecv1.CreateRequest{Backend: string(e.kind), Job: e.job}, PauseToken: []byte("token"),
	}), nil
}

func (e *stubEdge) RedirectSandbox(_ context.Context, req *connect.Request[dsecv1.RedirectSandboxRequest]) (*connect.Response[dsecv1.RedirectSandboxResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := &e.moving
	if m.lostBefore > 0 {
		m.lostBefore--
		return nil, errLost
	}
	if m.used || m.movedTo != "" && m.movedTo != req.Msg.MovedTo {
		return nil, apierr.Encode(dsec.Errorf(dsec.CodeConflict, "it was used meanwhile"))
	}
	m.was, m.movedTo = req.Msg.SandboxId, req.Msg.MovedTo
	if m.loseRedirect > 0 {
		m.loseRedirect--
		return nil, errLost
	}
	return connect.NewResponse(new(dsecv1.RedirectSandboxResponse)), nil
}

func (e *stubEdge) ResumeSandbox(context.Context, *connect.Request[dsecv1.ResumeRequest]) (*connect.Response[dsecv1.ResumeResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.moving.resumed++
	return connect.NewResponse(new(dsecv1.ResumeResponse)), nil
}

func (e *stubEdge) KillSandbox(_ context.Context, req *connect.Request[dsecv1.KillRequest]) (*connect.Response[dsecv1.KillResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.moving.killed = append(e.moving.killed, req.Msg.SandboxId)
	return connect.NewResponse(&dsecv1.KillResponse{State: "stopped"}), nil
}

// TestMigrationsThatBreak: whatever answer is lost, there is one sandbox in the end: the
// new one where the old one leads to it, and else the old one.
func TestMigrationsThatBreak(t *testing.T) {
	for name, tc := range map[string]struct {
		from, to stubMoving
		want     dsec.Code
		moved    bool
	}{
		"control":                         {moved: true},
		"the create's answer is lost":     {to: stubMoving{loseCreate: true}, moved: true},
		"and the sandbox is used":         {from: stubMoving{used: true}, to: stubMoving{loseCreate: true}, want: dsec.CodeUnavailable},
		"the redirect's answer is lost":   {from: stubMoving{loseRedirect: 1}, moved: true},
		"it is lost twice":                {from: stubMoving{loseRedirect: 2}, want: dsec.CodeOutcomeUnknown, moved: true},
		"the redirect does not come":      {from: stubMoving{lostBefore: 1}, moved: true},
		"it does not come for long":       {from: stubMoving{lostBefore: 3}, want: dsec.CodeOutcomeUnknown, moved: true},
		"the sandbox is used":             {from: stubMoving{used: true}, want: dsec.CodeConflict},
		"it is used, and that comes late": {from: stubMoving{used: true, lostBefore: 3}, want: dsec.CodeOutcomeUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			from, to := newStub("fake"), newStub("fake")
			from.moving, to.moving = tc.from, tc.to
			r := newRig(t, from, to)
			moved, _, err := r.client(r.secret).Sandbox(string(dsec.NewSandboxID(from.id))).Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
			if codeOf(err) != tc.want {
				t.Fatalf("%v, want %q", err, tc.want)
			}
			testutil.WaitFor(t, time.Minute, "one of two", func() (err error) {
				to.set(func() {
					from.set(func() {
						made, killed := "", to.moving.killed
						for id := range to.projects {
							made = string(id)
						}
						if made == "" || tc.moved != (from.moving.movedTo == made) || tc.moved == slices.Contains(killed, made) {
							err = errors.New("made " + made + ", moved to " + from.moving.movedTo + ", killed " + strings.Join(killed, " "))
						}
					})
				})
				return err
			})
			if tc.want == "" && moved.ID().Edge() != to.id {
				t.Errorf("moved to %s", moved.ID())
			}
			from.set(func() {
				if resumed := from.moving.resumed > 0; resumed != (tc.want != "") {
					t.Errorf("resumed: %v, and the migration: %q", resumed, tc.want)
				}
			})
		})
	}
}

// TestMigrationsOfAnEarlierApiserver: one that died left two sandboxes, or told one to be
// moved and did not tell anybody; or nothing was made.
func TestMigrationsOfAnEarlierApiserver(t *testing.T) {
	for name, tc := range map[string]struct {
		made, used, moved bool
	}{
		"the new one is there": {made: true, moved: true}, "the old one was used": {made: true, used: true}, "there is no new one": {},
	} {
		t.Run(name, func(t *testing.T) {
			from, to := newStub("fake"), newStub("fake")
			from.moving.used = tc.used
			r := newRig(t, from, to)
			made := dsec.NewSandboxID(to.id)
			if tc.made {
				to.keys["a\x00migrate/x"] = made
			}
			docs := r.server.layers.store
			_, err := store.Put(t.Context(), docs, migrationPrefix+"migrate/x", migration{
				RequestID: "migrate/x", Project: "a", From: string(dsec.NewSandboxID(from.id)), At: to.id, Began: time.Now().Add(-createComes),
			})
			check(t, err)
			next, err := New(t.Context(), Config{Store: docs, IAM: r.iam, Edges: r.server.edges, Log: testutil.Logger(t), Metrics: prometheus.NewRegistry()})
			check(t, err)
			defer next.Close()
			testutil.WaitFor(t, time.Minute, "the end of the migration", func() error {
				if left, err := store.List[migration](t.Context(), docs, migrationPrefix); err != nil || len(left) > 0 {
					return fmt.Errorf("%d are left, %v", len(left), err)
				}
				return nil
			})
			if moved, killed := from.moving.movedTo == string(made), len(to.moving.killed) > 0; moved != tc.moved || killed != (tc.made && !tc.moved) {
				t.Errorf("moved %v, killed %v", moved, killed)
			}
		})
	}
}

// TestMigrationThatIsRepeated, as by one who was not told that it was done, finds what took the
// sandbox's place, and that one can be moved by its own ID. Actions are lost where that is said.
func TestMigrationThatIsRepeated(t *testing.T) {
	from, to := newStub("fake"), newStub("fake")
	r := newRig(t, from, to)
	cl := r.client(r.secret)
	migrate := func(sb *client.Sandbox, o client.MigrateOptions) (*client.Sandbox, *client.PackReport) {
		t.Helper()
		moved, report, err := sb.Migrate(t.Context(), o)
		check(t, err)
		return moved, report
	}
	sb := cl.Sandbox(string(dsec.NewSandboxID(from.id)))
	moved, _ := migrate(sb, client.MigrateOptions{LoseMemory: true})
	again, report := migrate(sb, client.MigrateOptions{LoseMemory: true})
	if again.ID() != moved.ID() || report != nil || len(from.moving.packs) != 1 || len(to.moving.packs) != 0 {
		t.Errorf("moved to %s, and then to %s, %+v", moved.ID(), again.ID(), report)
	}
	if third, _ := migrate(moved, client.MigrateOptions{LoseMemory: true, LoseActions: true}); third.ID() == moved.ID() || len(to.moving.packs) != 1 {
		t.Errorf("by its own ID it stays %s", third.ID())
	}
	if m := from.moving.packs[0]; !m.RefuseActions || !m.Unnamed || !m.Pause {
		t.Errorf("packed by %v", m)
	}
	if to.moving.packs[0].RefuseActions {
		t.Error("actions may be lost, and are refused")
	}
}

// TestMigrationWhosePackIsLost: the sandbox, which it may have paused, goes on.
func TestMigrationWhosePackIsLost(t *testing.T) {
	e := newStub("fake")
	e.moving.losePack = true
	r := newRig(t, e)
	_, _, err := r.client(r.secret).Sandbox(string(dsec.NewSandboxID(e.id))).Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
	if codeOf(err) != dsec.CodeOutcomeUnknown {
		t.Errorf("%v, want %s", err, dsec.CodeOutcomeUnknown)
	}
	e.set(func() {
		if len(e.moving.packs) != 1 || e.moving.resumed != 1 {
			t.Errorf("packed %d times, resumed %d times", len(e.moving.packs), e.moving.resumed)
		}
	})
}

// A layer that a sandbox of any edge uses stays, and one of which an edge does not tell.
func TestLayersThatOtherNodesUse(t *testing.T) {
	edges := stubs(3)
	for _, e := range edges {
		e.digest = "sha256:" + strings.Repeat("a", 64)
	}
	r := newRig(t, edges...)
	dropped := func() (n int) {
		for _, e := range edges {
			e.set(func() { n += len(e.dropped) })
		}
		return n
	}
	remove := func() {
		t.Helper()
		c := r.client(r.secret)
		_, _, err := c.ImportLayer(t.Context(), "base", client.ImportOptions{}, strings.NewReader("tar"))
		check(t, err)
		check(t, c.RemoveLayer(t.Context(), "base"))
	}
	for i, e := range edges {
		e.set(func() { e.inUse = e.digest })
		if remove(); dropped() != 0 {
			t.Errorf("edge %d uses it, and it was removed", i)
		}
		e.set(func() { e.inUse = "" })
	}
	removes, err := r.server.builder()
	check(t, err)
	e := edges[slices.IndexFunc(edges, func(e *stubEdge) bool { return e.id != removes.ID() })]
	e.set(func() { e.badDrop = errLost })
	if remove(); dropped() != 0 {
		t.Error("an edge does not answer, and it was removed")
	}
	e.set(func() { e.badDrop = nil })
	if remove(); dropped() != 1 {
		t.Errorf("removed %d times, want once", dropped())
	}
}
