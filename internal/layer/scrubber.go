package layer

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/scrub"
)

// ScrubOptions say how Scrub works. Zero values take the default.
type ScrubOptions struct {
	// Rate is how many bytes are read in a second: 1 MiB.
	Rate int64
	// Every is how long a layer that was read is left alone: 24 h.
	Every time.Duration
	// Timeout is how long one read may take, of 1 MiB or one chunk: 30 s.
	Timeout time.Duration
	// Command runs scrub.Main: this program with the argument scrub-reader.
	Command []string
	// Lost is called where there is one more layer that Store.Lost tells of.
	Lost func(ctx context.Context) error
	// Metrics may be nil.
	Metrics prometheus.Registerer

	now   func() time.Time
	wait  func(ctx context.Context, d time.Duration)
	retry time.Duration
}

// scrubRead is how many bytes are asked for at once, and scrubKeep after how many
// of these it is written down how far a pass is.
const (
	scrubRead = 1 << 20
	scrubKeep = 64
)

func (o ScrubOptions) withDefaults() ScrubOptions {
	o.Rate = cmp.Or(o.Rate, 1<<20)
	o.Every = cmp.Or(o.Every, 24*time.Hour)
	o.Timeout = cmp.Or(o.Timeout, 30*time.Second)
	o.retry = cmp.Or(o.retry, 10*time.Minute)
	if len(o.Command) == 0 {
		o.Command = []string{"/proc/self/exe", scrub.Verb}
	}
	if o.Lost == nil {
		o.Lost = func(context.Context) error { return nil }
	}
	if o.now == nil {
		o.now = time.Now
	}
	if o.wait == nil {
		o.wait = func(ctx context.Context, d time.Duration) {
			t := time.NewTimer(d)
			defer t.Stop()
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}
	return o
}

// scrubber reads the data of layers over again.
type scrubber struct {
	s       *Store
	opt     ScrubOptions
	root    blob.Rooted
	reader  *scrub.Reader
	left    <-chan struct{}      // closed when the last one that was killed has ended
	failed  map[string]time.Time // when a pass was given up, by digest
	metrics scrubMetrics
}

type scrubMetrics struct {
	bytes, errors prometheus.Counter
	mismatches    *prometheus.CounterVec
	passed        prometheus.Gauge
}

// Scrub reads the data of the layers that are held here from the store, slowly and
// one layer at a time, and holds them against their hashes, until ctx ends: the
// kernel, which reads a directory by itself, does not. What differs, twice in
// succession, is damage: the layer is lost (see Lost), and until its chunks are
// right again Hold refuses it. The error is unsupported where the kernel does not
// read from the store by itself.
func (s *Store) Scrub(ctx context.Context, opt ScrubOptions) error {
	root, ok := s.blobs.(blob.Rooted)
	if s.direct() == nil || !ok {
		return errDirectOnly
	}
	c := &scrubber{s: s, opt: opt.withDefaults(), root: root, failed: map[string]time.Time{}, metrics: newScrubMetrics(opt.Metrics)}
	defer c.stop()
	for ctx.Err() == nil {
		meta, ok := c.next()
		if !ok {
			c.stop() // until there is work again
			c.opt.wait(ctx, scrubIdle)
			continue
		}
		c.pass(ctx, meta)
	}
	return nil
}

// scrubIdle is how often it is looked whether there is something to do.
const scrubIdle = 10 * time.Second

func newScrubMetrics(reg prometheus.Registerer) scrubMetrics {
	m := scrubMetrics{
		bytes:      prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_scrub_bytes_total", Help: "Bytes of layers that were read from the store over again and checked."}),
		errors:     prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_scrub_errors_total", Help: "Reads of the scrub that failed, or were not answered in time."}),
		mismatches: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_scrub_mismatches_total", Help: "Chunks of layers of which the store gave other bytes: once, and not when it was asked again, or twice, which is damage."}, []string{"times"}),
		passed:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "dsec_scrub_last_full_pass_timestamp_seconds", Help: "When the data of all layers in use had last been read whole, each within a day; 0: not yet."}),
	}
	m.mismatches.WithLabelValues("once")
	m.mismatches.WithLabelValues("twice")
	if reg != nil {
		reg.MustRegister(m.bytes, m.errors, m.mismatches, m.passed)
	}
	return m
}

