package edge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
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

// Held is how many bytes of output are held.
func (e *Edge) Held() int64 {
	e.output.mu.Lock()
	defer e.output.mu.Unlock()
	return e.output.total
}

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

// Starve has what serves the files of a sandbox be killed for want of memory by the next
// calls.
func (e *Edge) Starve(id dsec.SandboxID) {
	e.mu.RLock()
	s := e.sandboxes[id]
	e.mu.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instance = &starved{Instance: s.instance}
	s.client = nil
}

type starved struct{ backend.Instance }

func (*starved) DialFiles(context.Context) (net.Conn, error) {
	client, server := net.Pipe()
	go func() {
		_, err := server.Read(make([]byte, 64<<10)) // a request
		_ = errors.Join(err, server.Close())
	}()
	return client, nil
}

func (*starved) FilesStarved(time.Time) bool { return true }
