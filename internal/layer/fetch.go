package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// fetchTimeout bounds how long a node waits for the index of one layer.
const fetchTimeout = 5 * time.Minute

// fetch makes a layer of the store known to this node. Calls for the same layer
// wait for one fetch, which the context of none of them cancels.
func (s *Store) fetch(ctx context.Context, digest string) (*entry, error) {
	ch := s.flight.DoChan(digest, func() (any, error) {
		ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), fetchTimeout,
			dsec.Errorf(dsec.CodeUnavailable, "the layer store did not give the index of layer %s in %s", digest, fetchTimeout))
		defer cancel()
		if e := s.known(digest); e != nil { // since the caller looked
			return e, nil
		}
		if err := s.fetchLayer(ctx, digest); err != nil {
			return nil, err
		}
		return s.known(digest), nil
	})
	select {
	case r := <-ch:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*entry), nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (s *Store) fetchLayer(ctx context.Context, digest string) error {
	meta, err := s.fetchManifest(ctx, digest)
	if err != nil {
		return err
	}
	chunks, err := s.readBlob(ctx, digest, partChunks, meta.chunks()*sha256.Size)
	if err != nil {
		return err
	}
	if got := fmt.Sprintf("sha256:%x", sha256.Sum256(chunks)); got != meta.ChunksDigest {
		return s.corrupt(digest, partChunks, fmt.Errorf("it has digest %s", got))
	}
	index, err := os.CreateTemp(s.tmp(), "index-*")
	if err != nil {
		return storeError("make index file", err)
	}
	defer func() { _ = os.Remove(index.Name()); _ = index.Close() }()
	hashed := sha256.New()
	r := io.TeeReader(s.blobReader(ctx, digest, partIndex, meta.IndexSize), hashed)
	if err := writeIndex(index, r, meta.Size); err != nil {
		if e, ok := errors.AsType[*dsec.Error](err); ok {
			return e
		}
		return storeError("keep index", err)
	}
	if got := sumOf(hashed); got != meta.IndexDigest {
		return s.corrupt(digest, partIndex, fmt.Errorf("it has digest %s", got))
	}
	return s.addLocal(meta, index, chunks)
}

// fetchManifest gets what a layer is, and where it came from as far as that is there.
func (s *Store) fetchManifest(ctx context.Context, digest string) (Meta, error) {
	doc, err := s.readWhole(ctx, digest, partManifest)
	if notFound(err) {
		return Meta{}, noLayer(digest)
	} else if err != nil {
		return Meta{}, err
	}
	manifest, err := decodeManifest(doc, digest)
	if err != nil {
		return Meta{}, s.corrupt(digest, partManifest, err)
	}
	meta := Meta{Digest: digest, Manifest: manifest}
	doc, err = s.readWhole(ctx, digest, partAbout)
	if err != nil && !notFound(err) {
		return Meta{}, err
	}
	if err == nil && json.Unmarshal(doc, &meta.About) != nil {
		meta.About = About{} // nothing depends on it
	}
	return meta, nil
}

// readWhole reads a small part, of whatever size it has.
func (s *Store) readWhole(ctx context.Context, digest, part string) ([]byte, error) {
	info, err := s.blobs.Stat(ctx, blobKey(digest, part))
	if err != nil {
		return nil, err
	}
	if info.Size > metaBytes {
		return nil, s.corrupt(digest, part, fmt.Errorf("it has %d bytes", info.Size))
	}
	return s.readBlob(ctx, digest, part, info.Size)
}

// readBlob reads a part of n bytes.
func (s *Store) readBlob(ctx context.Context, digest, part string, n int64) ([]byte, error) {
	var b bytes.Buffer
	_, err := io.Copy(&b, s.blobReader(ctx, digest, part, n))
	return b.Bytes(), err
}

// fetchSize is how much of a part is asked for at once.
const fetchSize = 4 << 20

// blobReader reads the n bytes of a part from its beginning. A part that ends
// before, or is not there, is corrupt.
func (s *Store) blobReader(ctx context.Context, digest, part string, n int64) io.Reader {
	return &partReader{s: s, ctx: ctx, digest: digest, part: part, left: n}
}

type partReader struct {
	s      *Store
	ctx    context.Context
	digest string
	part   string
	off    int64
	left   int64
	buf    []byte
}

func (r *partReader) Read(p []byte) (int, error) {
	if len(r.buf) == 0 {
		if r.left == 0 {
			return 0, io.EOF
		}
		b := make([]byte, min(r.left, fetchSize))
		n, err := r.s.blobs.ReadAt(r.ctx, blobKey(r.digest, r.part), b, r.off)
		if err == io.EOF && n < len(b) || notFound(err) {
			return 0, r.s.corrupt(r.digest, r.part, errors.New("it ends too early, or is not there"))
		} else if err != nil && err != io.EOF {
			return 0, err
		}
		r.buf, r.off, r.left = b, r.off+int64(n), r.left-int64(n)
	}
	n := copy(p, r.buf)
	r.buf = r.buf[n:]
	return n, nil
}

func notFound(err error) bool { return err != nil && dsec.CodeOf(err) == dsec.CodeNotFound }

