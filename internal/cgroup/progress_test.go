package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec/internal/testutil"
)

func same() string          { return "" }
func stuck() (string, bool) { return "in a file system", false }

// What goes on is waited for however long it takes, and what does not is told
// 30 s after it last did.
func TestWaitsForAsLongAsSomethingGoesOn(t *testing.T) {
	counted := func(n *int) string {
		*n = min(*n+1, 3600)
		return fmt.Sprint(*n)
	}
	for name, p := range map[string]func(n *int) progress{
		"it uses CPU time": func(n *int) progress {
			return progress{func() string { return counted(n) }, stuck}
		},
		"it waits for one thing after the other": func(n *int) progress {
			return progress{same, func() (string, bool) { return counted(n), false }}
		},
		"it gets no CPU time": func(n *int) progress {
			return progress{same, func() (string, bool) { return "", counted(n) != "3600" }}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun, asked := time.Now(), 0
				ctx, cancel := whileProgress(t.Context(), p(&asked))
				defer cancel()
				<-ctx.Done()
				if took := time.Since(begun); asked != 3600 || took < time.Hour || !errors.Is(context.Cause(ctx), ErrStalled) {
					t.Errorf("it ended after %v and %d looks for %v", took, asked, context.Cause(ctx))
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		ctx, cancel := whileProgress(t.Context(), progress{same, stuck})
		defer cancel()
		<-ctx.Done()
		if took := time.Since(begun); took != stallTime || !errors.Is(context.Cause(ctx), ErrStalled) {
			t.Errorf("what is stuck ended it after %v for %v", took, context.Cause(ctx))
		}
	})
}

// A slow one makes a step less often than it is looked at.
func TestSlowIsNotStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		ctx, cancel := whileProgress(t.Context(), progress{func() string {
			return fmt.Sprint(time.Since(begun) / (stallTime - 2*stallEvery))
		}, stuck})
		<-time.After(time.Hour)
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
		ctx, cancel := whileProgress(outer, progress{same, stuck})
		defer cancel()
		<-ctx.Done()
		if context.Cause(ctx) != context.DeadlineExceeded {
			t.Errorf("it ended for %v", context.Cause(ctx))
		}
	})
}

// What the threads of a group wait for is told, and of no other's.
func TestTasksOfAGroup(t *testing.T) {
	tree := openTree(t, 0)
	g, other := create(t, tree, idA, small), create(t, tree, idB, small)
	spins := start(t, in(command(t, other), exec.Command("/bin/sh", "-c", "while :; do :; done")))
	if what, runs := tasksOf(g.name); what != "" || runs {
		t.Errorf("of an empty group: %q, %v", what, runs)
	}
	waits := start(t, in(command(t, g), exec.Command("/bin/sleep", "1000")))
	testutil.WaitFor(t, 20*time.Second, "it waits", func() error {
		if what, runs := tasksOf(g.name); runs || !strings.HasPrefix(what, fmt.Sprint(waits.Process.Pid, " S ")) {
			return fmt.Errorf("%q, %v", what, runs)
		}
		return nil
	})
	testutil.WaitFor(t, 20*time.Second, "the other runs", func() error {
		if what, runs := tasksOf(other.name); !runs || !strings.HasPrefix(what, fmt.Sprint(spins.Process.Pid, " R ")) {
			return fmt.Errorf("%q, %v", what, runs)
		}
		return nil
	})
}
