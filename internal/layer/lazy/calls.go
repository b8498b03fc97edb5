package lazy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// calls is what one client has asked for.
type calls struct {
	s *server
	c *connection

	ctx     context.Context //nolint:containedctx // of the calls of this client
	end     context.CancelFunc
	running sync.WaitGroup

	events *eventQueue // to be told

	mu     sync.Mutex
	cancel map[uint64]context.CancelFunc
}

func newCalls(s *server, c *connection) *calls {
	k := &calls{s: s, c: c, cancel: map[uint64]context.CancelFunc{}, events: newEventQueue()}
	k.ctx, k.end = context.WithCancel(context.Background())
	k.running.Go(func() {
		for {
			e, ok := k.events.next(k.ctx)
			if !ok {
				return
			}
			k.events.take(e)
			_ = c.send(&message{Event: &e})
		}
	})
	return k
}

// close ends all calls.
func (k *calls) close() {
	k.end()
	k.running.Wait()
}

// handle does a call on a goroutine of its own, and answers it.
func (k *calls) handle(m *message, files []*os.File) {
	ctx, cancel := context.WithCancel(k.ctx)
	k.mu.Lock()
	if m.Cancel {
		if f := k.cancel[m.ID]; f != nil {
			f()
		}
		k.mu.Unlock()
		cancel()
		closeFiles(files)
		return
	}
	k.cancel[m.ID] = cancel
	k.mu.Unlock()
	k.running.Go(func() {
		defer closeFiles(files)
		r, file, err := k.do(ctx, m, files)
		r.Error = toWire(err)
		if err := k.c.send(&message{ID: m.ID, Reply: &r}, some(file)...); err != nil && k.ctx.Err() == nil {
			k.s.log.Warn("an answer was not sent", "error", err)
		}
		if file != nil {
			_ = file.Close()
		}
		if m.Stop && err == nil {
			k.s.stop()
		}
		k.mu.Lock()
		delete(k.cancel, m.ID)
		k.mu.Unlock()
		cancel()
	})
}

func (k *calls) do(ctx context.Context, m *message, files []*os.File) (r reply, file *os.File, err error) {
	switch {
	case m.Open != nil:
		file, err = k.open(m.Open.FrontEnd, files)
	case m.Release != nil:
		r.Idle, err = k.s.release(ctx, m.Release)
	case m.Settle != nil:
		err = k.s.settle(m.Settle.Key)
	case m.Trace != nil:
		file, err = k.s.trace(m.Trace.Key)
	case m.Stats:
		stats := []Stats{}
		for _, im := range k.s.cache.all() {
			stats = append(stats, im.snapshot())
		}
		file, err = bulkJSON(stats)
	case m.Prefetch != nil:
		err = k.prefetch(ctx, m, files)
	case m.Stop:
		err = k.s.mayStop()
	case m.Ping:
		k.s.present()
	default:
		err = &dsec.Error{Code: dsec.CodeUnsupported, Message: "layerd does not know this call"}
	}
	return r, file, err
}

// described reads the image that a call is about.
func described(files []*os.File) (*Image, error) {
	if len(files) == 0 {
		return nil, errors.New("layerd protocol: no description")
	}
	b, err := readBulk(files[0])
	if err != nil {
		return nil, err
	}
	return parseMeta(b)
}

// open makes an image one that is served, and returns its file where the client
// cannot open it itself.
func (k *calls) open(front FrontEnd, files []*os.File) (*os.File, error) {
	want, err := described(files)
	if err != nil {
		return nil, err
	}
	im, err := k.s.cache.open(want)
	if err != nil {
		return nil, err
	}
	k.s.cache.crash("open.cached")
	im.ops.Lock()
	defer im.ops.Unlock()
	k.s.mu.Lock()
	fan, fuse := k.s.fan, k.s.fuse
	k.s.mu.Unlock()
	im.mu.Lock()
	lost := im.lost
	switch { // one that somebody has is served on as it is, whatever the client would choose now
	case im.armed:
		front = Fanotify
	case im.inUse || im.left:
		front = FUSE
	}
	err = im.wake()
	im.mu.Unlock()
	if lost {
		return nil, errNotSettled
	}
	if err != nil {
		return nil, err
	}
	switch {
	case front == Fanotify && fan != nil:
		return k.openFanotify(im, fan)
	case front == FUSE && fuse != nil:
		return nil, k.openFUSE(im)
	}
	return nil, &dsec.Error{Code: dsec.CodeUnsupported, Message: fmt.Sprintf("front end %q is not there", front)}
}

var errNotSettled = &dsec.Error{Code: dsec.CodeConflict, Field: "key", Message: "the image is lost and not settled"}

// openFanotify hands out the data file itself. The client has the descriptor for
// writing before there is a mark: one that is opened later would raise events.
func (k *calls) openFanotify(im *image, fan *fanotify) (*os.File, error) {
	if !im.complete() {
		if err := k.s.served.add(im, Fanotify); err != nil {
			return nil, err
		}
	}
	k.s.cache.crash("open.recorded")
	if err := k.c.send(&message{Hold: &hold{im.Key, Fanotify, true}}, im.data); err != nil {
		return nil, err
	}
	k.s.cache.crash("open.held")
	im.mu.Lock()
	im.inUse, im.used = true, time.Now()
	im.mu.Unlock()
	if err := fan.arm(im); err != nil {
		return nil, err
	}
	k.s.cache.crash("open.armed")
	return k.s.cache.dir.open(im.name+".data", unix.O_RDONLY)
}

