package trajectory

import (
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

const (
	inlineOutput = 64 << 10 // an output up to so long is in its entry
	inlinePieces = 1024     // unless it is in more pieces
	endOutput    = 2 << 10  // of a longer one, first and last
	endPieces    = 64
	maxPiece     = 64 << 10
)

// spool takes the output or the input of one action: into memory while it is short, then
// into an object, and where that cannot be, first and last bytes alone.
type spool struct {
	log *Log
	sb  *sandbox
	seq uint64 // of the entry with which the action begins; 0: keep is called once it is known
	of  flow

	mu     sync.Mutex
	mode   spoolMode
	head   []*dsecv1.TrajectoryOutputPiece // inline: all there is
	tail   []*dsecv1.TrajectoryOutputPiece
	total  int64
	taken  int64 // of the sandbox's share
	object *object
	sum    hash.Hash                    // of what is streamed to an action: of its bytes alone, all of them
	kept   []byte                       // digest of those that are kept, where that is not all
	piece  dsecv1.TrajectoryOutputPiece // next of object
	gap    string                       // why nothing more is kept
	hole   string                       // why something before is missing
}

type spoolMode uint8

const (
	spoolInline spoolMode = iota
	spoolObject
	spoolEnds
	spoolClosed
)

func (s *spool) write(stream dsecv1.Stream, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mode == spoolClosed || len(data) == 0 {
		return
	}
	s.total += int64(len(data))
	take := s.take(len(data))
	s.digest(data, take)
	if s.mode == spoolInline {
		switch {
		case take < len(data) && s.taken <= inlineOutput && len(s.head) < inlinePieces:
			s.mode, s.tail = spoolEnds, lastBytes(firstBytes(s.head, inlineOutput, inlinePieces))
			s.head = appendPiece(s.head, stream, data[:take])
		case take == len(data) && s.taken <= inlineOutput && len(s.head) < inlinePieces:
			s.head = appendPiece(s.head, stream, data)
			return
		default:
			s.spill()
			if n := min(take, endOutput-int(length(s.head))); n > 0 && len(s.head) < endPieces {
				s.head = appendPiece(s.head, stream, data[:n])
			}
		}
	}
	if s.mode == spoolObject {
		s.feed(stream, data[:take])
	}
	s.tail = lastBytes(appendPiece(s.tail, stream, data[max(0, len(data)-endOutput):]))
}

// digest takes in what was given, of which so much is kept.
func (s *spool) digest(data []byte, take int) {
	if s.of != flowIn || s.seq == 0 {
		return
	}
	if s.sum == nil {
		s.sum = sha256.New()
	}
	s.sum.Write(data[:take])
	if take < len(data) && s.kept == nil {
		s.kept = s.sum.Sum(nil)
	}
	s.sum.Write(data[take:])
}

// miss stands in for n bytes that nobody has.
func (s *spool) miss(n int64, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mode == spoolClosed || n <= 0 {
		return
	}
	s.total += n
	if s.hole == "" {
		s.hole = reason
	}
	if s.mode == spoolInline && len(s.head) < inlinePieces {
		s.head = appendHole(s.head, n)
		return
	}
	if s.mode == spoolInline {
		s.spill()
	}
	if s.mode == spoolObject && s.gap == "" {
		s.feedHole(n)
	}
	s.tail = lastBytes(appendHole(s.tail, n))
}

// take takes up to n bytes of what may be kept.
func (s *spool) take(n int) int {
	if s.gap != "" {
		return 0 // what is kept has no holes but those that miss told of
	}
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	share, ofOne := l.opts.bounds(s.of)
	share, ofOne = share-s.sb.kept[s.of]-s.sb.taken[s.of], ofOne-s.taken
	take := int(max(0, min(int64(n), share, ofOne)))
	switch {
	case s.taken+int64(n) > inlineOutput && l.bytes() > l.opts.MaxBytes:
		take, s.gap = 0, "the trajectory log of the node is full"
		notify(l.wake)
	case take < n && ofOne <= share:
		s.gap = "it is more than is kept of one action"
	case take < n:
		s.gap = "it is more than is kept of one sandbox"
	}
	s.taken += int64(take)
	s.sb.taken[s.of] += int64(take)
	return take
}

// spill goes on with an object, and with the first bytes of what is in memory
// beside it.
func (s *spool) spill() {
	all := s.head
	s.mode, s.head, s.tail = spoolObject, firstBytes(all, endOutput, endPieces), lastBytes(firstBytes(all, inlineOutput, inlinePieces))
	var err error
	if s.object, err = s.log.outputs.create(s.sum == nil); err != nil {
		s.failed(err)
		return
	}
	for _, p := range all {
		s.feed(p.Stream, p.Data)
		s.feedHole(p.MissingBytes)
	}
}

// feed adds to the object in the one way of cutting into pieces that there is
// for an output.
func (s *spool) feed(stream dsecv1.Stream, data []byte) {
	for len(data) > 0 && s.mode == spoolObject {
		if s.piece.Stream != stream || len(s.piece.Data) == maxPiece || s.piece.MissingBytes > 0 {
			s.flush()
		}
		n := min(len(data), maxPiece-len(s.piece.Data))
		s.piece.Stream, s.piece.Data = stream, append(s.piece.Data, data[:n]...)
		data = data[n:]
	}
}

// feedHole adds what is missing.
func (s *spool) feedHole(n int64) {
	if n == 0 || s.mode != spoolObject {
		return
	}
	if s.piece.MissingBytes == 0 {
		s.flush()
	}
	s.piece.MissingBytes += n
}

// flush writes the next piece as a message after its length.
func (s *spool) flush() {
	if s.mode != spoolObject || len(s.piece.Data) == 0 && s.piece.MissingBytes == 0 {
		return
	}
	var a [32]byte
	head := a[:0]
	if s.piece.MissingBytes > 0 {
		head = protowire.AppendTag(head, 3, protowire.VarintType)
		head = protowire.AppendVarint(head, uint64(s.piece.MissingBytes))
	} else {
		head = protowire.AppendTag(head, 1, protowire.VarintType)
		head = protowire.AppendVarint(head, uint64(s.piece.Stream))
		head = protowire.AppendTag(head, 2, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(len(s.piece.Data)))
	}
	_, err := s.object.Write(binary.AppendUvarint(nil, uint64(len(head)+len(s.piece.Data))))
	if err == nil {
		_, err = s.object.Write(head)
	}
	if err == nil {
		_, err = s.object.Write(s.piece.Data)
	}
	s.piece.Data, s.piece.MissingBytes = s.piece.Data[:0], 0
	if err != nil {
		s.failed(err)
	}
}

// failed goes on with first and last bytes alone.
func (s *spool) failed(err error) {
	s.log.opts.Logger.Warn("trajectory: output or input not kept", "sandbox", s.sb.id, "err", err)
	s.object.abandon()
	s.object, s.mode, s.gap = nil, spoolEnds, "it could not be written to the disk of the node"
}

// finish gives what an entry says of the output, nil where there was none, and
// how much of it is kept.
func (s *spool) finish() (*dsecv1.TrajectoryOutput, uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.mode = spoolClosed }()
	if s.total == 0 {
		return nil, 0
	}
	out := new(dsecv1.TrajectoryOutput)
	s.flush()
	if s.mode == spoolObject {
		var err error
		if out.Digest, err = s.object.finish(); s.sum != nil {
			if out.Digest = s.kept; out.Digest == nil {
				out.Digest = s.sum.Sum(nil)
			}
		}
		if err == nil && s.seq > 0 {
			err = s.keep(s.seq, out.Digest)
		}
		if err != nil {
			out.Digest = nil
			s.failed(err)
		}
	}
	out.Head, out.Tail, out.TotalBytes, out.KeptBytes = s.head, s.tail, s.total, length(s.head)
	if s.mode == spoolObject {
		out.KeptBytes = s.taken
	}
	if out.KeptBytes < out.TotalBytes {
		out.GapReason = strings.Trim(s.hole+"; "+s.gap, "; ")
	}
	return out, uint32(out.KeptBytes)
}

