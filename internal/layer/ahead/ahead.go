// Package ahead reads a source before its bytes are asked for, in pieces, and gives
// them in their order: so that who makes them and who uses them work at once, and a
// source that takes its time to answer is asked for several pieces at once.
//
//	r := ahead.Stream(ctx, ahead.Options{}, source) // or At, of what can be read at any place
//	defer r.Close()
//	_, err := io.Copy(w, r)
package ahead

import (
	"context"
	"io"
	"sync"
)

// Options say how much is in memory.
type Options struct {
	Piece  int // bytes read at once: 256 KiB
	Pieces int // at once, those asked for and that which is being used: 3; at least 2
}

func (o Options) withDefaults() Options {
	if o.Piece == 0 {
		o.Piece = 256 << 10
	}
	if o.Pieces == 0 {
		o.Pieces = 3
	}
	return o
}

// Reader gives the bytes of a source. It is used by one goroutine, which closes it.
type Reader struct {
	ctx    context.Context //nolint:containedctx // of the goroutines, until Close
	cancel context.CancelFunc
	work   sync.WaitGroup
	free   chan []byte     // of those in memory the ones that nobody uses; nil ones have never been
	asked  chan chan piece // in order, and each of them answered once

	now  piece  // that is being used
	left []byte // of now
	err  error  // what follows left, once it is known
}

type piece struct {
	b   []byte
	err error // what follows b; io.EOF is the source's end
}

func newReader(ctx context.Context, opt Options, run func(r *Reader)) *Reader {
	r := &Reader{free: make(chan []byte, opt.Pieces), asked: make(chan chan piece, opt.Pieces)}
	r.ctx, r.cancel = context.WithCancel(ctx)
	for range opt.Pieces {
		r.free <- nil // memory is taken when it is needed: most sources are short
	}
	r.work.Go(func() {
		defer close(r.asked)
		run(r)
	})
	return r
}

// Stream reads a source that gives its bytes in order, which only one read at a time
// is made of.
func Stream(ctx context.Context, opt Options, source io.Reader) *Reader {
	opt = opt.withDefaults()
	return newReader(ctx, opt, func(r *Reader) {
		for size := max(opt.Piece/16, 1); ; size = min(2*size, opt.Piece) {
			b, answer := r.ask(size)
			if answer == nil {
				return
			}
			n, err := 0, error(nil)
			for n < len(b) && err == nil {
				var m int
				m, err = source.Read(b[n:])
				n += m
			}
			if answer <- (piece{b[:n], err}); err != nil {
				return
			}
		}
	})
}

// At reads a source that can be read at any place. read is called by several
// goroutines, by the rules of io.ReaderAt, and size once, where the source is longer
// than a piece. One that ends before its size is an io.ErrUnexpectedEOF.
func At(ctx context.Context, opt Options, size func(ctx context.Context) (int64, error), read func(ctx context.Context, p []byte, off int64) (int, error)) *Reader {
	opt = opt.withDefaults()
	return newReader(ctx, opt, func(r *Reader) {
		b, answer := r.ask(opt.Piece)
		if answer == nil {
			return
		}
		n, err := read(r.ctx, b, 0)
		if answer <- (piece{b[:n], err}); err != nil {
			return
		}
		total, err := size(r.ctx)
		for off := int64(n); off < total || err != nil; off += int64(opt.Piece) {
			b, answer := r.ask(opt.Piece)
			if answer == nil {
				return
			}
			if err != nil {
				answer <- piece{b[:0], err}
				return
			}
			r.work.Go(func() {
				want := b[:min(int64(len(b)), total-off)]
				n, err := read(r.ctx, want, off)
				if n == len(want) {
					err = nil
				} else if err == nil || err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				answer <- piece{want[:n], err}
			})
		}
	})
}

// ask takes a buffer of size bytes, whose turn is next. The answer is nil where the
// reader is closed or its context has ended.
func (r *Reader) ask(size int) (b []byte, answer chan piece) {
	select {
	case b = <-r.free:
	case <-r.ctx.Done():
		return nil, nil
	}
	if r.ctx.Err() != nil {
		return nil, nil
	}
	if cap(b) < size {
		b = make([]byte, size)
	}
	answer = make(chan piece, 1)
	r.asked <- answer // which has room for as many as there are buffers
	return b[:size], answer
}

// next waits for the next piece, where all of the last one was used.
func (r *Reader) next() error {
	for len(r.left) == 0 {
		if r.err != nil {
			return r.err
		}
		if r.now.b != nil {
			r.free <- r.now.b
			r.now.b = nil
		}
		answer, ok := <-r.asked
		if !ok {
			if r.err = context.Cause(r.ctx); r.err == nil {
				r.err = io.EOF
			}
			return r.err
		}
		r.now = <-answer
		r.left, r.err = r.now.b, r.now.err
	}
	return nil
}

// Read implements io.Reader. An error is the source's, or the cause of the context's end.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if err := r.next(); err != nil {
		return 0, err
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

// WriteTo implements io.WriterTo: w gets the pieces as they are.
func (r *Reader) WriteTo(w io.Writer) (total int64, err error) {
	for {
		if err := r.next(); err == io.EOF {
			return total, nil
		} else if err != nil {
			return total, err
		}
		n, err := w.Write(r.left)
		total += int64(n)
		if r.left = r.left[n:]; err != nil {
			return total, err
		}
	}
}

// Close ends the reading, and returns when nothing reads the source any more. A read
// of a Stream's source that waits is ended by whoever owns it.
func (r *Reader) Close() error {
	r.cancel()
	r.work.Wait()
	return nil
}
