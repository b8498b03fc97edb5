package apiserver

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/event"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

const (
	// maxCursor bounds a cursor, maxFilter each list of a filter.
	maxCursor = 256 << 10
	maxFilter = 1000
	// watchAgain is how long after its end a node's stream is asked for again.
	watchAgain = time.Second
	// clockSlack is by how much the clocks of nodes may be apart.
	clockSlack = 10 * time.Second
	// watchAlive is how long a watcher hears nothing.
	watchAlive = 15 * time.Second
)

type eventService struct{ s *Server }

// WatchEvents streams what happens to the project's sandboxes and jobs.
func (v eventService) WatchEvents(ctx context.Context, req *connect.Request[dsecv1.WatchEventsRequest], out *connect.ServerStream[dsecv1.WatchEventsResponse]) error {
	m := req.Msg
	if err := checkFilter("filter.", m.Filter); err != nil {
		return err
	}
	cursor, err := parseCursor(m.Cursor)
	if err != nil {
		return err
	}
	if cursor != nil && m.FromStart {
		return dsec.Invalid("from_start", "want it without a cursor only")
	}
	return v.s.watchEvents(ctx, cursor, m.FromStart, m.Filter, func(e *dsecv1.Event, at *dsecv1.EventCursor) error {
		text, err := encodeCursor(at)
		if err != nil {
			return err
		}
		return out.Send(&dsecv1.WatchEventsResponse{Event: e, Cursor: text})
	})
}

func encodeCursor(at *dsecv1.EventCursor) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(at)
	return base64.RawURLEncoding.EncodeToString(b), err
}