// corrupt is the error of a store that does not hold what it was given.
func (s *Store) corrupt(digest, part string, err error) error {
	s.opt.Logger.Error("layer is damaged in the store", "digest", digest, "part", part, "error", err)
	return &dsec.Error{Code: dsec.CodeInternal, Message: "layer " + digest + " is damaged in the layer store: its " + part, Err: err}
}

// verify checks what this node has of a layer against its metadata: the index,
// which look-ups read.
func (s *Store) verify(meta Meta) error {
	if err := s.checkSize(meta); err != nil {
		return err
	}
	f, err := os.Open(s.imageFile(meta))
	if err != nil {
		return err
	}
	defer f.Close()
	got, _, err := digestIndex(f, meta.Size)
	want := meta.IndexDigest
	if meta.old != nil {
		want = meta.old.IndexDigest
	}
	if err == nil && got != want {
		err = fmt.Errorf("the index has digest %s, want %s", got, want)
	}
	return err
}

// Open gives what a layer is mounted from, to whoever holds it: its EROFS image,
// and after it the image's second device where it has one. The caller closes them.
func (s *Store) Open(ctx context.Context, digest string) (devices []*os.File, err error) {
	e, err := s.find(ctx, digest)
	if err != nil {
		return nil, err
	}
	index, err := os.Open(s.imageFile(e.meta))
	if err != nil {
		return nil, storeError("open layer", err)
	}
	if e.meta.old != nil || e.meta.DataSize == 0 {
		return []*os.File{index}, nil
	}
	data, err := s.openData(ctx, e.meta)
	if err != nil {
		_ = index.Close()
		return nil, err
	}
	return []*os.File{index, data}, nil
}

// direct is the blob store where the kernel reads data from it by itself, or nil.
func (s *Store) direct() blob.Opener {
	if s.opt.Verify {
		return nil
	}
	direct, _ := s.blobs.(blob.Opener)
	return direct
}

// openData opens the data of a layer: in the store, or as a file that is filled
// when it is read.
func (s *Store) openData(ctx context.Context, meta Meta) (*os.File, error) {
	key := blobKey(meta.Digest, partData)
	if direct := s.direct(); direct != nil {
		f, err := direct.Open(key)
		if notFound(err) {
			return nil, s.corrupt(meta.Digest, partData, err)
		} else if err != nil {
			return nil, err
		}
		if fi, err := f.Stat(); err != nil || fi.Size() != meta.DataSize {
			_ = f.Close()
			return nil, s.corrupt(meta.Digest, partData, errors.New("its size is not what it was"))
		}
		return f, nil
	}
	if s.opt.Lazy == nil {
		return nil, dsec.Errorf(dsec.CodeUnsupported, "this node cannot read from this layer store")
	}
	f, err := s.lazyFile(meta)
	if err != nil {
		return nil, err
	}
	return s.opt.Lazy.Open(ctx, f)
}

// lazyFile is the data of a layer as Lazy knows it.
func (s *Store) lazyFile(meta Meta) (LazyFile, error) {
	hashes, err := os.ReadFile(s.file(meta.Digest, chunksExt))
	if err != nil {
		return LazyFile{}, storeError("read chunks", err)
	}
	return LazyFile{Key: blobKey(meta.Digest, partData), Size: meta.DataSize, ChunkSize: meta.ChunkSize, Hashes: hashes}, nil
}

// Prefetch brings a layer to this node: its index, and its data unless the kernel
// reads them from the store by itself. progress is called with bytes that are here.
func (s *Store) Prefetch(ctx context.Context, digest string, progress func(done, total int64)) error {
	release, err := s.Hold(ctx, digest)
	if err != nil {
		return err
	}
	defer release()
	meta, err := s.Get(ctx, digest)
	if err != nil {
		return err
	}
	if s.direct() != nil || s.opt.Lazy == nil || meta.old != nil || meta.DataSize == 0 {
		progress(meta.Size, meta.Size)
		return nil
	}
	f, err := s.lazyFile(meta)
	if err != nil {
		return err
	}
	err = s.opt.Lazy.Prefetch(ctx, f, func(done, _ int64) { progress(meta.IndexSize+min(done, meta.DataSize), meta.Size) })
	if err == nil {
		progress(meta.Size, meta.Size)
	}
	return err
}

// Release says that what Open gave is neither open nor mounted any more.
func (s *Store) Release(digest string) {
	if s.opt.Lazy != nil {
		s.opt.Lazy.Release(blobKey(digest, partData))
	}
}

// Lost are the digests of layers whose readers may have got other bytes: all that
// has them mounted must end before anything else is done.
func (s *Store) Lost() (digests []string) {
	if s.opt.Lazy == nil {
		return nil
	}
	for _, key := range s.opt.Lazy.Lost() {
		if digest, ok := DigestOf(key); ok {
			digests = append(digests, digest)
		}
	}
	return digests
}

// Settle says that a lost layer is not mounted any more.
func (s *Store) Settle(ctx context.Context, digest string) error {
	return s.opt.Lazy.Settle(ctx, blobKey(digest, partData))
}