// stop ends the reading process, as far as its file system lets it end.
func (c *scrubber) stop() {
	if c.reader != nil {
		c.reader.Kill()
		c.left = c.reader.Ended()
	}
	c.reader = nil
}

// next is the layer to be read: one that was begun, else that which was not for
// longest.
func (c *scrubber) next() (Meta, bool) {
	now := c.opt.now()
	metas := c.s.inUse()
	known := map[string]bool{}
	for _, m := range c.s.List() {
		known[m.Digest] = true
	}
	c.s.scrubs.keep(known)
	maps.DeleteFunc(c.failed, func(digest string, _ time.Time) bool { return !known[digest] })
	due := slices.DeleteFunc(slices.Clone(metas), func(m Meta) bool {
		l, failed := c.s.scrubs.of(m.Digest), c.failed[m.Digest]
		// What is later than now was written by a clock that was put back.
		return !l.Passed.After(now) && now.Sub(l.Passed) < c.opt.Every || now.Sub(failed) < c.opt.retry
	})
	if len(due) == 0 {
		if len(metas) > 0 && !slices.ContainsFunc(metas, func(m Meta) bool { return !c.failed[m.Digest].IsZero() }) {
			c.metrics.passed.Set(float64(now.Unix()))
		}
		return Meta{}, false
	}
	return slices.MinFunc(due, func(a, b Meta) int {
		l, m := c.s.scrubs.of(a.Digest), c.s.scrubs.of(b.Digest)
		return cmp.Or(cmp.Compare(m.Next, l.Next), l.Passed.Compare(m.Passed), cmp.Compare(a.Digest, b.Digest))
	}), true
}

// pass reads a layer from where the last pass was broken off. It is given up where
// nobody uses the layer any more, and for a while where it cannot be read.
func (c *scrubber) pass(ctx context.Context, meta Meta) {
	log := c.s.opt.Logger.With("digest", meta.Digest)
	hashes, err := c.s.chunkHashes(meta)
	if err != nil {
		log.Error("layer cannot be scrubbed", "error", err)
		c.failed[meta.Digest] = c.opt.now()
		return
	}
	const most = 8 // reads that fail in succession
	failing, skipped := 0, false
	next := c.s.scrubs.of(meta.Digest).Next
	if next < 0 || next >= meta.chunks() {
		next = 0
	}
	batch := max(1, scrubRead/meta.ChunkSize)
	for turn := 1; next < meta.chunks(); turn++ {
		if !c.s.wanted(meta.Digest) {
			c.progress(meta, next, true)
			return
		}
		began, n := c.opt.now(), min(batch, meta.chunks()-next)
		err := c.check(ctx, meta, hashes, next, n)
		if ctx.Err() != nil {
			c.progress(meta, next, true)
			return
		}
		if err != nil {
			c.metrics.errors.Inc()
			log.Warn("layer cannot be read by the scrub", "chunk", next, "offset", next*meta.ChunkSize, "error", err)
			if failing++; errors.Is(err, scrub.ErrStuck) || errors.Is(err, scrub.ErrGone) || failing >= most {
				c.progress(meta, next, true)
				c.failed[meta.Digest] = c.opt.now()
				return
			}
			skipped = true
		} else {
			failing = 0
		}
		next += n
		c.progress(meta, next, turn%scrubKeep == 0)
		took := time.Duration(float64(n*meta.ChunkSize) / float64(c.opt.Rate) * float64(time.Second))
		c.opt.wait(ctx, max(0, took-c.opt.now().Sub(began)))
	}
	c.passed(meta, skipped)
}

