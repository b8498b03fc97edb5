package container

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// pool holds containers ready: shells, and spares of the kinds that creates
// asked for lately. It counts the one that is being made, so that there are
// never more than it was asked for, and makes one at a time: a create that
// finds nothing makes its own and does not wait.
type pool struct {
	b     *Backend
	want  int
	calls calls // of callers, which the pool gives way to

	once   sync.Once
	cancel context.CancelFunc
	done   chan struct{}  // closed when nothing is being made any more
	wake   chan struct{}  // something was taken
	drops  sync.WaitGroup // of what was found dead

	mu     sync.Mutex
	shells []*shell
	kinds  []*demand // asked for lately, the last one first
}

// kind is what makes one spare as good as another.
type kind struct {
	layers string // their digests
	limits dsec.Limits
}

// demand is a kind that is asked for, and its spares.
type demand struct {
	kind   kind
	layers []backend.Layer
	asked  int
	last   time.Time
	spares []*instance
}

const (
	// maxKinds bounds the kinds that spares are held of.
	maxKinds = 4
	// hotAfter creates of a kind make it worth a spare; keepSpares is how long
	// they wait for the next one.
	hotAfter   = 2
	keepSpares = time.Minute
)

func newPool(b *Backend, want int) *pool {
	return &pool{b: b, want: want, done: make(chan struct{}), wake: make(chan struct{}, 1)}
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

// Pauses after a container that could not be made: a host on which none can be
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
		step, wait := p.next(time.Now())
		wake := p.wake
		if step != nil {
			if err := step(ctx); err == nil {
				pause = minPause
				continue
			} else if ctx.Err() != nil {
				return
			} else {
				p.b.log.Warn("warm pool makes no progress", "err", err, "next", pause)
				wait, pause, wake = pause, min(2*pause, maxPause), nil
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		case <-wake:
		}
	}
}

// next is what the pool lacks or has too much of, or how long it may be at rest.
func (p *pool) next(now time.Time) (step func(context.Context) error, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hot := p.cool(now)
	perKind, shells := p.split(hot)
	for _, d := range p.kinds {
		if extra := len(d.spares) - perKind; extra > 0 && hot > 0 || len(d.spares) > 0 && !d.hot() {
			i := d.spares[0]
			d.spares = d.spares[1:]
			return func(ctx context.Context) error { p.dropSpare(ctx, i); return nil }, 0
		}
	}
	if len(p.shells) < shells {
		return p.addShell, 0
	}
	for _, d := range p.kinds {
		if d.hot() && len(d.spares) < perKind {
			return func(ctx context.Context) error { return p.addSpare(ctx, d) }, 0
		}
	}
	wait = time.Hour // what is asked for wakes it
	for _, d := range p.kinds {
		wait = min(wait, keepSpares-now.Sub(d.last)+1)
	}
	return nil, wait
}

// cool forgets kinds that were not asked for lately, except their spares, and
// counts those that spares are held of.
func (p *pool) cool(now time.Time) (hot int) {
	for _, d := range p.kinds {
		if now.Sub(d.last) > keepSpares {
			d.asked = 0
		}
	}
	p.kinds = slices.DeleteFunc(p.kinds, func(d *demand) bool { return d.asked == 0 && len(d.spares) == 0 })
	return p.hotKinds()
}

func (d *demand) hot() bool { return d.asked >= hotAfter }

// split divides what is wanted between the kinds and shells, which serve any.
func (p *pool) split(hot int) (perKind, shells int) {
	if hot == 0 {
		return 0, p.want
	}
	perKind = (p.want - p.want/4) / hot
	return perKind, p.want - hot*perKind
}

func (p *pool) addShell(ctx context.Context) error {
	sh, err := p.makeShell(ctx)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.shells = append(p.shells, sh)
	p.mu.Unlock()
	return nil
}

