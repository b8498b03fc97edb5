package lazy

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
)

// Data that were mended in the store are read, though the damaged file is open.
func TestABlobThatWasMended(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, _ := f.cache(t, Limits{RetryFor: time.Second})
	dir := filepath.Join(f.dir, "blobs")
	store, err := dirblob.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	c.configure(store, Limits{RetryFor: time.Second})
	damaged := bytes.Clone(f.truth)
	damaged[3*MinChunk] ^= 2
	key := "sha256/a"
	put := func(b []byte) {
		t.Helper()
		other, err := dirblob.Open(dir) // of another process
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		if err := other.Put(t.Context(), key, bytes.NewReader(b), int64(len(b))); err != nil {
			t.Fatal(err)
		}
	}
	put(damaged)
	want := f.image
	want.Key = key
	im := f.open(t, c, &want)
	check(t, c, im, f.truth, 0, 1000)
	if err := c.readAt(t.Context(), im, make([]byte, 10), 3*MinChunk); !errors.Is(err, errCorrupt) {
		t.Fatalf("%v, want %v", err, errCorrupt)
	}
	if err := os.Remove(filepath.Join(dir, key)); err != nil {
		t.Fatal(err)
	}
	put(f.truth)
	check(t, c, im, f.truth, 0, want.Size)
	c.filling.Wait()
}
