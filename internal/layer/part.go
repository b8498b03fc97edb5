package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec/internal/layer/blob"
)

// Parts are read in pieces, some of them at once: a store may take its time to
// answer, and most indexes are one piece.
const (
	pieceSize   = 1 << 20
	piecesAhead = 4
)

// partReader reads a part of a layer in order, of whatever size it is.
type partReader struct {
	s      *Store
	blobs  blob.Store
	ctx    context.Context //nolint:containedctx // of the reads
	cancel context.CancelFunc
	digest string
	part   string
	pieces chan chan piece // asked for, in order
	piece  []byte
	err    error // what ended it, unless that was the end
}

type piece struct {
	b   []byte
	err error
}

// openPart begins to read a part. The caller closes it. An error of a Read is the
// store's, not_found where there is no such part.
func (s *Store) openPart(ctx context.Context, digest, part string) *partReader {
	r := &partReader{s: s, blobs: s.blobs, digest: digest, part: part, pieces: make(chan chan piece, piecesAhead)}
	r.ctx, r.cancel = context.WithCancel(ctx)
	go r.fetch()
	return r
}

// Close implements io.Closer.
func (r *partReader) Close() error { r.cancel(); return nil }

// fetch asks for the first piece, and where that is not all for the rest.
func (r *partReader) fetch() {
	defer close(r.pieces)
	first := make(chan piece, 1)
	r.pieces <- first
	p, more := r.read(0, pieceSize)
	if first <- p; !more {
		return
	}
	info, err := r.blobs.Stat(r.ctx, blobKey(r.digest, r.part))
	if err != nil {
		failed := make(chan piece, 1)
		failed <- piece{err: err}
		r.pieces <- failed
		return
	}
	for off := int64(pieceSize); off < info.Size; off += pieceSize {
		ch := make(chan piece, 1)
		select {
		case r.pieces <- ch:
		case <-r.ctx.Done():
			return
		}
		go func() {
			want := min(pieceSize, info.Size-off)
			p, _ := r.read(off, want)
			if p.err == nil && int64(len(p.b)) < want {
				p.err = r.s.corrupt(r.digest, r.part, errors.New("it ends too early"))
			}
			ch <- p
		}()
	}
}

// read reads one piece; more tells that it does not end the part.
func (r *partReader) read(off, n int64) (p piece, more bool) {
	b := make([]byte, n)
	m, err := r.blobs.ReadAt(r.ctx, blobKey(r.digest, r.part), b, off)
	if err == io.EOF {
		return piece{b: b[:m]}, false
	}
	return piece{b[:m], err}, err == nil
}

// Read implements io.Reader.
func (r *partReader) Read(p []byte) (int, error) {
	for len(r.piece) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		ch, ok := <-r.pieces
		if !ok {
			if r.ctx.Err() != nil {
				r.err = context.Cause(r.ctx)
				return 0, r.err
			}
			return 0, io.EOF
		}
		next := <-ch
		r.piece, r.err = next.b, next.err
	}
	n := copy(p, r.piece)
	r.piece = r.piece[n:]
	return n, nil
}

// readPart reads a part of at most limit bytes.
func (s *Store) readPart(ctx context.Context, digest, part string, limit int64) ([]byte, error) {
	r := s.openPart(ctx, digest, part)
	defer r.Close()
	var b bytes.Buffer
	n, err := io.Copy(&b, io.LimitReader(r, limit+1))
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
	if notFound(r.err) { // of a layer that was stored before indexes were packed
		raw := s.openPart(ctx, digest, partIndex)
		defer raw.Close()
		r, err = raw, f(io.LimitReader(raw, n))
	}
	if notFound(r.err) {
		return s.corrupt(digest, partIndex, errors.New("it is not there"))
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
