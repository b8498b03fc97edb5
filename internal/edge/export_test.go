package edge

import "time"

// WithClock makes an edge run on another clock than the host's.
func WithClock(c Config, clock func() time.Duration) Config {
	c.clock = clock
	return c
}

// Calls is how many requests are in progress.
func (e *Edge) Calls() int64 { return e.calls.Load() }

// Live is how many sandboxes hold objects.
func (e *Edge) Live() int {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.live
}
