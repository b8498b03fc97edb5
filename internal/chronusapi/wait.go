package chronusapi

import (
	"encoding/binary"
	"errors"
	"os"
	"time"
)

// Wait waits until something comes for Next to return, but not longer than d;
// with d 0 it only looks. It reports whether something is there, and must not
// be called at the same time as Next.
func (s *Events) Wait(d time.Duration) bool {
	if s.first != nil || s.err != nil || s.k.cn.ready() {
		return true
	}
	cn := s.k.cn
	if d <= 0 || cn.nc.SetReadDeadline(time.Now().Add(d)) != nil {
		return false
	}
	_, err := cn.r.Peek(1) // an error of the connection comes again with the next read
	_ = cn.nc.SetReadDeadline(time.Time{})
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

// ready reports whether a whole message of one frame is in memory.
func (c *conn) ready() bool {
	if c.r.Buffered() < headerLen {
		return false
	}
	h, err := c.r.Peek(headerLen)
	return err == nil && h[0] != frameMore && c.r.Buffered()-headerLen >= int(binary.BigEndian.Uint32(h[1:]))
}
