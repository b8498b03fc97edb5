package disk

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"math/bits"
	"os"
	"slices"
	"time"
)

// The limits of sandboxes may add up to more than the shared disk holds, and one
// may be larger than it alone. So that no few take it from all, a volume may hold
// have at most so many times what is left for everybody: it is held, which means that
// it may not grow, while it has more. Who wants little is not bound by that, and a disk
// with room binds nobody: with a share of 80 percent, four times what is left,
// one volume that wants all gets 0.8 of the disk, and each further one 0.8 of what is
// left then. What is left is counted without what creates want to be free (Room), so
// that a few who want all do not keep others out. Of that those who are there may
// still have a quarter each, down to what counts as full.
//
// What a held volume could not write failed for no limit of its own, so Starved
// tells of the time, as it does of that in which the disk was full.

// rationer is a driver that can hold a volume.
type rationer interface {
	// ration holds the volumes that have more than part and lets go of the others. It
	// returns those that are held, and calls begin before it holds one: what fails
	// for that is to find it on record. It may call it under a lock.
	ration(part int64, begin func(name string)) (held []string, err error)
	// recovered tells of a volume that an earlier Store made, and its own limit. It
	// returns whether that Store held it.
	recovered(name string, bytes int64) (held bool, err error)
	// disown is told of a volume that is to be removed: when it returns, begin is
	// called for it no more.
	disown(name string)
}

const (
	// defaultShare is the part of the shared disk, in percent, that one volume may have.
	defaultShare = 80
	noShare      = 100 // nothing is held
	heldName     = "held.json"
	// rationPart is the part of one CPU that looking at many volumes may take.
	rationPart = 16
)

func (o Options) share() int64 {
	if o.Share == 0 {
		return defaultShare
	}
	return int64(o.Share)
}

// capacity is how large the disk is, or can become.
func (s sample) capacity() int64 { return s.Size + s.growable }

// most is the most that one volume may be limited to. It is rounded down by an
// eighth at most, so that it stays the same while others use a bit of the disk
// below: sandboxes that are made ahead are of one limit.
func most(capacity, share int64) int64 {
	n := max(0, capacity-Room(capacity)) * share / 100
	step := int64(1) << max(20, bits.Len64(uint64(n))-4)
	return n / step * step
}

// part is what a volume may have and still grow.
func part(now sample, share int64) int64 {
	if share >= noShare {
		return math.MaxInt64
	}
	left := now.Free + now.growable
	return max(0, (left-Room(now.capacity()))*share/(100-share), (left-2*starveBelow)/4)
}

// Most is the largest Request.Bytes that the shared disk has a place for. ok is
// false where volumes share none.
func (s *Store) Most() (bytes int64, ok bool) {
	v := s.starved
	if v == nil {
		return 0, false
	}
	share := s.opts.share()
	v.mu.Lock()
	defer v.mu.Unlock()
	return most(v.last.capacity(), share), share < noShare
}

// ration has the driver hold who has too much, and notes it. It is called by run alone.
func (v *starvation) ration(d rationer, now sample) {
	begun := time.Now()
	if begun.Before(v.rationed) {
		return
	}
	changed := false
	names, err := d.ration(part(now, v.s.opts.share()), func(name string) {
		v.mu.Lock()
		defer v.mu.Unlock()
		changed = v.beginHeld(time.Now(), name) || changed
	})
	if err != nil {
		v.s.log.Error("disk: not all volumes are held that have too much", "err", err)
	}
	ended := time.Now()
	v.rationed = ended.Add(rationPart * ended.Sub(begun))
	if err != nil {
		v.rationed = ended.Add(latest) // nor does the log say it all the time
	}
	v.mu.Lock()
	changed = v.endHeld(ended, names) || changed
	v.mu.Unlock()
	if !changed {
		return
	}
	if len(names) > 0 {
		v.s.log.Warn("the disk of all sandboxes is nearly full: those that have most of it cannot write", "held", len(names), "free", now.Free)
	} else {
		v.s.log.Info("no sandbox is kept from writing any more", "free", now.Free)
	}
	v.writeHeld()
}

// endHeld notes of all volumes but those that they are held no more, and reports
// whether one was. The caller holds v.mu.
func (v *starvation) endHeld(at time.Time, but []string) (changed bool) {
	for name, p := range v.held {
		if p.Until.IsZero() && !slices.Contains(but, name) {
			p.Until = at.Round(0)
			v.held[name], changed = p, true
		}
	}
	return changed
}

// beginHeld notes that a volume is held, and reports whether it was not. One that is
// held twice counts as held in between. The caller holds v.mu.
func (v *starvation) beginHeld(at time.Time, name string) (changed bool) {
	p, ok := v.held[name]
	if ok && p.Until.IsZero() {
		return false
	}
	if !ok {
		p.From = at.Round(0)
	}
	p.Until = time.Time{}
	v.held[name] = p
	return true
}

// holdAgain notes that a volume is held still, as an earlier Store left it. Where
// that has left no word, nobody knows since when.
func (v *starvation) holdAgain(name string) {
	v.mu.Lock()
	p := v.held[name]
	p.Until = time.Time{}
	v.held[name] = p
	v.mu.Unlock()
	v.writeHeld()
}

// letGo forgets a volume that is to be removed, since its name may be another's soon,
// and returns when it was held, if it was.
func (v *starvation) letGo(name string) (p span, ok bool) {
	if d, ok := v.s.driver.(rationer); ok {
		d.disown(name)
	}
	v.mu.Lock()
	p, ok = v.held[name]
	delete(v.held, name)
	v.mu.Unlock()
	if !ok {
		return p, false
	}
	if p.Until.IsZero() {
		p.Until = time.Now().Round(0)
	}
	v.writeHeld()
	return p, true
}

// readHeld goes on with what an earlier Store held.
func (v *starvation) readHeld() error {
	v.held = map[string]span{}
	data, err := os.ReadFile(v.s.path(heldName))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if json.Unmarshal(data, &v.held) != nil || v.held == nil {
		v.held = map[string]span{}
		v.spans = append([]span{{Until: time.Now().Round(0)}}, v.spans...) // nobody knows who was held
	}
	return nil
}

// writeHeld makes what is known of who was held outlive this process.
func (v *starvation) writeHeld() {
	v.writing.Lock()
	defer v.writing.Unlock()
	v.mu.Lock()
	held := maps.Clone(v.held)
	v.mu.Unlock()
	if err := v.s.writeJSON(heldName, held); err != nil {
		v.s.log.Error("disk: it is not on record which volumes were held", "err", err)
	}
}

// Starved reports whether the volume was kept from growing below its own limit at
// some time between two: the shared disk was full, or the volume was held. It knows
// of a volume that is removed as well.
func (v *Volume) Starved(from, until time.Time) bool {
	if v.store.Starved(from, until) {
		return true
	}
	s := v.store.starved
	if s == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.held.Until.IsZero() && v.held.overlaps(from, until) {
		return true
	}
	if v.removed {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.held[v.name]
	return ok && p.overlaps(from, until)
}
