package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// vanishing has a part go once the first piece of it was read.
type vanishing struct {
	blob.Store
	part string
}

func (v vanishing) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	if strings.HasSuffix(key, "/"+v.part) && off > 0 {
		return 0, dsec.Errorf(dsec.CodeNotFound, "no such blob")
	}
	return v.Store.ReadAt(ctx, key, p, off)
}

// A packed index that goes while it is read is not gone on with by an unpacked one: the
// layer was removed, or it is damaged.
func TestIndexThatVanishes(t *testing.T) {
	s := openStore(t, Options{})
	index := make([]byte, 3*pieceSize)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(index)
	digest := digestOf(index)
	packed, size, err := s.packIndex(bytes.NewReader(index))
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	if err := errors.Join(
		s.blobs.Put(t.Context(), blobKey(digest, partPacked), io.NewSectionReader(packed, 0, size), size),
		s.blobs.Put(t.Context(), blobKey(digest, partIndex), bytes.NewReader(index), int64(len(index))),
	); err != nil {
		t.Fatal(err)
	}
	s.blobs = vanishing{s.blobs, partPacked}
	read := func() error {
		calls := 0
		err := s.readIndexPart(t.Context(), digest, int64(len(index)), func(r io.Reader) error {
			calls++
			_, err := io.Copy(io.Discard, r)
			return err
		})
		if calls != 1 {
			t.Errorf("an index was read %d times", calls)
		}
		return err
	}
	wantCode(t, read(), dsec.CodeNotFound)
	if err := s.blobs.Put(t.Context(), blobKey(digest, partManifest), strings.NewReader("x"), 1); err != nil {
		t.Fatal(err)
	}
	wantCode(t, read(), dsec.CodeInternal)
}

// hanging holds reads until their contexts end, and counts them.
type hanging struct {
	blob.Store
	reading atomic.Int64
	began   chan struct{}
}

func (h *hanging) ReadAt(ctx context.Context, _ string, _ []byte, _ int64) (int, error) {
	h.reading.Add(1)
	defer h.reading.Add(-1)
	select {
	case h.began <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return 0, context.Cause(ctx)
}

// A store that is closed reads nothing any more, also for callers who gave up.
func TestCloseWaitsForFetches(t *testing.T) {
	s := openStore(t, Options{})
	h := &hanging{Store: s.blobs, began: make(chan struct{}, 1)}
	s.blobs = h
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := s.Get(ctx, digestOf([]byte("any")))
		done <- err
	}()
	<-h.began
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want that it was canceled", err)
	}
	if err := errors.Join(s.Close(), h.Store.(io.Closer).Close()); err != nil {
		t.Error(err)
	}
	if n := h.reading.Load(); n != 0 {
		t.Errorf("%d reads go on", n)
	}
	_, err := s.Get(t.Context(), digestOf([]byte("any")))
	wantCode(t, err, dsec.CodeUnavailable)
}
