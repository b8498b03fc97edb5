package disk

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/units"
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

func (p span) overlaps(from, until time.Time) bool {
	return !p.From.After(until) && (p.Until.IsZero() || !p.Until.Before(from))
}

// starvation remembers when the disk was full.
type starvation struct {
	s *Store

	looking sync.Mutex // held over a look, so that samples are noted in their order
	// Of run alone: when to try again to grow, and when to ration again.
	again, rationed time.Time

	writing sync.Mutex // of heldName

	mu    sync.Mutex // of what follows; held for no look at the disk
	spans []span
	seen  time.Time       // of the last look, with the monotonic clock
	last  sample          // then
	held  map[string]span // by the volume's name: when it was first and last held
}

// openStarvation goes on with what an earlier Store knew. It is nil where the
// volumes share no disk.
func openStarvation(s *Store) (*starvation, error) {
	now, ok, err := s.look()
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
	if err := v.readHeld(); err != nil {
		return nil, err
	}
	if n := len(v.spans); n > 0 {
		v.seen = v.spans[n-1].Until // if the disk is full, nobody knows since when
	}
	v.record(time.Now(), now)
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
		now := v.look(time.Now())
		if g, ok := v.s.driver.(grower); ok {
			// After the look: that it was full is not to be missed.
			if now.nearlyFull {
				v.grow(g, now.Size)
			}
			if now.Free < starveBelow {
				g.commitSoon()
			}
		}
		wait := now.safe(starveBelow)
		if d, ok := v.s.driver.(rationer); ok {
			v.ration(d, now)
			wait = min(wait, now.safe(Room(now.capacity()))/2)
		}
		timer.Reset(min(latest, max(soonest, wait)))
	}
}

// grow makes the disk larger, where it can.
func (v *starvation) grow(g grower, size int64) {
	if time.Now().Before(v.again) {
		return
	}
	if err := g.grow(size); err != nil {
		v.s.log.Warn("disk: the image of all volumes does not grow", "err", err)
		v.again = time.Now().Add(time.Minute)
	}
}

// look returns a sample that was taken after a time.
func (v *starvation) look(after time.Time) sample {
	v.looking.Lock()
	defer v.looking.Unlock()
	v.mu.Lock()
	seen, last := v.seen, v.last
	v.mu.Unlock()
	if seen.After(after) { // another has looked meanwhile
		return last
	}
	at := time.Now()
	now, _, err := v.s.look()
	if err != nil {
		v.s.log.Error("disk: free space is not known", "err", err)
		return last // the next look decides about the time since the last
	}
	v.record(at, now)
	return now
}

// safe is how long after a sample there is more than so much free for sure.
func (s sample) safe(bytes int64) time.Duration {
	return time.Duration((s.Free - bytes) / maxRate)
}

// short looks again where it must, and returns what is free and whether that is
// less than so much.
func (v *starvation) short(bytes int64) (sample, bool) {
	now := time.Now()
	v.mu.Lock()
	seen, last := v.seen, v.last
	v.mu.Unlock()
	if now.Sub(seen) > last.safe(bytes) {
		last = v.look(now)
	}
	return last, last.Free < bytes
}

// record notes a sample, and writes where that changes what is to be remembered.
// The caller holds v.looking, or alone has v.
func (v *starvation) record(at time.Time, now sample) {
	v.mu.Lock()
	changed := v.note(at, now)
	spans := slices.Clone(v.spans)
	v.mu.Unlock()
	if !changed {
		return
	}
	if err := v.s.writeJSON(starvedName, spans); err != nil {
		v.s.log.Error("disk: it is not on record when the disk was full", "err", err)
	}
}

// note takes a sample in, and reports whether the disk has become full or has room
// again. It may have been full from just after the last one on, and up to the next.
// The caller holds v.mu.
func (v *starvation) note(at time.Time, now sample) bool {
	last := v.seen
	v.seen, v.last = at, now
	n := len(v.spans)
	open := n > 0 && v.spans[n-1].Until.IsZero()
	switch full := now.Free < starveBelow; {
	case full && !open:
		v.spans = append(v.spans, span{From: last.Round(0)})
		if len(v.spans) > maxSpans {
			v.spans[1].From = v.spans[0].From
			v.spans = v.spans[1:]
		}
		v.s.log.Error("the disk of all sandboxes is full: how commands end is not told until it has room", "size", now.Size, "free", now.Free)
	case !full && open:
		v.spans[n-1].Until = at.Round(0)
		v.s.log.Info("the disk of all sandboxes has room again", "free", now.Free)
	default:
		return false
	}
	return true
}

// writeJSON replaces a file in the Store's directory.
func (s *Store) writeJSON(name string, what any) error {
	data, err := json.Marshal(what)
	if err != nil {
		return err
	}
	fresh := s.path(name + ".new")
	if err := os.WriteFile(fresh, data, 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, s.path(name))
}

// Starved reports whether the disk that all volumes share was full at some time
// between two: what could not be written then failed for no sandbox's own limit.
// Volume.Starved knows more of one of them.
// What it knows survives a restart.
func (s *Store) Starved(from, until time.Time) bool {
	v := s.starved
	if v == nil {
		return false
	}
	v.short(starveBelow)
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range v.spans {
		if p.overlaps(from, until) {
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
	want := Room(v.last.Size)
	v.mu.Unlock()
	if now, short := v.short(want); short {
		return dsec.Errorf(dsec.CodeExhausted, "the disk of all sandboxes has %s free, and a new one wants %s left for those that run", units.Bytes(now.Free), units.Bytes(want))
	}
	return nil
}
