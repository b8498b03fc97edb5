package chronusapi

import (
	"encoding/binary"
	"time"

	"github.com/opendsec/dsec"
)

// enc appends fields to a message. Integers are big-endian and of fixed
// width; strings and byte slices have a 32-bit length before them.
type enc struct{ b []byte }

func (e *enc) u8(v uint8)   { e.b = append(e.b, v) }
func (e *enc) u16(v uint16) { e.b = binary.BigEndian.AppendUint16(e.b, v) }
func (e *enc) u32(v uint32) { e.b = binary.BigEndian.AppendUint32(e.b, v) }
func (e *enc) u64(v uint64) { e.b = binary.BigEndian.AppendUint64(e.b, v) }
func (e *enc) i64(v int64)  { e.u64(uint64(v)) }

func (e *enc) bool(v bool) {
	if v {
		e.u8(1)
	} else {
		e.u8(0)
	}
}

func (e *enc) str(s string) {
	e.u32(uint32(len(s)))
	e.b = append(e.b, s...)
}

func (e *enc) bytes(p []byte) {
	e.u32(uint32(len(p)))
	e.b = append(e.b, p...)
}

func (e *enc) strs(list []string) {
	e.u32(uint32(len(list)))
	for _, s := range list {
		e.str(s)
	}
}

// time is encoded as nanoseconds since 1970; the zero Time as the smallest
// integer, which no clock shows.
func (e *enc) time(t time.Time) {
	if t.IsZero() {
		e.i64(-1 << 63)
		return
	}
	e.i64(t.UnixNano())
}

// dec reads the fields of a message back. After the first field that does not
// fit, bad is set and every later field reads as zero, so that a decoder is
// checked once at its end. Nothing is allocated for a length that the rest of
// the message cannot fill.
type dec struct {
	b   []byte
	bad bool
}

func (d *dec) take(n int) []byte {
	if d.bad || n < 0 || n > len(d.b) {
		d.bad = true
		return nil
	}
	p := d.b[:n:n]
	d.b = d.b[n:]
	return p
}

func (d *dec) u8() uint8 {
	if p := d.take(1); p != nil {
		return p[0]
	}
	return 0
}

func (d *dec) u16() uint16 {
	if p := d.take(2); p != nil {
		return binary.BigEndian.Uint16(p)
	}
	return 0
}

func (d *dec) u32() uint32 {
	if p := d.take(4); p != nil {
		return binary.BigEndian.Uint32(p)
	}
	return 0
}

func (d *dec) u64() uint64 {
	if p := d.take(8); p != nil {
		return binary.BigEndian.Uint64(p)
	}
	return 0
}

func (d *dec) i64() int64 { return int64(d.u64()) }

// bool takes 0 and 1 only, so that a message has one encoding.
func (d *dec) bool() bool {
	v := d.u8()
	if v > 1 {
		d.bad = true
	}
	return v == 1
}

// bytes returns a slice of the message itself.
func (d *dec) bytes(limit int) []byte {
	n := d.u32()
	if uint64(n) > uint64(limit) {
		d.bad = true
		return nil
	}
	return d.take(int(n))
}

func (d *dec) str(limit int) string { return string(d.bytes(limit)) }

func (d *dec) strs(maxCount, maxBytes int) []string {
	n := d.u32()
	// Every string has at least its length.
	if d.bad || uint64(n) > uint64(maxCount) || uint64(n) > uint64(len(d.b)/4) {
		d.bad = true
		return nil
	}
	if n == 0 {
		return nil
	}
	list := make([]string, n)
	for i := range list {
		list[i] = d.str(maxBytes)
		maxBytes -= len(list[i])
	}
	if d.bad {
		return nil
	}
	return list
}

func (d *dec) time() time.Time {
	v := d.i64()
	if d.bad || v == -1<<63 {
		return time.Time{}
	}
	return time.Unix(0, v)
}

// ok reports whether the whole message was read, and nothing else.
func (d *dec) ok() bool { return !d.bad && len(d.b) == 0 }

const (
	outcomeOOM = 1 << iota
	outcomeTimedOut
	outcomeOutputLimit
	outcomeClaimed
	outcomeAll = 1<<iota - 1
)

func (e *enc) outcome(o *dsec.Outcome) {
	var flags uint8
	for i, set := range []bool{o.OOM, o.TimedOut, o.OutputLimit, o.Claimed} {
		if set {
			flags |= 1 << i
		}
	}
	e.u16(uint16(o.Code))
	e.u16(uint16(o.Signal))
	e.u8(flags)
	e.time(o.Started)
	e.i64(int64(o.Duration))
	e.i64(int64(o.CPU))
	e.i64(o.MaxRSS)
}

func (d *dec) outcome() dsec.Outcome {
	o := dsec.Outcome{Code: int(d.u16()), Signal: int(d.u16())}
	flags := d.u8()
	o.OOM = flags&outcomeOOM != 0
	o.TimedOut = flags&outcomeTimedOut != 0
	o.OutputLimit = flags&outcomeOutputLimit != 0
	o.Claimed = flags&outcomeClaimed != 0
	o.Started = d.time()
	o.Duration = time.Duration(d.i64())
	o.CPU = time.Duration(d.i64())
	o.MaxRSS = d.i64()
	if o.Code > 255 || o.Signal > 127 || flags > outcomeAll || o.Duration < 0 || o.CPU < 0 || o.MaxRSS < 0 {
		d.bad = true
	}
	return o
}
