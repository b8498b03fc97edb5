package lazy

import (
	"context"
	"slices"
	"sync"
)

// mostEvents is how many may wait until those go that others have made void.
const mostEvents = 1024

// eventQueue keeps events for who takes them, who may be slow: who tells of them does
// not wait. What was last said of an image is always told.
type eventQueue struct {
	most int
	more chan struct{} // has one where there may be events

	mu     sync.Mutex
	events []Event
}

func newEventQueue() *eventQueue { return &eventQueue{most: mostEvents, more: make(chan struct{}, 1)} }

// put adds an event. It is false where that, or another in its place, will not be told.
func (q *eventQueue) put(e Event) (all bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if all = len(q.events) < q.most; !all {
		i := slices.IndexFunc(q.events, e.replaces)
		switch {
		case i >= 0:
			q.events = slices.Delete(q.events, i, i+1)
		case e.Kind == EventCorrupt: // a store may have any number of them
			return false
		}
	}
	q.events = append(q.events, e)
	select {
	case q.more <- struct{}{}:
	default:
	}
	return all
}

// replaces reports whether what an earlier event told is void, or told again, by e.
func (e Event) replaces(earlier Event) bool {
	reads := func(k EventKind) bool { return k == EventDegraded || k == EventRecovered }
	return earlier.Key == e.Key && e.Kind != EventCorrupt && (earlier.Kind == e.Kind || reads(earlier.Kind) && reads(e.Kind))
}

// next waits for the next event until ctx ends. It is in the queue until it is taken.
func (q *eventQueue) next(ctx context.Context) (Event, bool) {
	for {
		q.mu.Lock()
		if len(q.events) > 0 && ctx.Err() == nil {
			defer q.mu.Unlock()
			return q.events[0], true
		}
		q.mu.Unlock()
		select {
		case <-q.more:
		case <-ctx.Done():
			return Event{}, false
		}
	}
}

// take removes what next gave, unless that was replaced meanwhile.
func (q *eventQueue) take(e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.events) > 0 && q.events[0] == e {
		q.events = q.events[1:]
	}
}

func (q *eventQueue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.events) == 0
}
