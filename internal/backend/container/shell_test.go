package container

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// A container that takes too long is the node's fault, which is told as such
// and never as the end of a deadline that the caller would have set.
func TestSlowStartIsToldAsThePlatforms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proc := &process{done: make(chan struct{})}
		silent := func(context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() { // reads, and never answers
				for b := make([]byte, 100); ; {
					if _, err := theirs.Read(b); err != nil {
						return
					}
				}
			}()
			return ours, nil
		}
		for name, start := range map[string]*shell{
			"the launcher": {pending: &starting{run: &launcherRun{dead: make(chan struct{})}, ch: make(chan answer)}},
			"chronus":      {proc: proc, client: chronusapi.NewClient(silent)},
		} {
			begun := time.Now()
			err := start.await(t.Context())
			if err == nil || dsec.CodeOf(typed(err)) != dsec.CodeUnavailable || time.Since(begun) != stepTimeout {
				t.Errorf("%s does not answer: %v after %v, want unavailable after %v", name, err, time.Since(begun), stepTimeout)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if err := start.await(ctx); !errors.Is(typed(err), context.DeadlineExceeded) {
				t.Errorf("%s does not answer in the caller's time: %v", name, err)
			}
			cancel()
		}
	})
}
