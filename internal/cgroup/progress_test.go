package cgroup

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// What goes on is waited for however long it takes, and what does not is told
// 30 s after it last did.
func TestWaitsForAsLongAsSomethingGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun, steps := time.Now(), 0
		ctx, cancel := whileProgress(t.Context(), func() string {
			steps = min(steps+1, 3600) // an hour of it
			return fmt.Sprint(steps)
		})
		defer cancel()
		<-ctx.Done()
		if took := time.Since(begun); took != time.Hour+stallTime || !errors.Is(context.Cause(ctx), ErrStalled) {
			t.Errorf("it ended after %v for %v", took, context.Cause(ctx))
		}
	})
}

// A slow one makes a step less often than it is looked at.
func TestSlowIsNotStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		ctx, cancel := whileProgress(t.Context(), func() string {
			return fmt.Sprint(time.Since(begun) / (stallTime - 2*stallEvery))
		})
		time.Sleep(time.Hour)
		synctest.Wait()
		if ctx.Err() != nil {
			t.Errorf("it ended for %v", context.Cause(ctx))
		}
		cancel()
		if context.Cause(ctx) != context.Canceled {
			t.Errorf("the caller's end is %v", context.Cause(ctx))
		}
	})
}

func TestEndsWithItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outer, stop := context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		ctx, cancel := whileProgress(outer, func() string { return "" })
		defer cancel()
		<-ctx.Done()
		if context.Cause(ctx) != context.DeadlineExceeded {
			t.Errorf("it ended for %v", context.Cause(ctx))
		}
	})
}
