package container

import (
	"sync"
	"time"
)

// closer closes detached mounts that nothing needs any more. The kernel waits
// for an RCU grace period at each, and so would a create; and for as long as a
// thread waits in the kernel, the runtime looks every 20 us whether it has come
// back. So many are closed at once.
type closer struct {
	mu      sync.Mutex
	fds     []int
	pending *time.Timer // set while fds wait
	running sync.WaitGroup
}

const (
	closeEvery = 100 * time.Millisecond
	maxToClose = 128 // descriptors are bounded
)

// later takes over the descriptors.
func (c *closer) later(fds ...int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fds = append(c.fds, fds...)
	switch {
	case len(c.fds) >= maxToClose:
		c.run()
	case c.pending == nil && len(c.fds) > 0:
		c.pending = time.AfterFunc(closeEvery, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.run()
		})
	}
}

// run closes what waits. It is called with the lock.
func (c *closer) run() {
	if c.pending != nil {
		c.pending.Stop()
		c.pending = nil
	}
	fds := c.fds
	c.fds = nil
	c.running.Go(func() { closeAll(fds) })
}

// close closes all that waits, and returns once that is done.
func (c *closer) close() {
	c.mu.Lock()
	c.run()
	c.mu.Unlock()
	c.running.Wait()
}
