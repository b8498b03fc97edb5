package edge_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// watching is a stream of events, each as a line.
type watching struct {
	n      *node
	stream *connect.ServerStreamForClient[dsecv1.WatchNodeResponse]
	next   *dsecv1.NodePosition
	cancel context.CancelFunc
	last   *dsecv1.Event
}

func (n *node) watch(req *dsecv1.WatchNodeRequest) *watching {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	stream, err := n.WatchNode(ctx, connect.NewRequest(req))
	if err != nil {
		n.t.Fatal(err)
	}
	w := &watching{n: n, stream: stream, cancel: cancel}
	n.t.Cleanup(w.stop)
	if req.From == nil && !req.FromStart {
		w.receive() // it watches from here on
	}
	return w
}

func (w *watching) stop() { w.cancel(); _ = w.stream.Close() }

func (w *watching) receive() *dsecv1.WatchNodeResponse {
	w.n.t.Helper()
	if !w.stream.Receive() {
		w.n.t.Fatalf("the stream ends: %v", w.stream.Err())
	}
	w.next = w.stream.Msg().Next
	return w.stream.Msg()
}

// event is the next one.
func (w *watching) event() string {
	w.n.t.Helper()
	m := w.receive()
	for m.Event == nil {
		m = w.receive()
	}
	w.last = m.Event
	line := m.Event.Kind + " " + m.Event.State
	if m.Event.Repeated {
		line += " repeated"
	}
	return strings.TrimSpace(line)
}

func (w *watching) want(lines ...string) {
	w.n.t.Helper()
	for _, line := range lines {
		if got := w.event(); got != line {
			w.n.t.Fatalf("event %q of %s, want %q", got, w.last.SandboxId, line)
		}
	}
}

// TestEvents: each change of a sandbox comes once, in order, wherever a watcher goes on, over
// restarts of the edge too.
func TestEvents(t *testing.T) {
	n := newNode(t, nil)
	w := n.watch(&dsecv1.WatchNodeRequest{})
	start := w.next
	id := n.create(&dsecv1.CreateRequest{Job: "j", Labels: map[string]string{"a": "b"}})
	w.want("sandbox running")
	if e := w.last; e.SandboxId != id || e.Job != "j" || e.Labels["a"] != "b" || e.Node == "" || e.Time == nil {
		t.Errorf("event %v", e)
	}
	n.mustPause(id, nil)
	n.shell(id, "true")
	w.want("sandbox paused", "sandbox running")
	w.stop()
	n.restart()
	n.shell(id, "true")
	n.kill(id)
	all := []string{"sandbox running", "sandbox paused", "sandbox running", "sandbox stopping", "sandbox stopped"}
	for i := range all {
		w := n.watch(&dsecv1.WatchNodeRequest{From: start})
		w.want(all[:i]...)
		w.stop()
		from := start
		if i > 0 {
			from = w.next
		}
		n.watch(&dsecv1.WatchNodeRequest{From: from}).want(all[i:]...)
	}
	n.watch(&dsecv1.WatchNodeRequest{FromStart: true}).want(all...)
}

