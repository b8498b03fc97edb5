package layer

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// lazyReaders are a Lazy of which only what was read is asked: for so many times
// nothing, then each time a span more, up to some.
type lazyReaders struct {
	Lazy
	none, most, asked int
}

func (r *lazyReaders) Trace(context.Context, string) (spans []Span, err error) {
	r.asked++
	for i := range min(r.asked-r.none, r.most) {
		spans = append(spans, Span{int64(i) * 8192, 4096})
	}
	return spans, nil
}

// A layer's trace is stored when its readers have read all they read at first, or
// for long, counted from the first read: a layer that is held ready is read later.
func TestTraceIsOfTheFirstReads(t *testing.T) {
	for name, tt := range map[string]struct {
		lazyReaders
		asked int
	}{
		"at once":         {lazyReaders{none: 0, most: 2}, 3},
		"after a while":   {lazyReaders{none: 3 * tracePeriods, most: 2}, 3*tracePeriods + 3},
		"more and more":   {lazyReaders{none: 0, most: 99}, tracePeriods},
		"late, then more": {lazyReaders{none: 50, most: 99}, 50 + tracePeriods},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Options{})
			meta := build(t, s, strings.Repeat("content", 20_000))
			lazy := tt.lazyReaders
			s.opt.Lazy, s.opt.TraceFor = &lazy, time.Second
			synctest.Test(t, func(t *testing.T) {
				if err := s.record(t.Context(), meta, LazyFile{}); err != nil {
					t.Fatal(err)
				}
			})
			if lazy.asked != tt.asked {
				t.Errorf("stored after %d looks, want %d", lazy.asked, tt.asked)
			}
			spans, err := decodeTrace(bytesOf(t, s.blobs, blobKey(meta.Digest, partTrace)), meta)
			if want := min(tt.asked-tt.none, tt.most); err != nil || len(spans) != want {
				t.Errorf("%d spans and %v are stored, want %d", len(spans), err, want)
			}
		})
	}

	s := openStore(t, Options{})
	meta := build(t, s, "content")
	lazy := &lazyReaders{none: 1 << 30}
	s.opt.Lazy, s.opt.TraceFor = lazy, time.Second
	synctest.Test(t, func(t *testing.T) {
		done := make(chan error)
		go func() { done <- s.record(t.Context(), meta, LazyFile{}) }()
		<-time.After(time.Hour)
		if err := s.Remove(t.Context(), meta.Digest); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Errorf("of a layer that was never read, and removed: %v", err)
		}
	})
	if lazy.asked < 3000 {
		t.Errorf("gave up after %d looks", lazy.asked)
	}
}