// keep has a finished object be of the action that begins with an entry.
func (s *spool) keep(seq uint64, digest []byte) error {
	return s.log.outputs.keep(s.object, s.sb.id, seq, digest)
}

// withoutEnds leaves of an output what an entry has room for on a full disk.
func withoutEnds(out *dsecv1.TrajectoryOutput) *dsecv1.TrajectoryOutput {
	if out == nil {
		return nil
	}
	out.Head, out.Tail = nil, nil
	if out.Digest == nil {
		out.KeptBytes, out.GapReason = 0, "the disk of the node has no room"
	}
	return out
}

// close gives back what was taken of the sandbox's share: what is kept is in its entry.
func (s *spool) close() {
	s.mu.Lock()
	s.object.abandon()
	s.object, s.head, s.tail, s.piece.Data = nil, nil, nil, nil
	s.mu.Unlock()
	s.log.mu.Lock()
	s.sb.taken[s.of] -= s.taken
	s.log.mu.Unlock()
}

// appendPiece adds data to the last piece where that is of the same stream.
func appendPiece(pieces []*dsecv1.TrajectoryOutputPiece, stream dsecv1.Stream, data []byte) []*dsecv1.TrajectoryOutputPiece {
	if n := len(pieces); n > 0 && pieces[n-1].Stream == stream && pieces[n-1].MissingBytes == 0 {
		pieces[n-1].Data = append(pieces[n-1].Data, data...)
		return pieces
	}
	return append(pieces, &dsecv1.TrajectoryOutputPiece{Stream: stream, Data: append([]byte(nil), data...)})
}

