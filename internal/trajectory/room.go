package trajectory

import (
	"errors"

	"golang.org/x/sys/unix"
)

// endRoom is what each action under way has reserved: its end without output.
const endRoom = 8 << 10

// slack is what is left to single entries, such as changes of state, where there
// is no room for actions any more.
func (l *Log) slack() int64 { return l.opts.SegmentBytes / 8 }

// left is what is left of the space allocated ahead after a record of n bytes;
// it is negative where that does not fit. The caller holds mu.
func (l *Log) left(n int64) int64 {
	if cur := l.cur.room - l.cur.size; n <= cur {
		return cur - n + l.spare()
	}
	return l.spare() - n
}

// spare is what segments made ahead have room for. The caller holds mu.
func (l *Log) spare() int64 {
	return (l.opts.SegmentBytes - segmentHeaderLen) * int64(len(l.ahead))
}

// roomFor has there be room for a record of n bytes that leaves so much, beside
// what is reserved for the ends of actions, and what is wasted at the end of a
// segment. The caller holds mu.
func (l *Log) roomFor(n, leaves int64) error {
	if l.err != nil {
		return l.err
	}
	leaves += l.reserved + endRoom
	for l.left(n) < leaves {
		if err := l.makeAhead(); err != nil {
			return l.failed(err)
		}
	}
	return nil
}

// makeAhead makes one segment more. The caller holds mu.
func (l *Log) makeAhead() error {
	if l.bytes()+l.opts.SegmentBytes > 2*l.opts.MaxBytes {
		return unix.EDQUOT
	}
	s, err := newSegment(l.opts.Dir, l.salt, l.opts.SegmentBytes)
	if err != nil {
		return err
	}
	return l.place(s)
}

// makeAheadAside makes a segment while the log goes on, if there is none.
func (l *Log) makeAheadAside() {
	l.mu.Lock()
	needed := l.err == nil && len(l.ahead) == 0 && l.bytes()+l.opts.SegmentBytes <= 2*l.opts.MaxBytes
	l.mu.Unlock()
	if !needed {
		return
	}
	s, err := newSegment(l.opts.Dir, l.salt, l.opts.SegmentBytes)
	if err != nil {
		return // whoever needs it is told
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ahead) == 0 {
		err = l.place(s)
	} else {
		err = s.discard() // somebody did not wait
	}
	if err != nil {
		l.opts.Logger.Warn("trajectory: no segment made ahead", "err", err)
	}
}

// place has a new segment come after all others. The caller holds mu.
func (l *Log) place(s *segment) error {
	number := uint32(1)
	if all := append(l.all(), l.ahead...); len(all) > 0 {
		number = all[len(all)-1].number + 1
	}
	if err := s.place(l.opts.Dir, number); err != nil {
		return errors.Join(err, s.discard())
	}
	l.ahead = append(l.ahead, s)
	l.group.created(s.f, l.opts.Dir)
	return nil
}

// rotate goes on with the segment ahead. The caller holds mu.
func (l *Log) rotate() error {
	if len(l.ahead) == 0 {
		if err := l.makeAhead(); err != nil {
			return err
		}
	}
	if err := l.cur.finish(l.seed); err != nil {
		// It will be read from its start.
		l.opts.Logger.Warn("trajectory: segment without footer", "segment", l.cur.number, "err", err)
		if _, ok := errors.AsType[*brokenError](err); ok {
			return err
		}
	}
	l.group.written(l.cur.f)
	l.finished += l.cur.size
	l.segments = append(l.segments, l.cur)
	l.cur, l.ahead = l.ahead[0], l.ahead[1:]
	notify(l.wake)
	return nil
}

// bytes is what the log takes of the disk. The caller holds mu.
func (l *Log) bytes() int64 {
	n := l.finished + l.opts.SegmentBytes*int64(1+len(l.ahead))
	if l.outputs != nil {
		n += l.outputs.bytes.Load()
	}
	return n
}
