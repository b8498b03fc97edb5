package layer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// A trace says which data of a layer were read first, in order, where a sandbox was
// first made of it. It is a part of the layer in the store that nothing depends on:
// a node that has not seen the layer fetches these data at once, without waiting for
// a reader to want one after the other.

// Span is a range of a layer's data, in bytes.
type Span struct {
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// trace is the document.
type trace struct {
	Version int    `json:"version"`
	Spans   []Span `json:"spans"`
}

const (
	traceVersion = 1
	traceBytes   = 1 << 20 // of the document
	traceSpans   = 1 << 14
	tracePeriods = 10 // of Options.TraceFor from a layer's first read, until its trace is stored at the latest
	// traceTimeout bounds what is done for a trace, as long as a store may hang.
	traceTimeout = 5 * time.Minute
)

// traces are the layers whose traces are recorded or fetched.
type traces struct {
	mu   sync.Mutex
	busy map[string]bool
}

// follow fetches what the trace of a layer that was just opened names. Where the
// store has no trace it makes one of what is read here in the next while.
func (s *Store) follow(meta Meta, f LazyFile) {
	t := &s.traces
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.opt.TraceFor == 0 || t.busy[meta.Digest] || !s.tasks.begin() {
		return
	}
	t.busy[meta.Digest] = true // a layer is opened anew while its trace is still made
	go func() {
		defer s.tasks.runs.Done()
		ctx := s.tasks.ctx
		err := s.followOne(ctx, meta, f)
		if err != nil && ctx.Err() == nil {
			s.opt.Logger.Warn("trace of a layer", "digest", meta.Digest, "error", err)
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.busy, meta.Digest)
	}()
}

func (s *Store) followOne(ctx context.Context, meta Meta, f LazyFile) error {
	bounded, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	doc, err := s.readPart(bounded, meta.Digest, partTrace, traceBytes)
	if notFound(err) {
		return s.record(ctx, meta, f)
	} else if err != nil {
		return err
	}
	spans, err := decodeTrace(doc, meta)
	if err != nil {
		return s.corrupt(meta.Digest, partTrace, err)
	}
	if len(spans) == 0 {
		return nil
	}
	return s.opt.Lazy.Prefetch(bounded, f, spans, func(int64, int64) {})
}

// record stores the trace of a layer, once its readers have read for a while what
// they had read before, or for long. Readers may come late: the layers of sandboxes
// held ready are mounted, and not read.
func (s *Store) record(ctx context.Context, meta Meta, f LazyFile) (err error) {
	var spans []Span
	for n, before := 0, int64(0); n < tracePeriods; {
		select {
		case <-time.After(s.opt.TraceFor):
		case <-ctx.Done():
			return nil
		}
		if s.known(meta.Digest) == nil { // removed
			return nil
		}
		if spans, err = s.traced(ctx, f); err != nil {
			return err
		}
		var read int64
		for _, p := range spans {
			read += p.Length
		}
		switch {
		case read > 0 && read == before:
			n = tracePeriods
		case read > 0:
			n++
		}
		before = read
	}
	ctx, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	return s.storeTrace(ctx, meta, spans)
}

// storeTrace stores a trace beside its layer, which another node may have removed.
func (s *Store) storeTrace(ctx context.Context, meta Meta, spans []Span) error {
	doc, err := json.Marshal(trace{traceVersion, spans[:min(len(spans), traceSpans)]})
	if err != nil {
		return err
	}
	key := blobKey(meta.Digest, partTrace)
	err = s.blobs.Put(ctx, key, bytes.NewReader(doc), int64(len(doc)))
	if err != nil && dsec.CodeOf(err) == dsec.CodeConflict { // another node's
		return nil
	} else if err != nil {
		return err
	}
	if _, err = s.blobs.Stat(ctx, blobKey(meta.Digest, partManifest)); notFound(err) {
		return s.blobs.Delete(ctx, key)
	}
	return err
}

func (s *Store) traced(ctx context.Context, f LazyFile) ([]Span, error) {
	ctx, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	return s.opt.Lazy.Trace(ctx, f.Key)
}

// decodeTrace reads a trace that came from a store.
func decodeTrace(doc []byte, meta Meta) ([]Span, error) {
	var t trace
	if err := json.Unmarshal(doc, &t); err != nil {
		return nil, err
	}
	switch {
	case t.Version != traceVersion:
		return nil, fmt.Errorf("a trace of version %d, want %d", t.Version, traceVersion)
	case len(t.Spans) > traceSpans:
		return nil, fmt.Errorf("a trace of %d spans", len(t.Spans))
	}
	var total int64
	for _, p := range t.Spans {
		if p.Offset < 0 || p.Length <= 0 || p.Length > meta.DataSize || p.Offset > meta.DataSize-p.Length {
			return nil, fmt.Errorf("%d bytes from %d of %d", p.Length, p.Offset, meta.DataSize)
		}
		if total += p.Length; total > meta.DataSize {
			return nil, errors.New("it names more than there is")
		}
	}
	return t.Spans, nil
}
