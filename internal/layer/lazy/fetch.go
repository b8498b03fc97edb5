package lazy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// flight is the one fetch or check of a chunk that is under way.
type flight struct {
	done chan struct{} // closed at the end
	err  error
	data []byte // the chunk, verified, where the disk had no room for it
}

// errCorrupt is of a chunk that is not what its hash says.
var errCorrupt = errors.New("the store's bytes are not those of the image")

// wait returns once the chunks that r touches are on local disk and verified. Its
// error is that of the fetch, or ctx's. A chunk for which the disk has no room is
// errNoRoom.
func (c *cache) wait(ctx context.Context, im *image, r Range) error {
	first, end := im.span(r)
	waited := false
	err := func() error {
		if !im.ready(first, end) {
			waited = true
			return c.waitFor(ctx, im, first, end)
		}
		c.readAhead(im, first, end)
		return nil
	}()
	im.noteRead(waited, err)
	return err
}

var errNoRoom = errors.New("the cache's disk is full")

func (c *cache) waitFor(ctx context.Context, im *image, first, end int64) error {
	flights := c.start(im, first, end, c.demand)
	c.readAhead(im, first, end)
	for _, fl := range flights {
		select {
		case <-fl.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		switch {
		case fl.err != nil:
			return fl.err
		case fl.data != nil:
			return errNoRoom
		}
	}
	return nil
}

// readAt fills p from off, which lies within the image together with p. Where the
// disk has no room the bytes come from memory.
func (c *cache) readAt(ctx context.Context, im *image, p []byte, off int64) error {
	first, end := im.span(Range{off, int64(len(p))})
	ok := im.ready(first, end)
	err := c.readChunks(ctx, im, p, off)
	im.noteRead(!ok, err)
	return err
}

func (c *cache) readChunks(ctx context.Context, im *image, p []byte, off int64) error {
	first, end := im.span(Range{off, int64(len(p))})
	begun := map[int64]*flight{}
	if !im.ready(first, end) {
		begun = c.begin(im, first, end, c.demand) // all at once
	}
	c.readAhead(im, first, end)
	for i := first; i < end; i++ {
		chunk := im.chunk(i)
		from := max(off, chunk.Offset)
		part := p[from-off : min(off+int64(len(p)), chunk.Offset+chunk.Length)-off]
		if err := c.readChunk(ctx, im, i, begun[i], part, from); err != nil {
			return err
		}
	}
	return nil
}

// readChunk fills p from off, all within chunk i, whose flight may have begun: where
// it has failed meanwhile, no other begins.
func (c *cache) readChunk(ctx context.Context, im *image, i int64, fl *flight, p []byte, off int64) error {
	for ; ; fl = nil {
		im.hole.RLock()
		if im.ready(i, i+1) {
			_, err := im.data.ReadAt(p, off)
			im.hole.RUnlock()
			return err
		}
		im.hole.RUnlock()
		if fl == nil {
			if fl = c.begin(im, i, i+1, c.demand)[i]; fl == nil {
				continue // present by now
			}
		}
		select {
		case <-fl.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if fl.err != nil {
			return fl.err
		}
		if fl.data != nil {
			copy(p, fl.data[off-im.chunk(i).Offset:])
			return nil
		}
	}
}

func (im *image) noteRead(waited bool, err error) {
	im.mu.Lock()
	defer im.mu.Unlock()
	im.stats.Reads++
	if waited {
		im.stats.Waits++
	}
	if err != nil {
		im.stats.Errors++
	}
}

// start is begin for who waits for all flights.
func (c *cache) start(im *image, first, end int64, budget *semaphore.Weighted) []*flight {
	return slices.Collect(maps.Values(c.begin(im, first, end, budget)))
}

// begin makes sure that a flight is under way for each chunk from first to end
// that is not present, and returns these by chunk. budget bounds what is fetched.
func (c *cache) begin(im *image, first, end int64, budget *semaphore.Weighted) map[int64]*flight {
	im.mu.Lock()
	defer im.mu.Unlock()
	flights := map[int64]*flight{}
	if c.life.Err() != nil {
		fl := &flight{done: make(chan struct{}), err: errClosed}
		close(fl.done)
		flights[first] = fl
		return flights
	}
	if err := im.wake(); err != nil {
		fl := &flight{done: make(chan struct{}), err: fmt.Errorf("cache: %w", err)}
		close(fl.done)
		flights[first] = fl
		return flights
	}
	var run []*flight
	var from int64
	launch := func() {
		if len(run) > 0 {
			from, run := from, run
			c.filling.Go(func() { c.fly(im, from, run, budget) })
		}
		run = nil
	}
	for i := first; i < end; i++ {
		fl := im.flights[i]
		if fl != nil || im.states[i] == present {
			launch()
			if fl != nil {
				flights[i] = fl
			}
			continue
		}
		if fl = c.inMemory(im, i); fl != nil {
			launch()
			flights[i] = fl
			continue
		}
		if int64(len(run)+1)*im.ChunkSize > fetchRun || len(run) > 0 && im.states[i] != im.states[from] {
			launch()
		}
		if len(run) == 0 {
			from = i
		}
		fl = &flight{done: make(chan struct{})}
		im.flights[i] = fl
		flights[i], run = fl, append(run, fl)
	}
	launch()
	return flights
}

var errClosed = &dsec.Error{Code: dsec.CodeUnavailable, Message: "layerd is ending"}

// fly brings the chunks from first on, all absent or all doubtful, to where they
// are present, and ends their flights.
func (c *cache) fly(im *image, first int64, flights []*flight, budget *semaphore.Weighted) {
	_, limits := c.settings()
	ctx, cancel := context.WithTimeout(c.life, limits.RetryFor)
	defer cancel()
	c.crash("fill.claimed")
	im.mu.Lock()
	check := im.states[first] == doubtful
	im.mu.Unlock()
	if check {
		rest := flights[:0:0]
		from := first
		for n, fl := range flights {
			if c.recheck(im, first+int64(n)) {
				c.land(im, first+int64(n), fl)
				continue
			}
			if len(rest) > 0 && from+int64(len(rest)) != first+int64(n) {
				c.fetch(ctx, im, from, rest, budget)
				rest = nil
			}
			if len(rest) == 0 {
				from = first + int64(n)
			}
			rest = append(rest, fl)
		}
		first, flights = from, rest
	}
	if len(flights) > 0 {
		c.fetch(ctx, im, first, flights, budget)
	}
}

// recheck reports whether a chunk that an earlier run of the kernel wrote is what
// it must be, and makes it present. It makes the chunk absent otherwise.
func (c *cache) recheck(im *image, i int64) bool {
	r := im.chunk(i)
	b := make([]byte, r.Length)
	im.hole.RLock() // it may be about to go
	defer im.hole.RUnlock()
	if _, err := im.data.ReadAt(b, r.Offset); err == nil && im.verified(i, b) && im.setState(i, present) == nil {
		return true
	}
	if err := im.setState(i, absent); err != nil {
		c.log.Warn("map not written", "key", im.Key, "error", err)
	}
	return false
}

// land ends a flight.
func (c *cache) land(im *image, i int64, fl *flight) {
	im.mu.Lock()
	delete(im.flights, i)
	im.mu.Unlock()
	close(fl.done)
}

// fetch brings absent chunks from the store, and repeats until ctx ends what may
// succeed another time. It ends all flights.
func (c *cache) fetch(ctx context.Context, im *image, first int64, flights []*flight, budget *semaphore.Weighted) {
	offset := im.chunk(first).Offset
	last := im.chunk(first + int64(len(flights)) - 1)
	length := last.Offset + last.Length - offset
	b, release, err := c.read(ctx, im, Range{offset, length}, budget)
	c.crash("fill.fetched")
	for n, fl := range flights {
		i := first + int64(n)
		chunk := im.chunk(i)
		fl.err = err
		if err == nil {
			fl.err = c.accept(ctx, im, i, b[chunk.Offset-offset:][:chunk.Length:chunk.Length], fl)
		}
		if fl.data != nil {
			c.judge(im, i, errNoRoom)
		} else {
			c.judge(im, i, fl.err)
		}
		c.land(im, i, fl)
	}
	release()
}

// accept stores a chunk that came from the store if it is what it must be. It is
// asked of the store once more if not, which opens the blob anew: it may have been
// mended since.
func (c *cache) accept(ctx context.Context, im *image, i int64, b []byte, fl *flight) error {
	if !im.verified(i, b) {
		c.corrupt(im, i)
		store, _ := c.settings()
		if r, ok := store.(blob.Reopener); ok {
			r.Reopen(im.Key)
		}
		var err error
		if b, err = c.call(ctx, im, im.chunk(i), func() {}); err != nil {
			return fmt.Errorf("%w; once more: %w", errCorrupt, err)
		}
		if !im.verified(i, b) {
			c.corrupt(im, i)
			return errCorrupt
		}
	}
	c.crash("fill.verified")
	im.mu.Lock()
	im.stats.Fetched++
	im.mu.Unlock()
	if err := c.keep(im, i, b); err != nil {
		if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
			return fmt.Errorf("cache: %w", err)
		}
		fl.data = bytes.Clone(b) // readers take it from here
		c.keepInMemory(im, i, fl)
	}
	return nil
}

// keep writes a verified chunk to the cache. A full disk makes room once.
func (c *cache) keep(im *image, i int64, b []byte) error {
	// Counted before there is room: several chunks come at once, and each must see the others.
	c.coming.Add(int64(len(b)))
	defer c.coming.Add(-int64(len(b)))
	c.makeRoom(0, false)
	write := func() error {
		im.hole.RLock() // the one before may not have gone yet, but be forgotten already
		defer im.hole.RUnlock()
		_, err := im.data.WriteAt(b, im.chunk(i).Offset)
		return err
	}
	err := write()
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		if c.makeRoom(int64(len(b)), true) {
			err = write()
		}
	}
	if err == nil {
		c.crash("fill.written")
		err = im.setState(i, present)
	}
	if err != nil {
		return errors.Join(err, im.punch(i)) // a part may have been written
	}
	c.crash("fill.mapped")
	return nil
}

