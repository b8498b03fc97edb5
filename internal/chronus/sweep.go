package chronus

import (
	"maps"
	"runtime/debug"
	"slices"
	"time"
)

// How long what is left of ended commands is kept.
const (
	keepTold     = 5 * time.Second  // output, after the exit was delivered
	keepProcess  = 10 * time.Minute // the entry in the list, with its outcome
	keepFinished = 64               // entries of ended commands
	sweepEvery   = 10 * time.Second
)

// sweepLater arms the sweeper. The caller holds c.mu.
func (c *Chronus) sweepLater() {
	if c.sweeper == nil {
		c.sweeper = time.AfterFunc(sweepEvery, c.sweep)
	}
}

// sweep frees what ended commands left, and gives memory back to the kernel
// when nothing runs.
func (c *Chronus) sweep() {
	now := time.Now()
	c.mu.Lock()
	left := 0
	for _, p := range c.processes {
		if p.ended.Load() && !c.expire(p, now) {
			left++
		}
	}
	c.sweeper = nil
	if left > 0 {
		wait := sweepEvery
		if c.running == 0 {
			wait = keepProcess / 4 // only entries are left, which are small
		}
		c.sweeper = time.AfterFunc(wait, c.sweep)
	}
	idle := c.running == 0
	c.mu.Unlock()
	if idle {
		debug.FreeOSMemory()
	}
}

// expire frees what an ended p does not need any more, and reports whether
// its entry went too. The caller holds c.mu.
func (c *Chronus) expire(p *process, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.outcome == nil || p.readers > 0 {
		return false
	}
	if p.delivered() && now.Sub(p.told) >= keepTold {
		p.spool.free()
	}
	if now.Sub(p.finished) < keepProcess || p.open > 0 {
		return false
	}
	p.spool.free()
	delete(c.processes, p.id)
	return true
}

// delivered reports whether the one reader that there was to be has all. What
// was detached may be read again and again. The caller holds p.mu.
func (p *process) delivered() bool { return !p.told.IsZero() && !p.detached }

// forgetOldest removes entries of ended commands where there are too many:
// first those whose exit was told, then the oldest. The caller holds c.mu.
func (c *Chronus) forgetOldest() {
	for len(c.processes)-c.running > keepFinished {
		var oldest *process
		oldestTold := false
		for _, p := range c.processes {
			if !p.ended.Load() {
				continue
			}
			p.mu.Lock()
			free, told := p.outcome != nil && p.readers == 0, !p.told.IsZero()
			p.mu.Unlock()
			if free && (oldest == nil || told && !oldestTold || told == oldestTold && p.id < oldest.id) {
				oldest, oldestTold = p, told
			}
		}
		if oldest == nil {
			return
		}
		oldest.mu.Lock()
		oldest.spool.free()
		oldest.mu.Unlock()
		delete(c.processes, oldest.id)
	}
}

// reclaim frees spools of ended commands until half of the budget is free:
// first those that were delivered, then the oldest.
func (c *Chronus) reclaim() {
	defer c.budget.reclaimed()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, deliveredOnly := range []bool{true, false} {
		for _, id := range slices.Sorted(maps.Keys(c.processes)) {
			if !c.budget.tight() {
				return
			}
			p := c.processes[id]
			p.mu.Lock()
			if p.outcome != nil && p.readers == 0 && p.open == 0 && (p.delivered() || !deliveredOnly) {
				p.spool.free()
			}
			p.mu.Unlock()
		}
	}
}
