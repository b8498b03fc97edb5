package journal

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"strconv"
)

// A record on disk is
//
//	length u32 | crc32c u32 | version u8 | body
//
// little endian; length counts the body, the checksum covers version and body.
// The body is the JSON of entry. A record is appended by one write(2).
const (
	headerLen = 9
	version   = 1
	// MaxValue bounds one value, so that a damaged length cannot ask for much.
	MaxValue = 1 << 20
	maxBody  = MaxValue + 1024
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// entry is the body of a record. A missing value deletes the key.
type entry struct {
	Key   string          `json:"k"`
	Seq   uint64          `json:"n"` // counts every record ever written here
	Value json.RawMessage `json:"v,omitempty"`
}

// appendRecord appends the encoded record of e, whose value is compact JSON, to
// dst. It writes what json.Marshal(e) gives without reading the value again: an
// edge does this several times in each life of a sandbox.
func appendRecord(dst []byte, e entry) ([]byte, error) {
	key, err := json.Marshal(e.Key)
	if err != nil {
		return dst, err
	}
	start := len(dst)
	dst = append(dst, make([]byte, headerLen)...)
	dst = append(append(dst, bodyStart[:len(bodyStart)-1]...), key...)
	dst = strconv.AppendUint(append(dst, `,"n":`...), e.Seq, 10)
	if len(e.Value) > 0 {
		dst = append(append(dst, `,"v":`...), e.Value...)
	}
	dst = append(dst, '}')
	header, body := dst[start:start+headerLen], dst[start+headerLen:]
	header[8] = version
	binary.LittleEndian.PutUint32(header, uint32(len(body)))
	binary.LittleEndian.PutUint32(header[4:], crc32.Checksum(dst[start+8:], castagnoli))
	return dst, nil
}

// decodeRecord reads the record at the start of b and returns its length.
// ok is false where b does not start with a whole, undamaged record.
func decodeRecord(b []byte) (e entry, n int, ok bool) {
	if len(b) < headerLen {
		return e, 0, false
	}
	size := binary.LittleEndian.Uint32(b)
	if size > maxBody || int(size) > len(b)-headerLen || b[8] != version {
		return e, 0, false
	}
	body := b[headerLen : headerLen+int(size)]
	sum := crc32.Update(crc32.Checksum(b[8:9], castagnoli), castagnoli, body)
	if sum != binary.LittleEndian.Uint32(b[4:]) {
		return e, 0, false
	}
	if e, ok = parse(body); !ok {
		if err := json.Unmarshal(body, &e); err != nil || e.Key == "" {
			return entry{}, 0, false
		}
	}
	return e, headerLen + int(size), true
}

// parse reads a body that is as appendRecord writes it, unless its key has an escape.
// It does not look into the value: the checksum was right.
func parse(body []byte) (e entry, ok bool) {
	rest, ok := bytes.CutPrefix(body, []byte(bodyStart))
	key, rest, found := bytes.Cut(rest, []byte(`","n":`))
	if !ok || !found || len(key) == 0 || bytes.ContainsAny(key, "\"\\") {
		return e, false
	}
	rest, ok = bytes.CutSuffix(rest, []byte("}"))
	seq, value, has := bytes.Cut(rest, []byte(`,"v":`))
	n, err := strconv.ParseUint(string(seq), 10, 64)
	if !ok || err != nil || has && len(value) == 0 {
		return e, false
	}
	// Not a part of the file, all of which would stay in memory with it.
	return entry{Key: string(key), Seq: n, Value: bytes.Clone(value)}, true
}

// bodyStart is what all bodies begin with; the key follows.
const bodyStart = `{"k":"`

// image is what the bytes of a journal file say.
type image struct {
	values  map[string]json.RawMessage
	seq     uint64 // of the newest record
	damaged [][]byte
	records int
}

// decodeImage reads a whole journal file. It never fails: what is damaged is
// skipped up to the next whole record and reported, and what a crash left half
// written at the end is dropped.
func decodeImage(b []byte) image {
	img := image{values: make(map[string]json.RawMessage)}
	for len(b) > 0 {
		e, n, ok := decodeRecord(b)
		if !ok {
			skip := nextRecord(b[1:]) + 1
			if bad := b[:skip]; !tornTail(bad, skip == len(b)) {
				img.damaged = append(img.damaged, bytes.Clone(bad))
			}
			b = b[skip:]
			continue
		}
		b = b[n:]
		img.records++
		img.seq = max(img.seq, e.Seq)
		if e.Value == nil {
			delete(img.values, e.Key)
		} else {
			img.values[e.Key] = e.Value
		}
	}
	return img
}

// nextRecord finds the next whole record in b, and len(b) if there is none.
// A chance match needs a checksum of 32 bits and valid JSON.
func nextRecord(b []byte) int {
	for i := range b {
		// The version byte and the start of the JSON tell most places apart
		// without a checksum.
		if len(b)-i < headerLen+2 {
			break
		}
		if b[i+8] != version || b[i+9] != '{' {
			continue
		}
		if e, _, ok := decodeRecord(b[i:]); ok && (e.Value == nil || json.Valid(e.Value)) {
			return i
		}
	}
	return len(b)
}

// tornTail tells an append that a crash cut off, which says nothing about any
// earlier record, from damage to a record that was once whole: the first is
// the last thing in the file and shorter than its length says, or zeros that a
// file system left after a loss of power.
func tornTail(bad []byte, last bool) bool {
	if !last {
		return false
	}
	if len(bad) < headerLen || len(bytes.Trim(bad, "\x00")) == 0 {
		return true
	}
	size := binary.LittleEndian.Uint32(bad)
	return size <= maxBody && int(size) > len(bad)-headerLen && bad[8] == version
}
