package fake

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// spoolSize is how much of a command's last output is kept.
const spoolSize = 256 << 10

type segment struct {
	stream chronusapi.Stream
	data   []byte
}

// spool holds the last output of one command. A lossless one makes the writer
// wait for its reader; any other overwrites the oldest.
type spool struct {
	mu       sync.Mutex
	segs     []segment
	first    uint64 // number of the oldest byte held
	next     uint64
	read     uint64 // how far the reader that the writer waits for has come
	lossless bool
	outcome  *dsec.Outcome
	changed  chan struct{} // closed at the next change; nil if nobody waits
}

// signal wakes all that wait. The caller holds mu.
func (s *spool) signal() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// waiter returns what the next change closes. The caller holds mu.
func (s *spool) waiter() <-chan struct{} {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// write appends a copy of b, in pieces that fit. It reports false once done is
// closed while it waits for room.
func (s *spool) write(stream chronusapi.Stream, b []byte, done <-chan struct{}) bool {
	for len(b) > 0 {
		n := min(len(b), 16<<10)
		if !s.room(uint64(n), done) {
			return false
		}
		s.mu.Lock()
		s.segs = append(s.segs, segment{stream, append([]byte(nil), b[:n]...)})
		s.next += uint64(n)
		for s.next-s.first > spoolSize {
			s.first += uint64(len(s.segs[0].data))
			s.segs = s.segs[1:]
		}
		s.signal()
		s.mu.Unlock()
		b = b[n:]
	}
	return true
}

func (s *spool) room(n uint64, done <-chan struct{}) bool {
	for {
		s.mu.Lock()
		if !s.lossless || s.next+n-s.read <= spoolSize {
			s.mu.Unlock()
			return true
		}
		wait := s.waiter()
		s.mu.Unlock()
		select {
		case <-wait:
		case <-done:
			return false
		}
	}
}

// release lets the writer overwrite from now on.
func (s *spool) release() {
	s.mu.Lock()
	s.lossless = false
	s.signal()
	s.mu.Unlock()
}

func (s *spool) end(o dsec.Outcome) {
	s.mu.Lock()
	s.outcome = &o
	s.signal()
	s.mu.Unlock()
}

// wait returns the outcome once there is one.
func (s *spool) wait(ctx context.Context) (dsec.Outcome, error) {
	for {
		s.mu.Lock()
		o, wait := s.outcome, s.waiter()
		s.mu.Unlock()
		if o != nil {
			return *o, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return dsec.Outcome{}, ctx.Err()
		}
	}
}

// follow gives sink everything from byte from on, and the outcome at the end.
// With owner the writer waits for this reader.
func (s *spool) follow(ctx context.Context, from uint64, owner bool, sink chronusapi.Sink) error {
	for {
		s.mu.Lock()
		if owner {
			s.read = from
			s.signal()
		}
		ev, ok := s.event(from)
		wait := s.waiter()
		s.mu.Unlock()
		if !ok {
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err := sink(ev); err != nil {
			return err
		}
		switch ev.Kind {
		case chronusapi.EventExited:
			return nil
		case chronusapi.EventGap:
			from = ev.To
		default:
			from = ev.Seq + uint64(len(ev.Data))
		}
	}
}

// event is what a reader at byte from gets next. The caller holds mu.
func (s *spool) event(from uint64) (chronusapi.Event, bool) {
	switch {
	case from < s.first:
		return chronusapi.Event{Kind: chronusapi.EventGap, Seq: from, To: s.first}, true
	case from < s.next:
		at := s.first
		for _, seg := range s.segs {
			if from < at+uint64(len(seg.data)) {
				return chronusapi.Event{Kind: chronusapi.EventOutput, Stream: seg.stream, Seq: from, Data: seg.data[from-at:]}, true
			}
			at += uint64(len(seg.data))
		}
	case s.outcome != nil:
		return chronusapi.Event{Kind: chronusapi.EventExited, Outcome: *s.outcome}, true
	}
	return chronusapi.Event{}, false
}

// input is the standard input of one command: bounded, with back-pressure.
type input struct {
	mu      sync.Mutex
	buf     []byte
	eof     bool // no more will come
	gone    bool // nobody reads any more
	changed chan struct{}
}

const inputSize = 64 << 10

func (in *input) signal() {
	if in.changed != nil {
		close(in.changed)
		in.changed = nil
	}
}

func (in *input) waiter() <-chan struct{} {
	if in.changed == nil {
		in.changed = make(chan struct{})
	}
	return in.changed
}

// write takes all of b or tells how much it took.
func (in *input) write(ctx context.Context, b []byte, eof bool) (int, error) {
	taken := 0
	for {
		in.mu.Lock()
		if in.gone || in.eof {
			in.mu.Unlock()
			return taken, &dsec.Error{Code: dsec.CodeConflict, Field: "stdin", Message: "the command's input is closed"}
		}
		n := min(len(b), inputSize-len(in.buf))
		in.buf = append(in.buf, b[:n]...)
		b, taken = b[n:], taken+n
		if len(b) == 0 {
			in.eof = eof
		}
		wait := in.waiter()
		if n > 0 || len(b) == 0 {
			in.signal()
			wait = in.waiter()
		}
		in.mu.Unlock()
		if len(b) == 0 {
			return taken, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return taken, ctx.Err()
		}
	}
}

// close is called by the command's end.
func (in *input) close() {
	in.mu.Lock()
	in.gone = true
	in.signal()
	in.mu.Unlock()
}
