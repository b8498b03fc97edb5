package chronus

import (
	"sync"

	"github.com/opendsec/dsec/internal/chronusapi"
)

// Limits of the spools.
const (
	spoolLimit  = 256 << 10 // bytes of one process
	budgetLimit = 8 << 20   // bytes of all processes
	minBlock    = 4 << 10
	maxBlock    = 64 << 10
)

// budget is the memory that all spools of a sandbox may use together.
type budget struct {
	reclaim func() // frees spools nobody needs; called on a goroutine of its own

	mu         sync.Mutex
	used       int
	reclaiming bool
}

// take reserves n bytes, and reports whether there was room.
func (b *budget) take(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > budgetLimit {
		if !b.reclaiming {
			b.reclaiming = true
			go b.reclaim()
		}
		return false
	}
	b.used += n
	return true
}

func (b *budget) reclaimed() {
	b.mu.Lock()
	b.reclaiming = false
	b.mu.Unlock()
}

// tight reports whether more than half is used.
func (b *budget) tight() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used > budgetLimit/2
}

// force reserves n bytes that a process always gets.
func (b *budget) force(n int) {
	b.mu.Lock()
	b.used += n
	b.mu.Unlock()
}

func (b *budget) give(n int) {
	b.mu.Lock()
	b.used -= n
	b.mu.Unlock()
}

// block is a run of bytes of one stream.
type block struct {
	stream chronusapi.Stream
	seq    uint64 // of buf[0]
	buf    []byte // len is what was written; cap is fixed
}

func (b *block) end() uint64 { return b.seq + uint64(len(b.buf)) }

// spool holds the last output of a process, as blocks with ascending numbers.
// Bytes below consumed have been taken by the reader that the process waits
// for; they stay until their room is needed, for a reader that comes back. It
// has no lock of its own: its process's does.
type spool struct {
	budget   *budget
	blocks   []*block
	size     int // bytes of memory of all blocks
	next     uint64
	consumed uint64
	lossless bool   // wait for the reader where nothing consumed can be dropped
	grow     int    // size of the next block
	spare    []byte // of a block that was not needed
}

// space returns a slice to read output into, or nil where the reader must
// take something first.
func (s *spool) space(stream chronusapi.Stream) []byte {
	if n := len(s.blocks); n > 0 {
		b := s.blocks[n-1]
		if free := cap(b.buf) - len(b.buf); b.stream == stream && free >= minBlock/4 {
			return b.buf[len(b.buf):cap(b.buf)]
		}
	}
	size := max(s.grow, minBlock)
	for s.size+size > spoolLimit || !s.budget.take(size) {
		if len(s.blocks) == 0 {
			size = minBlock
			s.budget.force(size) // every process gets one
			break
		}
		if s.lossless && s.blocks[0].end() > s.consumed {
			return nil
		}
		s.drop()
	}
	s.size += size
	buf := s.spare
	s.spare = nil
	if cap(buf) != size {
		buf = make([]byte, 0, size)
	}
	s.blocks = append(s.blocks, &block{stream: stream, seq: s.next, buf: buf})
	return s.blocks[len(s.blocks)-1].buf[:size]
}

// wrote tells that the first n bytes of the last space have been filled.
func (s *spool) wrote(n int) {
	b := s.blocks[len(s.blocks)-1]
	b.buf = b.buf[:len(b.buf)+n]
	s.next += uint64(n)
	if len(b.buf) == cap(b.buf) {
		s.grow = min(2*cap(b.buf), maxBlock) // busy
	}
}

// unused gives back a space that nothing was written to.
func (s *spool) unused() {
	if n := len(s.blocks); n > 0 && len(s.blocks[n-1].buf) == 0 {
		b := s.blocks[n-1]
		s.blocks = s.blocks[:n-1]
		s.size -= cap(b.buf)
		s.budget.give(cap(b.buf))
		s.spare = b.buf // most reads find an empty pipe first
	}
}

// drop forgets the oldest block.
func (s *spool) drop() {
	b := s.blocks[0]
	s.blocks[0] = nil
	s.blocks = s.blocks[1:]
	s.size -= cap(b.buf)
	s.budget.give(cap(b.buf))
}

// free forgets everything.
func (s *spool) free() {
	for len(s.blocks) > 0 {
		s.drop()
	}
	s.blocks = nil
	s.spare = nil
	s.grow = 0
}

// first is the number of the oldest byte that is held, or of the next one.
func (s *spool) first() uint64 {
	if len(s.blocks) == 0 {
		return s.next
	}
	return s.blocks[0].seq
}

// at returns bytes from number seq on, at most one chunk. Where seq is not
// held any more, gap is the number of the first byte that is, and more than
// seq. Without new bytes, data is empty and gap is seq.
func (s *spool) at(seq uint64) (stream chronusapi.Stream, data []byte, gap uint64) {
	for _, b := range s.blocks {
		if b.end() <= seq {
			continue
		}
		if b.seq > seq {
			return 0, nil, b.seq
		}
		data = b.buf[seq-b.seq:]
		return b.stream, data[:min(len(data), chronusapi.MaxChunk)], seq
	}
	return 0, nil, max(seq, s.next)
}
