package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func open(t *testing.T, opts Options) (*Journal, Replay) {
	t.Helper()
	opts.Logger = slog.New(slog.DiscardHandler)
	j, r, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j, r
}

func put(t *testing.T, j *Journal, key string, v any) {
	t.Helper()
	if err := j.Put(key, v); err != nil {
		t.Fatal(err)
	}
}

func TestLastValueWins(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, Options{Dir: dir})
	put(t, j, "a", 1)
	put(t, j, "b", 2)
	put(t, j, "a", 3)
	if err := j.Delete("b"); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := j.Put("a", 4); err == nil {
		t.Error("put after close: no error")
	}
	_, r := open(t, Options{Dir: dir})
	if len(r.Values) != 1 || string(r.Values["a"]) != "3" {
		t.Errorf("values = %s, want a=3", r.Values)
	}
}

func TestOneOwner(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, Options{Dir: dir})
	if _, _, err := Open(Options{Dir: dir}); !errors.Is(err, ErrInUse) {
		t.Errorf("second open: %v, want ErrInUse", err)
	}
	_ = j.Close()
	open(t, Options{Dir: dir})
}

// storyKeys look like sandbox IDs: no two are near each other.
var storyKeys = []string{
	"abcdefsqdo3vqn2uvy7xtkmlpe", "abcdeg5xkzqhn4w6rjd2ytbvoa", "abcdeh7mfcu3lgpiszw4qnxkyd",
	"abcdei2ovrtbj6ahyelq5dwfzx", "abcdej4yngkpx7smtciu3hvbro",
}

// story writes a few records and returns the bytes of the file and, for each
// count of whole records, the values that they leave.
func story(t *testing.T) (data []byte, ends []int, states []map[string]string) {
	t.Helper()
	states = append(states, map[string]string{})
	ends = append(ends, 0)
	live := map[string]string{}
	for i := range 12 {
		e := entry{Key: storyKeys[i%5], Seq: uint64(i + 1)}
		if i%7 != 6 {
			e.Value = json.RawMessage(fmt.Sprintf(`{"state":"running","i":%d}`, i))
		}
		var err error
		if data, err = appendRecord(data, e); err != nil {
			t.Fatal(err)
		}
		if e.Value == nil {
			delete(live, e.Key)
		} else {
			live[e.Key] = string(e.Value)
		}
		ends = append(ends, len(data))
		states = append(states, maps.Clone(live))
	}
	return data, ends, states
}

func text(m map[string]json.RawMessage) map[string]string {
	out := make(map[string]string)
	for k, v := range m {
		out[k] = string(v)
	}
	return out
}

func TestTruncatedAtEveryByte(t *testing.T) {
	data, ends, states := story(t)
	for cut := range len(data) + 1 {
		img := decodeImage(data[:cut])
		whole := 0
		for whole+1 < len(ends) && ends[whole+1] <= cut {
			whole++
		}
		if got := text(img.values); !maps.Equal(got, states[whole]) {
			t.Fatalf("cut at %d: %v, want %v", cut, got, states[whole])
		}
		if len(img.damaged) != 0 {
			t.Fatalf("cut at %d: reported as damage, want a torn tail", cut)
		}
	}
}

func TestDamagedAtEveryByteTakesOneKey(t *testing.T) {
	data, ends, states := story(t)
	want := states[len(states)-1]
	for at := range data {
		bad := slices.Clone(data)
		bad[at] ^= 0x55
		img := decodeImage(bad)
		record, _ := slices.BinarySearch(ends, at+1)
		victim := storyKeys[(record-1)%5]
		got := text(img.values)
		for k, v := range want {
			if k != victim && got[k] != v {
				t.Fatalf("byte %d of record %d damaged: %s = %q, want %q", at, record, k, got[k], v)
			}
		}
		if len(img.damaged) == 0 {
			// Only a length that now reaches past the end looks like a tail.
			if record != len(ends)-1 {
				t.Fatalf("byte %d of record %d: damage not reported", at, record)
			}
			continue
		}
		if len(img.damaged) != 1 {
			t.Fatalf("byte %d: %d damaged regions, want 1", at, len(img.damaged))
		}
		if _, ok := img.values[victim]; ok {
			if keys, unclaimed := newClaimants(img.values).of(img.damaged[0]); !slices.Equal(keys, []string{victim}) || unclaimed > 0 {
				t.Fatalf("byte %d of record %d: damage claimed by %q, want %q", at, record, keys, victim)
			}
		}
	}
}

