package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/opendsec/dsec"
)

// countingReader counts what is read of a file.
type countingReader struct {
	io.ReaderAt
	n atomic.Int64
}

func (c *countingReader) ReadAt(p []byte, off int64) (int, error) {
	c.n.Add(int64(len(p)))
	return c.ReaderAt.ReadAt(p, off)
}

// Holes are not read to be hashed: an archive of 2 KiB, of a sparse file, had a
// server hash 32 GiB of zeros. (S93)
func TestHolesAreNotHashed(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const size = 64<<20 + 4096 // the last chunk is not a whole one
	for _, off := range []int64{0, 5*chunkSize - 1, 20<<20 + 7, size - 1} {
		if _, err := f.WriteAt([]byte{1}, off); err != nil {
			t.Fatal(err)
		}
	}
	whole := make([]byte, size)
	if _, err := f.ReadAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	var want []byte
	for off := 0; off < size; off += chunkSize {
		sum := sha256.Sum256(whole[off:min(off+chunkSize, size)])
		want = append(want, sum[:]...)
	}
	counted := &countingReader{ReaderAt: f}
	got, err := hashChunks(t.Context(), counted, nextData(f), size)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("other hashes than of the same bytes without holes")
	}
	if n := counted.n.Load(); n > 6*chunkSize {
		t.Errorf("%d bytes were read", n)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := hashChunks(ctx, counted, nextData(f), size); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Errorf("given up: %v, want unavailable", err)
	}
}
