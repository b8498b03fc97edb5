package edge

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
)

// WithClock makes an edge run on another clock than the host's.
func WithClock(c Config, clock func() time.Duration) Config {
	c.clock = clock
	return c
}

// WithMemory makes an edge believe that the node can give so much memory.
func WithMemory(c Config, available func() (int64, error)) Config {
	c.availableMemory = available
	return c
}

// WithSettling makes an edge try to settle lost layers more often.
func WithSettling(c Config, every time.Duration) Config {
	c.settleEvery = every
	return c
}

// WithTexts makes an edge hold less of records and output.
func WithTexts(c Config, live, ended int, held int64, page int) Config {
	c.texts = textBounds{live, ended, held, page}
	return c
}

// Calls is how many requests are in progress.
func (e *Edge) Calls() int64 { return e.calls.Load() }

// WaitState waits until a sandbox is in a state.
func (e *Edge) WaitState(ctx context.Context, id dsec.SandboxID, want dsec.State) error {
	e.mu.RLock()
	s := e.sandboxes[id]
	e.mu.RUnlock()
	for {
		s.mu.Lock()
		state, reason, changed := s.state, s.reason, s.waiter()
		s.mu.Unlock()
		if state == want {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("it is %s (%s)", state, reason)
		}
	}
}

// Live is how many sandboxes hold objects.
func (e *Edge) Live() int {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.live
}

// SetEvents bounds the events of a stretch.
func SetEvents(c *Config, most uint64) { c.events = most }