// Of damaged records that follow each other each is told whose it was; a short key is
// one where a key stands, and not in other text.
func TestDamageOfSeveral(t *testing.T) {
	values := map[string]json.RawMessage{"edge": json.RawMessage(`1`)}
	var bad []byte
	for i, damage := range []int{9, 4, headerLen + len(bodyStart) + 3, 70} { // body, checksum, key, value
		k := storyKeys[i]
		values[k] = json.RawMessage(`{}`)
		rec, err := appendRecord(nil, entry{Key: k, Value: json.RawMessage(`{"reason":"the edge was restarted while it was made"}`)})
		if err != nil {
			t.Fatal(err)
		}
		rec[damage] ^= 0x55
		bad = append(bad, rec...)
	}
	keys, unclaimed := newClaimants(values).of(bad)
	if !slices.Equal(keys, storyKeys[:4]) || unclaimed != 0 {
		t.Errorf("claimed by %q, %d by nobody", keys, unclaimed)
	}
	delete(values, storyKeys[1])
	keys, unclaimed = newClaimants(values).of(bad)
	if want := []string{storyKeys[0], storyKeys[2], storyKeys[3]}; !slices.Equal(keys, want) || unclaimed != 1 {
		t.Errorf("claimed by %q, %d by nobody; want one", keys, unclaimed)
	}
}

func TestDamageIsGoneAfterOpen(t *testing.T) {
	dir := t.TempDir()
	data, ends, _ := story(t)
	data[ends[3]+20] ^= 0xff
	if err := os.WriteFile(filepath.Join(dir, fileName), data, 0o600); err != nil {
		t.Fatal(err)
	}
	j, r := open(t, Options{Dir: dir})
	if len(r.Damaged)+r.Unclaimed != 1 {
		t.Fatalf("first open: damaged %v, unclaimed %d, want one", r.Damaged, r.Unclaimed)
	}
	_ = j.Close()
	if _, r := open(t, Options{Dir: dir}); len(r.Damaged)+r.Unclaimed != 0 {
		t.Errorf("second open: damaged %v, unclaimed %d, want none", r.Damaged, r.Unclaimed)
	}
}

func TestOlderCopyIsFound(t *testing.T) {
	dir, run := t.TempDir(), t.TempDir()
	opts := Options{Dir: dir, Mirror: run}
	j, _ := open(t, opts)
	put(t, j, "a", "before")
	old, err := os.ReadFile(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	put(t, j, "b", "after the copy was made")
	_ = j.Close()
	if err := os.WriteFile(filepath.Join(dir, fileName), old, 0o600); err != nil {
		t.Fatal(err)
	}
	j, r := open(t, opts)
	if !r.RolledBack || len(r.Values) != 2 {
		t.Fatalf("rolled back %v, values %s; want true and both", r.RolledBack, r.Values)
	}
	_ = j.Close()
	j, r = open(t, opts)
	if r.RolledBack || len(r.Values) != 2 {
		t.Fatalf("next open: rolled back %v, values %s; want false and both", r.RolledBack, r.Values)
	}
	_ = j.Close()
	// After a boot the mirror is gone and the main copy is all there is.
	if err := os.Remove(filepath.Join(run, fileName)); err != nil {
		t.Fatal(err)
	}
	if _, r := open(t, opts); r.RolledBack || len(r.Values) != 2 {
		t.Fatalf("without mirror: rolled back %v, values %s; want false and both", r.RolledBack, r.Values)
	}
}

func TestRewriteKeepsLiveValues(t *testing.T) {
	dir := t.TempDir()
	j, _ := open(t, Options{Dir: dir, Compact: 64 << 10})
	for round := range 5 {
		for i := range 1000 {
			put(t, j, fmt.Sprintf("key-%d", i%10), round*1000+i)
		}
		j.rewrites.Wait()
	}
	put(t, j, "key-0", 4990)
	j.rewrites.Wait()
	st, err := os.Stat(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	// What was put during the last rewrite follows it, at most one round.
	if st.Size() > 192<<10 {
		t.Errorf("file has %d bytes after 5,000 puts of 10 keys", st.Size())
	}
	_ = j.Close()
	_, r := open(t, Options{Dir: dir})
	for i := range 10 {
		if got, want := string(r.Values[fmt.Sprintf("key-%d", i)]), fmt.Sprint(4990+i); got != want {
			t.Errorf("key-%d = %s, want %s", i, got, want)
		}
	}
}

func TestPutDeleteReopen(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir := t.TempDir()
		opts := Options{Dir: dir, Compact: 2048, Logger: slog.New(slog.DiscardHandler)}
		j, _, err := Open(opts)
		if err != nil {
			rt.Fatal(err)
		}
		want := map[string]string{}
		for range rapid.IntRange(0, 60).Draw(rt, "steps") {
			key := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(rt, "key")
			switch rapid.IntRange(0, 6).Draw(rt, "op") {
			case 0:
				err = j.Delete(key)
				delete(want, key)
			case 1:
				_ = j.Close()
				j, _, err = Open(opts)
			default:
				v := rapid.StringN(0, 40, -1).Draw(rt, "value")
				err = j.Put(key, v)
				b, _ := json.Marshal(v)
				want[key] = string(b)
			}
			if err != nil {
				rt.Fatal(err)
			}
		}
		_ = j.Close()
		j, r, err := Open(opts)
		if err != nil {
			rt.Fatal(err)
		}
		defer j.Close()
		if got := text(r.Values); !maps.Equal(got, want) {
			rt.Fatalf("values %v, want %v", got, want)
		}
	})
}

