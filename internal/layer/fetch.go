package layer

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// fetchTimeout bounds how long a node waits for the index of one layer.
const fetchTimeout = 5 * time.Minute

// fetch makes a layer of the store known to this node. Calls for the same layer
// wait for one fetch, which the context of none of them cancels.
func (s *Store) fetch(ctx context.Context, digest string) (*entry, error) {
	ch := s.flight.DoChan(digest, func() (any, error) {
		if !s.tasks.begin() {
			return nil, errClosed
		}
		defer s.tasks.runs.Done()
		ctx, cancel := context.WithTimeoutCause(s.tasks.ctx, fetchTimeout,
			dsec.Errorf(dsec.CodeUnavailable, "the layer store did not give the index of layer %s in %s", digest, fetchTimeout))
		defer cancel()
		if e := s.known(digest); e != nil { // since the caller looked
			return e, nil
		}
		return s.fetchLayer(ctx, digest)
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

func (s *Store) fetchLayer(ctx context.Context, digest string) (*entry, error) {
	meta, err := s.fetchManifest(ctx, digest)
	if err != nil {
		return nil, err
	}
	index, err := os.CreateTemp(s.tmp(), "index-*")
	if err != nil {
		return nil, storeError("make index file", err)
	}
	defer func() { _ = os.Remove(index.Name()); _ = index.Close() }()
	var chunks []byte
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) { chunks, err = s.fetchChunks(ctx, meta); return })
	g.Go(func() error { return s.fetchIndex(ctx, meta, index) })
	if err := g.Wait(); err != nil {
		return nil, err
	}
	e := &entry{meta: meta}
	e.check.Do(func() {}) // it was, just now
	return e, s.addLocal(e, index, chunks)
}

func (s *Store) fetchChunks(ctx context.Context, meta Meta) ([]byte, error) {
	chunks, err := s.readPart(ctx, meta.Digest, partChunks, meta.chunks()*sha256.Size)
	if notFound(err) {
		return nil, s.missing(ctx, meta.Digest, partChunks)
	} else if err != nil {
		return nil, err
	}
	if got := fmt.Sprintf("sha256:%x", sha256.Sum256(chunks)); got != meta.ChunksDigest {
		return nil, s.corrupt(meta.Digest, partChunks, fmt.Errorf("it has digest %s", got))
	}
	return chunks, nil
}

func (s *Store) fetchIndex(ctx context.Context, meta Meta, index *os.File) error {
	return s.readIndexPart(ctx, meta.Digest, meta.IndexSize, func(r io.Reader) error {
		hashed := sha256.New()
		if err := writeIndex(index, io.TeeReader(r, hashed), meta.Size); err != nil {
			return err
		}
		return isIndex(hashed, meta)
	})
}

// isIndex holds what was hashed against the digest of a layer's index.
func isIndex(hashed hash.Hash, meta Meta) error {
	if got := sumOf(hashed); got != meta.IndexDigest {
		return fmt.Errorf("it has digest %s", got)
	}
	return nil
}

// fetchManifest gets what a layer is, and where it came from as far as that is there.
func (s *Store) fetchManifest(ctx context.Context, digest string) (Meta, error) {
	var about About
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		doc, err := s.readPart(ctx, digest, partAbout, metaBytes)
		damaged := err != nil && dsec.CodeOf(err) == dsec.CodeInternal
		if err == nil && json.Unmarshal(doc, &about) != nil || damaged || notFound(err) {
			about = About{} // packs see to it that nothing depends on it
			return nil
		}
		return err
	})
	var manifest Manifest
	g.Go(func() error {
		doc, err := s.readPart(ctx, digest, partManifest, metaBytes)
		if errors.Is(err, blob.ErrDirectory) {
			return s.corrupt(digest, partManifest, err)
		} else if notFound(err) {
			return noLayer(digest)
		} else if err != nil {
			return err
		}
		if manifest, err = decodeManifest(doc, digest); err != nil {
			return s.corrupt(digest, partManifest, err)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return Meta{}, err
	}
	return Meta{Digest: digest, Manifest: manifest, About: about}, nil
}

func notFound(err error) bool { return err != nil && dsec.CodeOf(err) == dsec.CodeNotFound }

// corrupt is the error of a store that does not hold what it was given.
func (s *Store) corrupt(digest, part string, err error) error {
	s.opt.Logger.Error("layer is damaged in the store", "digest", digest, "part", part, "error", err)
	return &dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "layer " + digest + " is damaged in the layer store: its " + part, Err: err}
}

