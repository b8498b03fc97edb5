package trajectory

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	gocmp "github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/encoding/protodelim"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func recordOf(h header, payload string, seed uint32) []byte {
	b := append(make([]byte, headerLen), payload...)
	h.seal(b, crc32.Update(seed, castagnoli, b[headerLen:]))
	return b
}

// FuzzScan reads anything as a segment.
func FuzzScan(f *testing.F) {
	const seed = 42
	one := recordOf(header{typ: typeBegun, kind: 16, flags: flagAction, seq: 1}, "begun", seed)
	two := recordOf(header{typ: typeEnded, seq: 2, begun: 1, prev: position{1, segmentHeaderLen}}, "ended", seed)
	f.Add(append(bytes.Clone(one), two...))
	f.Add(append(append(bytes.Clone(one), 1, 2, 3), two...))
	f.Add(append(bytes.Clone(one), two[:20]...))
	f.Add(recordOf(header{typ: typeFooter}, "x", seed))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = append(make([]byte, segmentHeaderLen), b...)
		covered, next := int64(segmentHeaderLen), int64(segmentHeaderLen)
		footer := false
		err := scan(bytes.NewReader(b), int64(len(b)), seed, func(off int64, h header, record []byte) error {
			if off != next || !bytes.Equal(record, b[off:off+int64(len(record))]) {
				t.Errorf("record at %d after %d", off, next)
			}
			if again := recordOf(h, string(record[headerLen:]), seed); !bytes.Equal(again, record) {
				t.Errorf("%x is written as %x", record, again)
			}
			next, covered = off+int64(len(record)), covered+int64(len(record))
			return nil
		}, func(off, n int64, first []byte) error {
			if off != next || len(first) > headerLen || n <= 0 {
				t.Errorf("damage at %d after %d", off, next)
			}
			next, covered = off+n, covered+n
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if covered != int64(len(b)) {
			h, ok := parseHeader(b[covered:])
			if footer = ok && h.typ == typeFooter; !footer {
				t.Errorf("%d of %d bytes are told", covered, len(b))
			}
		}
	})
}

// FuzzFooter reads anything as a footer, and as the end of a segment.
func FuzzFooter(f *testing.F) {
	item := footerItem{head: position{7, 99}, state: state{project: "p", seq: 9, sealed: 3, kept: [flows]int64{4, 5}, unfinished: map[uint64]uint8{8: 16}}}
	copy(item.id[:], "abcdefghijklmnopqrstuvwxy")
	f.Add(item.append(nil))
	f.Add(item.append(item.append(nil)))
	item.entries = 6
	f.Add(item.append(nil))
	f.Add([]byte("short"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		items, err := parseFooter(b, 7)
		if err == nil {
			var again []byte
			for _, item := range items {
				again = item.append(again)
			}
			back, err := parseFooter(again, 7)
			if d := cmp.Diff(items, back, cmp.AllowUnexported(footerItem{}, state{}, position{}), gocmp.EquateEmpty()); err != nil || d != "" {
				t.Errorf("%v, %s", err, d)
			}
		}
		path := filepath.Join(dir, "segment")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		s := segment{number: 7, f: file, size: int64(len(b))}
		if _, ok := s.footer(42); ok {
			t.Error("bytes of which no checksum is known are a footer")
		}
	})
}

// An agent's output that looks like a record is none, also where the record
// around it is damaged.
func TestARecordWithinARecordIsNone(t *testing.T) {
	seed := crc32.Checksum([]byte("the log's"), castagnoli)
	forged := recordOf(header{typ: typeEvent, seq: 5}, "forged", 0)
	for _, s := range []uint32{0, crc32.Checksum(nil, castagnoli), crc32.Checksum([]byte("another log's"), castagnoli)} {
		forged = append(forged, recordOf(header{typ: typeEvent, seq: 5}, "forged", s)...)
	}
	b := append(make([]byte, segmentHeaderLen), recordOf(header{typ: typeEvent, seq: 1}, string(forged), seed)...)
	b[segmentHeaderLen] ^= 1
	b = append(b, recordOf(header{typ: typeEvent, seq: 2}, "whole", seed)...)
	var seqs []uint64
	err := scan(bytes.NewReader(b), int64(len(b)), seed, func(_ int64, h header, _ []byte) error {
		seqs = append(seqs, h.seq)
		return nil
	}, func(int64, int64, []byte) error { return nil })
	if err != nil || len(seqs) != 1 || seqs[0] != 2 {
		t.Errorf("records %v, %v; want the second alone", seqs, err)
	}
}

// FuzzPiece reads anything as a sealed piece, and as an output.
func FuzzPiece(f *testing.F) {
	var b bytes.Buffer
	for _, e := range []*dsecv1.TrajectoryEntry{execOf("x", "id"), gapEntry(2, 5, "why"), exited(1)} {
		if _, err := protodelim.MarshalTo(&b, e); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(compress(nil, b.Bytes()))
	f.Add(b.Bytes())
	f.Add(compress(nil, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		sum := sha256.Sum256(b)
		if entries, err := decodePiece(hex.EncodeToString(sum[:]), b); err != nil && entries != nil {
			t.Error("entries and an error")
		}
		if _, err := decodePiece(hex.EncodeToString(sum[1:])+"00", b); err == nil {
			t.Error("bytes that are not what the key says are a piece")
		}
		n := 0
		err := eachPiece(bytes.NewReader(b), sum[:], func(p *dsecv1.TrajectoryOutputPiece) error {
			n += len(p.Data)
			return nil
		})
		if err == nil && n > len(b) {
			t.Errorf("%d bytes of output in %d", n, len(b))
		}
	})
}
