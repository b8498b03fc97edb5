package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// How long the end of killed processes takes is the machine's matter: thousands of
// them on two busy CPUs take minutes. So it is waited for as long as it goes on,
// and one that stands still, as in a file system that does not answer, is told.

const (
	// stallTime is how long nothing may go on.
	stallTime = 30 * time.Second
	// stallEvery is how often it is looked whether something does.
	stallEvery = time.Second
)

// ErrStalled is the cause of the end of a context of Ending.
var ErrStalled = errors.New("killed processes have not ended, and wait for the same as before")

// Ending returns a context for waiting until the killed processes of the group
// have ended. It ends with ctx, or with ErrStalled once nothing has gone on among
// them for 30 s. The caller calls what it returns.
func (g *Group) Ending(ctx context.Context) (context.Context, context.CancelFunc) {
	return g.tree.ending(ctx, g.name)
}

func (t *Tree) ending(ctx context.Context, name string) (context.Context, context.CancelFunc) {
	return whileProgress(ctx, progress{
		// The end of a process takes CPU time, and that is the group's: v2 counts it
		// wherever the controllers are.
		used: func() string {
			usec, err := readKey(t.v2, name+"/cpu.stat", "usage_usec")
			return fmt.Sprint(usec, err)
		},
		waits: func() (string, bool) { return tasksOf(name) },
	})
}

// progress is how it is told whether something goes on.
type progress struct {
	// used tells another thing than before where something did. It costs little.
	used func() string
	// waits tells what the processes wait for, and whether one of them does not:
	// it only gets no CPU time. One may wait for what other threads of the kernel do,
	// and then for the next. This is asked where used has told the same for long.
	waits func() (what string, runs bool)
}

// whileProgress returns a context that ends with ctx, or with ErrStalled where
// nothing went on for stallTime.
func whileProgress(ctx context.Context, p progress) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	s := stall{progress: p, since: time.Now()}
	var timer *time.Timer
	ready := make(chan struct{})
	timer = time.AfterFunc(stallEvery, func() {
		<-ready
		switch {
		case ctx.Err() != nil:
		case s.over(time.Now()):
			cancel(ErrStalled)
		default:
			timer.Reset(stallEvery)
		}
	})
	close(ready) // timer is set
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}

// stall is since when nothing went on.
type stall struct {
	progress
	since  time.Time
	last   string
	asked  bool // what is waited for, in the middle of that time
	waited string
}

// over reports whether that is too long.
func (s *stall) over(now time.Time) bool {
	if used := s.used(); used != s.last {
		s.last, s.since, s.asked = used, now, false
		return false
	}
	quiet := now.Sub(s.since)
	if quiet < stallTime/2 || s.asked && quiet < stallTime {
		return false
	}
	what, runs := s.waits()
	switch {
	case runs, s.asked && what != s.waited:
		s.since, s.asked = now, false
	case !s.asked:
		s.waited, s.asked = what, true
	default:
		return true
	}
	return false
}

// tasksOf tells of each thread of a group's processes what it waits for, and
// whether one of them does not wait. Those that have begun to end are in none of
// the lists of the group, but still of it.
func tasksOf(name string) (what string, runs bool) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err.Error(), false
	}
	var all strings.Builder
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		dir := "/proc/" + e.Name()
		groups, err := os.ReadFile(dir + "/cgroup")
		if err != nil || !strings.Contains(string(groups), "/"+name) {
			continue
		}
		tasks, _ := os.ReadDir(dir + "/task")
		for _, task := range tasks {
			stat, err := os.ReadFile(dir + "/task/" + task.Name() + "/stat")
			// The name, in parentheses, may hold anything.
			end := strings.LastIndexByte(string(stat), ')')
			if err != nil || end+2 >= len(stat) {
				continue
			}
			state := stat[end+2]
			runs = runs || state == 'R'
			wchan, _ := os.ReadFile(dir + "/task/" + task.Name() + "/wchan")
			fmt.Fprintf(&all, "%s %c %s\n", task.Name(), state, wchan)
		}
	}
	return all.String(), runs
}
