package container

import (
	"context"
	"sync/atomic"
	"time"
)

// calls counts the creates in progress. To make a shell takes as long as a
// claim takes several times, of the same processors.
type calls struct {
	active atomic.Int64
	last   atomic.Int64 // when the last one ended, in ns of the monotonic clock
}

// Background work starts once no create was in progress for quiet, the time in
// which a caller sends its first command; never later than after busy, so that
// a stream of creates finds a pool, too.
const (
	quiet = 5 * time.Millisecond
	busy  = 50 * time.Millisecond
)

var started = time.Now()

func (c *calls) begin() { c.active.Add(1) }

func (c *calls) end() {
	c.last.Store(int64(time.Since(started)))
	c.active.Add(-1)
}

func (c *calls) awaitQuiet(ctx context.Context) {
	deadline := time.Since(started) + busy
	for {
		now := time.Since(started)
		wait := quiet
		if c.active.Load() == 0 {
			wait = time.Duration(c.last.Load()) + quiet - now
		}
		if wait = min(wait, deadline-now); wait <= 0 || c.last.Load() == 0 && c.active.Load() == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
