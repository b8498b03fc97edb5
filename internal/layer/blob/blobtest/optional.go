package blobtest

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// RunModel does any sequence of calls to an empty store and to a map.
func RunModel(t *testing.T, s blob.Store) {
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		round++
		in := fmt.Sprint("round-", round, "/") // each begins with nothing there
		model := map[string][]byte{}
		key := rapid.Map(rapid.SampledFrom([]string{"a", "b-", "c/d", "c/e", "c.f"}), func(k string) string { return in + k })
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				k, b := key.Draw(rt, "key"), Bytes(rapid.IntRange(0, 3).Draw(rt, "size"))
				err := s.Put(t.Context(), k, bytes.NewReader(b), int64(len(b)))
				switch had, there := model[k]; {
				case there && len(had) != len(b):
					if err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
						rt.Fatalf("put %s over another: %v", k, err)
					}
				case err != nil:
					rt.Fatalf("put %s: %v", k, err)
				default:
					model[k] = b
				}
			},
			"delete": func(rt *rapid.T) {
				k := key.Draw(rt, "key")
				if err := s.Delete(t.Context(), k); err != nil {
					rt.Fatalf("delete %s: %v", k, err)
				}
				delete(model, k)
			},
			"read": func(rt *rapid.T) {
				k := key.Draw(rt, "key")
				off, p := rapid.Int64Range(0, 4).Draw(rt, "off"), make([]byte, rapid.IntRange(1, 4).Draw(rt, "n"))
				n, err := s.ReadAt(t.Context(), k, p, off)
				want, there := model[k]
				if !there {
					if err == nil || err == io.EOF || dsec.CodeOf(err) != dsec.CodeNotFound {
						rt.Fatalf("read %s, which is not there: %v", k, err)
					}
					return
				}
				want = want[min(off, int64(len(want))):]
				want = want[:min(len(p), len(want))]
				if !bytes.Equal(p[:n], want) || n < len(p) && err != io.EOF || err != nil && err != io.EOF {
					rt.Fatalf("read %s from %d: %x, %v; want %x", k, off, p[:n], err, want)
				}
			},
			"": func(rt *rapid.T) {
				var want []string
				for k := range model {
					want = append(want, k)
				}
				slices.Sort(want)
				if got := Keys(t, s, in); got != strings.Join(want, " ") {
					rt.Fatalf("listed %s, want %s", got, want)
				}
			},
		})
	})
}

func testOpener(t *testing.T, s blob.Store) {
	o, ok := s.(blob.Opener)
	if !ok {
		return // its blobs are no files
	}
	want := Bytes(70_000)
	MustPut(t, s, "a/b", want)
	f, err := o.Open("a/b")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("an immutable file was written to")
	}
	for _, key := range []string{"none", "a/none", "a"} {
		_, err := o.Open(key)
		WantCode(t, "open "+key, err, dsec.CodeNotFound, "")
	}
	for _, key := range BadKeys {
		_, err := o.Open(key)
		WantCode(t, fmt.Sprintf("open %q", key), err, dsec.CodeInvalid, "key")
	}
	if err := s.Delete(t.Context(), "a/b"); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("a file that was open when its blob was deleted: %d bytes, %v", len(got), err)
	}
}

func testLinker(t *testing.T, s blob.Store) {
	l, ok := s.(blob.Linker)
	if !ok {
		return // it takes no files over
	}
	want := Bytes(3<<20 + 1)
	for i, key := range []string{"a/b", "a/b", "c"} { // the second is there already
		f, err := l.Temp()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(want); err != nil {
			t.Fatal(err)
		}
		if err := l.Link(t.Context(), key, f); err != nil {
			t.Errorf("link %d: %v", i, err)
		}
		WantBlob(t, s, key, want)
	}
	f, err := l.Temp()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	WantCode(t, "link of another size", l.Link(t.Context(), "c", f), dsec.CodeConflict, "")
	WantCode(t, "link where a directory is", l.Link(t.Context(), "a", f), dsec.CodeConflict, "")
	for _, key := range BadKeys {
		WantCode(t, fmt.Sprintf("link %q", key), l.Link(t.Context(), key, f), dsec.CodeInvalid, "key")
	}
	if keys := Keys(t, s, ""); keys != "a/b c" {
		t.Errorf("listed %s", keys)
	}
	WantBlob(t, s, "c", want)
}
