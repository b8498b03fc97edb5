package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// parts are what a layer is made of beside its manifest.
type parts struct {
	data   *os.File
	chunks []byte
	index  *os.File
}

// upload stores the parts of a layer that are not there, and those that are there and
// are damaged: whoever imports a layer anew has the right bytes at hand, and one read
// of what is there costs less than what was done to come by them.
func (s *Store) upload(ctx context.Context, meta Meta, manifest []byte, p parts) error {
	about, err := json.Marshal(meta.About)
	if err != nil {
		return err
	}
	index, _, err := readIndex(p.index, meta.Size)
	if err != nil {
		return err
	}
	packed, packedSize, err := s.packIndex(index)
	if err != nil {
		return err
	}
	defer packed.Close()
	for _, b := range []struct {
		part  string
		r     io.Reader
		size  int64
		check func() (bool, error) // whether the one that is there is as it should be
	}{
		{partData, io.NewSectionReader(p.data, 0, meta.DataSize), meta.DataSize, func() (bool, error) { return s.sameData(ctx, meta, p.chunks) }},
		{partChunks, bytes.NewReader(p.chunks), int64(len(p.chunks)), func() (bool, error) { return s.sameBytes(ctx, meta, partChunks, p.chunks) }},
		{partPacked, io.NewSectionReader(packed, 0, packedSize), packedSize, func() (bool, error) { return s.samePacked(ctx, meta) }},
		{partAbout, bytes.NewReader(about), int64(len(about)), nil},
		{partManifest, bytes.NewReader(manifest), int64(len(manifest)), func() (bool, error) { return s.sameBytes(ctx, meta, partManifest, manifest) }},
	} {
		key := blobKey(meta.Digest, b.part)
		switch info, err := s.blobs.Stat(ctx, key); {
		case err == nil && b.part == partAbout: // nothing depends on it, and it may tell of another archive
			continue
		case err == nil:
			same := false
			if info.Size == b.size || b.part == partPacked { // packed by another version, it has another size
				if same, err = b.check(); err != nil {
					return err
				}
			}
			if same {
				continue
			}
			s.opt.Logger.Warn("a damaged part of a layer in the store is written anew", "digest", meta.Digest, "part", b.part)
			if b.part == partData && len(s.scrubs.of(meta.Digest).Bad) == 0 { // of what the scrub found nothing is mounted any more
				if _, err := s.blobs.Stat(ctx, key); !notFound(err) { // what was removed meanwhile is whole where it is mounted
					s.lose(meta.Digest)
				}
			}
			if err := s.blobs.Delete(ctx, key); err != nil {
				return err
			}
		case !notFound(err):
			return err
		}
		if l, ok := s.blobs.(blob.Linker); ok && b.part == partData {
			err = l.Link(ctx, key, p.data)
		} else {
			err = s.blobs.Put(ctx, key, b.r, b.size)
		}
		if err != nil && b.part == partAbout {
			// Of two imports of the same layer at once, one tells where it came from.
			if _, found := s.blobs.Stat(ctx, key); found == nil {
				continue
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sameData reports whether the store's data have these hashes.
func (s *Store) sameData(ctx context.Context, meta Meta, hashes []byte) (bool, error) {
	// What the scrub found to be wrong it read past the page cache, which may still
	// have it right.
	if len(s.scrubs.of(meta.Digest).Bad) > 0 {
		return false, nil
	}
	r := s.openPart(ctx, meta.Digest, partData)
	defer r.Close()
	b := make([]byte, meta.ChunkSize)
	for i := range meta.chunks() {
		n, err := io.ReadFull(r, b[:min(meta.ChunkSize, meta.DataSize-i*meta.ChunkSize)])
		if sum := sha256.Sum256(b[:n]); err == nil && bytes.Equal(sum[:], hashes[i*sha256.Size:(i+1)*sha256.Size]) {
			continue
		}
		if err != nil && !isDamage(err) {
			return false, err
		}
		return false, nil
	}
	return true, nil
}

// sameBytes reports whether a part in the store is what it should be.
func (s *Store) sameBytes(ctx context.Context, meta Meta, part string, want []byte) (bool, error) {
	got, err := s.readPart(ctx, meta.Digest, part, int64(len(want)))
	if err != nil && !isDamage(err) {
		return false, err
	}
	return err == nil && bytes.Equal(got, want), nil
}

// samePacked reports whether the store's packed index is the layer's, which another
// version may have packed into other bytes.
func (s *Store) samePacked(ctx context.Context, meta Meta) (bool, error) {
	err := s.checkIndex(ctx, meta)
	if err != nil && !isDamage(err) {
		return false, err
	}
	return err == nil, nil
}

// checkIndex holds the index in the store against the layer's digest.
func (s *Store) checkIndex(ctx context.Context, meta Meta) error {
	return s.readIndexPart(ctx, meta.Digest, meta.IndexSize, func(r io.Reader) error {
		hashed := sha256.New()
		if _, err := io.Copy(hashed, r); err != nil {
			return err
		}
		return isIndex(hashed, meta)
	})
}

// isDamage reports whether a read of a part failed for what is in the store: or is
// not, since it was looked at.
func isDamage(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || notFound(err) || isInternal(err)
}

func isInternal(err error) bool {
	e, ok := errors.AsType[*dsec.Error](err)
	return ok && e.Code == dsec.CodeInternal
}
