package layer

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
)

// tasks is what a store does whether or not a caller waits for it, until it is closed.
type tasks struct {
	ctx  context.Context //nolint:containedctx // of the goroutines, until close
	end  context.CancelFunc
	mu   sync.Mutex // so that none begins after close
	runs sync.WaitGroup
}

func newTasks() *tasks {
	t := new(tasks)
	t.ctx, t.end = context.WithCancel(context.Background())
	return t
}

var errClosed = dsec.Errorf(dsec.CodeUnavailable, "the layer store is closed")

// begin counts one in, who says Done of runs at its end. It is false where the store
// is closed.
func (t *tasks) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ctx.Err() != nil {
		return false
	}
	t.runs.Add(1)
	return true
}

// close ends all, and returns when they have ended.
func (t *tasks) close() {
	t.mu.Lock()
	t.end()
	t.mu.Unlock()
	t.runs.Wait()
}
