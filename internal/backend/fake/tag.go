package fake

import (
	"context"
	"fmt"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// tags are what is remembered of tags beside those of commands that are listed.
type tags struct {
	denied  map[uint64]bool // of which somebody was told that no command has them
	dropped uint64          // commands with tags up to this one may be forgotten
}

// tagged is the command with a tag, or nil. The caller holds mu.
func (c *chronus) tagged(tag uint64) *process {
	for _, p := range c.procs {
		if p.tag == tag {
			return p
		}
	}
	return nil
}

// claim refuses a tag that no command may be started with. The caller holds mu.
func (c *chronus) claim(tag uint64) error {
	conflict := func(format string, args ...any) error {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "tag", Message: fmt.Sprintf(format, args...)}
	}
	p := c.tagged(tag)
	switch {
	case tag == 0:
		return nil
	case p != nil:
		return conflict("process %d has tag %d", p.id, tag)
	case tag <= c.tags.dropped:
		return conflict("tag %d may be that of a command that is forgotten", tag)
	case c.tags.denied[tag]:
		return conflict("tag %d was asked for before, and is of no command", tag)
	}
	return nil
}

// FindTag implements chronusapi.Handler.
func (c *chronus) FindTag(_ context.Context, tag uint64) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.tagged(tag); p != nil {
		return p.id, nil
	}
	if tag <= c.tags.dropped {
		return 0, &dsec.Error{Code: dsec.CodeOutcomeUnknown, Field: "tag", Message: fmt.Sprintf("a command with tag %d may have run and be forgotten", tag)}
	}
	if c.tags.denied == nil {
		c.tags.denied = map[uint64]bool{}
	}
	c.tags.denied[tag] = true
	return 0, nil
}

// ForgetTag implements chronusapi.Handler.
func (c *chronus) ForgetTag(_ context.Context, tag uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.tagged(tag); p != nil {
		p.keep = false
	}
	return nil
}

// forgetOldest keeps the count of ended commands down: last go those whose tag was
// not forgotten. The caller holds mu.
func (c *chronus) forgetOldest() {
	for len(c.ended) > chronusapi.MaxEnded {
		oldest := 0
		for i, id := range c.ended {
			if !c.procs[id].keep {
				oldest = i
				break
			}
		}
		p := c.procs[c.ended[oldest]]
		if p.keep {
			c.tags.dropped = max(c.tags.dropped, p.tag)
		}
		delete(c.procs, p.id)
		c.ended = append(c.ended[:oldest], c.ended[oldest+1:]...)
	}
}
