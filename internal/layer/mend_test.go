package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
)

// Whatever of a layer is damaged or gone in the store, importing it again makes it
// whole, also where nothing has looked for damage before; what is whole stays as it is.
func TestImportMends(t *testing.T) {
	eachPlace(t, func(t *testing.T, p place) {
		s := p.node(t)
		content := strings.Repeat("some content of a file", 200_000) // some pieces, and chunks
		meta := build(t, s, content)
		all := []string{partData, partChunks, partPacked, partManifest, partAbout}
		whole := map[string][]byte{}
		for _, part := range all {
			whole[part] = bytesOf(t, s.blobs, blobKey(meta.Digest, part))
		}
		for _, damaged := range all[:4] {
			for what, spoil := range map[string]func(key string){
				"damaged": func(key string) { p.spoil(t, key) },
				"gone": func(key string) {
					if err := s.blobs.Delete(t.Context(), key); err != nil {
						t.Fatal(err)
					}
				},
			} {
				spoil(blobKey(meta.Digest, damaged))
				before := map[string]os.FileInfo{}
				for _, part := range all {
					before[part], _ = os.Stat(p.file(blobKey(meta.Digest, part)))
				}
				if again := build(t, s, content); again.Digest != meta.Digest {
					t.Fatalf("the same archive is layer %s", again.Digest)
				}
				for _, part := range all {
					if got := bytesOf(t, s.blobs, blobKey(meta.Digest, part)); !bytes.Equal(got, whole[part]) {
						t.Errorf("%s %s: %s has %d other bytes", damaged, what, part, len(got))
					}
					after, err := os.Stat(p.file(blobKey(meta.Digest, part)))
					if part != damaged && (err != nil || !os.SameFile(before[part], after) || !after.ModTime().Equal(before[part].ModTime())) {
						t.Errorf("%s %s: %s was written again", damaged, what, part)
					}
				}
				other := p.node(t)
				release, err := other.Hold(t.Context(), meta.Digest)
				if err != nil {
					t.Errorf("%s %s: on another node: %v", damaged, what, err)
					continue
				}
				release()
			}
		}
	})
}

// What has a layer mounted whose data an import found damaged goes on with the damaged
// file: it is lost.
func TestImportTellsOfDamage(t *testing.T) {
	eachPlace(t, func(t *testing.T, p place) {
		s := p.node(t)
		content := strings.Repeat("content", 100_000)
		meta := build(t, s, content)
		release, err := s.Hold(t.Context(), meta.Digest)
		if err != nil {
			t.Fatal(err)
		}
		p.spoil(t, blobKey(meta.Digest, partData))
		build(t, s, content)
		var want []string
		if s.direct() != nil {
			want = []string{meta.Digest}
		}
		if lost := s.Lost(); !slices.Equal(lost, want) {
			t.Errorf("lost %v, want %v", lost, want)
		}
		release()
		if err := s.Settle(t.Context(), meta.Digest); err != nil {
			t.Fatal(err)
		}
		again, err := s.Hold(t.Context(), meta.Digest) // it is whole again
		if err != nil {
			t.Fatal(err)
		}
		again()
	})
}

// An index that was packed otherwise, by another version, is as good as one's own.
func TestImportLeavesAnotherPacking(t *testing.T) {
	s := openStore(t, Options{})
	meta := build(t, s, "content")
	f, err := os.Open(s.imageFile(meta))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	index, _, err := readIndex(f, meta.Size)
	if err != nil {
		t.Fatal(err)
	}
	var other bytes.Buffer
	w, err := zstd.NewWriter(&other, zstd.WithEncoderCRC(true), zstd.WithWindowSize(packWindow))
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(w, index)
	key := blobKey(meta.Digest, partPacked)
	if err := errors.Join(err, w.Close(), s.blobs.Delete(t.Context(), key), s.blobs.Put(t.Context(), key, bytes.NewReader(other.Bytes()), int64(other.Len()))); err != nil {
		t.Fatal(err)
	}
	build(t, s, "content")
	if got := bytesOf(t, s.blobs, key); !bytes.Equal(got, other.Bytes()) {
		t.Errorf("%d bytes became %d", other.Len(), len(got))
	}
}

// removed is a store from which a part goes as soon as it is read.
type removed struct {
	blob.Store
	key  string
	gone bool
}

func (v *removed) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	if key == v.key && !v.gone {
		v.gone = true
		if err := v.Delete(ctx, key); err != nil {
			return 0, err
		}
	}
	return v.Store.ReadAt(ctx, key, p, off)
}

func (v *removed) Open(key string) (*os.File, error) { return v.Store.(blob.Opener).Open(key) }

// A layer that is removed while it is imported is stored anew, and not lost: what was
// mounted of it is as it was.
func TestImportOfALayerThatIsRemoved(t *testing.T) {
	blobs, err := dirblob.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	v := &removed{Store: blobs}
	s := openStore(t, Options{Blobs: v})
	if s.direct() == nil {
		t.Fatal("control: the kernel does not read this store")
	}
	content := strings.Repeat("content", 100_000)
	meta := build(t, s, content)
	v.key = blobKey(meta.Digest, partData)
	whole := bytesOf(t, blobs, v.key)
	build(t, s, content)
	if got := bytesOf(t, blobs, v.key); !v.gone || !bytes.Equal(got, whole) {
		t.Errorf("gone: %v; %d bytes are there", v.gone, len(got))
	}
	if lost := s.Lost(); len(lost) > 0 {
		t.Errorf("lost %v", lost)
	}
}
