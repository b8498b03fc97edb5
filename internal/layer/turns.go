package layer

import (
	"context"
	"slices"
	"sync"
)

// turns has no more than so many builds run at once. Those that wait get their turn
// by their projects, one after another: who has many waits for them alone.
type turns struct {
	mu      sync.Mutex
	free    int
	waiting map[string][]chan struct{} // of each project in the order in which they came
	order   []string                   // projects that wait, the next one first
}

func newTurns(most int) *turns { return &turns{free: most, waiting: map[string][]chan struct{}{}} }

// take waits for a turn until ctx ends, and reports whether there is one, which is
// then to be given back.
func (t *turns) take(ctx context.Context, project string) bool {
	t.mu.Lock()
	if t.free > 0 {
		t.free--
		t.mu.Unlock()
		return true
	}
	turn := make(chan struct{}, 1)
	if len(t.waiting[project]) == 0 {
		t.order = append(t.order, project)
	}
	t.waiting[project] = append(t.waiting[project], turn)
	t.mu.Unlock()
	select {
	case <-turn:
		return true
	case <-ctx.Done():
	}
	t.mu.Lock()
	select {
	case <-turn: // it came at the last moment
		t.mu.Unlock()
		t.give()
		return false
	default:
	}
	defer t.mu.Unlock()
	t.forget(project, turn)
	return false
}

// give gives a turn back, to who is next.
func (t *turns) give() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.order) == 0 {
		t.free++
		return
	}
	project := t.order[0]
	turn := t.waiting[project][0]
	t.forget(project, turn)
	if len(t.waiting[project]) > 0 { // behind the others
		t.order = append(t.order[1:], project)
	}
	turn <- struct{}{}
}

// forget takes one that waits out. The caller holds mu.
func (t *turns) forget(project string, turn chan struct{}) {
	t.waiting[project] = slices.DeleteFunc(t.waiting[project], func(c chan struct{}) bool { return c == turn })
	if len(t.waiting[project]) == 0 {
		delete(t.waiting, project)
		t.order = slices.DeleteFunc(t.order, func(p string) bool { return p == project })
	}
}