// parseCursor reads a cursor; nil is none.
func parseCursor(text string) (*dsecv1.EventCursor, error) {
	if text == "" {
		return nil, nil
	}
	wrong := dsec.Invalid("cursor", "want one that a response had")
	if len(text) > maxCursor {
		return nil, wrong
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	c := new(dsecv1.EventCursor)
	if err != nil || (proto.UnmarshalOptions{DiscardUnknown: false}).Unmarshal(b, c) != nil || c.Jobs < 0 || c.Began != nil && c.Began.CheckValid() != nil || len(c.ProtoReflect().GetUnknown()) > 0 {
		return nil, wrong
	}
	for node, p := range c.Nodes {
		if _, err := dsec.ParseSandboxID(p.GetLog()); err != nil || !strings.HasPrefix(p.GetLog(), node) || p.GetSeq() == 0 {
			return nil, wrong
		}
	}
	return c, nil
}

func checkFilter(path string, f *dsecv1.EventFilter) error {
	for i, k := range f.GetKinds() {
		if k != event.Sandbox && k != event.Job {
			return dsec.Invalid(fmt.Sprintf("%skinds[%d]", path, i), "want %s or %s", event.Sandbox, event.Job)
		}
	}
	for i, id := range f.GetSandboxIds() {
		if _, err := dsec.ParseSandboxID(id); err != nil {
			return dsec.Invalid(fmt.Sprintf("%ssandbox_ids[%d]", path, i), "want the ID of a sandbox")
		}
	}
	for field, n := range map[string]int{"kinds": len(f.GetKinds()), "sandbox_ids": len(f.GetSandboxIds()), "labels": len(f.GetLabels()), "states": len(f.GetStates())} {
		if n > maxFilter {
			return dsec.Invalid(path+field, "want at most %d, got %d", maxFilter, n)
		}
	}
	return nil
}

// watch is one watcher's view of all nodes and jobs.
type watch struct {
	s      *Server
	filter *dsecv1.EventFilter
	start  bool // where there is no position: from the oldest event on

	events chan told
	cursor *dsecv1.EventCursor // of run's goroutine
}

// told is an event, or nothing, with what it does to the cursor.
type told struct {
	event *dsecv1.Event
	move  func(*dsecv1.EventCursor)
}

// watchEvents calls emit for each event of ctx's project, with the cursor behind it, and
// without one now and then. It ends with ctx, the server or emit's error. A cursor of nil is from
// now on, or with start from the oldest event.
func (s *Server) watchEvents(ctx context.Context, cursor *dsecv1.EventCursor, start bool, filter *dsecv1.EventFilter, emit func(*dsecv1.Event, *dsecv1.EventCursor) error) error {
	// Nothing else of the caller's call goes along: its answer is sent by this goroutine alone.
	caller := ctx
	ctx, cancel := context.WithCancelCause(context.WithValue(s.stopping, principalKey{}, principal(caller)))
	defer context.AfterFunc(caller, func() { cancel(context.Cause(caller)) })()
	w := &watch{s: s, filter: filter, start: start || cursor != nil, events: make(chan told)}
	if cursor == nil {
		cursor = &dsecv1.EventCursor{}
		if !start {
			rev, err := s.jobs.store.Revision(ctx)
			if err != nil {
				return err
			}
			cursor.Jobs, cursor.Began = rev+1, timestamppb.Now()
		}
	}
	w.cursor = proto.CloneOf(cursor)
	if w.cursor.Nodes == nil {
		w.cursor.Nodes = map[string]*dsecv1.NodePosition{}
	}
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel(nil)
	first := new(sync.WaitGroup)
	known := w.beginNodes(ctx, &work, first, map[string]bool{})
	if w.wants(event.Job) {
		from := w.cursor.Jobs
		work.Go(func() { w.jobs(ctx, from) })
	}
	ready := make(chan struct{})
	work.Go(func() { first.Wait(); close(ready) })
	return w.run(ctx, &work, known, ready, emit)
}

var errStopping = dsec.Restarting("the server shuts down: go on from the last cursor")

// run passes on what comes, until something ends it.
func (w *watch) run(ctx context.Context, work *sync.WaitGroup, known map[string]bool, ready chan struct{}, emit func(*dsecv1.Event, *dsecv1.EventCursor) error) error {
	alive, look := time.NewTimer(watchAlive), time.NewTicker(watchAgain)
	defer alive.Stop()
	defer look.Stop()
	for {
		var event *dsecv1.Event
		select {
		case t := <-w.events:
			if t.move != nil {
				t.move(w.cursor)
			}
			if event = t.event; event == nil {
				continue
			}
		case <-ready: // it is known of all nodes from where on they tell
			ready = nil
		case <-alive.C:
		case <-look.C:
			w.beginNodes(ctx, work, nil, known)
			continue
		case <-ctx.Done():
			if w.s.stopping.Err() != nil {
				return errStopping
			}
			return context.Cause(ctx)
		}
		alive.Reset(watchAlive)
		if err := emit(event, w.cursor); err != nil {
			return err
		}
	}
}

func (w *watch) wants(kind string) bool {
	return len(w.filter.GetKinds()) == 0 || slices.Contains(w.filter.Kinds, kind)
}

// beginNodes begins to follow the nodes that are not known yet. first, where it is not nil, waits
// until each has answered, or cannot be reached.
func (w *watch) beginNodes(ctx context.Context, work, first *sync.WaitGroup, known map[string]bool) map[string]bool {
	if !w.wants(event.Sandbox) {
		return known
	}
	for _, edge := range w.s.edges.Edges() {
		id := string(edge.ID())
		if known[id] {
			continue
		}
		known[id] = true
		answered := func() {}
		if first != nil {
			first.Add(1)
			answered = sync.OnceFunc(first.Done)
		}
		at, began := w.cursor.Nodes[id], w.cursor.Began
		// One that came later is told of from its start.
		start := w.start || first == nil
		work.Go(func() { defer answered(); w.node(ctx, edge, at, start, began, answered) })
	}
	return known
}

// node follows one node, and again when that ends. Of one that was not there when the watch began it
// tells what happened since.
func (w *watch) node(ctx context.Context, edge *watcher.Edge, at *dsecv1.NodePosition, start bool, began *timestamppb.Timestamp, answered func()) {
	id, reachable := string(edge.ID()), true
	var since *timestamppb.Timestamp
	if start && at == nil {
		since = began
	}
	for {
		err := relay(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.WatchNode, &dsecv1.WatchNodeRequest{From: at, FromStart: start, Filter: w.filter}, func(m *dsecv1.WatchNodeResponse) error {
			if !reachable {
				reachable = true
				if err := w.tell(ctx, nodeEvent(event.Reachable, id, ""), nil); err != nil {
					return err
				}
			}
			var move func(*dsecv1.EventCursor)
			if m.Next != nil { // else it goes on from the start
				at, since = m.Next, skipOlder(m, since)
				move = func(c *dsecv1.EventCursor) { c.Nodes[id] = m.Next }
			}
			err := w.tell(ctx, m.Event, move)
			answered()
			return err
		})
		answered()
		if ctx.Err() != nil {
			return
		}
		if !start && at == nil {
			start, since = true, began
		}
		if reachable {
			reachable = false
			if w.tell(ctx, nodeEvent(event.Unreachable, id, reasonOf(err)), nil) != nil {
				return
			}
		}
		select {
		case <-time.After(watchAgain):
		case <-ctx.Done():
			return
		}
	}
}

// skipOlder takes an event out that is older than a time, and returns that until one is not.
func skipOlder(m *dsecv1.WatchNodeResponse, since *timestamppb.Timestamp) *timestamppb.Timestamp {
	if since == nil || m.Event.GetKind() != event.Sandbox {
		return since
	}
	if !m.Event.Time.AsTime().Before(since.AsTime().Add(-clockSlack)) {
		return nil
	}
	m.Event = nil
	return since
}

func reasonOf(err error) string {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e.Message
	}
	return "it ended the stream"
}