// progress notes how far a pass is.
func (c *scrubber) progress(meta Meta, next int64, write bool) {
	err := c.s.scrubs.change(meta.Digest, func(l *scrubbed) bool { l.Next = next; return write })
	if err != nil {
		c.s.opt.Logger.Warn("how far the scrub is, is not on record", "error", err)
	}
}

// passed notes the end of a pass, of which a part may not have been readable. What
// was bad and is not any more is forgotten.
func (c *scrubber) passed(meta Meta, skipped bool) {
	delete(c.failed, meta.Digest)
	if skipped {
		c.failed[meta.Digest] = c.opt.now()
	}
	err := c.s.scrubs.change(meta.Digest, func(l *scrubbed) bool {
		if !l.Found && !skipped {
			l.Bad = nil
		}
		l.Next, l.Passed, l.Found = 0, c.opt.now(), false
		return true
	})
	if err != nil {
		c.s.opt.Logger.Warn("how far the scrub is, is not on record", "error", err)
	}
}

// check reads n chunks and compares them. Only an error of reading is one.
func (c *scrubber) check(ctx context.Context, meta Meta, hashes []byte, first, n int64) error {
	sums, err := c.sums(ctx, meta, first, n, false)
	if err != nil {
		return err
	}
	for k := range n {
		i := first + k
		want := hashes[i*sha256.Size : (i+1)*sha256.Size]
		if k < int64(len(sums)) && bytes.Equal(sums[k], want) {
			continue
		}
		if err := c.again(ctx, meta, i, want); err != nil {
			return err
		}
	}
	c.metrics.bytes.Add(float64(min(n*meta.ChunkSize, meta.DataSize-first*meta.ChunkSize)))
	return nil
}

// again reads a chunk that was not what it must be once more, from a file that is
// opened anew: one that was removed is no damage.
func (c *scrubber) again(ctx context.Context, meta Meta, i int64, want []byte) error {
	log := c.s.opt.Logger.With("digest", meta.Digest, "chunk", i, "offset", i*meta.ChunkSize)
	sums, err := c.sums(ctx, meta, i, 1, true)
	if err != nil {
		return err
	}
	if len(sums) == 1 && bytes.Equal(sums[0], want) {
		c.metrics.mismatches.WithLabelValues("once").Inc()
		log.Error("the layer store gave bytes that are not the layer's, and the right ones when it was asked again")
		return nil
	}
	if c.s.known(meta.Digest) == nil {
		return nil
	}
	c.metrics.mismatches.WithLabelValues("twice").Inc()
	log.Error("the layer is damaged in the store: what it gives is not the layer's; sandboxes that have it may have read it")
	if c.s.markBad(meta, i) {
		if err := c.opt.Lost(ctx); err != nil {
			log.Warn("layer stays lost for now", "error", err)
		}
	}
	return nil
}

// sums asks the reading process, which is started where there is none.
func (c *scrubber) sums(ctx context.Context, meta Meta, first, n int64, fresh bool) ([][]byte, error) {
	if err := c.start(ctx); err != nil {
		return nil, err
	}
	off := first * meta.ChunkSize
	sums, dead, err := c.reader.Sums(ctx, scrub.Request{
		Key: blobKey(meta.Digest, partData), Offset: off, Length: min(n*meta.ChunkSize, meta.DataSize-off),
		Chunk: meta.ChunkSize, Fresh: fresh,
	}, c.opt.Timeout)
	if dead {
		c.stop()
	}
	return sums, err
}

// start starts the reading process where there is none. One that is stuck is left
// behind, and waited for before there is another.
func (c *scrubber) start(ctx context.Context) error {
	if c.reader != nil {
		return nil
	}
	if c.left != nil {
		select {
		case <-c.left:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	root, err := c.root.Root()
	if err != nil {
		return err
	}
	defer root.Close()
	c.reader, err = scrub.Start(c.opt.Command, root, c.s.opt.Logger)
	return err
}
