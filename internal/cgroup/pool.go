package cgroup

import (
	"context"
	"time"
)

// refill keeps the pool full. One group is made at a time: the kernel makes
// them under one lock anyway, and a create that finds the pool empty makes its own.
func (t *Tree) refill(ctx context.Context) {
	for {
		g, err := t.newGroup()
		if err != nil {
			t.opts.Log.Warn("cgroup pool", "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
			continue
		}
		select {
		case t.ready <- g:
		case <-ctx.Done():
			if err := g.Remove(context.WithoutCancel(ctx)); err != nil {
				t.opts.Log.Warn("cgroup pool", "err", err)
			}
			return
		}
	}
}
