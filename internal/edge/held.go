package edge

import (
	"sync"

	"github.com/opendsec/dsec"
)

// heldOutput is the output that Exec calls, and answers from the log, hold in memory.
// Past its most the calls of the sandbox that holds most end, so that no neighbour's do.
type heldOutput struct {
	most int64

	mu    sync.Mutex
	total int64
	calls map[*call]*held
	again uint64 // answers from the log so far
}

type held struct {
	bytes int64
	again uint64 // the number of an answer from the log; 0: of a command
	cut   bool   // its call is about to end
}

// rather reports whether of two calls x is to end: what is in the log can be asked for
// once more, and who came last has waited least.
func (x *held) rather(y *held) bool {
	if x.again != y.again {
		return x.again > y.again
	}
	return x.bytes > y.bytes
}

// errHeld is no `exhausted`: the command ran.
var errHeld = dsec.Errorf(dsec.CodeOutcomeUnknown, "the edge holds too much output of commands, and most of this sandbox's; the command was killed: use Start")

var errHeldAgain = dsec.Errorf(dsec.CodeExhausted, "the edge holds too much output of commands, and most of this sandbox's: ask again")

// addAgain counts an answer from the log, of n bytes, of c.
func (h *heldOutput) addAgain(c *call, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.again++
	h.count(c, n).again = h.again
	h.cut()
}

// add counts n more bytes of c.
func (h *heldOutput) add(c *call, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.count(c, n)
	h.cut()
}

// count is add that ends nothing. The caller holds mu.
func (h *heldOutput) count(c *call, n int64) *held {
	if h.calls == nil {
		h.calls = make(map[*call]*held)
	}
	if h.calls[c] == nil {
		h.calls[c] = new(held)
	}
	h.calls[c].bytes += n
	h.total += n
	return h.calls[c]
}

// cut ends calls until no more is held than the most. The caller holds mu.
func (h *heldOutput) cut() {
	for h.excess() > 0 && h.cutOne() {
	}
}

// excess is how much is held beyond the most once the calls that were cut have
// ended. The caller holds mu.
func (h *heldOutput) excess() int64 {
	if h.total <= h.most {
		return 0
	}
	n := h.total - h.most
	for _, x := range h.calls {
		if x.cut {
			n -= x.bytes
		}
	}
	return n
}

// cutOne ends a call of the sandbox that holds most, the longest of commands. The caller
// holds mu.
func (h *heldOutput) cutOne() bool {
	sums := make(map[*sandbox]int64)
	var largest *sandbox
	for c, x := range h.calls {
		if sums[c.s] += x.bytes; largest == nil || sums[c.s] > sums[largest] {
			largest = c.s
		}
	}
	var next *call
	for c, x := range h.calls {
		if c.s == largest && !x.cut && (next == nil || x.rather(h.calls[next])) {
			next = c
		}
	}
	if next == nil {
		return false // all of it is about to be given back
	}
	h.calls[next].cut = true
	if h.calls[next].again > 0 {
		next.cancel(errHeldAgain)
	} else {
		next.cancel(errHeld)
	}
	return true
}

// release counts no more of c.
func (h *heldOutput) release(c *call) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.calls[c]; x != nil {
		h.total -= x.bytes
		delete(h.calls, c)
	}
}
