package trajectory

import (
	"encoding/binary"
	"errors"
	"hash/crc32"

	"github.com/opendsec/dsec"
)

// A record in a segment is a header and a payload, little endian:
//
//	crc32c u32 | payload length u32 | version u8 | type u8 | kind u8 | flags u8 |
//	segment u32 and offset u32 of the sandbox's record before it |
//	bytes of output kept u32 | seq u64 | begun seq u64 | sandbox 25 bytes
//
// The checksum is of the log's salt, the payload and the header behind the
// checksum, in this order. The salt keeps what an agent wrote, and what lies in
// a payload, from passing for a record where the one around it is damaged.
const (
	headerLen    = 40 + sandboxIDLen
	sandboxIDLen = 25
	version      = 1
	// maxPayload bounds what a damaged length can ask for.
	maxPayload = 256 << 10
)

// recordType says what a record is to its sandbox's chain.
type recordType uint8

const (
	typeBegun  recordType = 1 + iota // an entry: an action has begun
	typeEnded                        // an entry: the action of begun seq has ended
	typeEvent                        // an entry by itself
	typeState                        // what is known of the sandbox; takes no seq
	typeFooter                       // states of a segment's sandboxes; of no chain
)

const (
	flagAction  = 1 << iota // begun: it has an action ID
	flagNotDone             // ended: provably without any effect, so that its action ID is free again
	flagObject              // begun, ended: its output or input is an object
	flagGap                 // event: a gap
	flagInput               // begun, ended: its input counts
	flagBoundary
)

// position is where a record begins; without a segment there is none.
type position struct {
	segment uint32
	offset  uint32
}

// header is a record's, decoded.
type header struct {
	size    uint32 // of the payload
	typ     recordType
	kind    uint8
	flags   uint8
	prev    position
	kept    uint32
	given   int64  // bytes of input kept; in the payload alone, where flagInput says so
	seq     uint64 // of an entry; of any other record that of the last entry before it
	begun   uint64 // seq
	sandbox [sandboxIDLen]byte
}

func (h *header) of(id dsec.SandboxID) bool { return string(h.sandbox[:]) == string(id) }

func (h *header) entry() bool { return h.typ >= typeBegun && h.typ <= typeEvent }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal fills in the header of record, whose payload is there already; sum is
// the checksum of salt and payload.
func (h *header) seal(record []byte, sum uint32) {
	le := binary.LittleEndian
	le.PutUint32(record[4:], uint32(len(record)-headerLen))
	record[8], record[9], record[10], record[11] = version, byte(h.typ), h.kind, h.flags
	le.PutUint32(record[12:], h.prev.segment)
	le.PutUint32(record[16:], h.prev.offset)
	le.PutUint32(record[20:], h.kept)
	le.PutUint64(record[24:], h.seq)
	le.PutUint64(record[32:], h.begun)
	copy(record[40:], h.sandbox[:])
	le.PutUint32(record, crc32.Update(sum, castagnoli, record[4:headerLen]))
}

// parseHeader reads a header without its checksum: what it says may be wrong.
func parseHeader(b []byte) (h header, ok bool) {
	if len(b) < headerLen || b[8] != version {
		return h, false
	}
	le := binary.LittleEndian
	h.size, h.typ, h.kind, h.flags = le.Uint32(b[4:]), recordType(b[9]), b[10], b[11]
	h.prev = position{le.Uint32(b[12:]), le.Uint32(b[16:])}
	h.kept, h.seq, h.begun = le.Uint32(b[20:]), le.Uint64(b[24:]), le.Uint64(b[32:])
	copy(h.sandbox[:], b[40:])
	if h.typ == typeFooter { // of no sandbox
		return h, h.sandbox == [sandboxIDLen]byte{}
	}
	return h, typeBegun <= h.typ && h.typ < typeFooter && h.size <= maxPayload && h.flags < flagBoundary
}

// whole reports whether record, a header with its payload, is as it was written.
func whole(record []byte, seed uint32) bool {
	sum := crc32.Update(seed, castagnoli, record[headerLen:])
	return crc32.Update(sum, castagnoli, record[4:headerLen]) == binary.LittleEndian.Uint32(record)
}

// state is what is known of a sandbox beside its entries: the payload of a
// state record, and with where its last record is, an item of a footer.
type state struct {
	project string
	seq     uint64       // of the last entry
	sealed  uint64       // entries up to it are in the store
	kept    [flows]int64 // bytes
	entries int64        // bytes, but for those
	// unfinished are the kinds of actions that have not ended, by the seq of begun.
	unfinished map[uint64]uint8
	forgotten  bool
}

