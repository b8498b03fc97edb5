package trajectory

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// index is where the entries of one sandbox are. It is made by one walk along
// its chain when it is first asked for, and then kept for as long as there is
// room among the others.
type index struct {
	at      []position // of entry seq-1; the zero position: not here
	actions *actions   // nil: not yet asked for
	used    uint64     // orders indexes by their last use
}

// damagedAt is in the place of the position of an entry that is lost. Of one
// that is gone with its segment there is none.
var damagedAt = position{offset: 1}

// actions are what a sandbox's action IDs lead to.
type actions struct {
	byID       map[string]actionRef
	unfinished map[uint64]string // IDs by the seq of begun
	seen       uint64            // entries up to it are in here
	hole       uint64            // the first entry that is gone; 0: none is
}

type actionRef struct{ begun, ended uint64 }

// add takes over the next entry. actionID is called where it has one.
func (x *index) add(h *header, at position, actionID func() string) {
	x.at = append(x.at, at)
	if x.actions != nil {
		x.actions.add(h.seq, h.typ, h.flags, h.begun, actionID)
	}
}

func (a *actions) add(seq uint64, typ recordType, flags uint8, begun uint64, actionID func() string) {
	a.seen = seq
	switch {
	case typ == typeBegun && flags&flagAction != 0:
		id := actionID()
		a.byID[id] = actionRef{begun: seq}
		a.unfinished[seq] = id
	case typ == typeEnded:
		id, ok := a.unfinished[begun]
		if !ok {
			return
		}
		delete(a.unfinished, begun)
		if flags&flagNotDone != 0 {
			delete(a.byID, id)
		} else {
			a.byID[id] = actionRef{begun, seq}
		}
	}
}

// indexes bounds how many positions are in memory.
type indexes struct {
	of        map[*sandbox]struct{}
	positions int
	clock     uint64
}

// maxPositions is of all indexes together: 16 MiB, and about as many action IDs.
const maxPositions = 2 << 20

func (x *indexes) grow(n int) {
	x.positions += n
	for x.positions > maxPositions && len(x.of) > 1 {
		var oldest *sandbox
		for sb := range x.of {
			if oldest == nil || sb.index.used < oldest.index.used {
				oldest = sb
			}
		}
		x.drop(oldest)
	}
}

func (x *indexes) keep(sb *sandbox, ix *index) {
	x.drop(sb)
	if x.of == nil {
		x.of = make(map[*sandbox]struct{})
	}
	x.of[sb] = struct{}{}
	sb.index = ix
	x.touch(ix)
	x.grow(len(ix.at))
}

func (x *indexes) drop(sb *sandbox) {
	if sb.index != nil {
		x.positions -= len(sb.index.at)
		delete(x.of, sb)
		sb.index = nil
	}
}

func (x *indexes) touch(ix *index) {
	x.clock++
	ix.used = x.clock
}

// indexed returns the index of a sandbox, made now where it is not there. The
// caller holds mu, which is let go of meanwhile.
func (l *Log) indexed(sb *sandbox) (*index, error) {
	var at []position
	for sb.index == nil {
		if sb.forgotten {
			return nil, notFound(sb.id)
		}
		if uint64(len(at)) == sb.seq {
			l.indexes.keep(sb, &index{at: at})
			break
		}
		head, from, seq, v := sb.head, uint64(len(at)), sb.seq, l.view()
		l.mu.Unlock()
		at = append(at, make([]position, seq-from)...)
		broken := v.walk(sb.id, head, at, from)
		l.mu.Lock()
		if broken > from {
			l.rescue(sb, at[from:broken], from)
		}
	}
	l.indexes.touch(sb.index)
	return sb.index, nil
}

// walk fills in the positions of the entries after from, by the chain that ends
// at head. Where the chain is broken it returns up to which entry it did not come.
func (v view) walk(id dsec.SandboxID, head position, at []position, from uint64) (broken uint64) {
	var buf []byte
	next := uint64(len(at))
	for pos := head; pos.segment != 0 && next > from; {
		s := v.find(pos.segment)
		if s == nil {
			return 0 // it was sealed, or dropped
		}
		h, record, err := s.record(pos.offset, v.seed, buf)
		if errors.Is(err, fs.ErrClosed) {
			return 0
		}
		if err != nil || !h.of(id) || h.seq > next {
			return next
		}
		buf = record
		for ; next > max(h.seq, from); next-- {
			at[next-1] = damagedAt
		}
		if h.entry() && h.seq > from {
			at[h.seq-1] = pos
			next--
		}
		pos = h.prev
	}
	for ; next > from; next-- { // what was before the first record that there is
		at[next-1] = damagedAt
	}
	return 0
}

