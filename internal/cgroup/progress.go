package cgroup

import (
	"context"
	"errors"
	"fmt"
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
var ErrStalled = errors.New("killed processes have not ended, and use no CPU time")

// Ending returns a context for waiting until the killed processes of the group
// have ended. It ends with ctx, or with ErrStalled once nothing has gone on among
// them for 30 s. The caller calls what it returns.
func (g *Group) Ending(ctx context.Context) (context.Context, context.CancelFunc) {
	return g.tree.ending(ctx, g.name)
}

func (t *Tree) ending(ctx context.Context, name string) (context.Context, context.CancelFunc) {
	return whileProgress(ctx, func() string {
		// The end of a process takes CPU time, and that is the group's: v2 counts it
		// wherever the controllers are.
		usec, err := readKey(t.v2, name+"/cpu.stat", "usage_usec")
		return fmt.Sprint(usec, err)
	})
}

// whileProgress returns a context that ends with ctx, or with ErrStalled once
// progress has told the same for stallTime.
func whileProgress(ctx context.Context, progress func() string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	var timer *time.Timer
	last, since, ready := "", time.Now(), make(chan struct{})
	timer = time.AfterFunc(stallEvery, func() {
		<-ready
		if ctx.Err() != nil {
			return
		}
		now := time.Now()
		if p := progress(); p != last {
			last, since = p, now
		}
		if now.Sub(since) >= stallTime {
			cancel(ErrStalled)
			return
		}
		timer.Reset(stallEvery)
	})
	close(ready) // timer is set
	return ctx, func() {
		timer.Stop()
		cancel(nil)
	}
}