func (p *pool) makeShell(ctx context.Context) (*shell, error) {
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

// addSpare makes a spare, of a shell if there are more than are wanted.
func (p *pool) addSpare(ctx context.Context, d *demand) error {
	i := p.b.newInstance(dsec.NewSandboxID(spareEdge), d.kind.limits, d.layers)
	p.mu.Lock()
	_, shells := p.split(p.hotKinds())
	if len(p.shells) > shells {
		i.sh = p.popShell()
	}
	p.mu.Unlock()
	if err := p.b.build(ctx, i); err != nil {
		return errors.Join(err, i.destroy(context.WithoutCancel(ctx)))
	}
	i.sh.warm = true
	p.mu.Lock()
	d.spares = append(d.spares, i)
	p.mu.Unlock()
	return nil
}

func (p *pool) hotKinds() (n int) {
	for _, d := range p.kinds {
		if d.hot() {
			n++
		}
	}
	return n
}

// take returns a spare of this kind, or a shell, or neither.
func (p *pool) take(req backend.CreateRequest) (i *instance, sh *shell) {
	defer func() {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.want <= 0 {
		return nil, nil
	}
	d := p.ask(req, time.Now())
	for len(d.spares) > 0 {
		last := d.spares[len(d.spares)-1]
		d.spares = d.spares[:len(d.spares)-1]
		if last.sh.alive() {
			return last, nil
		}
		p.drops.Go(func() { p.dropSpare(context.Background(), last) })
	}
	return nil, p.popShell()
}

// popShell takes a shell that lives. The caller holds p.mu.
func (p *pool) popShell() *shell {
	for len(p.shells) > 0 {
		sh := p.shells[len(p.shells)-1]
		p.shells = p.shells[:len(p.shells)-1]
		if sh.alive() {
			return sh
		}
		p.drops.Go(func() { p.drop(context.Background(), sh) })
	}
	return nil
}

// ask counts a create of a kind. The caller holds p.mu.
func (p *pool) ask(req backend.CreateRequest, now time.Time) *demand {
	k := kindOf(req)
	n := slices.IndexFunc(p.kinds, func(d *demand) bool { return d.kind == k })
	var d *demand
	if n >= 0 {
		d = p.kinds[n]
		p.kinds = slices.Delete(p.kinds, n, n+1)
	} else {
		d = &demand{kind: k, layers: slices.Clone(req.Layers)}
	}
	d.asked++
	d.last = now
	p.kinds = slices.Insert(p.kinds, 0, d)
	for _, old := range p.kinds[min(maxKinds, len(p.kinds)):] {
		old.asked = 0
	}
	return d
}

func (p *pool) drop(ctx context.Context, sh *shell) {
	if err := p.b.discard(context.WithoutCancel(ctx), sh); err != nil {
		p.b.log.Warn("warm container is not gone; the next sweep frees it", "err", err)
	}
}

func (p *pool) dropSpare(ctx context.Context, i *instance) {
	_ = i.destroy(context.WithoutCancel(ctx)) // logs what it cannot free
}

// dropSpares destroys the spares that have a layer, and makes no more of their kinds.
func (p *pool) dropSpares(ctx context.Context, digest string) {
	has := func(l backend.Layer) bool { return l.Digest == digest }
	var drop []*instance
	p.mu.Lock()
	for _, d := range p.kinds {
		if slices.ContainsFunc(d.layers, has) {
			d.asked = 0
			drop = append(drop, d.spares...)
			d.spares = nil
		}
	}
	p.mu.Unlock()
	for _, i := range drop {
		p.dropSpare(ctx, i)
	}
}

// close stops making containers and destroys those that are left.
func (p *pool) close(ctx context.Context) error {
	p.start() // so that done is closed
	p.cancel()
	<-p.done
	p.mu.Lock()
	shells, kinds := p.shells, p.kinds
	p.shells, p.kinds, p.want = nil, nil, 0
	p.mu.Unlock()
	p.drops.Wait()
	var errs []error
	for _, sh := range shells {
		errs = append(errs, p.b.discard(ctx, sh))
	}
	for _, d := range kinds {
		for _, i := range d.spares {
			errs = append(errs, i.destroy(ctx))
		}
	}
	return errors.Join(errs...)
}

// Warm is how many containers are ready to be claimed, for metrics.
func (b *Backend) Warm() int {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	n := len(b.pool.shells)
	for _, d := range b.pool.kinds {
		n += len(d.spares)
	}
	return n
}

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
