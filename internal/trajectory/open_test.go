package trajectory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// segmentOf is a segment of these records, with checksums that are right.
func segmentOf(records []byte) []byte {
	b := append([]byte(segmentMagic), "saltsalt"...)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	seed := crc32.Checksum([]byte("saltsalt"), castagnoli)
	for len(records) > headerLen {
		h, _ := parseHeader(records)
		n := min(headerLen+int(h.size), len(records))
		record := bytes.Clone(records[:n])
		if len(record) > headerLen && record[8] == version {
			binary.LittleEndian.PutUint32(record[4:], uint32(n-headerLen))
			sum := crc32.Update(seed, castagnoli, record[headerLen:])
			binary.LittleEndian.PutUint32(record, crc32.Update(sum, castagnoli, record[4:headerLen]))
		}
		b, records = append(b, record...), records[n:]
	}
	return append(b, records...)
}

// FuzzOpen opens a log with anything in its segments: as it is, and as records that are
// whole whatever they say. What can be read is read, and the log goes on, also once more.
func FuzzOpen(f *testing.F) {
	id := dsec.SandboxID("aaaaabbbbbcccccdddddeeeee")
	record := func(h header, m proto.Message, state []byte) []byte {
		b := append(make([]byte, headerLen), state...)
		if m != nil {
			payload, err := proto.Marshal(m)
			if err != nil {
				f.Fatal(err)
			}
			b = append(b, payload...)
		}
		copy(h.sandbox[:], id)
		h.seal(b, 0)
		return b
	}
	st := state{project: "p"}
	all := record(header{typ: typeState}, nil, st.append(nil))
	at := func(off int) position { return position{1, uint32(segmentHeaderLen + off)} }
	begun := len(all)
	all = append(all, record(header{typ: typeBegun, kind: 16, flags: flagAction | flagInput, seq: 1, prev: at(0)}, execOf("make", "id"), nil)...)
	ended := len(all)
	all = append(all, record(header{typ: typeEnded, kind: 16, seq: 2, begun: 1, prev: at(begun)}, exited(3), nil)...)
	all = append(all, record(header{typ: typeEvent, flags: flagGap, seq: 3, prev: at(ended)}, gapEntry(3, 9, "why"), nil)...)
	f.Add(all, all[:ended], true)
	f.Add(all, []byte("short"), false)
	f.Add(all[:ended], all, true)
	f.Add([]byte{}, bytes.Repeat([]byte{0}, 200), false)
	f.Fuzz(func(t *testing.T, one, two []byte, sealed bool) {
		dir := t.TempDir()
		for i, b := range [][]byte{one, two} {
			if b = append([]byte{}, b...); sealed {
				b = segmentOf(b)
			}
			if err := os.WriteFile(filepath.Join(dir, segmentName(uint32(i+1))), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		told := make(map[dsec.SandboxID]uint64)
		for range 2 {
			l, _, err := Open(Options{Dir: dir, SegmentBytes: 2 * maxPayload, MaxBytes: 8 * maxPayload})
			if err != nil {
				if again, _, err := Open(Options{Dir: dir}); err == nil {
					_ = again.Close()
					t.Error("a log that cannot be opened can, a moment later")
				}
				return
			}
			for _, id := range l.Sandboxes() {
				goOn(t, l, id, told)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// goOn reads what there is of a sandbox, each entry once, and notes one more.
func goOn(t *testing.T, l *Log, id dsec.SandboxID, told map[dsec.SandboxID]uint64) {
	t.Helper()
	last, err := l.Last(id)
	if err != nil {
		t.Fatal(err)
	}
	if last > 1<<16 { // it takes as much memory as that says
		return
	}
	if before, ok := told[id]; ok && last < before {
		t.Errorf("sandbox %q has %d entries, and had %d", id, last, before)
	}
	next := uint64(1)
	err = l.Entries(t.Context(), id, 1, nil, func(e *dsecv1.TrajectoryEntry) error {
		if e.Seq != next {
			t.Errorf("entry %d comes after %d", e.Seq, next-1)
		}
		next = max(e.Seq, e.Gap.GetLastSeq()) + 1
		return nil
	})
	if err == nil && next != last+1 {
		t.Errorf("entries up to %d are told, of %d", next-1, last)
	}
	if _, err := l.Lookup(t.Context(), id, "id"); err != nil && dsec.CodeOf(err) == "" {
		t.Error(err)
	}
	if _, err := l.Append(id, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE}); err == nil {
		told[id] = last + 1
	} else if !errors.As(err, new(*dsec.Error)) {
		t.Error(err)
	}
}
