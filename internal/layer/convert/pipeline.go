package convert

import (
	"context"
	"crypto/sha256"
	"hash"
	"io"
	"sync"
)

// What follows has the processors share the work on one stream: each piece of it is
// hashed by a goroutine of its own, as it is unpacked by one (package ahead).

const (
	pieceSize   = 256 << 10
	pieceBehind = 4 // pieces on their way
)

// hasher hashes what it is given, behind the caller's back.
type hasher struct {
	h    hash.Hash
	buf  []byte
	free chan []byte
	full chan []byte // nil: stopped
	done chan struct{}
}

// newHasher makes one, which must be stopped.
func newHasher() *hasher {
	h := &hasher{h: sha256.New(), free: make(chan []byte, pieceBehind), full: make(chan []byte, pieceBehind), done: make(chan struct{})}
	full := h.full
	go func() {
		defer close(h.done)
		for b := range full {
			h.h.Write(b)
			h.free <- b[:0]
		}
	}()
	for range pieceBehind - 1 {
		h.free <- nil // memory is taken when it is needed: most streams are short
	}
	return h
}

func (h *hasher) add(p []byte) {
	for len(p) > 0 {
		if len(h.buf) == cap(h.buf) {
			h.next(len(p))
		}
		n := copy(h.buf[len(h.buf):cap(h.buf)], p)
		h.buf, p = h.buf[:len(h.buf)+n], p[n:]
	}
}

// next hands over the buffer and takes another.
func (h *hasher) next(want int) {
	if len(h.buf) > 0 {
		h.full <- h.buf
	}
	if h.buf = <-h.free; cap(h.buf) == 0 {
		h.buf = make([]byte, 0, min(pieceSize, max(want, 4<<10)))
	}
}

// stop ends the goroutine, any number of times.
func (h *hasher) stop() {
	if h.full == nil {
		return
	}
	close(h.full)
	h.full = nil
	<-h.done
}

// sum is the digest of all that was added. Nothing can be added any more.
func (h *hasher) sum() string {
	h.stop()
	h.h.Write(h.buf)
	h.buf = h.buf[:0]
	return sum(h.h.Sum(nil))
}

// hashed hashes what is read.
type hashed struct {
	r io.Reader
	h *hasher
}

// Read implements io.Reader.
func (r *hashed) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.h.add(p[:n])
	return n, err
}

// UntilDone reads from r until ctx ends, and then fails with why it did.
func UntilDone(ctx context.Context, r io.Reader) io.Reader { return &untilDone{ctx, r} }

type untilDone struct {
	ctx context.Context
	r   io.Reader
}

// Read implements io.Reader.
func (u *untilDone) Read(p []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.r.Read(p)
}

// gate is a reader that can be shut while somebody else reads it.
type gate struct {
	mu   sync.Mutex
	r    io.Reader
	over bool
}

// Read implements io.Reader.
func (g *gate) Read(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over {
		return 0, io.ErrClosedPipe
	}
	return g.r.Read(p)
}

// shut returns when nothing reads any more.
func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
}
