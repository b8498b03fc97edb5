package trajectory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// A segment begins with
//
//	magic 8 bytes | salt 8 bytes | crc32c u32
//
// and ends, once it is full, with a footer: a record that holds the state of
// each of its sandboxes, and behind it
//
//	offset of that record u32 | magic u32
//
// A segment without one, such as the last, is read from its start.
const (
	segmentHeaderLen = 20
	segmentMagic     = "dsectrj1"
	trailerLen       = 8
	trailerMagic     = 0x746f6f66
)

// segment is one file of the log.
type segment struct {
	number  uint32
	f       *os.File
	size    int64
	room    int64 // up to which it has blocks
	members []member
	objects int64 // bytes of output kept since it became the current one
}

// member is a sandbox that has records in a segment. last is the seq of the
// last of its entries in there, or before: nobody needs what is not later.
type member struct {
	sb   *sandbox
	last uint64
}

func segmentName(number uint32) string { return fmt.Sprintf("%08x.seg", number) }

func segmentNumber(name string) (number uint32, ok bool) {
	n, err := fmt.Sscanf(name, "%08x.seg", &number)
	return number, n == 1 && err == nil && name == segmentName(number) && number > 0
}

// newSegment makes an empty segment with room for size bytes, which has no number
// yet. Where there is no room nothing is left of it. It takes milliseconds.
func newSegment(dir string, salt [8]byte, size int64) (*segment, error) {
	f, err := os.CreateTemp(dir, "*"+unnumbered)
	if err != nil {
		return nil, err
	}
	s := &segment{f: f, size: segmentHeaderLen}
	if err = s.allocate(size); err == nil {
		b := append(make([]byte, 0, segmentHeaderLen), segmentMagic...)
		b = append(b, salt[:]...)
		b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
		_, err = f.WriteAt(b, 0)
	}
	if err != nil {
		return nil, errors.Join(err, s.discard())
	}
	return s, nil
}

// unnumbered is the end of the name of a segment without a number.
const unnumbered = ".new"

// discard leaves nothing of a segment without a number.
func (s *segment) discard() error { return errors.Join(s.f.Close(), os.Remove(s.f.Name())) }

// place gives a segment its number.
func (s *segment) place(dir string, number uint32) error {
	s.number = number
	return os.Rename(s.f.Name(), filepath.Join(dir, segmentName(number)))
}

// allocate has the segment's blocks be there before they are written. A file
// system that cannot do so has nothing to promise.
func (s *segment) allocate(size int64) error {
	err := unix.Fallocate(int(s.f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, size)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	s.room = size
	return nil
}

// openSegment opens a segment that is there. Its salt is not known where its
// header is damaged.
func openSegment(dir string, number uint32) (s *segment, salt [8]byte, salted bool, err error) {
	f, err := os.OpenFile(filepath.Join(dir, segmentName(number)), os.O_RDWR, 0)
	if err != nil {
		return nil, salt, false, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, salt, false, errors.Join(err, f.Close())
	}
	s = &segment{number: number, f: f, size: info.Size()}
	b := make([]byte, segmentHeaderLen)
	if _, err := f.ReadAt(b, 0); err != nil && err != io.EOF {
		return nil, salt, false, errors.Join(err, f.Close())
	}
	if string(b[:7]) == segmentMagic[:7] && '0' <= b[7] && b[7] <= '9' && b[7] != segmentMagic[7] {
		return nil, salt, false, errors.Join(fmt.Errorf("trajectory: %s is of version %c, want %c", f.Name(), b[7], segmentMagic[7]), f.Close())
	}
	if string(b[:8]) != segmentMagic || crc32.Checksum(b[:16], castagnoli) != binary.LittleEndian.Uint32(b[16:]) {
		return s, salt, false, nil
	}
	copy(salt[:], b[8:16])
	return s, salt, true, nil
}

// append writes a record after the last one, in one call.
func (s *segment) append(record []byte) error {
	// os.File.WriteAt tries again after a short write and then does not tell
	// how much of it went through.
	var n int
	var err error = unix.EINTR
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Pwrite(int(s.f.Fd()), record, s.size)
	}
	if err == nil && n < len(record) {
		err = unix.ENOSPC // the one cause of a short write to a regular file
	}
	if err != nil {
		// Cutting the file would give the blocks allocated ahead away, so what
		// was written becomes zeros, until the next record takes their place.
		if n > 0 {
			if _, werr := s.f.WriteAt(make([]byte, n), s.size); werr != nil {
				return &brokenError{errors.Join(err, werr)}
			}
		}
		return err
	}
	s.size += int64(n)
	return nil
}