// TestEventsOfWhom: a project's, and of those what is asked for.
func TestEventsOfWhom(t *testing.T) {
	n := newNode(t, nil)
	a := n.create(&dsecv1.CreateRequest{Job: "a", Labels: map[string]string{"k": "1"}})
	b := n.create(&dsecv1.CreateRequest{Job: "b", Labels: map[string]string{"k": "2"}})
	n.kill(a)
	n.kill(b)
	for name, tt := range map[string]struct {
		filter *dsecv1.EventFilter
		id     string
		lines  []string
	}{
		"of a job":     {&dsecv1.EventFilter{Job: "b"}, b, []string{"sandbox running", "sandbox stopping", "sandbox stopped"}},
		"of a sandbox": {&dsecv1.EventFilter{SandboxIds: []string{b}}, b, []string{"sandbox running"}},
		"with a label": {&dsecv1.EventFilter{Labels: map[string]string{"k": "2"}}, b, []string{"sandbox running"}},
		"of a state":   {&dsecv1.EventFilter{States: []string{"stopped"}}, a, []string{"sandbox stopped", "sandbox stopped"}},
	} {
		w := n.watch(&dsecv1.WatchNodeRequest{FromStart: true, Filter: tt.filter})
		for i, line := range tt.lines {
			w.want(line)
			if i == 0 && w.last.SandboxId != tt.id {
				t.Errorf("%s: %v", name, w.last)
			}
		}
	}
	none := n.watch(&dsecv1.WatchNodeRequest{FromStart: true, Filter: &dsecv1.EventFilter{Kinds: []string{"job"}}})
	if m := none.receive(); m.Event != nil || m.Next == nil {
		t.Errorf("of another kind: %v", m)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	other := dsecv1connect.NewEdgeServiceClient(n.http, "http://edge", connect.WithInterceptors(withProject("other")))
	stream, err := other.WatchNode(ctx, connect.NewRequest(&dsecv1.WatchNodeRequest{FromStart: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() || stream.Msg().Event != nil {
		t.Errorf("another project sees %v, %v", stream.Msg(), stream.Err())
	}
}

// TestEventsWithManyLabels: one with as many labels as there can be, of the most bytes, is as any other.
func TestEventsWithManyLabels(t *testing.T) {
	n := newNode(t, nil)
	labels := map[string]string{}
	for i := range 64 {
		labels[fmt.Sprint("label", i)] = strings.Repeat("\u20ac", 256) // 3 bytes
	}
	w := n.watch(&dsecv1.WatchNodeRequest{})
	start := w.next
	id := n.create(&dsecv1.CreateRequest{Labels: labels})
	other := n.create(&dsecv1.CreateRequest{})
	look := func(w *watching) {
		t.Helper()
		w.want("sandbox running")
		if e := w.last; e.SandboxId != id || !maps.Equal(e.Labels, labels) {
			t.Errorf("%s with %d labels", e.SandboxId, len(e.Labels))
		}
		w.want("sandbox running")
		if w.last.SandboxId != other {
			t.Errorf("then %v", w.last)
		}
	}
	look(w)
	n.restart()
	look(n.watch(&dsecv1.WatchNodeRequest{From: start}))
}

// TestEventsThatAreGone: who comes too late is told so, and goes on with what there is.
func TestEventsThatAreGone(t *testing.T) {
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { edge.SetEvents(c, 5) })
	w := n.watch(&dsecv1.WatchNodeRequest{})
	late, live := w.next, w
	for i := range 10 {
		n.kill(n.create(&dsecv1.CreateRequest{Job: fmt.Sprint(i)}))
		live.want("sandbox running", "sandbox stopping", "sandbox stopped")
	}
	gone := n.watch(&dsecv1.WatchNodeRequest{From: late})
	gone.want("gap")
	rest := []string{gone.event()}
	for gone.last.Job != "9" || gone.last.State != "stopped" {
		rest = append(rest, gone.event())
	}
	if len(rest) < 5 || len(rest) > 16 {
		t.Errorf("%d events are kept: %q", len(rest), rest)
	}
	// From a place that the node, which lost power, does not have any more.
	gone.next.Seq += 100
	n.watch(&dsecv1.WatchNodeRequest{From: gone.next}).want("gap")
	// What is of another log altogether.
	n.watch(&dsecv1.WatchNodeRequest{From: &dsecv1.NodePosition{Log: string(dsec.NewSandboxID("aaaaa")), Seq: 3}}).want("gap")
}

// TestEventsLostWithPower: who was told of events that the node, which lost power, has lost, is told so
// and of all that comes, however many there were, and also where no other was in their stretch.
func TestEventsLostWithPower(t *testing.T) {
	for name, lost := range map[string]int{"one": 1, "some": 5} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, nil)
			n.create(&dsecv1.CreateRequest{})
			testEventsLost(t, n, lost)
		})
		t.Run(name+" of a new stretch", func(t *testing.T) { testEventsLost(t, newNode(t, nil), lost) })
		t.Run(name+" after a restart", func(t *testing.T) {
			n := newNode(t, nil)
			n.create(&dsecv1.CreateRequest{})
			n.restart()
			testEventsLost(t, n, lost)
		})
	}
}

// keepEvents copies the log of events, and puts the copy back in its place.
func (n *node) keepEvents() (back func()) {
	n.t.Helper()
	dir, kept := filepath.Join(n.cfg.StateDir, "events"), filepath.Join(n.t.TempDir(), "events")
	if err := os.CopyFS(kept, os.DirFS(dir)); err != nil {
		n.t.Fatal(err)
	}
	return func() {
		n.t.Helper()
		if err := errors.Join(os.RemoveAll(dir), os.Rename(kept, dir)); err != nil {
			n.t.Fatal(err)
		}
	}
}

func testEventsLost(t *testing.T, n *node, lost int) {
	t.Helper()
	w := n.watch(&dsecv1.WatchNodeRequest{})
	none := w.next
	back := n.keepEvents()
	for range lost {
		n.create(&dsecv1.CreateRequest{})
		w.want("sandbox running")
	}
	w.stop()
	n.close()
	back()
	for range 2 { // a later start knows as well
		n.start()
		next := n.create(&dsecv1.CreateRequest{})
		for from, gap := range map[*dsecv1.NodePosition]bool{w.next: true, none: false} {
			w := n.watch(&dsecv1.WatchNodeRequest{From: from})
			if gap {
				w.want("gap")
			}
			for w.event(); w.last.SandboxId != next; w.event() {
				if w.last.Kind != "sandbox" {
					t.Fatalf("event %v", w.last)
				}
			}
		}
		n.close()
	}
}

// TestEventsThatAnEdgeDidNotTell come from the next one, which cannot know whether they did.
func TestEventsThatAnEdgeDidNotTell(t *testing.T) {
	n := newNode(t, nil)
	id := n.create(&dsecv1.CreateRequest{})
	paused := n.create(&dsecv1.CreateRequest{Job: "p"})
	n.mustPause(paused, nil)
	n.close()
	check := os.RemoveAll(filepath.Join(n.cfg.StateDir, "events"))
	if check != nil {
		t.Fatal(check)
	}
	n.start()
	w := n.watch(&dsecv1.WatchNodeRequest{FromStart: true})
	seen := map[string]string{w.event(): w.last.SandboxId, w.event(): w.last.SandboxId}
	seen2 := map[string]string{"sandbox running repeated": id, "sandbox paused repeated": paused}
	for line, want := range seen2 {
		if _, ok := seen[line]; !ok {
			t.Errorf("no %q of %s: %v", line, want, seen)
		}
	}
	n.restart() // and once
	n.kill(id)
	w = n.watch(&dsecv1.WatchNodeRequest{FromStart: true})
	w.event()
	w.event()
	w.want("sandbox stopping", "sandbox stopped")
}