func nodeEvent(kind, node, reason string) *dsecv1.Event {
	now := time.Now()
	return &dsecv1.Event{Kind: kind, Id: fmt.Sprintf("%s-%s-%d", kind, node, now.UnixNano()), Node: node, Reason: reason, Time: timestamppb.New(now)}
}

// tell hands over an event.
func (w *watch) tell(ctx context.Context, e *dsecv1.Event, move func(*dsecv1.EventCursor)) error {
	select {
	case w.events <- told{e, move}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// jobs follows the project's jobs.
func (w *watch) jobs(ctx context.Context, from int64) {
	project := principal(ctx).Project
	for {
		if from == 0 { // from the start: as they are now
			now, err := w.jobsNow(ctx, project)
			if err == nil {
				from = now
			}
		}
		var err error
		if from > 0 {
			err = store.Watch(ctx, w.s.jobs.store, jobPrefix+project+"/", from, func(changes []store.Change[job], next int64) error {
				for _, c := range changes {
					if e := jobEvent(c); e != nil && event.Picks(w.filter, e) {
						if err := w.tell(ctx, e, func(at *dsecv1.EventCursor) { at.Jobs = c.Revision + 1 }); err != nil {
							return err
						}
					}
				}
				from = next
				return w.tell(ctx, nil, func(at *dsecv1.EventCursor) { at.Jobs = next })
			})
		}
		if errors.Is(err, store.ErrCompacted) {
			from = 0
			err = w.tell(ctx, nodeEvent(event.Gap, "", "changes of jobs are kept no more: here is how they are"), nil)
		}
		if err != nil && ctx.Err() == nil {
			w.s.log.Warn("watching jobs is begun again", "err", err)
		}
		select {
		case <-time.After(watchAgain):
		case <-ctx.Done():
			return
		}
	}
}

// jobsNow tells of all jobs, and returns the revision behind that.
func (w *watch) jobsNow(ctx context.Context, project string) (next int64, err error) {
	rev, err := w.s.jobs.store.Revision(ctx)
	if err == nil {
		err = w.s.jobs.docs.Wait(ctx, rev)
	}
	if err != nil {
		return 0, err
	}
	next = w.s.jobs.docs.Revision() + 1
	all := w.s.jobs.list(project, func(job) bool { return true })
	for _, name := range slices.Sorted(maps.Keys(all)) {
		j := all[name]
		e := jobEvent(store.Change[job]{Key: name, New: &j})
		e.Repeated = true
		if event.Picks(w.filter, e) {
			if err := w.tell(ctx, e, nil); err != nil {
				return 0, err
			}
		}
	}
	return next, w.tell(ctx, nil, func(at *dsecv1.EventCursor) { at.Jobs = next })
}

// jobEvent is the event of a change of a job's document; nil where its state stays. Its ID is of the
// state and not of the change: it is the same where jobs are told as they are.
func jobEvent(c store.Change[job]) *dsecv1.Event {
	if c.New == nil || c.Old != nil && c.Old.State == c.New.State {
		return nil
	}
	return &dsecv1.Event{Kind: event.Job, Id: fmt.Sprintf("jobs-%d-%s", c.New.Changed.UnixNano(), c.Key), Job: c.Key, Labels: c.New.Labels, State: c.New.State, Time: timestamppb.New(c.New.Changed)}
}
