package trajectory

import (
	"bytes"
	"crypto/sha256"
	"io"
	"os"
	"strings"
	"testing"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// newObject is what an object is of that is written in steps of so many bytes; raw has
// each block be kept as it is.
func newObject(t testing.TB, content []byte, step int, raw bool) (path string, w *object) {
	t.Helper()
	o := &outputs{dir: t.TempDir()}
	if err := os.Mkdir(o.path("new"), 0o700); err != nil {
		t.Fatal(err)
	}
	w, err := o.create(!raw)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.abandon)
	for rest := content; len(rest) > 0; {
		n := min(step, len(rest))
		if raw {
			w.raw = 1 << 20
		}
		if _, err := w.Write(rest[:n]); err != nil {
			t.Fatal(err)
		}
		if err := w.wait(); err != nil { // raw is drain's
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	digest, err := w.finish()
	if sum := sha256.Sum256(content); err != nil || !raw && !bytes.Equal(digest, sum[:]) || raw && digest != nil {
		t.Fatalf("digest %x, %v, want %x", digest, err, sum)
	}
	return w.f.Name(), w
}

// TestObject: what is written comes back, as it was compressed or not, and is known to be
// whole only to its last byte.
func TestObject(t *testing.T) {
	text := []byte(strings.Repeat("a line of text\n", 50_000))
	for name, content := range map[string][]byte{
		"text": text, "noise": noise(700_000), "both": append(noise(300_000), text...), "a byte": {1}, "a block": text[:blockLen], "two blocks": text[:2*blockLen],
	} {
		for _, step := range []int{1000, 64 << 10, 1 << 20} {
			for _, raw := range []bool{false, true} {
				path, w := newObject(t, content, step, raw)
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				r, err := decompressed(bytes.NewReader(b))
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, content) {
					t.Errorf("%s in steps of %d, raw %v: %d bytes came back, %v, want %d", name, step, raw, len(got), err, len(content))
				}
				if small := len(b) < len(content)/2; name == "text" && small == raw {
					t.Errorf("%s, raw %v: %d bytes take %d", name, raw, len(content), len(b))
				}
				if !wholeObject(path, w.n) || wholeObject(path, w.n-1) {
					t.Errorf("%s: a whole object is none", name)
				}
				if err := os.Truncate(path, int64(len(b))-1); err != nil {
					t.Fatal(err)
				}
				if wholeObject(path, w.n) {
					t.Errorf("%s: an object without its end is whole", name)
				}
			}
		}
	}
}

// TestObjectThatCannotBeWritten tells so, at the latest when it is finished, and nobody
// waits for it for ever.
func TestObjectThatCannotBeWritten(t *testing.T) {
	o := &outputs{dir: t.TempDir()}
	if err := os.Mkdir(o.path("new"), 0o700); err != nil {
		t.Fatal(err)
	}
	w, err := o.create(true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.abandon()
	if err := w.f.Close(); err != nil {
		t.Fatal(err)
	}
	for range 4 * maxQueue {
		_, err = w.Write(noise(blockLen))
	}
	if _, ferr := w.finish(); err == nil || ferr == nil {
		t.Errorf("written to a file that is closed: %v, %v", err, ferr)
	}
}

// FuzzObject reads anything as an object.
func FuzzObject(f *testing.F) {
	for _, content := range [][]byte{[]byte("short"), noise(300_000), []byte(strings.Repeat("text ", 60_000))} {
		for _, raw := range []bool{false, true} {
			path, _ := newObject(f, content, 64<<10, raw)
			b, err := os.ReadFile(path)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decompressed(bytes.NewReader(b))
		if err != nil {
			return
		}
		defer r.Close()
		n := 0
		err = eachPiece(io.LimitReader(r, 64<<20), nil, func(p *dsecv1.TrajectoryOutputPiece) error {
			n += len(p.Data)
			return nil
		})
		if err == nil {
			t.Errorf("%d bytes of output without a digest are whole", n)
		}
	})
}
