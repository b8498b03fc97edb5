package apiserver

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/iam"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// tellingEdge has events.
type tellingEdge struct {
	*stubEdge
	log string

	mu     sync.Mutex
	events []*dsecv1.Event
	more   chan struct{} // closed when there is another
	breaks func()
}

func newTelling() *tellingEdge {
	e := &tellingEdge{stubEdge: newStub("fake"), more: make(chan struct{})}
	e.log, e.instead = string(dsec.NewSandboxID(e.id)), e
	return e
}

// happens adds an event, and returns the ID of its sandbox.
func (e *tellingEdge) happens(age time.Duration) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := string(dsec.NewSandboxID(e.id))
	e.events = append(e.events, &dsecv1.Event{Kind: client.EventSandbox, SandboxId: id, State: "running", Time: timestamppb.New(time.Now().Add(-age))})
	close(e.more)
	e.more = make(chan struct{})
	return id
}

func (e *tellingEdge) away(yes bool) {
	e.set(func() { e.down = yes })
	if yes {
		e.breaks()
	}
}

func (e *tellingEdge) WatchNode(ctx context.Context, req *connect.Request[dsecv1.WatchNodeRequest], out *connect.ServerStream[dsecv1.WatchNodeResponse]) error {
	e.mu.Lock()
	at := len(e.events)
	if from := req.Msg.From; from != nil {
		at = int(from.Seq) - 1
	} else if req.Msg.FromStart {
		at = 0
	}
	e.mu.Unlock()
	send := func(ev *dsecv1.Event) error {
		return out.Send(&dsecv1.WatchNodeResponse{Event: ev, Next: &dsecv1.NodePosition{Log: e.log, Seq: uint64(at) + 1}})
	}
	if err := send(nil); err != nil {
		return err
	}
	for {
		e.mu.Lock()
		todo, more := e.events[at:], e.more
		e.mu.Unlock()
		for _, ev := range todo {
			at++
			if err := send(ev); err != nil {
				return err
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// TestNodeThatIsAwayWhenAWatchBegins: what happens there from then on is told when it is back, and
// nothing that was before; so it is by a cursor of that time, as of a webhook.
func TestNodeThatIsAwayWhenAWatchBegins(t *testing.T) {
	e := newTelling()
	r := newBreakable(t, e.stubEdge, &e.breaks)
	e.happens(time.Hour)
	e.away(true)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	events := make(chan string, 99)
	watch := func(o client.EventOptions) {
		c := r.client(r.secret)
		go func() {
			for ev, err := range c.Events(ctx, o) {
				if err != nil {
					events <- err.Error()
					return
				}
				events <- strings.TrimSpace(fmt.Sprint(ev.Kind, " ", ev.SandboxID))
			}
		}()
	}
	want := func(lines ...string) {
		t.Helper()
		for _, line := range lines {
			select {
			case got := <-events:
				if got != line {
					t.Fatalf("%q, want %q", got, line)
				}
			case <-ctx.Done():
				t.Fatalf("nothing comes, want %q", line)
			}
		}
	}
	watch(client.EventOptions{})
	want("unreachable")
	cursor, err := r.server.cursorNow(context.WithValue(ctx, principalKey{}, iam.Principal{Project: "a"}))
	check(t, err)
	one := e.happens(0)
	e.away(false)
	want("reachable", "sandbox "+one)
	two := e.happens(0)
	want("sandbox " + two)
	watch(client.EventOptions{Cursor: cursor})
	want("sandbox "+one, "sandbox "+two)
	// The control: what is old is told to who asks for it.
	watch(client.EventOptions{FromStart: true})
	if got := <-events; got == "sandbox "+one || !strings.HasPrefix(got, "sandbox ") {
		t.Errorf("from the start there is %q", got)
	}
}
