package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"

	"github.com/erofs/go-erofs"
)

// OpenFS opens a layer's files for reading, as go-erofs shows them. Whoever calls
// holds the layer, and closes what it got; ctx is that of all reads. Data come from
// the store and are checked, not through Lazy: a process must not read through a
// FUSE connection that it holds itself.
func (s *Store) OpenFS(ctx context.Context, digest string) (fs.FS, io.Closer, error) {
	e, err := s.find(ctx, digest)
	if err != nil {
		return nil, nil, err
	}
	index, err := os.Open(s.imageFile(e.meta))
	if err != nil {
		return nil, nil, storeError("open layer", err)
	}
	image := &wholeImage{ctx: ctx, s: s, meta: e.meta, index: index, chunk: -1}
	var opts []erofs.OpenOpt
	if e.meta.old == nil && e.meta.DataSize > 0 {
		if image.hashes, err = os.ReadFile(s.file(digest, chunksExt)); err != nil {
			return nil, nil, errors.Join(storeError("read chunks", err), index.Close())
		}
		opts = append(opts, erofs.WithExtraDevices(bytes.NewReader(nil))) // which it never reads from
	}
	img, err := erofs.Open(image, opts...)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open layer %s: %w", digest, err), index.Close())
	}
	return img, index, nil
}

// wholeImage reads an image whose data are on another device as if they were not:
// go-erofs takes a file that is not of chunks from the first device wherever the
// table says that its blocks are, and would find the hole there.
type wholeImage struct {
	ctx    context.Context
	s      *Store
	meta   Meta
	index  *os.File
	hashes []byte // of the chunks of data; nil: there are none

	mu    sync.Mutex
	chunk int64  // which one buf has
	buf   []byte // checked
}

// ReadAt implements io.ReaderAt.
func (w *wholeImage) ReadAt(p []byte, off int64) (n int, err error) {
	if w.hashes == nil {
		return w.index.ReadAt(p, off)
	}
	end := firstBlock + w.meta.DataSize // of the data in the image
	for n < len(p) {
		at, part := off+int64(n), p[n:]
		var m int
		switch {
		case at < firstBlock:
			m, err = w.index.ReadAt(part[:min(int64(len(part)), firstBlock-at)], at)
		case at < end:
			m, err = w.readData(part, at-firstBlock)
		default:
			m, err = w.index.ReadAt(part, at)
		}
		n += m
		if err != nil && (err != io.EOF || m == 0 || at >= end) {
			return n, err
		}
	}
	return n, nil
}

// readData reads what one chunk has of p.
func (w *wholeImage) readData(p []byte, off int64) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	size := w.meta.ChunkSize
	if c := off / size; c != w.chunk {
		buf := make([]byte, min(size, w.meta.DataSize-c*size))
		n, err := w.s.blobs.ReadAt(w.ctx, blobKey(w.meta.Digest, partData), buf, c*size)
		if err != nil && (err != io.EOF || n < len(buf)) {
			return 0, err
		}
		if sum := sha256.Sum256(buf); !bytes.Equal(sum[:], w.hashes[c*sha256.Size:(c+1)*sha256.Size]) {
			return 0, w.s.corrupt(w.meta.Digest, partData, fmt.Errorf("chunk %d has another hash", c))
		}
		w.chunk, w.buf = c, buf
	}
	return copy(p, w.buf[off%size:]), nil
}

// openImage opens an image as the helper writes it, which is no layer yet.
func openImage(f *os.File, size int64) (fs.FS, error) {
	image := &splitFile{f: f}
	if _, err := f.ReadAt(image.first[:], size-firstBlock); err != nil {
		return nil, storeError("read superblock", err)
	}
	return erofs.Open(image)
}
