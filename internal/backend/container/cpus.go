package container

import (
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
)

// cpus spreads sandboxes over the host's CPUs. A sandbox may use as many of
// them as its limit, rounded up, and its commands are bound to these: that is
// the number that nproc, and every runtime that sizes its pools, sees.
type cpus struct {
	all []int // allowed to this process

	mu   sync.Mutex
	used map[int]int // sandboxes bound to each
}

func newCPUs() (*cpus, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("affinity: %w", err)
	}
	c := &cpus{used: map[int]int{}}
	for n := range len(set) * 64 {
		if set.IsSet(n) {
			c.all = append(c.all, n)
		}
	}
	return c, nil
}

// count is how many CPUs programs of a sandbox see.
func (c *cpus) count(milliCPU int64) int {
	return confine.CPUs(milliCPU, len(c.all))
}

// take binds a sandbox to the n least used CPUs; nil where that is all of them.
func (c *cpus) take(n int) []int {
	if n >= len(c.all) {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	order := slices.Clone(c.all)
	slices.SortStableFunc(order, func(a, b int) int { return c.used[a] - c.used[b] })
	c.add(order[:n], 1)
	return order[:n:n]
}

// restore counts what a recovered sandbox is bound to.
func (c *cpus) restore(bound []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.add(bound, 1)
}

func (c *cpus) release(bound []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.add(bound, -1)
}

func (c *cpus) add(bound []int, n int) {
	for _, cpu := range bound {
		c.used[cpu] += n
	}
}

// cpuMask is the set as sched_setaffinity(2) takes it; empty for nil.
func cpuMask(bound []int) []byte {
	if len(bound) == 0 {
		return nil
	}
	mask := make([]byte, (slices.Max(bound)/64+1)*8) // whole words, little-endian
	for _, cpu := range bound {
		mask[cpu/8] |= 1 << (cpu % 8)
	}
	return mask
}
