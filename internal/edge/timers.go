package edge

import (
	"container/heap"
	"sync"
	"time"
)

// timers wake sandboxes at times of the boot clock: one heap and one goroutine
// for all. A sandbox has at most one entry, which may be early: whoever is
// woken looks what is due, and tells when it wants to be woken next. So
// activity, which only moves a time further away, does not touch the heap.
type timers struct {
	clock func() time.Duration
	fire  func(*sandbox, time.Duration) (next time.Duration)

	mu    sync.Mutex
	heap  timerHeap
	wake  chan struct{}
	quit  chan struct{}
	ended chan struct{}
}

// maxSleep bounds how late a timer is after a suspend, which the runtime's
// clock does not count.
const maxSleep = time.Minute

func newTimers(clock func() time.Duration, fire func(*sandbox, time.Duration) time.Duration) *timers {
	t := &timers{clock: clock, fire: fire, wake: make(chan struct{}, 1), quit: make(chan struct{}), ended: make(chan struct{})}
	go t.loop()
	return t
}

func (t *timers) stop() {
	close(t.quit)
	<-t.ended
}

// schedule has s woken at the given time or before.
func (t *timers) schedule(s *sandbox, at time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case s.timerIndex == 0:
		s.timerAt = at
		heap.Push(&t.heap, s)
	case at < s.timerAt:
		s.timerAt = at
		heap.Fix(&t.heap, s.timerIndex-1)
	default:
		return
	}
	if t.heap[0] == s {
		select {
		case t.wake <- struct{}{}:
		default:
		}
	}
}

// remove forgets s.
func (t *timers) remove(s *sandbox) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.timerIndex != 0 {
		heap.Remove(&t.heap, s.timerIndex-1)
	}
}

func (t *timers) loop() {
	defer close(t.ended)
	timer := time.NewTimer(maxSleep)
	defer timer.Stop()
	for {
		timer.Reset(min(maxSleep, t.expire()))
		select {
		case <-timer.C:
		case <-t.wake:
		case <-t.quit:
			return
		}
	}
}

// expire wakes all whose time has come and returns how long the next one has.
func (t *timers) expire() time.Duration {
	for {
		now := t.clock()
		t.mu.Lock()
		if len(t.heap) == 0 {
			t.mu.Unlock()
			return maxSleep
		}
		s := t.heap[0]
		if wait := s.timerAt - now; wait > 0 {
			t.mu.Unlock()
			return wait
		}
		heap.Pop(&t.heap)
		t.mu.Unlock()
		if next := t.fire(s, now); next > 0 {
			t.schedule(s, next)
		}
	}
}

// timerHeap is ordered by time. An entry's index is its place plus one, so
// that the zero value of a sandbox is in no heap.
type timerHeap []*sandbox

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].timerAt < h[j].timerAt }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].timerIndex, h[j].timerIndex = i+1, j+1
}

func (h *timerHeap) Push(x any) {
	s := x.(*sandbox)
	*h = append(*h, s)
	s.timerIndex = len(*h)
}

func (h *timerHeap) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	s.timerIndex = 0
	return s
}
