package edge

import (
	"sync"

	"github.com/opendsec/dsec"
)

// heldOutput is the output that Exec calls hold in memory. Past its most the
// calls of the sandbox that holds most end, so that no neighbour's do.
type heldOutput struct {
	most int64

	mu    sync.Mutex
	total int64
	calls map[*call]*held
}

type held struct {
	bytes int64
	cut   bool // its call is about to end
}

// errHeld is no `exhausted`: the command ran.
var errHeld = dsec.Errorf(dsec.CodeOutcomeUnknown, "the edge holds too much output of commands, and most of this sandbox's; the command was killed: use Start")

// add counts n more bytes of c.
func (h *heldOutput) add(c *call, n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.calls == nil {
		h.calls = make(map[*call]*held)
	}
	if h.calls[c] == nil {
		h.calls[c] = new(held)
	}
	h.calls[c].bytes += n
	for h.total += n; h.excess() > 0 && h.cutOne(); {
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

// cutOne ends the longest call of the sandbox that holds most. The caller holds mu.
func (h *heldOutput) cutOne() bool {
	sums := make(map[*sandbox]int64)
	var largest *sandbox
	for c, x := range h.calls {
		if sums[c.s] += x.bytes; largest == nil || sums[c.s] > sums[largest] {
			largest = c.s
		}
	}
	var longest *call
	for c, x := range h.calls {
		if c.s == largest && !x.cut && (longest == nil || x.bytes > h.calls[longest].bytes) {
			longest = c
		}
	}
	if longest == nil {
		return false // all of it is about to be given back
	}
	h.calls[longest].cut = true
	longest.cancel(errHeld)
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
