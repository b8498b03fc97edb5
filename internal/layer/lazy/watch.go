package lazy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A layerd that lives and does not answer, because it is stopped or stuck, would
// have its readers wait for ever. It is asked whether it is there, by a call that
// takes the locks which others need. The time without an answer is counted in calls:
// where the machine has no time for this process either, it does not pass.
const (
	pingEvery = 5 * time.Second
	hungAfter = 4                     // times of pingEvery without an answer: what it serves is degraded
	killAfter = 12                    // it is killed, and another takes over; before the kernel's requestTimeout
	greetFor  = killAfter * pingEvery // a greeting may take so long
)

// watch asks the layerd of a connection until that ends, and looks after images that
// were left.
func (c *Client) watch(ctx context.Context, conn *connection) {
	var looking sync.WaitGroup
	defer looking.Wait()
	var busy atomic.Bool
	ticks := c.cfg.ticks
	if ticks == nil {
		t := time.NewTicker(pingEvery)
		defer t.Stop()
		ticks = t.C
	}
	pong, silent := c.ping(conn), 0
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-pong:
			if errors.Is(a.err, errCut) {
				return
			}
			if pong = nil; silent >= hungAfter {
				c.log.Warn("layerd answers again")
				c.answers()
			}
			silent = 0
		case <-ticks:
			if busy.CompareAndSwap(false, true) {
				looking.Go(func() { c.leave(ctx); busy.Store(false) })
			}
			if pong == nil {
				pong = c.ping(conn)
				continue
			}
			switch silent++; silent {
			case hungAfter:
				c.log.Error("layerd does not answer", "for", time.Duration(silent)*pingEvery)
				c.hung(fmt.Sprintf("layerd, which reads it, has not answered for %s", time.Duration(silent)*pingEvery))
			case killAfter:
				c.log.Error("layerd is killed: it does not answer", "for", time.Duration(silent)*pingEvery)
				if err := conn.killPeer(); err != nil {
					c.log.Error("layerd cannot be killed", "error", err)
				}
				conn.close() // also where a thread of it is stuck, and it with that
			}
		}
	}
}

// ping asks once. The answer comes over the channel.
func (c *Client) ping(conn *connection) <-chan answer {
	p := &pending{answer: make(chan answer, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != conn {
		p.answer <- answer{err: errCut}
		return p.answer
	}
	c.next++
	id := c.next
	c.pending[id] = p
	// It waits as long as nobody reads at the other end, or the connection ends.
	go func() { _ = conn.send(&message{ID: id, Ping: true}) }()
	return p.answer
}

// killPeer kills the process at the other end.
func (c *connection) killPeer() error {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return err
	}
	pidfd := -1
	var perr error
	if err := raw.Control(func(fd uintptr) {
		if pidfd, perr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); perr == nil {
			return
		}
		var cred *unix.Ucred // before Linux 6.5
		if cred, perr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); perr == nil {
			pidfd, perr = unix.PidfdOpen(int(cred.Pid), 0)
		}
	}); err != nil {
		return err
	}
	if perr != nil {
		return perr
	}
	defer unix.Close(pidfd)
	return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
}

// bounded ends a greeting that is not answered, and the layerd that does not, by
// closing the connection. The caller calls stop when it is.
func (c *Client) bounded(ctx context.Context, conn *connection) (stop func()) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.greetFor)
	unhook := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			c.log.Error("layerd is killed: it does not answer a greeting", "for", c.cfg.greetFor)
			if err := conn.killPeer(); err != nil {
				c.log.Error("layerd cannot be killed", "error", err)
			}
		}
		conn.close()
	})
	return func() { unhook(); cancel() }
}

// told notes what an event says of an image's reads, and passes it on.
func (c *Client) told(e Event) {
	c.mu.Lock()
	switch e.Kind {
	case EventDegraded:
		c.failing[e.Key] = e.Reason
	case EventRecovered:
		delete(c.failing, e.Key)
	}
	c.mu.Unlock()
	c.emit(e)
}

// hung tells that no image that is in use can be read.
func (c *Client) hung(reason string) {
	keys := c.Served()
	c.mu.Lock()
	c.silent = keys
	c.mu.Unlock()
	for _, key := range keys {
		c.emit(Event{Kind: EventDegraded, Key: key, Reason: reason})
	}
}

// answers takes back what hung told.
func (c *Client) answers() {
	c.mu.Lock()
	keys := c.silent
	c.silent = nil
	c.mu.Unlock()
	for _, key := range keys {
		c.mu.Lock()
		reason := c.failing[key]
		c.mu.Unlock()
		if reason != "" {
			c.emit(Event{Kind: EventDegraded, Key: key, Reason: reason})
		} else {
			c.emit(Event{Kind: EventRecovered, Key: key})
		}
	}
}

// begun tells, after a layerd took the place of another, that nothing is known to
// fail: of what the other had failed to read it knows nothing.
func (c *Client) begun() {
	c.mu.Lock()
	for key := range c.failing {
		if !slices.Contains(c.silent, key) {
			c.silent = append(c.silent, key)
		}
	}
	clear(c.failing)
	c.mu.Unlock()
	c.answers()
	c.emit(Event{Kind: EventRestarted})
}

// Served are the keys of images that were opened and not released.
func (c *Client) Served() (keys []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, h := range c.held {
		if h.InUse {
			keys = append(keys, key)
		}
	}
	return keys
}
