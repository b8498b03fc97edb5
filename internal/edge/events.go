package edge

import (
	"cmp"
	"context"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/event"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// eventSegment is the size of a file of events.
const eventSegment = 16 << 20

// standing is what events tell of a sandbox.
type standing struct {
	state      dsec.State
	conditions string
}

func (e *Edge) openEvents() (err error) {
	most := uint64(eventsPerStretch)
	if e.cfg.events > 0 {
		most = e.cfg.events
	}
	segment := min(cmp.Or(e.cfg.Trajectories.SegmentBytes, eventSegment), eventSegment)
	e.events, err = openEventLog(filepath.Join(e.cfg.StateDir, "events"), segment, e.id, most, e.log)
	return err
}

// announce tells watchers how s stands, if that is another than they know. The caller
// holds s.mu, and the journal has it. Nobody knows of a sandbox before it runs.
func (e *Edge) announce(s *sandbox) {
	if s.err != nil || s.state == dsec.StatePending || s.state == dsec.StateStarting {
		return
	}
	if now := s.standing(); s.told != now {
		s.told, s.assumed = now, false
		e.tellWatchers(s, false)
	}
}

// tellWatchers adds an event of how s stands. The caller holds s.mu.
func (e *Edge) tellWatchers(s *sandbox, repeated bool) {
	e.events.add(s.project, &dsecv1.Event{
		Kind: event.Sandbox, SandboxId: string(s.id), Job: s.spec.Job, Labels: s.spec.Labels, State: string(s.state), Reason: s.reason,
		Conditions: s.conditions, Repeated: repeated, MovedTo: string(s.movedTo),
	})
}

// standing is how s stands. The caller holds s.mu.
func (s *sandbox) standing() standing {
	conditions := slices.Sorted(slices.Values(s.conditions))
	out := standing{state: s.state}
	for _, c := range conditions {
		out.conditions += c + "\x00"
	}
	return out
}

// catchUp tells watchers of what an earlier edge did not live to tell: the event of a change
// is written after the journal has it.
func (e *Edge) catchUp() {
	told := map[dsec.SandboxID]standing{}
	err := e.events.each(e.closing, func(ev *dsecv1.Event) {
		if ev.Kind == event.Sandbox {
			s := sandbox{state: dsec.State(ev.State), conditions: ev.Conditions}
			told[dsec.SandboxID(ev.SandboxId)] = s.standing()
		}
	})
	if err != nil && e.closing.Err() == nil {
		e.log.Warn("some events may be told again", "err", err)
	}
	e.mu.RLock()
	all := slices.Collect(maps.Values(e.sandboxes))
	e.mu.RUnlock()
	for _, s := range all {
		s.mu.Lock()
		was, known := told[s.id]
		if s.assumed && (known && was != s.told || !known && !s.state.Terminal()) {
			e.tellWatchers(s, true)
		}
		s.assumed = false
		s.mu.Unlock()
	}
}

// WatchNode streams the events of a project's sandboxes.
func (v service) WatchNode(ctx context.Context, req *connect.Request[dsecv1.WatchNodeRequest], stream *connect.ServerStream[dsecv1.WatchNodeResponse]) error {
	if !v.e.ready.Load() {
		return errStarting
	}
	project, m := req.Header().Get(projectHeader), req.Msg
	from := m.From
	if from == nil && !m.FromStart {
		end, err := v.e.events.end()
		if err != nil {
			return err
		}
		from = end
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(v.e.closing, func() { cancel(context.Cause(v.e.closing)) })()
	out := newWatched(stream, from)
	defer out.close()
	err := v.e.events.follow(ctx, from, func(of string, ev *dsecv1.Event, next *dsecv1.NodePosition) error {
		if of != project && of != "" || !event.Picks(m.Filter, ev) {
			out.pass(next)
			return nil
		}
		return out.send(&dsecv1.WatchNodeResponse{Event: ev, Next: next})
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// watched is a stream of events, which tells now and then where it is.
type watched struct {
	stream *connect.ServerStream[dsecv1.WatchNodeResponse]

	mu     sync.Mutex
	timer  *time.Timer
	next   *dsecv1.NodePosition
	closed bool
}

func newWatched(stream *connect.ServerStream[dsecv1.WatchNodeResponse], from *dsecv1.NodePosition) *watched {
	w := &watched{stream: stream, next: from}
	w.mu.Lock() // alive may run before AfterFunc has returned
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(attachedAfter, w.alive) // the client is to know that it watches
	return w
}

// pass notes that what is before next is of no use to this watcher.
func (w *watched) pass(next *dsecv1.NodePosition) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = next
}

func (w *watched) send(m *dsecv1.WatchNodeResponse) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = m.Next
	w.timer.Reset(keepalive)
	return w.stream.Send(m)
}

func (w *watched) alive() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		_ = w.stream.Send(&dsecv1.WatchNodeResponse{Next: w.next}) // who is gone is told of by the context
		w.timer.Reset(keepalive)
	}
}

func (w *watched) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.timer.Stop()
}
