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
	"sync/atomic"
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
	if n, err := io.Copy(io.Discard, r); n != 2*pieceSize || r.n != n || !errors.Is(err, errFailing) || !errors.Is(r.err, errFailing) {
		t.Errorf("read %d bytes, %v; noted are %d, %v", n, err, r.n, r.err)
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

// A packed index may hold any number of frames of nothing: no more of it is read than
// an index of that size takes.
func TestIndexOfEmptyFrames(t *testing.T) {
	s := openStore(t, Options{})
	digest := digestOf([]byte("b"))
	empty := bytes.Repeat([]byte("\x50\x2a\x4d\x18\x00\x00\x00\x00"), 4<<20) // skippable frames
	if err := s.blobs.Put(t.Context(), blobKey(digest, partPacked), bytes.NewReader(empty), int64(len(empty))); err != nil {
		t.Fatal(err)
	}
	counted := &counting{Store: s.blobs}
	s.blobs = counted
	err := s.readIndexPart(t.Context(), digest, 8192, func(r io.Reader) error {
		_, err := io.ReadFull(r, make([]byte, 8192))
		return err
	})
	wantCode(t, err, dsec.CodeInternal)
	if n := counted.n.Load(); n > (piecesAhead+3)*pieceSize {
		t.Errorf("%d bytes of %d were read for an index of 8 KiB", n, len(empty))
	}
}

// counting counts the bytes that are read.
type counting struct {
	blob.Store
	n atomic.Int64
}

func (c *counting) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	n, err := c.Store.ReadAt(ctx, key, p, off)
	c.n.Add(int64(n))
	return n, err
}

// The largest index that packing makes is read: zstd stores what has no pattern.
func TestIndexThatDoesNotPack(t *testing.T) {
	s := openStore(t, Options{})
	for _, n := range []int{1, 4096, 1<<20 + 1, 5<<20 + 7} {
		want := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{1}).Read(want)
		f, size, err := s.packIndex(bytes.NewReader(want))
		if err != nil {
			t.Fatal(err)
		}
		digest := digestOf(want)
		err = errors.Join(s.blobs.Put(t.Context(), blobKey(digest, partPacked), io.NewSectionReader(f, 0, size), size), f.Close())
		if err != nil {
			t.Fatal(err)
		}
		err = s.readIndexPart(t.Context(), digest, int64(n), func(r io.Reader) error {
			got, err := io.ReadAll(r)
			if err == nil && !bytes.Equal(got, want) {
				err = errors.New("other bytes")
			}
			return err
		})
		if err != nil {
			t.Errorf("%d bytes, packed %d: %v", n, size, err)
		}
	}
}

func digestOf(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
