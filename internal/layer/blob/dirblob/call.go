package dirblob

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
)

const (
	callTimeout = 30 * time.Second // of a system call or a few
	syncTimeout = 10 * time.Minute // of one that waits for all that was written
	maxCalls    = 128              // at once, each of which may hold a thread
	maxStuck    = 32               // of these that nobody waits for any more
)

// calls bounds the system calls that a store is waiting for. One on a file system
// whose server is gone may never return: its caller leaves it behind.
type calls struct {
	timeout time.Duration
	slots   chan struct{}
	stuck   atomic.Int64
}

func newCalls(timeout time.Duration) calls {
	return calls{timeout: timeout, slots: make(chan struct{}, maxCalls)}
}

var errStuck = &dsec.Error{Code: dsec.CodeUnavailable, Message: "blob store: its file system does not answer"}

// call runs f, and waits for it until ctx ends or the timeout has passed; what f
// uses must be its own, because it may go on. What it returns too late goes to drop.
func call[T any](ctx context.Context, c *calls, timeout time.Duration, f func() (T, error), drop func(T)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	if c.stuck.Load() >= maxStuck {
		return none, errStuck
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return none, ctx.Err()
	case <-timer.C:
		return none, errStuck
	}
	type result struct {
		v   T
		err error
	}
	const waiting, returned, left = 0, 1, 2
	var state atomic.Int32
	done := make(chan result, 1)
	go func() {
		v, err := f()
		<-c.slots
		if state.CompareAndSwap(waiting, returned) {
			done <- result{v, err}
			return
		}
		c.stuck.Add(-1)
		if drop != nil {
			drop(v)
		}
	}()
	var err error
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		err = errStuck
	}
	c.stuck.Add(1)
	if state.CompareAndSwap(waiting, left) {
		return none, err
	}
	c.stuck.Add(-1)
	r := <-done
	return r.v, r.err
}

// end takes all slots, so that no call follows. It is false where some are in use.
func (c *calls) end() bool {
	c.stuck.Store(2 * maxCalls) // so that calls fail at once
	for range maxCalls {
		select {
		case c.slots <- struct{}{}:
		default:
			return false
		}
	}
	return true
}

// idle is an error while calls have not returned.
func (c *calls) idle() error {
	if n := len(c.slots); n > 0 {
		return fmt.Errorf("%d calls have not returned, %d of them left behind", n, c.stuck.Load())
	}
	return nil
}

// leftBehind reports whether err is that of a call which may still be running.
func leftBehind(err error) bool {
	return errors.Is(err, errStuck) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