func FuzzDecodeImage(f *testing.F) {
	data, _ := appendRecord(nil, entry{Key: "a", Seq: 1, Value: json.RawMessage(`1`)})
	data, _ = appendRecord(data, entry{Key: "b", Seq: 2})
	f.Add(data)
	f.Add(data[:len(data)-1])
	f.Add(append([]byte{0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4, version, '{'}, data...))
	f.Add(make([]byte, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		img := decodeImage(b)
		total := 0
		for _, bad := range img.damaged {
			total += len(bad)
			newClaimants(img.values).of(bad)
		}
		if total > len(b) {
			t.Errorf("%d damaged bytes of %d", total, len(b))
		}
		// What was read is read again from its own rewrite.
		var out []byte
		for k, v := range img.values {
			var err error
			if out, err = appendRecord(out, entry{Key: k, Seq: img.seq, Value: v}); err != nil {
				t.Fatal(err)
			}
		}
		if again := decodeImage(out); len(again.values) != len(img.values) || len(again.damaged) != 0 {
			t.Errorf("rewrite of %d values reads as %d", len(img.values), len(again.values))
		}
	})
}

func BenchmarkPut(b *testing.B) {
	j, _, err := Open(Options{Dir: b.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	v := map[string]any{"state": "running", "project": "p", "layers": []string{"sha256:0123456789abcdef"}}
	i := 0
	for b.Loop() {
		i++
		if err := j.Put(fmt.Sprintf("k%d", i%100), v); err != nil {
			b.Fatal(err)
		}
	}
}

// TestPutsDuringRewriteAreKept races puts against rewrites of a journal that
// is always due for one.
func TestPutsDuringRewriteAreKept(t *testing.T) {
	dir, run := t.TempDir(), t.TempDir()
	j, _ := open(t, Options{Dir: dir, Mirror: run, Compact: 1024})
	const keys, rounds = 8, 300
	for i := range rounds {
		for k := range keys {
			put(t, j, fmt.Sprint("key-", k), i)
		}
	}
	_ = j.Close()
	for name, opts := range map[string]Options{"main": {Dir: dir}, "mirror": {Dir: run}} {
		_, r := open(t, opts)
		for k := range keys {
			if got := string(r.Values[fmt.Sprint("key-", k)]); got != fmt.Sprint(rounds-1) {
				t.Errorf("%s: key-%d = %s, want %d", name, k, got, rounds-1)
			}
		}
		if len(r.Damaged)+r.Unclaimed != 0 {
			t.Errorf("%s: damaged %v, unclaimed %d", name, r.Damaged, r.Unclaimed)
		}
	}
}

// A record's body is the JSON of its entry, whatever the key.
func TestRecordIsTheEntrysJSON(t *testing.T) {
	for _, e := range []entry{
		{Key: "a", Seq: 1}, {Key: "a\"b\\c<\u2028\n", Seq: 1 << 63, Value: json.RawMessage(`{"x":[1,"\u003c"]}`)}, {Key: "é", Value: json.RawMessage(`null`)},
	} {
		want, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		got, err := appendRecord([]byte("before"), e)
		if err != nil {
			t.Fatal(err)
		}
		if body := got[len("before")+headerLen:]; !bytes.Equal(body, want) {
			t.Errorf("body of %+v is %s, want %s", e, body, want)
		}
		if back, n, ok := decodeRecord(got[len("before"):]); !ok || n != len(got)-len("before") || back.Key != e.Key || back.Seq != e.Seq || !bytes.Equal(back.Value, e.Value) {
			t.Errorf("%+v came back as %+v, %d bytes, %t", e, back, n, ok)
		}
	}
}
