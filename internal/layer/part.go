package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec/internal/layer/ahead"
)

// Parts are read in pieces, some of them at once: a store may take its time to
// answer, and most indexes are one piece.
const (
	pieceSize   = 1 << 20
	piecesAhead = 4
)

// partReader reads a part of a layer in order, of whatever size it is.
type partReader struct {
	r      *ahead.Reader // not embedded: its WriteTo would go past Read
	s      *Store
	digest string
	part   string
	n      int64 // bytes that came
	err    error // what ended it, unless that was the end
}

// openPart begins to read a part. The caller closes it. An error of a Read is the
// store's, not_found where there is no such part.
func (s *Store) openPart(ctx context.Context, digest, part string) *partReader {
	key, blobs := blobKey(digest, part), s.blobs
	size := func(ctx context.Context) (int64, error) {
		info, err := blobs.Stat(ctx, key)
		return info.Size, err
	}
	read := func(ctx context.Context, p []byte, off int64) (int, error) { return blobs.ReadAt(ctx, key, p, off) }
	return &partReader{r: ahead.At(ctx, ahead.Options{Piece: pieceSize, Pieces: piecesAhead + 1}, size, read), s: s, digest: digest, part: part}
}

// Close implements io.Closer.
func (r *partReader) Close() error { return r.r.Close() }

// Read implements io.Reader.
func (r *partReader) Read(p []byte) (n int, err error) {
	n, err = r.r.Read(p)
	r.n += int64(n)
	if err == io.ErrUnexpectedEOF {
		err = r.s.corrupt(r.digest, r.part, errors.New("it ends too early"))
	}
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

// missing is the error of a part that is not there, or not any more: the layer's own,
// which was removed meanwhile, or damage.
func (s *Store) missing(ctx context.Context, digest, part string) error {
	if _, err := s.blobs.Stat(ctx, blobKey(digest, partManifest)); notFound(err) {
		return noLayer(digest)
	} else if err != nil {
		return err
	}
	return s.corrupt(digest, part, errors.New("it is not there"))
}

// readPart reads a part of at most limit bytes.
func (s *Store) readPart(ctx context.Context, digest, part string, limit int64) ([]byte, error) {
	r := s.openPart(ctx, digest, part)
	defer r.Close()
	var b bytes.Buffer
	n, err := b.ReadFrom(io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = s.corrupt(digest, part, errors.New("it is too large"))
	}
	return b.Bytes(), err
}

// packIndex compresses an index: what a node fetches before its first create of a
// layer is a fifth so. The layer's digest is of the index as it is.
func (s *Store) packIndex(index io.Reader) (f *os.File, size int64, err error) {
	if f, err = s.scratchFile(); err != nil {
		return nil, 0, storeError("pack index", err)
	}
	w, err := zstd.NewWriter(f, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithWindowSize(packWindow))
	if err == nil {
		_, err = io.Copy(w, index)
		err = errors.Join(err, w.Close())
	}
	if err == nil {
		size, err = f.Seek(0, io.SeekCurrent)
	}
	if err != nil {
		_ = f.Close()
		return nil, 0, storeError("pack index", err)
	}
	return f, size, nil
}

// packWindow is how far a packed index refers back: how much of it a reader keeps.
const packWindow = 1 << 20

// packedMost is how large an index of n bytes is at most when it is packed: zstd stores
// what it cannot make smaller, with three bytes for each block of at most 128 KiB.
func packedMost(n int64) int64 { return n + n>>10 + 4096 }

// readIndexPart calls f with the index of a layer in the store, of n bytes. An
// error of f means that it is corrupt, unless the store has one or the local disk.
func (s *Store) readIndexPart(ctx context.Context, digest string, n int64, f func(io.Reader) error) error {
	r := s.openPart(ctx, digest, partPacked)
	defer r.Close()
	// Frames may be empty, so that any number of bytes unpacks to none.
	zr, err := zstd.NewReader(io.LimitReader(r, packedMost(n)), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(packWindow))
	if err == nil {
		err = f(io.LimitReader(zr, n))
		zr.Close()
	}
	if notFound(r.err) && r.n == 0 { // of a layer that was stored before indexes were packed
		raw := s.openPart(ctx, digest, partIndex)
		defer raw.Close()
		r, err = raw, f(io.LimitReader(raw, n))
	}
	if notFound(r.err) {
		return s.missing(ctx, digest, partIndex)
	} else if r.err != nil {
		return r.err
	}
	if _, ok := errors.AsType[*fs.PathError](err); ok {
		return storeError("keep index", err)
	} else if err != nil {
		return s.corrupt(digest, partIndex, err)
	}
	return nil
}
