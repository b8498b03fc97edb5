package trajectory

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// load reads what there is, repairs its end and makes the log ready to go on.
func (l *Log) load() (r Recovery, err error) {
	if err := l.openSegments(); err != nil {
		return r, err
	}
	var claims []claim
	for i, s := range l.segments {
		if items, ok := s.footer(l.seed); ok {
			for _, item := range items {
				l.apply(s, &item)
			}
			continue
		}
		last := i == len(l.segments)-1
		more, err := l.replay(s, last, &r)
		if err != nil {
			return r, err
		}
		claims = append(claims, more...)
		if last {
			l.segments, l.cur = l.segments[:i], s
		}
	}
	for _, s := range l.segments {
		l.finished += s.size
	}
	if l.cur == nil {
		if l.cur, err = l.firstAhead(); err != nil {
			return r, err
		}
	}
	for _, sb := range l.sandboxes {
		l.reserved += endRoom * int64(len(sb.unfinished))
	}
	for _, c := range claims {
		l.settle(c)
	}
	return r, nil
}

// openSegments opens what is there: segments with records, and those made ahead.
func (l *Log) openSegments() error {
	names, err := os.ReadDir(l.opts.Dir)
	if err != nil {
		return err
	}
	var salt [8]byte
	_, _ = rand.Read(salt[:]) // never fails
	l.setSalt(salt)
	salted := false
	for _, d := range names {
		number, ok := segmentNumber(d.Name())
		if !ok {
			if strings.HasSuffix(d.Name(), unnumbered) {
				if err := os.Remove(filepath.Join(l.opts.Dir, d.Name())); err != nil {
					return err
				}
			}
			continue
		}
		s, salt, ok, err := openSegment(l.opts.Dir, number)
		if err != nil {
			return err
		}
		if ok && !salted {
			salted = true
			l.setSalt(salt)
		}
		switch {
		case s.size > segmentHeaderLen:
			l.segments, l.ahead = append(append(l.segments, l.ahead...), s), nil
		case ok && salt == l.salt:
			l.ahead = append(l.ahead, s)
		default: // half made
			if err := errors.Join(s.f.Close(), os.Remove(filepath.Join(l.opts.Dir, d.Name()))); err != nil {
				return err
			}
		}
	}
	return nil
}

// firstAhead takes the segment with which the log goes on.
func (l *Log) firstAhead() (*segment, error) {
	if len(l.ahead) > 0 {
		s := l.ahead[0]
		l.ahead = l.ahead[1:]
		return s, s.allocate(l.opts.SegmentBytes)
	}
	if err := l.makeAhead(); err != nil {
		return nil, err
	}
	return l.firstAhead()
}

// sandboxOf is the sandbox with an ID, which has a record in s from now on.
func (l *Log) sandboxOf(s *segment, id *[sandboxIDLen]byte) *sandbox {
	sb := l.sandboxes[dsec.SandboxID(id[:])]
	if sb == nil {
		sb = &sandbox{id: dsec.SandboxID(id[:])}
		l.sandboxes[sb.id] = sb
	}
	if sb.head.segment != s.number {
		s.members = append(s.members, member{sb: sb})
		sb.segments++
	}
	return sb
}

// apply takes over what a footer says.
func (l *Log) apply(s *segment, item *footerItem) {
	sb := l.sandboxOf(s, &item.id)
	sb.head, sb.state = item.head, item.state
	s.members[len(s.members)-1].last = sb.seq
}

// claim is a damaged stretch that may have been the last entry of a sandbox.
type claim struct {
	sb  *sandbox
	seq uint64
}

