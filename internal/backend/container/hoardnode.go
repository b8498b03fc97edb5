package container

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/opendsec/dsec/internal/units"
)

// What many sandboxes hold adds up, each of them below hoardLimit. So there is a
// bound on what all of them hold together, and where they are past it those that
// hold most are killed first, until the rest is below it.

const (
	// nodeShare of the node's memory is what they may hold: a sixteenth.
	nodeShare = 16
	// hoardLeast is what a sandbox may always hold: one with less is no reason for
	// what the node lacks.
	hoardLeast = hoardLimit / 8
)

// hoards are the bytes that a sandbox keeps of what is charged to nobody.
type hoards struct{ sockets, tcp, locks int64 }

// fill sets the bounds that are not set by what the host has.
func (h *hoardBounds) fill() error {
	if h.node <= 0 {
		total, err := fieldAfter("/proc/meminfo", "MemTotal:", "")
		if err != nil {
			return err
		}
		h.node = max(total<<10/nodeShare, 2*hoardLimit)
	}
	if h.code > 0 {
		return nil
	}
	text, err := os.ReadFile("/proc/sys/net/core/bpf_jit_limit")
	if os.IsNotExist(err) {
		return nil // no such kernel: nothing is compiled
	}
	if err != nil {
		return err
	}
	limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return fmt.Errorf("net.core.bpf_jit_limit: %w", err)
	}
	h.code = limit / codeShare
	return nil
}

// note changes what is known of the instance's hoards.
func (i *instance) note(f func(*hoards)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	f(&i.hoards)
}

// A holding is what a sandbox has of something.
type holding struct {
	*instance
	bytes int64
}

// instances lists those that are there.
func (b *Backend) instances() []*instance {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]*instance, 0, len(b.live))
	for _, i := range b.live {
		list = append(list, i)
	}
	return list
}

// boundHoards kills what runs in those sandboxes that keep most, where all of them
// together keep more than the node can spare.
func (b *Backend) boundHoards() {
	var list []holding
	for _, i := range b.instances() {
		i.note(func(h *hoards) { list = append(list, holding{i, h.sockets + h.tcp + h.locks}) })
	}
	for _, h := range excess(list, b.config.hoards.node) {
		if h.shell() != nil {
			h.killForNode(fmt.Sprintf("sandboxes together took more than the %s that the node has for what no limit of theirs counts (netlink sockets, buffers of TCP, locks of files), and of those that were left it had most: %s",
				units.Bytes(b.config.hoards.node), units.Bytes(h.bytes)))
		}
	}
}

// excess returns those whose end leaves at most limit to the others: as few as can
// be, those with most first. None of them has less than hoardLeast.
func excess(list []holding, limit int64) []holding {
	list = slices.SortedFunc(slices.Values(list), func(x, y holding) int { return cmp.Compare(y.bytes, x.bytes) })
	var sum int64
	for _, h := range list {
		sum += h.bytes
	}
	n := 0
	for n < len(list) && sum > limit && list[n].bytes >= hoardLeast {
		sum -= list[n].bytes
		n++
	}
	return list[:n]
}
