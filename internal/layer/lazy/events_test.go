package lazy

import (
	"context"
	"fmt"
	"testing"

	"github.com/opendsec/dsec/internal/testutil"
)

// Whoever takes events late, or not for long, knows in the end what was last said of
// each image, that it is lost, and that layerd began anew; and no more wait than that.
func TestEventsThatAreTakenLate(t *testing.T) {
	q := newEventQueue()
	q.most = 8
	const images = 50
	key := func(i int) string { return fmt.Sprint("image-", i%images) }
	for n := range 5000 {
		kind := EventDegraded
		if n%3 == 0 {
			kind = EventRecovered
		}
		q.put(Event{Kind: kind, Key: key(n), Reason: fmt.Sprint(n)})
		q.put(Event{Kind: EventCorrupt, Key: key(n), Chunk: int64(n)})
		if n%100 == 0 {
			q.put(Event{Kind: EventLost, Key: key(n / 100)})
			q.put(Event{Kind: EventRestarted})
			q.put(Event{Kind: eventIdle, Key: key(n / 100)})
		}
	}
	const most = 8 + 3*images + 1
	if len(q.events) > most {
		t.Errorf("%d events wait, want at most %d", len(q.events), most)
	}
	ctx, cancel := context.WithCancel(t.Context())
	reads, lost, idle, restarted := map[string]string{}, map[string]bool{}, map[string]bool{}, false
	for len(q.events) > 0 {
		e, ok := q.next(ctx)
		if !ok {
			t.Fatal("no event")
		}
		q.take(e)
		switch e.Kind {
		case EventDegraded, EventRecovered:
			reads[e.Key] = string(e.Kind) + " " + e.Reason
		case EventLost:
			lost[e.Key] = true
		case eventIdle:
			idle[e.Key] = true
		case EventRestarted:
			restarted = true
		}
	}
	for n := 5000 - images; n < 5000; n++ {
		kind := EventDegraded
		if n%3 == 0 {
			kind = EventRecovered
		}
		if want := fmt.Sprint(kind, " ", n); reads[key(n)] != want || !lost[key(n)] || !idle[key(n)] {
			t.Errorf("%s: %q, lost %t, idle %t; want %q", key(n), reads[key(n)], lost[key(n)], idle[key(n)], want)
		}
	}
	if !restarted {
		t.Error("that layerd began anew is not told")
	}
	cancel()
	if e, ok := q.next(ctx); ok {
		t.Errorf("%+v after the end", e)
	}
}

// Nothing is left out, and all comes in order, as long as there is room.
func TestEventsInOrder(t *testing.T) {
	q := newEventQueue()
	var want []Event
	for n := range mostEvents {
		e := Event{Kind: []EventKind{EventDegraded, EventRecovered, EventCorrupt}[n%3], Key: fmt.Sprint(n % 5), Chunk: int64(n)}
		want = append(want, e)
		if !q.put(e) {
			t.Fatalf("event %d is left out", n)
		}
	}
	for n, e := range want {
		got, ok := q.next(t.Context())
		if q.take(got); !ok || got != e {
			t.Fatalf("event %d is %+v, want %+v", n, got, e)
		}
	}
}

// A client whose events nobody takes tells, once somebody does, what is so then.
func TestClientTellsLate(t *testing.T) {
	c := &Client{log: testutil.Logger(t), queue: newEventQueue(), events: make(chan Event, 4)}
	c.queue.most = 4
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); c.tell(ctx) }()
	const images, rounds = 10, 200
	for n := range rounds {
		for i := range images {
			c.emit(Event{Kind: []EventKind{EventDegraded, EventRecovered}[(n+i)%2], Key: fmt.Sprint(i)})
		}
	}
	c.emit(Event{Kind: EventLost, Key: "0"})
	last := map[string]EventKind{}
	for e := range c.Events() {
		if e.Kind == EventLost {
			break
		}
		last[e.Key] = e.Kind
	}
	for i := range images {
		if want := []EventKind{EventDegraded, EventRecovered}[(rounds-1+i)%2]; last[fmt.Sprint(i)] != want {
			t.Errorf("image %d is %q, want %q", i, last[fmt.Sprint(i)], want)
		}
	}
	cancel()
	<-done
}