// entered counts an entry whose record has so many bytes, with what it keeps.
func (s *state) entered(h *header, record int) {
	s.seq = h.seq
	s.kept[flowOut] += int64(h.kept)
	s.kept[flowIn] += h.given
	n := int64(record)
	if h.flags&flagObject == 0 { // it has what it keeps in it
		n -= int64(h.kept) + h.given
	}
	s.entries += max(0, n)
}

func (s *state) begin(seq uint64, kind uint8) {
	if s.unfinished == nil {
		s.unfinished = make(map[uint64]uint8)
	}
	s.unfinished[seq] = kind
}

// What the first byte of a state says.
const (
	stateForgotten = 1 << iota
	stateInput     // input is counted, after output
	stateEntries   // entries are counted, after that
	stateBoundary
)

func (s *state) append(b []byte) []byte {
	flags := byte(0)
	if s.forgotten {
		flags |= stateForgotten
	}
	if s.kept[flowIn] > 0 {
		flags |= stateInput
	}
	if s.entries > 0 {
		flags |= stateEntries
	}
	b = append(b, flags, byte(len(s.project)))
	b = append(b, s.project...)
	b = binary.AppendUvarint(b, s.seq)
	b = binary.AppendUvarint(b, s.sealed)
	b = binary.AppendUvarint(b, uint64(s.kept[flowOut]))
	if s.kept[flowIn] > 0 {
		b = binary.AppendUvarint(b, uint64(s.kept[flowIn]))
	}
	if s.entries > 0 {
		b = binary.AppendUvarint(b, uint64(s.entries))
	}
	b = binary.AppendUvarint(b, uint64(len(s.unfinished)))
	for seq, kind := range s.unfinished {
		b = append(binary.AppendUvarint(b, seq), kind)
	}
	return b
}

var errMalformed = errors.New("trajectory: malformed state of a sandbox")

func parseState(b []byte) (s state, rest []byte, err error) {
	if len(b) < 2 || b[0] >= stateBoundary || len(b) < 2+int(b[1]) {
		return s, nil, errMalformed
	}
	flags := b[0]
	s.forgotten = flags&stateForgotten != 0
	s.project, b = string(b[2:2+b[1]]), b[2+int(b[1]):]
	uvarint := func() uint64 {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			b, err = nil, errMalformed
			return 0
		}
		b = b[n:]
		return v
	}
	s.seq, s.sealed, s.kept[flowOut] = uvarint(), uvarint(), int64(uvarint())
	if flags&stateInput != 0 {
		if s.kept[flowIn] = int64(uvarint()); s.kept[flowIn] == 0 {
			err = errMalformed
		}
	}
	if flags&stateEntries != 0 {
		if s.entries = int64(uvarint()); s.entries == 0 {
			err = errMalformed
		}
	}
	for n := uvarint(); n > 0 && err == nil; n-- {
		seq := uvarint()
		if len(b) == 0 {
			return state{}, nil, errMalformed
		}
		s.begin(seq, b[0])
		b = b[1:]
	}
	if err != nil || s.kept[flowOut] < 0 || s.kept[flowIn] < 0 || s.entries < 0 || s.sealed > s.seq {
		return state{}, nil, errMalformed
	}
	return s, b, nil
}

// footerItem tells of one of a segment's sandboxes.
type footerItem struct {
	id   [sandboxIDLen]byte
	head position // of its last record, in this segment
	state
}

func (i *footerItem) append(b []byte) []byte {
	b = append(b, i.id[:]...)
	b = binary.AppendUvarint(b, uint64(i.head.offset))
	return i.state.append(b)
}

func parseFooter(b []byte, segment uint32) (items []footerItem, err error) {
	for len(b) > 0 {
		var i footerItem
		if len(b) < sandboxIDLen {
			return nil, errMalformed
		}
		b = b[copy(i.id[:], b):]
		offset, n := binary.Uvarint(b)
		if n <= 0 || offset > 1<<32-1 {
			return nil, errMalformed
		}
		i.head = position{segment, uint32(offset)}
		if i.state, b, err = parseState(b[n:]); err != nil {
			return nil, err
		}
		items = append(items, i)
	}
	return items, nil
}