// read reads a range of the store, with repeats. release gives the buffer's share
// of the budget back; it must be called.
func (c *cache) read(ctx context.Context, im *image, r Range, budget *semaphore.Weighted) (b []byte, release func(), err error) {
	release = func() { budget.Release(r.Length) }
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		if budget.Acquire(ctx, r.Length) != nil {
			if err == nil {
				err = errors.New("more is waiting for the store than may")
			}
			break
		}
		if b, err = c.call(ctx, im, r, release); err == nil {
			im.mu.Lock()
			im.stats.FetchedBytes += r.Length
			im.mu.Unlock()
			return b, release, nil
		}
		if final(err) {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			continue
		}
		break
	}
	return nil, func() {}, fmt.Errorf("store: %w", err)
}

// call asks the store once, and returns in time though the store may not heed
// its context. failed is called once the buffer of a call that failed is free.
func (c *cache) call(ctx context.Context, im *image, r Range, failed func()) ([]byte, error) {
	store, limits := c.settings()
	ctx, cancel := context.WithTimeoutCause(ctx, limits.CallFor, errHung)
	defer cancel()
	b := make([]byte, r.Length)
	done := make(chan error, 1)
	go func() { done <- readFull(ctx, store, im.Key, b, r.Offset) }()
	select {
	case err := <-done:
		if err != nil {
			failed()
		}
		return b, err
	case <-ctx.Done():
		go func() {
			c.log.Debug("a call to the store ended late", "key", im.Key, "error", <-done)
			failed()
		}()
		return nil, context.Cause(ctx)
	}
}

var errHung = &dsec.Error{Code: dsec.CodeUnavailable, Message: "no answer in time"}

func readFull(ctx context.Context, store blob.Store, key string, p []byte, off int64) error {
	n, err := store.ReadAt(ctx, key, p, off)
	if n == len(p) && (err == nil || err == io.EOF) {
		return nil
	}
	if err == nil || err == io.EOF {
		err = &dsec.Error{Code: dsec.CodeInternal, Message: "the store's blob is shorter than the image"}
	}
	return err
}

// final reports whether repeating cannot help.
func final(err error) bool {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok {
		return false
	}
	switch e.Code {
	case dsec.CodeUnavailable, dsec.CodeExhausted, dsec.CodeInternal:
		return false
	}
	return true
}

func (c *cache) corrupt(im *image, i int64) {
	im.mu.Lock()
	im.stats.Corrupt++
	im.mu.Unlock()
	c.notify(Event{Kind: EventCorrupt, Key: im.Key, Chunk: i, Reason: errCorrupt.Error()})
}
