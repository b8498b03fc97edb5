package container

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Background work keeps out of the way of creates, and is not starved by them.
func TestAwaitQuiet(t *testing.T) {
	for _, c := range []struct {
		name   string
		before func(c *calls, cancel func())
		want   time.Duration
	}{
		{"no create yet", func(*calls, func()) {}, 0},
		{"a create just ended", func(c *calls, _ func()) { c.begin(); c.end() }, quiet},
		{"a create ended a while ago", func(c *calls, _ func()) { c.begin(); c.end(); time.Sleep(quiet) }, 0}, //nolint:forbidigo // of the bubble's clock
		{"one goes on", func(c *calls, _ func()) { c.begin() }, busy},
		{"one goes on for a while", func(c *calls, _ func()) { c.begin(); time.AfterFunc(2*quiet, c.end) }, 3 * quiet},
		{"one ends, another begins", func(c *calls, _ func()) {
			c.begin()
			time.AfterFunc(quiet/2, func() { c.begin(); c.end(); c.end() })
		}, quiet/2 + quiet},
		{"the backend closes", func(c *calls, cancel func()) { c.begin(); time.AfterFunc(quiet/2, cancel) }, quiet / 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.Sleep(time.Second) //nolint:forbidigo // of the bubble's clock, which starts at another time than this process
				var cs calls
				c.before(&cs, cancel)
				begin := time.Now()
				cs.awaitQuiet(ctx)
				// It looks again every quiet, so that it may be that much late.
				if got := time.Since(begin); got < c.want || got > c.want+quiet || c.want == busy && got != busy {
					t.Errorf("waited for %v, want %v", got, c.want)
				}
			})
		})
	}
}