// openFUSE lets the client open the image below the mount.
func (k *calls) openFUSE(im *image) error {
	if err := k.s.served.add(im, FUSE); err != nil {
		return err
	}
	k.s.cache.crash("open.recorded")
	if err := k.c.send(&message{Hold: &hold{im.Key, FUSE, true}}); err != nil {
		return err
	}
	k.s.cache.crash("open.held")
	im.mu.Lock()
	im.inUse, im.left, im.used = true, false, time.Now()
	im.mu.Unlock()
	return nil
}

// release lets an image's chunks go, fanotify's as soon as nobody has it open. It
// reports whether nobody has now. One that was given up does nothing: its image may
// have been opened again since.
func (s *server) release(ctx context.Context, r *releaseCall) (idle bool, err error) {
	im, err := s.cache.byKey(r.Key)
	if err != nil {
		return false, err
	}
	im.ops.Lock()
	if err := ctx.Err(); err != nil {
		im.ops.Unlock()
		return false, err
	}
	im.mu.Lock()
	if r.Last && (im.inUse || !im.left) { // it was opened again meanwhile
		im.mu.Unlock()
		im.ops.Unlock()
		return false, nil
	}
	im.inUse, im.used = false, time.Now()
	im.left = r.Open && !im.armed
	armed, left := im.armed, im.left
	im.mu.Unlock()
	if !armed && !left {
		err = s.served.remove(im)
		s.cache.rest(im)
	}
	im.ops.Unlock()
	if left {
		return false, err
	}
	if armed && !s.tryDisarm(im) {
		s.wake()
		return false, err
	}
	return true, err
}

// settle forgets that an image was lost. Where there is a fanotify group it is once
// nobody has it open, for readers that are left get errors by the mark. Where there
// is none nothing keeps them from anything, and by FUSE the next ones get what the
// map vouches for.
func (s *server) settle(key string) error {
	s.mu.Lock()
	lost, fan := s.lost[key], s.fan
	s.mu.Unlock()
	if !lost {
		return &dsec.Error{Code: dsec.CodeNotFound, Field: "key", Message: fmt.Sprintf("%q is not lost", key)}
	}
	im, err := s.cache.byKey(key)
	if err == nil {
		im.ops.Lock()
		defer im.ops.Unlock()
		if im.armed && fan != nil && !fan.disarm(im) {
			return &dsec.Error{Code: dsec.CodeConflict, Field: "key", Message: "somebody has the image open"}
		}
		if err := im.reopen(); err != nil {
			return err
		}
		im.mu.Lock()
		im.lost, im.armed, im.inUse, im.left = false, false, false, false
		im.mu.Unlock()
		s.cache.rest(im)
	}
	if err := s.served.dir.remove(name(key)); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.lost, key)
	s.mu.Unlock()
	return nil
}

// present returns as long as no lock that readers and calls need is held for ever.
func (s *server) present() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cache.all()
}

func (s *server) mayStop() error {
	for _, im := range s.cache.all() {
		im.mu.Lock()
		busy := im.inUse || im.armed || im.left
		im.mu.Unlock()
		if busy {
			return &dsec.Error{Code: dsec.CodeConflict, Message: "images are in use"}
		}
	}
	return nil
}

// trace returns the chunks in order of their first read, as ranges in JSON.
func (s *server) trace(key string) (*os.File, error) {
	im, err := s.cache.byKey(key)
	if err != nil {
		return nil, err
	}
	im.mu.Lock()
	ranges := []Range{}
	for _, i := range im.trace {
		r := im.chunk(i)
		if n := len(ranges); n > 0 && ranges[n-1].Offset+ranges[n-1].Length == r.Offset {
			ranges[n-1].Length += r.Length
		} else {
			ranges = append(ranges, r)
		}
	}
	im.mu.Unlock()
	return bulkJSON(ranges)
}

// Progress tells how far a prefetch is.
type Progress struct {
	Done  int64 // bytes that are on local disk now
	Total int64 // bytes that were asked for, in whole chunks
}

// prefetch brings ranges of an image to the cache, a few runs of chunks at a time.
func (k *calls) prefetch(ctx context.Context, m *message, files []*os.File) error {
	want, err := described(files)
	if err != nil {
		return err
	}
	im, err := k.s.cache.open(want)
	if err != nil {
		return err
	}
	im.mu.Lock()
	lost := im.lost
	im.mu.Unlock()
	if lost {
		return errNotSettled
	}
	ranges := []Range{{0, im.Size}}
	if !m.Prefetch.All {
		if ranges, err = rangesOf(files); err != nil {
			return err
		}
	}
	err = k.s.cache.prefetch(ctx, im, ranges, func(p Progress) {
		_ = k.c.send(&message{ID: m.ID, Progress: &p})
	})
	im.ops.Lock()
	defer im.ops.Unlock()
	k.s.cache.rest(im)
	return err
}

func rangesOf(files []*os.File) (ranges []Range, err error) {
	if len(files) != 2 {
		return nil, errors.New("layerd protocol: no ranges")
	}
	b, err := readBulk(files[1])
	if err != nil {
		return nil, err
	}
	return ranges, json.Unmarshal(b, &ranges)
}
