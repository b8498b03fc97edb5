package blob

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
)

// Sweeper is a Store in which a crash may leave what is no blob.
type Sweeper interface {
	// Sweep removes what dead writers left. It takes nothing from one that lives, on
	// any host. What opens a store need not call it: a node that runs for long does.
	Sweep(ctx context.Context) error
}

// Options are of a wrapped store.
type Options struct {
	// Requests bounds the reads in progress at once, and the writes; 0 is 64.
	Requests int
	// Backoff is DefaultBackoff where it is zero.
	Backoff Backoff
	// Metrics may be nil.
	Metrics prometheus.Registerer
}

// Wrap gives a store what each needs: a bound on requests at once, requests
// repeated after errors that pass, and metrics. Put is left to the driver, which
// alone can begin again in the middle. What it returns is an Opener and a Linker
// where s is, and always a Sweeper and an io.Closer.
func Wrap(s Store, opt Options) Store {
	if opt.Requests == 0 {
		opt.Requests = 64
	}
	if opt.Backoff == (Backoff{}) {
		opt.Backoff = DefaultBackoff
	}
	w := &wrapped{
		store: s, backoff: opt.Backoff, metrics: newMetrics(opt.Metrics),
		reads: make(chan struct{}, opt.Requests), writes: make(chan struct{}, opt.Requests),
	}
	opener, opens := s.(Opener)
	linker, links := s.(Linker)
	if opens && links {
		return &wrappedFiles{wrapped: w, opener: opener, linker: linker}
	}
	return w
}

type wrapped struct {
	store         Store
	backoff       Backoff
	metrics       *metrics
	reads, writes chan struct{}
}

// do counts a call, and bounds it by slots.
func (w *wrapped) do(ctx context.Context, op string, slots chan struct{}, f func() error) (err error) {
	start := time.Now()
	defer func() { w.metrics.ended(op, start, err) }()
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-slots }()
	return f()
}

// repeat is do with a call that may be repeated.
func (w *wrapped) repeat(ctx context.Context, op string, slots chan struct{}, f func() error) error {
	return w.do(ctx, op, slots, func() error {
		tries := 0
		defer func() { w.metrics.retries.Add(float64(tries - 1)) }()
		return w.backoff.Do(ctx, func() error {
			tries++
			return f()
		})
	})
}

// Put implements Store.
func (w *wrapped) Put(ctx context.Context, key string, r io.Reader, size int64) error {
	return w.do(ctx, "put", w.writes, func() error {
		counted := &countingReader{r: r}
		err := w.store.Put(ctx, key, counted, size)
		w.metrics.bytes.WithLabelValues("written").Add(float64(counted.n))
		return err
	})
}

type countingReader struct {
	r io.Reader
	n int64
}

// Read implements io.Reader.
func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// ReadAt implements Store.
func (w *wrapped) ReadAt(ctx context.Context, key string, p []byte, off int64) (n int, err error) {
	err = w.repeat(ctx, "read", w.reads, func() error {
		n, err = w.store.ReadAt(ctx, key, p, off)
		w.metrics.bytes.WithLabelValues("read").Add(float64(n))
		return err
	})
	return n, err
}

// Reopen implements Reopener.
func (w *wrapped) Reopen(key string) {
	if r, ok := w.store.(Reopener); ok {
		r.Reopen(key)
	}
}

// Stat implements Store.
func (w *wrapped) Stat(ctx context.Context, key string) (info Info, err error) {
	err = w.repeat(ctx, "stat", w.reads, func() error {
		info, err = w.store.Stat(ctx, key)
		return err
	})
	return info, err
}

// List implements Store. It takes no slot, for its function may read, and goes on
// behind the last key that it told of.
func (w *wrapped) List(ctx context.Context, prefix string, f func(Info) error) (err error) {
	start := time.Now()
	defer func() { w.metrics.ended("list", start, err) }()
	last := ""
	var own error // of f, after which nothing is repeated
	err = w.backoff.Do(ctx, func() error {
		err := w.store.List(ctx, prefix, func(info Info) error {
			if info.Key > last {
				last = info.Key
				own = f(info)
			}
			return own
		})
		if own != nil {
			return nil
		}
		return err
	})
	if own != nil {
		return own
	}
	return err
}

// Delete implements Store.
func (w *wrapped) Delete(ctx context.Context, key string) error {
	return w.repeat(ctx, "delete", w.writes, func() error { return w.store.Delete(ctx, key) })
}

// Sweep implements Sweeper.
func (w *wrapped) Sweep(ctx context.Context) error {
	s, ok := w.store.(Sweeper)
	if !ok {
		return nil
	}
	return w.repeat(ctx, "sweep", w.writes, func() error { return s.Sweep(ctx) })
}

// Close implements io.Closer.
func (w *wrapped) Close() error {
	if c, ok := w.store.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

type wrappedFiles struct {
	*wrapped
	opener Opener
	linker Linker
}

// Open implements Opener.
func (w *wrappedFiles) Open(key string) (f *os.File, err error) {
	err = w.do(context.Background(), "open", w.reads, func() error {
		f, err = w.opener.Open(key)
		return err
	})
	return f, err
}

// Root implements Rooted, where the store does.
func (w *wrappedFiles) Root() (*os.File, error) {
	if r, ok := w.opener.(Rooted); ok {
		return r.Root()
	}
	return nil, dsec.Errorf(dsec.CodeUnsupported, "this store of layers is no directory")
}

// Temp implements Linker.
func (w *wrappedFiles) Temp() (f *os.File, err error) {
	err = w.do(context.Background(), "temp", w.writes, func() error {
		f, err = w.linker.Temp()
		return err
	})
	return f, err
}

// Link implements Linker.
func (w *wrappedFiles) Link(ctx context.Context, key string, f *os.File) error {
	return w.do(ctx, "link", w.writes, func() error { return w.linker.Link(ctx, key, f) })
}

// metrics are of one store.
type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	bytes    *prometheus.CounterVec
	retries  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_blob_requests_total", Help: "Calls of the store of layers that ended, by operation and code (ok or an error's)."}, []string{"op", "code"}),
		seconds:  prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dsec_blob_request_seconds", Help: "Time of the calls that ended, repetitions and waiting included.", Buckets: prometheus.ExponentialBuckets(0.00025, 2, 19)}, []string{"op"}),
		bytes:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_blob_bytes_total", Help: "Bytes of blobs, by direction (read, written)."}, []string{"direction"}),
		retries:  prometheus.NewCounter(prometheus.CounterOpts{Name: "dsec_blob_retries_total", Help: "Requests that were repeated after an error that may pass."}),
	}
	if reg != nil {
		reg.MustRegister(m.requests, m.seconds, m.bytes, m.retries)
	}
	return m
}

// ended counts a call. The end of a blob is no error, the end of a context its
// caller's.
func (m *metrics) ended(op string, start time.Time, err error) {
	code := "ok"
	switch {
	case err == nil, err == io.EOF:
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		code = "cancelled"
	default:
		code = string(dsec.CodeOf(err))
	}
	m.requests.WithLabelValues(op, code).Inc()
	m.seconds.WithLabelValues(op).Observe(time.Since(start).Seconds())
}