// replay reads a segment from its start. Of the last one it cuts what a crash
// left half written.
func (l *Log) replay(s *segment, last bool, r *Recovery) (claims []claim, err error) {
	record := func(off int64, h header, record []byte) error {
		l.replayRecord(s, position{s.number, uint32(off)}, &h, record[headerLen:])
		return nil
	}
	size := s.size
	damaged := func(off, n int64, first []byte) error {
		if off+n == s.size && torn(first, n) {
			size = off
			return nil
		}
		r.Damaged++
		h, ok := parseHeader(first)
		if ok && h.typ == typeFooter {
			return nil
		}
		sb := l.sandboxes[dsec.SandboxID(h.sandbox[:])]
		if !ok || !h.entry() || sb == nil || n != headerLen+int64(h.size) {
			r.Unclaimed++ // or it may be more than what its start says
		}
		if ok && h.entry() && sb != nil {
			seq := h.seq
			if seq <= sb.seq || seq > sb.seq+1024 {
				seq = sb.seq + 1 // the number is damaged, too
			}
			claims = append(claims, claim{sb, seq})
		}
		return nil
	}
	if err := scan(s.f, s.size, l.seed, record, damaged); err != nil {
		return nil, err
	}
	for i := range s.members {
		s.members[i].last = s.members[i].sb.seq
	}
	if !last {
		return claims, nil
	}
	r.Cut, s.size = s.size-size, size
	err = errors.Join(s.f.Truncate(size), s.allocate(l.opts.SegmentBytes))
	if errors.Is(err, unix.ENOSPC) {
		// The cut gave back what was allocated, and others took it: the segment is full.
		s.room, err = size, nil
	}
	return claims, err
}

// replayRecord has what is known of a sandbox be as its next record says.
func (l *Log) replayRecord(s *segment, at position, h *header, payload []byte) {
	sb := l.sandboxOf(s, &h.sandbox)
	sb.head = at
	if !h.entry() {
		if st, _, err := parseState(payload); err == nil {
			sb.state = st
		}
		return
	}
	if h.flags&flagInput != 0 {
		var e dsecv1.TrajectoryEntry
		if err := proto.Unmarshal(payload, &e); err == nil {
			h.given = e.GetInput().GetKeptBytes()
		}
	}
	sb.entered(h, headerLen+len(payload))
	switch h.typ {
	case typeBegun:
		sb.begin(h.seq, h.kind)
	case typeEnded:
		delete(sb.unfinished, h.begun)
	}
}

// torn tells the rest of a write that a crash cut off, which nobody was told
// of, from damage to a record that was once whole: it is shorter than its length
// says, or zeros, which a file system may leave after a loss of power.
func torn(first []byte, n int64) bool {
	if len(first) < headerLen || slices.Max(first) == 0 {
		return true
	}
	h, ok := parseHeader(first)
	return ok && (headerLen+int64(h.size) > n || h.typ == typeFooter)
}

// settle has a sandbox whose last entry was damaged have a gap in its place: one
// that is not the last shows by the next.
func (l *Log) settle(c claim) {
	sb := c.sb
	if sb.forgotten || sb.seq >= c.seq {
		return
	}
	if err := l.putGap(sb, c.seq, reasonDamaged); err != nil {
		l.opts.Logger.Error("trajectory: a lost entry is not marked", "sandbox", sb.id, "seq", c.seq, "err", err)
	}
}

// putGap writes that the next entries of a sandbox, up to last, are not there. The caller holds mu.
func (l *Log) putGap(sb *sandbox, last uint64, reason string) error {
	d, err := l.draft(gapEntry(sb.seq+1, last, reason))
	if err != nil {
		return err
	}
	defer d.free()
	if err := l.roomFor(int64(len(d.record)), 0); err != nil {
		return err
	}
	sb.seq = last - 1
	return l.putEntry(sb, header{typ: typeEvent, flags: flagGap}, d, "")
}

// Lost notes that entries of a sandbox may be gone, of which nothing here tells: those that were
// written after the copy was made that the log was put back to. Errors: those of Append.
func (l *Log) Lost(id dsec.SandboxID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	sb, err := l.find(id)
	if err != nil {
		return err
	}
	l.indexes.drop(sb) // it knows of no hole
	return l.putGap(sb, sb.seq+1, reasonOlder)
}

const (
	reasonDamaged = "the log was damaged"
	reasonDropped = "the log was over its bound, and there was no store"
	reasonOlder   = "the log was put back to an older copy"
)

func gapEntry(first, last uint64, reason string) *dsecv1.TrajectoryEntry {
	return &dsecv1.TrajectoryEntry{
		Seq: first, Phase: dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP,
		Gap: &dsecv1.TrajectoryGap{LastSeq: last, Reason: reason},
	}
}
