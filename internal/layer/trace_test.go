package layer

import (
	"fmt"
	"testing"
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
