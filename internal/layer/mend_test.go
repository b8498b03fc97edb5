package layer

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
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
