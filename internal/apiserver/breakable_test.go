package apiserver

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/opendsec/dsec/internal/watcher"
)

// newBreakable is an apiserver before one edge, whose connections breaks breaks.
func newBreakable(t *testing.T, e *stubEdge, breaks *func()) *rig {
	t.Helper()
	var mu sync.Mutex
	var conns []net.Conn
	*breaks = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			_ = c.Close()
		}
		conns = nil
	}
	to := e.endpoint(t)
	return newRigOver(t, []watcher.Endpoint{{Name: to.Name, Dial: func(ctx context.Context) (net.Conn, error) {
		c, err := to.Dial(ctx)
		if err == nil {
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, c)
		}
		return c, err
	}}})
}
