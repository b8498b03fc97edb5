package client

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/opendsec/dsec"
)

// restarting reports whether err says that the server, or the node, is being
// restarted, and so has not accepted the call.
func restarting(err error) bool {
	e, ok := errors.AsType[*dsec.Error](err)
	return ok && e.Restarting && e.Code == dsec.CodeUnavailable
}

// overRestart makes an attempt at a call, and makes it again for a minute while the
// server says that it is being restarted, as the dialer does while it refuses
// connections. again, where not nil, is asked before each whether it can be made.
func overRestart(ctx context.Context, again func() bool, attempt func() error) error {
	end := time.Now().Add(outOfReach)
	for n := 1; ; n++ {
		err := attempt()
		if !restarting(err) || time.Now().After(end) || again != nil && !again() || pause(ctx, min(n, 4)) != nil {
			return err
		}
	}
}

// rewinder has r begin anew, and reports whether it can.
func rewinder(r io.Reader) func() bool {
	s, ok := r.(io.Seeker)
	if !ok {
		return func() bool { return false }
	}
	start, err := s.Seek(0, io.SeekCurrent)
	return func() bool {
		if err != nil { // as of a pipe
			return false
		}
		_, serr := s.Seek(start, io.SeekStart)
		return serr == nil
	}
}
