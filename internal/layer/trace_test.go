package layer

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// ofTraces are documents as a store may give them, and whether they can be used.
var ofTraces = map[string]bool{
	`{"version":1,"spans":[{"offset":131072,"length":131072},{"offset":0,"length":131072}]}`: true,
	`{"version":1,"spans":[]}`: true,
	`{"version":1}`:            true,
	`{"version":2,"spans":[{"offset":0,"length":131072}]}`:                              false,
	`{"version":1,"spans":[{"offset":-131072,"length":131072}]}`:                        false,
	`{"version":1,"spans":[{"offset":0,"length":0}]}`:                                   false,
	`{"version":1,"spans":[{"offset":0,"length":-1}]}`:                                  false,
	`{"version":1,"spans":[{"offset":262144,"length":131072}]}`:                         false,
	`{"version":1,"spans":[{"offset":9223372036854775807,"length":131072}]}`:            false,
	`{"version":1,"spans":[{"offset":0,"length":262144},{"offset":0,"length":262144}]}`: false,
	`{"version":1,"spans":[{"offset":1e99,"length":1}]}`:                                false,
	`{"version":1,"spans":[{"offset":0,"length":131072`:                                 false,
	``: false,
}

var tracedLayer = Meta{Manifest: Manifest{DataSize: 256 << 10, ChunkSize: chunkSize}}

func TestTraceOfAStore(t *testing.T) {
	for doc, good := range ofTraces {
		if _, err := decodeTrace([]byte(doc), tracedLayer); (err == nil) != good {
			t.Errorf("%s: %v", doc, err)
		}
	}
	many := `{"version":1,"spans":[`
	for range traceSpans {
		many += `{"offset":0,"length":1},`
	}
	if _, err := decodeTrace(fmt.Append(nil, many, `{"offset":0,"length":1}]}`), tracedLayer); err == nil {
		t.Error("a trace of too many spans")
	}
}

// A trace does not outlive its layer: one that comes after the layer went, from a node
// that has not heard of it, is not left, and what a crash leaves of one is collected.
func TestTraceOfALayerThatIsGone(t *testing.T) {
	eachPlace(t, func(t *testing.T, p place) {
		s, other := p.node(t), p.node(t)
		ctx, spans := t.Context(), []Span{{0, 4096}}
		meta := build(t, s, strings.Repeat("content", 10_000))
		key := blobKey(meta.Digest, partTrace)
		if err := s.storeTrace(ctx, meta, spans); err != nil {
			t.Fatal(err)
		}
		if got := bytesOf(t, s.blobs, key); string(got) != `{"version":1,"spans":[{"offset":0,"length":4096}]}` {
			t.Errorf("the trace is %s", got)
		}
		if err := other.Remove(ctx, meta.Digest); err != nil {
			t.Fatal(err)
		}
		if err := s.storeTrace(ctx, meta, spans); err != nil {
			t.Error(err)
		}
		_, err := s.blobs.Stat(ctx, key)
		wantCode(t, err, dsec.CodeNotFound)

		if err := s.blobs.Put(ctx, key, strings.NewReader("x"), 1); err != nil { // by who dies then
			t.Fatal(err)
		}
		if _, err := other.Sweep(ctx, time.Hour); err != nil {
			t.Fatal(err)
		}
		if _, err := s.blobs.Stat(ctx, key); err != nil {
			t.Errorf("what was just stored is collected: %v", err)
		}
		if _, err := other.Sweep(ctx, -time.Hour); err != nil {
			t.Fatal(err)
		}
		_, err = s.blobs.Stat(ctx, key)
		wantCode(t, err, dsec.CodeNotFound)
	})
}

func FuzzTrace(f *testing.F) {
	for doc := range ofTraces {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		spans, err := decodeTrace(doc, tracedLayer)
		if err != nil {
			return
		}
		var total int64
		for _, p := range spans {
			if p.Offset < 0 || p.Length <= 0 || p.Offset+p.Length > tracedLayer.DataSize {
				t.Errorf("%+v", p)
			}
			total += p.Length
		}
		if total > tracedLayer.DataSize {
			t.Errorf("%d bytes", total)
		}
	})
}
