package container

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// pool holds shells ready, counting the one that is being made, so that it
// never makes more than it was asked for. It makes one at a time: a create
// that finds it empty makes its own and does not wait.
type pool struct {
	b     *Backend
	ready chan *shell // one more waits to be sent
	want  int
	count atomic.Int64 // shells ready
	calls calls        // of callers, which the pool gives way to

	once   sync.Once
	cancel context.CancelFunc
	done   chan struct{} // closed when nothing is being made any more
}

func newPool(b *Backend, want int) *pool {
	return &pool{b: b, want: want, ready: make(chan *shell, max(want-1, 0)), done: make(chan struct{})}
}

// start begins to fill the pool. Only the first call counts.
func (p *pool) start() {
	p.once.Do(func() {
		ctx, cancel := context.WithCancel(context.Background())
		p.cancel = cancel
		if p.want <= 0 {
			close(p.done)
			return
		}
		go p.fill(ctx)
	})
}

// Pauses after a shell that could not be made: a host on which none can be
// made is told about, not hammered.
const (
	minPause = 100 * time.Millisecond
	maxPause = 30 * time.Second
)

func (p *pool) fill(ctx context.Context) {
	defer close(p.done)
	pause := minPause
	for ctx.Err() == nil {
		p.calls.awaitQuiet(ctx)
		sh, err := p.make(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			p.b.log.Warn("warm pool makes no progress", "err", err, "next", pause)
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, maxPause)
			continue
		}
		pause = minPause
		p.count.Add(1)
		select {
		case p.ready <- sh:
		case <-ctx.Done():
			p.count.Add(-1)
			p.drop(ctx, sh)
		}
	}
}

func (p *pool) make(ctx context.Context) (*shell, error) {
	sh, err := p.b.newShell(ctx)
	if err != nil {
		return nil, err
	}
	if err := sh.await(ctx); err != nil {
		return nil, errors.Join(err, p.b.discard(context.WithoutCancel(ctx), sh))
	}
	sh.warm = true
	return sh, nil
}

// take returns a ready shell, or nil.
func (p *pool) take() *shell {
	for {
		select {
		case sh := <-p.ready:
			p.count.Add(-1)
			select {
			case <-sh.proc.done: // died while it waited
				p.drop(context.Background(), sh)
			default:
				return sh
			}
		default:
			return nil
		}
	}
}

func (p *pool) drop(ctx context.Context, sh *shell) {
	if err := p.b.discard(context.WithoutCancel(ctx), sh); err != nil {
		p.b.log.Warn("warm container is not gone; the next sweep frees it", "err", err)
	}
}

// close stops making shells and destroys those that are left.
func (p *pool) close(ctx context.Context) error {
	p.start() // so that done is closed
	p.cancel()
	<-p.done
	var errs []error
	for {
		select {
		case sh := <-p.ready:
			errs = append(errs, p.b.discard(ctx, sh))
		default:
			return errors.Join(errs...)
		}
	}
}

// Warm is how many shells are ready to be claimed, for metrics.
func (b *Backend) Warm() int { return int(b.pool.count.Load()) }

// discard destroys a shell that nobody claimed.
func (b *Backend) discard(ctx context.Context, sh *shell) error {
	if err := sh.destroy(ctx, b); err != nil {
		return err
	}
	if sh.proc != nil {
		sh.proc.close()
	}
	return b.slots.release(sh.slot)
}

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
