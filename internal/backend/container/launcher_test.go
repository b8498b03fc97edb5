package container

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/opendsec/dsec"
)

// A create whose caller gives up just as the launcher says no has the answer
// already, and must not wait for another one.
func TestAbandonAfterTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		run := &launcherRun{dead: make(chan struct{}), waiting: map[uint64]chan answer{}}
		s := &starting{run: run, ch: make(chan answer, 1)}
		s.ch <- answer{reply: reply{Error: &wireError{Code: dsec.CodeExhausted, Message: "full"}}}
		ctx, cancel := context.WithCancel(t.Context())
		sh := &shell{userns: -1, pending: s}
		if err := sh.started(ctx); dsec.CodeOf(err) != dsec.CodeExhausted || sh.pending != nil {
			t.Errorf("%v, pending %v", err, sh.pending)
		}
		cancel()
		s.abandon()
	})
}