// brokenError means that the segment may end in half a record.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// finish writes the footer and gives back what is allocated behind it. Without
// a footer, as on a full disk, the segment is read from its start when opened.
func (s *segment) finish(seed uint32) error {
	size := s.size
	record := make([]byte, headerLen, headerLen+64*len(s.members))
	for i := range s.members {
		m := &s.members[i]
		m.last = m.sb.seq
		item := footerItem{head: m.sb.head, state: m.sb.state}
		copy(item.id[:], m.sb.id)
		record = item.append(record)
	}
	h := header{typ: typeFooter}
	h.seal(record, crc32.Update(seed, castagnoli, record[headerLen:]))
	record = binary.LittleEndian.AppendUint32(record, uint32(size))
	record = binary.LittleEndian.AppendUint32(record, trailerMagic)
	err := s.append(record)
	if err != nil {
		s.size = size
	}
	return errors.Join(err, s.f.Truncate(s.size))
}

// footer reads the footer; ok is false where there is no whole one.
func (s *segment) footer(seed uint32) (items []footerItem, ok bool) {
	var t [trailerLen]byte
	if s.size < segmentHeaderLen+headerLen+trailerLen || s.size > math.MaxUint32 {
		return nil, false
	}
	if _, err := s.f.ReadAt(t[:], s.size-trailerLen); err != nil {
		return nil, false
	}
	offset := int64(binary.LittleEndian.Uint32(t[:]))
	length := s.size - trailerLen - offset
	if binary.LittleEndian.Uint32(t[4:]) != trailerMagic || offset < segmentHeaderLen || length < headerLen {
		return nil, false
	}
	b := make([]byte, length)
	if _, err := s.f.ReadAt(b, offset); err != nil {
		return nil, false
	}
	h, ok := parseHeader(b)
	if !ok || h.typ != typeFooter || int64(h.size) != length-headerLen || !whole(b, seed) {
		return nil, false
	}
	items, err := parseFooter(b[headerLen:], s.number)
	return items, err == nil
}

// record reads the record at offset. The payload is in buf where it has room.
func (s *segment) record(offset uint32, seed uint32, buf []byte) (h header, record []byte, err error) {
	b := buf[:cap(buf)]
	if len(b) < 1024 {
		b = make([]byte, 1024)
	}
	n, err := s.f.ReadAt(b, int64(offset))
	if err != nil && err != io.EOF {
		return h, nil, err
	}
	h, ok := parseHeader(b[:n])
	if !ok || h.typ == typeFooter {
		return h, nil, errDamaged
	}
	size := headerLen + int(h.size)
	if size > n {
		b = append(b[:n], make([]byte, size-n)...)
		if m, err := s.f.ReadAt(b[n:size], int64(offset)+int64(n)); m < size-n {
			if err == io.EOF {
				err = errDamaged
			}
			return h, nil, err
		}
	}
	if b = b[:size]; !whole(b, seed) {
		return h, nil, errDamaged
	}
	return h, b, nil
}

var errDamaged = errors.New("trajectory: a record is damaged")

// window is a segment as a slice that moves over it.
type window struct {
	r     io.ReaderAt
	size  int64
	start int64
	b     []byte
}

const windowLen = 1 << 20

// at returns n bytes from off on, or those that there are up to the end. They
// are good until the next call.
func (w *window) at(off, n int64) ([]byte, error) {
	n = min(n, w.size-off)
	if off < w.start || off+n > w.start+int64(len(w.b)) {
		length := int(min(max(n, windowLen), w.size-off))
		if cap(w.b) < length {
			w.b = make([]byte, length)
		}
		w.b, w.start = w.b[:length], off
		if m, err := w.r.ReadAt(w.b, off); m < length {
			w.b = w.b[:0]
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return w.b[off-w.start:][:n], nil
}

// scan calls record for each whole record of a segment of size bytes, in order,
// and damaged for each stretch between them that is none, with its first bytes.
// What it gives them is good until they return.
func scan(r io.ReaderAt, size int64, seed uint32, record func(off int64, h header, record []byte) error, damaged func(off, n int64, first []byte) error) error {
	w := window{r: r, size: size}
	bad := int64(-1)
	tell := func(end int64) error {
		if bad < 0 {
			return nil
		}
		first, err := w.at(bad, headerLen)
		if err != nil {
			return err
		}
		from := bad
		bad = -1
		return damaged(from, end-from, first)
	}
	for off := int64(segmentHeaderLen); off < size; {
		b, err := w.at(off, headerLen)
		if err != nil {
			return err
		}
		h, ok := parseHeader(b)
		n := headerLen + int64(h.size)
		if ok = ok && off+n <= size; ok {
			if b, err = w.at(off, n); err != nil {
				return err
			}
			ok = whole(b, seed)
		}
		if !ok {
			if bad < 0 {
				bad = off
			}
			off++
			continue
		}
		if err := tell(off); err != nil {
			return err
		}
		if h.typ == typeFooter {
			return nil
		}
		if b, err = w.at(off, n); err != nil { // tell may have moved it
			return err
		}
		if err := record(off, h, b); err != nil {
			return err
		}
		off += n
	}
	return tell(size)
}
