package disk

import (
	"encoding/json"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// The limits of sandboxes may add up to more than the shared disk holds. A
// sandbox that is under its own limit and finds the disk full fails by no act of
// its own; so the Store remembers when the disk was full, for whoever judges what
// ended in that time. The kernel tells of no such moment. So the Store looks
// again before the disk can have become full since the last look: no node writes
// more than maxRate, and the sandboxes' seccomp program refuses fallocate, which
// takes blocks faster.
const (
	// starveBelow is the Free at which the disk counts as full: what is written
	// between two looks at the shortest distance, and some.
	starveBelow = 32 << 20
	maxRate     = 4 // bytes a nanosecond
	soonest     = 5 * time.Millisecond
	latest      = time.Second
	// Creates are refused while less than a part of the disk is free, so that
	// those who are there have it: minRoom at least and maxRoom at most.
	roomPart = 64
	minRoom  = 64 << 20
	maxRoom  = 2 << 30
	// maxSpans bounds what is remembered; the oldest two become one.
	maxSpans = 64

	starvedName = "starved.json"
)

// span is a time in which the disk was full. Until zero: it still is.
type span struct {
	From  time.Time `json:"from"`
	Until time.Time `json:"until,omitzero"`
}

// starvation remembers when the disk was full.
type starvation struct {
	s *Store

	mu    sync.Mutex
	spans []span
	seen  time.Time // of the last look, with the monotonic clock
	space Space     // then
	again time.Time // when to try again to grow
}

// openStarvation goes on with what an earlier Store knew. It is nil where the
// volumes share no disk.
func openStarvation(s *Store) (*starvation, error) {
	space, ok, err := s.Space()
	if err != nil || !ok {
		return nil, err
	}
	v := &starvation{s: s}
	data, err := os.ReadFile(s.path(starvedName))
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, err
	case json.Unmarshal(data, &v.spans) != nil:
		v.spans = []span{{}} // nobody knows when it was
	}
	if n := len(v.spans); n > 0 {
		v.seen = v.spans[n-1].Until // if the disk is full, nobody knows since when
	}
	v.note(time.Now(), space)
	s.wg.Go(v.run)
	return v, nil
}

func (v *starvation) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-v.s.stop:
			return
		case <-timer.C:
		}
		// Before it grows: that it was full is not to be missed.
		v.mu.Lock()
		v.look()
		full := v.space.Free < starveBelow
		wait := v.safe(starveBelow)
		v.mu.Unlock()
		if g, ok := v.s.driver.(grower); ok {
			v.grow(g)
			if full {
				g.commitSoon()
			}
		}
		timer.Reset(min(latest, max(soonest, wait)))
	}
}

// grow makes the disk larger, where it can and is to become so.
func (v *starvation) grow(g grower) {
	if time.Now().Before(v.again) {
		return
	}
	if err := g.grow(); err != nil {
		v.s.log.Warn("disk: the image of all volumes does not grow", "err", err)
		v.again = time.Now().Add(time.Minute)
	}
}

// look takes a sample. The caller holds v.mu: samples are noted in the order in
// which they were taken.
func (v *starvation) look() {
	now := time.Now()
	space, _, err := v.s.Space()
	if err != nil {
		v.s.log.Error("disk: free space is not known", "err", err)
		return // the next look decides about the time since the last
	}
	v.note(now, space)
}

// safe is how long after the last look there is more than so much free for sure.
// The caller holds v.mu.
func (v *starvation) safe(bytes int64) time.Duration {
	return time.Duration((v.space.Free - bytes) / maxRate)
}

// short looks again where it must, and reports whether less than that is free.
// The caller holds v.mu.
func (v *starvation) short(bytes int64) bool {
	if time.Since(v.seen) > v.safe(bytes) {
		v.look()
	}
	return v.space.Free < bytes
}

// note takes a sample in. The disk may have been full from just after the last
// one on, and up to the next. The caller holds v.mu, or alone has v.
func (v *starvation) note(at time.Time, space Space) {
	last := v.seen
	v.seen, v.space = at, space
	n := len(v.spans)
	open := n > 0 && v.spans[n-1].Until.IsZero()
	switch full := space.Free < starveBelow; {
	case full && !open:
		v.spans = append(v.spans, span{From: last.Round(0)})
		if len(v.spans) > maxSpans {
			v.spans[1].From = v.spans[0].From
			v.spans = v.spans[1:]
		}
		v.s.log.Error("the disk of all sandboxes is full: how commands end is not told until it has room", "size", space.Size, "free", space.Free)
	case !full && open:
		v.spans[n-1].Until = at.Round(0)
		v.s.log.Info("the disk of all sandboxes has room again", "free", space.Free)
	default:
		return
	}
	if err := v.write(); err != nil {
		v.s.log.Error("disk: it is not on record when the disk was full", "err", err)
	}
}

// write makes the record outlive this process.
func (v *starvation) write() error {
	data, err := json.Marshal(v.spans)
	if err != nil {
		return err
	}
	fresh := v.s.path(starvedName + ".new")
	if err := os.WriteFile(fresh, data, 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, v.s.path(starvedName))
}

// Starved reports whether the disk that all volumes share was full at some time
// between two: what could not be written then failed for no sandbox's own limit.
// What it knows survives a restart.
func (s *Store) Starved(from, until time.Time) bool {
	v := s.starved
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.short(starveBelow)
	for _, p := range v.spans {
		if !p.From.After(until) && (p.Until.IsZero() || !p.Until.Before(from)) {
			return true
		}
	}
	return false
}

// Room is how much of a disk of that size must be free for one more volume.
func Room(size int64) int64 { return min(maxRoom, max(minRoom, size/roomPart)) }

// Admit refuses one more sandbox while those that are there may need what is left.
// Create asks by itself.
func (s *Store) Admit() error {
	v := s.starved
	if v == nil {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if want := Room(v.space.Size); v.short(want) {
		return dsec.Errorf(dsec.CodeExhausted, "the disk of all sandboxes has %d MiB free, and a new one wants %d left for those that run", v.space.Free>>20, want>>20)
	}
	return nil
}
