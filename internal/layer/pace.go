package layer

import (
	"context"
	"io"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/units"
)

// A build has one of few turns, so its archive has to come at a pace: who sends it has
// so much time, of which waiting for him takes, and to which each byte adds.
const (
	leastPace = 64 << 10 // bytes a second
	patience  = 2 * time.Minute
)

// paced ends a call whose archive comes too slowly.
type paced struct {
	r      io.Reader
	most   time.Duration
	left   time.Duration
	cancel context.CancelCauseFunc // of the call
}

// Read implements io.Reader. What of it waits when the call is ended goes on.
func (p *paced) Read(b []byte) (int, error) {
	start := time.Now()
	timer := time.AfterFunc(p.left, func() {
		p.cancel(dsec.Errorf(dsec.CodeUnavailable, "the archive comes too slowly: it was waited for for %s, want at least %s a second",
			p.most, units.Bytes(leastPace)))
	})
	n, err := p.r.Read(b)
	timer.Stop()
	p.left -= time.Since(start)
	p.left = min(p.left+time.Duration(n)*time.Second/leastPace, p.most)
	return n, err
}