// rescue finds what there is of the entries after from, whose chain is broken,
// by reading all that may hold them. The caller holds mu, which is let go of
// meanwhile.
func (l *Log) rescue(sb *sandbox, at []position, from uint64) {
	type part struct {
		s    *segment
		size int64
	}
	var parts []part
	for _, s := range l.all() {
		if slices.ContainsFunc(s.members, func(m member) bool { return m.sb == sb }) {
			parts = append(parts, part{s, s.size})
		}
	}
	l.mu.Unlock()
	defer l.mu.Lock()
	for i := range at {
		at[i] = damagedAt
	}
	for _, p := range parts {
		_ = scan(p.s.f, p.size, l.seed, func(off int64, h header, _ []byte) error {
			if h.entry() && h.of(sb.id) && h.seq > from && h.seq <= from+uint64(len(at)) {
				at[h.seq-from-1] = position{p.s.number, uint32(off)}
			}
			return nil
		}, func(int64, int64, []byte) error { return nil }) // what cannot be read is lost
	}
	l.opts.Logger.Warn("trajectory: broken chain", "sandbox", sb.id, "from", from+1, "to", from+uint64(len(at)))
}

// acted returns the index of a sandbox with what its action IDs lead to. The
// caller holds mu, which is let go of meanwhile.
func (l *Log) acted(ctx context.Context, sb *sandbox) (*actions, error) {
	for {
		ix, err := l.indexed(sb)
		if err != nil {
			return nil, err
		}
		if ix.actions != nil {
			return ix.actions, nil
		}
		a := &actions{byID: make(map[string]actionRef), unfinished: make(map[uint64]string)}
		for a.seen < sb.seq {
			l.mu.Unlock()
			err := l.read(ctx, sb, a.seen+1, a.read)
			l.mu.Lock()
			if err != nil {
				return nil, err
			}
			if sb.forgotten {
				return nil, notFound(sb.id)
			}
		}
		if sb.index != nil {
			sb.index.actions = a
		}
	}
}

// read takes over the next entry that is read.
func (a *actions) read(r *read) error {
	if r.last > r.seq || r.flags&flagGap != 0 {
		a.hole = cmp.Or(a.hole, r.seq)
		a.seen = r.last
		return nil
	}
	var err error
	a.add(r.seq, r.typ, r.flags, r.begun, func() string {
		var e *dsecv1.TrajectoryEntry
		if e, err = r.entry(); err != nil {
			return ""
		}
		return e.ActionId
	})
	return err
}

// Lookup tells what the sandbox's log has of an action ID; nil is nothing.
func (l *Log) Lookup(ctx context.Context, id dsec.SandboxID, actionID string) (*Earlier, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return nil, err
	}
	return l.earlier(ctx, sb, actionID)
}

// HasActions reports whether an action ID may lead to something in the sandbox's log: also
// one of a part that is gone.
func (l *Log) HasActions(ctx context.Context, id dsec.SandboxID) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return false, err
	}
	a, err := l.acted(ctx, sb)
	if err != nil {
		return false, err
	}
	return len(a.byID) > 0 || a.hole > 0, nil
}

// earlier is Lookup. The caller holds mu, which is let go of meanwhile; where the
// log has nothing, that is so when it returns.
func (l *Log) earlier(ctx context.Context, sb *sandbox, actionID string) (*Earlier, error) {
	a, err := l.acted(ctx, sb)
	if err != nil {
		return nil, err
	}
	ref, ok := a.byID[actionID]
	switch {
	case !ok && a.hole > 0:
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "a part of the sandbox's log is gone, from entry %d on: whether action %q was in there is not known", a.hole, actionID)
	case !ok:
		return nil, nil
	}
	x := &Earlier{Action: sb.actions[ref.begun]}
	l.mu.Unlock()
	defer l.mu.Lock()
	for seq, to := range map[uint64]**dsecv1.TrajectoryEntry{ref.begun: &x.Begun, ref.ended: &x.Ended} {
		if seq == 0 {
			continue
		}
		if *to, err = l.one(ctx, sb, seq); err != nil {
			return nil, err
		}
	}
	return x, nil
}

// one reads one entry that was in the index.
func (l *Log) one(ctx context.Context, sb *sandbox, seq uint64) (e *dsecv1.TrajectoryEntry, err error) {
	err = l.read(ctx, sb, seq, func(r *read) error {
		if e, err = r.entry(); err != nil {
			return err
		}
		return errEnough
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	if e == nil || e.Seq != seq || e.Gap != nil {
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "entry %d of the sandbox's log is gone", seq)
	}
	return e, nil
}

var errEnough = errors.New("trajectory: enough was read")

// view is the log's segments at one time, for who reads them without its lock.
type view struct {
	segments []*segment
	seed     uint32
}

// view of what there is now. The caller holds mu.
func (l *Log) view() view { return view{segments: l.all(), seed: l.seed} }

func (v view) find(number uint32) *segment {
	i, ok := slices.BinarySearchFunc(v.segments, number, func(s *segment, n uint32) int { return cmp.Compare(s.number, n) })
	if !ok {
		return nil
	}
	return v.segments[i]
}
