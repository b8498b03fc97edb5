package blob

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/opendsec/dsec"
)

// Backoff says how often, and for how long, a request is repeated.
type Backoff struct {
	Attempts int           // at most, the first included
	Base     time.Duration // the longest pause before the second; each further one may be twice as long
	Max      time.Duration // the longest pause
	Total    time.Duration // since the first attempt began, after which no other begins
}

// DefaultBackoff outlasts the restart of a server, and no more.
var DefaultBackoff = Backoff{Attempts: 6, Base: 50 * time.Millisecond, Max: 4 * time.Second, Total: 30 * time.Second}

// Do calls f until it succeeds, fails with another code than unavailable, or may
// not be repeated any more. f must be such that doing it twice is doing it once.
// Pauses are random, so that clients who failed together do not come back together.
func (b Backoff) Do(ctx context.Context, f func() error) error {
	end := time.Now().Add(b.Total)
	pause := b.Base
	for attempt := 1; ; attempt++ {
		err := f()
		if !transient(err) || attempt >= b.Attempts || time.Now().After(end) {
			return err
		}
		timer := time.NewTimer(rand.N(pause + 1))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		pause = min(2*pause, b.Max)
	}
}

func transient(err error) bool { return err != nil && dsec.CodeOf(err) == dsec.CodeUnavailable }