// appendHole is appendPiece of what is missing.
func appendHole(pieces []*dsecv1.TrajectoryOutputPiece, missing int64) []*dsecv1.TrajectoryOutputPiece {
	if n := len(pieces); n > 0 && pieces[n-1].MissingBytes > 0 {
		pieces[n-1].MissingBytes += missing
		return pieces
	}
	return append(pieces, &dsecv1.TrajectoryOutputPiece{MissingBytes: missing})
}

// length is how many bytes there are, without what is missing.
func length(pieces []*dsecv1.TrajectoryOutputPiece) (n int64) {
	for _, p := range pieces {
		n += int64(len(p.Data))
	}
	return n
}

// firstBytes copies what is first of pieces.
func firstBytes(pieces []*dsecv1.TrajectoryOutputPiece, bytes, most int) (first []*dsecv1.TrajectoryOutputPiece) {
	for _, p := range pieces {
		n := min(bytes, len(p.Data))
		if n == 0 && p.MissingBytes == 0 || len(first) == most {
			break
		}
		if p.MissingBytes > 0 {
			first = appendHole(first, p.MissingBytes)
			continue
		}
		first = appendPiece(first, p.Stream, p.Data[:n])
		if bytes -= n; n < len(p.Data) {
			break
		}
	}
	return first
}

// lastBytes is what is last of pieces, in place. Where that is as much as it can be,
// it begins with data: what was before that may not be among the pieces.
func lastBytes(pieces []*dsecv1.TrajectoryOutputPiece) []*dsecv1.TrajectoryOutputPiece {
	pieces = pieces[max(0, len(pieces)-endPieces):]
	over := length(pieces) - endOutput
	for over > 0 {
		p := pieces[0]
		n := min(over, int64(len(p.Data)))
		over -= n
		if n == int64(len(p.Data)) {
			pieces = pieces[1:]
			continue
		}
		p.Data = append(p.Data[:0], p.Data[n:]...)
	}
	for over == 0 && pieces[0].MissingBytes > 0 {
		pieces = pieces[1:]
	}
	return pieces
}