// verify checks what this node has of a layer against its metadata: the index,
// which look-ups read, and the hashes that data are held against.
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
	if err != nil || meta.old != nil {
		return err
	}
	_, err = s.chunkHashes(meta)
	return err
}

// Open gives what a layer is mounted from, to whoever holds it: its EROFS image,
// and after it the image's second device where it has one, which onRead says is
// filled when it is read as a file. The caller closes them.
func (s *Store) Open(ctx context.Context, digest string) (devices []*os.File, onRead bool, err error) {
	e, err := s.find(ctx, digest)
	if err != nil {
		return nil, false, err
	}
	index, err := os.Open(s.imageFile(e.meta))
	if err != nil {
		return nil, false, storeError("open layer", err)
	}
	if e.meta.old != nil || e.meta.DataSize == 0 {
		return []*os.File{index}, false, nil
	}
	data, onRead, err := s.openData(ctx, e.meta)
	if err != nil {
		_ = index.Close()
		return nil, false, err
	}
	return []*os.File{index, data}, onRead, nil
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
func (s *Store) openData(ctx context.Context, meta Meta) (f *os.File, onRead bool, err error) {
	key := blobKey(meta.Digest, partData)
	if direct := s.direct(); direct != nil {
		f, err := direct.Open(key)
		if notFound(err) || err != nil && dsec.CodeOf(err) == dsec.CodeInternal { // such as a link in its place
			return nil, false, s.corrupt(meta.Digest, partData, err)
		} else if err != nil {
			return nil, false, err
		}
		if fi, err := f.Stat(); err != nil || fi.Size() != meta.DataSize {
			_ = f.Close()
			return nil, false, s.corrupt(meta.Digest, partData, errors.New("its size is not what it was"))
		}
		return f, false, nil
	}
	if s.opt.Lazy == nil {
		return nil, false, dsec.Errorf(dsec.CodeUnsupported, "this node cannot read from this layer store")
	}
	lazy, err := s.lazyFile(meta)
	if err != nil {
		return nil, false, err
	}
	if f, err = s.opt.Lazy.Open(ctx, lazy); err != nil {
		return nil, false, err
	}
	s.follow(meta, lazy)
	// One of a FUSE file system asks its server, however it is read; another is
	// filled by what its reads as a file set off.
	var st unix.Statfs_t
	err = unix.Fstatfs(int(f.Fd()), &st)
	return f, err != nil || st.Type != unix.FUSE_SUPER_MAGIC, nil
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
	err = s.opt.Lazy.Prefetch(ctx, f, nil, func(done, _ int64) { progress(meta.IndexSize+min(done, meta.DataSize), meta.Size) })
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

// Served are the digests of layers that were opened and not released, and are read
// through Lazy.
func (s *Store) Served() (digests []string) {
	if s.opt.Lazy == nil {
		return nil
	}
	for _, key := range s.opt.Lazy.Served() {
		if digest, ok := DigestOf(key); ok {
			digests = append(digests, digest)
		}
	}
	return digests
}

// Lost are the digests of layers whose readers may have got other bytes: all that
// has them mounted must end before anything else is done.
func (s *Store) Lost() []string {
	digests := s.scrubs.lost()
	if s.opt.Lazy == nil {
		return digests
	}
	for _, key := range s.opt.Lazy.Lost() {
		if digest, ok := DigestOf(key); ok && !slices.Contains(digests, digest) {
			digests = append(digests, digest)
		}
	}
	return digests
}

// Settle says that a lost layer is not mounted any more. The error is conflict while
// it is held: who does may be about to use a mount of it.
func (s *Store) Settle(ctx context.Context, digest string) error {
	if n := s.holds(digest); n > 0 {
		return dsec.Errorf(dsec.CodeConflict, "layer %s is used by %d sandboxes or calls", digest, n)
	}
	was, err := s.settled(digest)
	if err != nil {
		return err
	}
	key := blobKey(digest, partData)
	if s.opt.Lazy == nil || was && !slices.Contains(s.opt.Lazy.Lost(), key) {
		return nil
	}
	return s.opt.Lazy.Settle(ctx, key)
}
