package layer

import (
	"context"
	"slices"
	"sync"
)

// turns has no more than so many builds run at once, and one more of a project that has
// none of these: who has many, or slow ones, keeps others out for no time. Those that
// wait get their turn by their projects, one after another.
type turns struct {
	most int

	mu      sync.Mutex
	total   int                        // of running
	running map[string]int             // of each project
	waiting map[string][]chan struct{} // of each project in the order in which they came
	order   []string                   // projects that wait, the next one first
}

func newTurns(most int) *turns {
	return &turns{most: most, running: map[string]int{}, waiting: map[string][]chan struct{}{}}
}

// take waits for a turn until ctx ends, and reports whether there is one, which is
// then to be given back.
func (t *turns) take(ctx context.Context, project string) bool {
	t.mu.Lock()
	if t.room(project) {
		t.begin(project)
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
		t.give(project)
		return false
	default:
	}
	defer t.mu.Unlock()
	t.forget(project, turn)
	return false
}

// room reports whether a build of a project may begin. The caller holds mu.
func (t *turns) room(project string) bool {
	return t.total < t.most || t.total == t.most && t.running[project] == 0
}

func (t *turns) begin(project string) {
	t.total++
	t.running[project]++
}

// give gives a turn of a project back, to who is next: with the one that is for who has
// none there may be two.
func (t *turns) give(project string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.total--
	if t.running[project]--; t.running[project] == 0 {
		delete(t.running, project)
	}
	for i := slices.IndexFunc(t.order, t.room); i >= 0; i = slices.IndexFunc(t.order, t.room) {
		next := t.order[i]
		turn := t.waiting[next][0]
		t.forget(next, turn)
		if len(t.waiting[next]) > 0 { // behind the others
			t.order = append(slices.Delete(t.order, i, i+1), next)
		}
		t.begin(next)
		turn <- struct{}{}
	}
}

// forget takes one that waits out. The caller holds mu.
func (t *turns) forget(project string, turn chan struct{}) {
	t.waiting[project] = slices.DeleteFunc(t.waiting[project], func(c chan struct{}) bool { return c == turn })
	if len(t.waiting[project]) == 0 {
		delete(t.waiting, project)
		t.order = slices.DeleteFunc(t.order, func(p string) bool { return p == project })
	}
}
