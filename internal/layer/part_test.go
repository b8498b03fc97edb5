package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

func TestPartOfAnySize(t *testing.T) {
	s := openStore(t, Options{})
	for i, size := range []int{0, 1, pieceSize - 1, pieceSize, pieceSize + 1, (piecesAhead+3)*pieceSize + 7} {
		want := make([]byte, size)
		rng := rand.NewChaCha8([32]byte{byte(i)})
		_, _ = rng.Read(want)
		digest := digestOf(want)
		if err := s.blobs.Put(t.Context(), blobKey(digest, partChunks), bytes.NewReader(want), int64(size)); err != nil {
			t.Fatal(err)
		}
		got, err := s.readPart(t.Context(), digest, partChunks, int64(size))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes: have %d, %v", size, len(got), err)
		}
		if size > 0 {
			_, err = s.readPart(t.Context(), digest, partChunks, int64(size)-1)
			wantCode(t, err, dsec.CodeInternal)
		}
	}
	_, err := s.readPart(t.Context(), digestOf(nil), partAbout, 1)
	wantCode(t, err, dsec.CodeNotFound)
}

// failing fails reads from an offset on, and, where it has a gate, holds them until
// that is closed.
type failing struct {
	blob.Store
	from int64
	gate chan struct{}
}

var errFailing = &dsec.Error{Code: dsec.CodeUnavailable, Message: "the store fails"}

func (f *failing) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	if off < f.from {
		return f.Store.ReadAt(ctx, key, p, off)
	}
	if f.gate != nil {
		select {
		case <-f.gate:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	return 0, errFailing
}

func TestPartThatBreaksOff(t *testing.T) {
	s := openStore(t, Options{})
	size := int64(6 * pieceSize)
	digest := digestOf([]byte("a"))
	if err := s.blobs.Put(t.Context(), blobKey(digest, partChunks), io.LimitReader(rand.NewChaCha8([32]byte{}), size), size); err != nil {
		t.Fatal(err)
	}
	whole := s.blobs
	s.blobs = &failing{Store: whole, from: 2 * pieceSize}
	r := s.openPart(t.Context(), digest, partChunks)
	defer r.Close()
	if n, err := io.Copy(io.Discard, r); n != 2*pieceSize || !errors.Is(err, errFailing) {
		t.Errorf("read %d bytes, %v", n, err)
	}
	// Whoever gives up does not wait for the store.
	s.blobs = &failing{Store: whole, from: pieceSize, gate: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	hung := s.openPart(ctx, digest, partChunks)
	defer hung.Close()
	if _, err := io.ReadFull(hung, make([]byte, pieceSize)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := hung.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it was canceled", err)
	}
}

// Layers that were stored before indexes were packed are read.
func TestIndexThatIsNotPacked(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	meta := build(t, s, "content")
	index, err := os.Open(s.imageFile(meta))
	if err != nil {
		t.Fatal(err)
	}
	defer index.Close()
	r, n, err := readIndex(index, meta.Size)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.blobs.Put(t.Context(), blobKey(meta.Digest, partIndex), r, n), s.blobs.Delete(t.Context(), blobKey(meta.Digest, partPacked)), s.Close(),
		os.RemoveAll(filepath.Join(dir, "local"))); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	release, err := s.Hold(t.Context(), meta.Digest)
	if err != nil {
		t.Fatal(err)
	}
	release()
	if err := s.Remove(t.Context(), meta.Digest); err != nil {
		t.Error(err)
	}
	wantFiles(t, s)
}

func digestOf(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
