package layer

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
)

// Store is a node's view of layers. Its methods may be called from any
// goroutine. One process at a time owns the directory.
type Store struct {
	// <dir>/local/<hex>.json, .index and .chunks of each layer that this node
	// knows, <dir>/sha256/<hex>.json and .erofs of old ones, <dir>/tmp, <dir>/lock;
	// and <dir>/blobs where the blob store is this node's own; <dir>/scrub.json.
	dir    string
	opt    Options
	lock   *os.File
	blobs  blob.Store
	builds *turns
	flight singleflight.Group
	tasks  *tasks
	traces traces
	scrubs *scrubs

	names sync.Mutex // held while files get or lose their names: not mu, which creates wait for

	mu     sync.Mutex
	layers map[string]*entry
}

// entry is one layer that this node knows.
type entry struct {
	meta  Meta
	holds int
	check sync.Once // what the node has of it, at first use
	bad   error     // what check found
}

const (
	indexExt  = ".index"
	chunksExt = ".chunks"
	metaExt   = ".json"
	imageExt  = ".erofs" // of versions 1 and 2
	hexLength = 64
)

// Open takes over the directory, which is made if missing, and removes what an
// earlier owner left unfinished. The error is conflict while another process owns
// it. A layer whose metadata cannot be read is left out and logged; its files stay
// for a person to look at.
func Open(dir string, opt Options) (*Store, error) {
	s := &Store{dir: dir, opt: opt.withDefaults(), layers: map[string]*entry{}, tasks: newTasks(), traces: traces{busy: map[string]bool{}}}
	s.builds = newTurns(s.opt.Builds)
	for _, d := range []string{dir, s.tmp(), s.local(), s.olds()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, storeError("make layer store", err)
		}
	}
	lock, err := hostos.Lock(filepath.Join(dir, "lock"))
	if errors.Is(err, hostos.ErrLocked) {
		return nil, dsec.Errorf(dsec.CodeConflict, "another process owns the layer store")
	} else if err != nil {
		return nil, storeError("open layer store", err)
	}
	s.lock = lock
	if s.blobs = s.opt.Blobs; s.blobs == nil {
		s.opt.Own = true
		s.blobs, err = dirblob.Open(filepath.Join(dir, "blobs"))
	}
	if err == nil {
		s.scrubs, err = loadScrubs(scrubPath(dir), filepath.Join(s.tmp(), "scrub"))
	}
	if err == nil {
		err = s.load()
	}
	if err == nil && s.opt.Own {
		_, err = s.Sweep(context.Background(), 0)
	}
	if err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

// Close gives the directory up, once no Build runs. Layers stay; holds are
// forgotten.
func (s *Store) Close() error {
	s.tasks.close()
	var err error
	if own, ok := s.blobs.(io.Closer); ok && s.opt.Blobs == nil {
		err = own.Close()
	}
	return errors.Join(err, s.lock.Close())
}

func (s *Store) tmp() string   { return filepath.Join(s.dir, "tmp") }
func (s *Store) local() string { return filepath.Join(s.dir, "local") }
func (s *Store) olds() string  { return filepath.Join(s.dir, "sha256") }

// file is the path of one of a layer's files.
func (s *Store) file(digest, ext string) string {
	return filepath.Join(s.local(), strings.TrimPrefix(digest, "sha256:")+ext)
}

// oldFile is the same of a layer of version 1 or 2.
func (s *Store) oldFile(digest, ext string) string {
	return filepath.Join(s.olds(), strings.TrimPrefix(digest, "sha256:")+ext)
}

// load sweeps and reads the directory.
func (s *Store) load() error {
	left, err := os.ReadDir(s.tmp())
	if err != nil {
		return fmt.Errorf("sweep layer store: %w", err)
	}
	for _, e := range left {
		if err := os.Remove(filepath.Join(s.tmp(), e.Name())); err != nil {
			return fmt.Errorf("sweep layer store: %w", err)
		}
	}
	return errors.Join(s.loadDir(s.local()), s.loadDir(s.olds()))
}

// loadDir reads one directory, and sweeps the files of what has no metadata: what
// made or removed it did not get to its end.
func (s *Store) loadDir(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read layer store: %w", err)
	}
	known := map[string]bool{}
	for _, f := range files {
		if base, ok := strings.CutSuffix(f.Name(), metaExt); ok {
			known[base] = true
			s.loadMeta(dir, base)
		}
	}
	for _, f := range files {
		base, ext, _ := strings.Cut(f.Name(), ".")
		if !known[base] && slices.Contains([]string{indexExt, chunksExt, imageExt}, "."+ext) {
			if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
				return fmt.Errorf("sweep layer store: %w", err)
			}
		}
	}
	return nil
}

func (s *Store) loadMeta(dir, base string) {
	meta, err := readMeta(filepath.Join(dir, base+metaExt))
	if err == nil && meta.Digest != "sha256:"+base {
		err = errors.New("its metadata are of another layer")
	}
	if err == nil {
		err = s.checkSize(meta)
	}
	if err != nil {
		s.opt.Logger.Error("layer left out", "digest", "sha256:"+base, "error", err)
		return
	}
	s.layers[meta.Digest] = &entry{meta: meta}
}

// imageFile is the file with the layer's index: that, or the old image.
func (s *Store) imageFile(meta Meta) string {
	if meta.old != nil {
		return s.oldFile(meta.Digest, imageExt)
	}
	return s.file(meta.Digest, indexExt)
}

func (s *Store) checkSize(meta Meta) error {
	fi, err := os.Lstat(s.imageFile(meta))
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() || fi.Size() != meta.Size {
		return fmt.Errorf("the image has %d bytes, its metadata say %d", fi.Size(), meta.Size)
	}
	return nil
}

// ParseDigest checks the form of a digest that came from a caller.
func ParseDigest(s string) (string, error) {
	h, ok := strings.CutPrefix(s, "sha256:")
	if ok && len(h) == hexLength && strings.ToLower(h) == h {
		if _, err := hex.DecodeString(h); err == nil {
			return s, nil
		}
	}
	return "", dsec.Invalid("digest", "want sha256: and %d characters of 0-9 and a-f", hexLength)
}

// known gives the entry of a layer that this node knows, or nil.
func (s *Store) known(digest string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.layers[digest]
}

// Get tells what a layer is, after fetching its index where this node does not
// know it. The error is not_found where the store has none, invalid for what is no
// digest, unavailable where the store cannot be reached.
func (s *Store) Get(ctx context.Context, digest string) (Meta, error) {
	e, err := s.find(ctx, digest)
	if err != nil {
		return Meta{}, err
	}
	return e.meta, nil
}

func (s *Store) find(ctx context.Context, digest string) (*entry, error) {
	if _, err := ParseDigest(digest); err != nil {
		return nil, err
	}
	if e := s.known(digest); e != nil {
		return e, nil
	}
	return s.fetch(ctx, digest)
}

// List gives all layers that this node knows, oldest first.
func (s *Store) List() []Meta {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Meta, 0, len(s.layers))
	for _, e := range s.layers {
		list = append(list, e.meta)
	}
	slices.SortFunc(list, func(a, b Meta) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Digest, b.Digest))
	})
	return list
}

// Hold keeps a layer from being removed until release is called, any number of
// times. The first hold after Open checks what the node has of it; what is not as
// it was written is fetched again. The error is internal where the store has
// nothing better, not_found where there is no such layer, unavailable while what
// had it is ended because the layer was lost: what is mounted of it must go first.
func (s *Store) Hold(ctx context.Context, digest string) (release func(), err error) {
	if slices.Contains(s.Lost(), digest) {
		return nil, &dsec.Error{Code: dsec.CodeUnavailable, Field: "layers",
			Message: "layer " + digest + " was lost on this node, and what had it mounted has not ended yet"}
	}
	for range 2 {
		var e *entry
		if e, err = s.find(ctx, digest); err != nil {
			return nil, err
		}
		if release, err = s.hold(e); err == nil {
			if err = s.recheck(ctx, e.meta); err != nil {
				release()
				return nil, err
			}
			return release, nil
		}
		if e.meta.old != nil || !s.drop(e) {
			return release, err
		}
	}
	return nil, err
}

// hold takes a reference. The error is internal where what this node has of the
// layer is damaged.
func (s *Store) hold(e *entry) (release func(), err error) {
	digest := e.meta.Digest
	s.mu.Lock()
	if s.layers[digest] != e {
		s.mu.Unlock()
		return nil, noLayer(digest) // removed meanwhile
	}
	e.holds++
	s.mu.Unlock()
	release = sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		e.holds--
	})
	e.check.Do(func() {
		bad := s.verify(e.meta)
		s.mu.Lock()
		defer s.mu.Unlock()
		e.bad = bad
	})
	if e.bad != nil { // written once, before Do returned
		release()
		s.opt.Logger.Error("layer is damaged on this node", "digest", digest, "error", e.bad)
		return nil, &dsec.Error{Code: dsec.CodeInternal, Message: "layer " + digest + " is damaged on this node", Err: e.bad}
	}
	return release, nil
}

// holds is how often a layer is held.
func (s *Store) holds(digest string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.layers[digest]; e != nil {
		return e.holds
	}
	return 0
}

// drop forgets a layer whose files on this node are damaged, and reports whether
// they were: the next find fetches it again. Mounts go on with the files.
func (s *Store) drop(e *entry) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.bad != nil && s.layers[e.meta.Digest] == e {
		delete(s.layers, e.meta.Digest)
	}
	return e.bad != nil
}

func noLayer(digest string) error {
	return dsec.Errorf(dsec.CodeNotFound, "no layer %s", digest)
}

// Forget removes what this node has of a layer. The error is conflict while it is held
// here.
func (s *Store) Forget(digest string) error {
	if _, err := ParseDigest(digest); err != nil {
		return err
	}
	e := s.known(digest)
	if e == nil || e.meta.old != nil { // an old one is this node's alone
		return nil
	}
	if err := s.removeLocal(e); !notFound(err) { // else another call has just done it
		return err
	}
	return nil
}

// Remove removes a layer from this node and from the store, damaged ones too. The
// error is conflict while it is held here, not_found where there is none.
func (s *Store) Remove(ctx context.Context, digest string) error {
	if _, err := ParseDigest(digest); err != nil {
		return err
	}
	if e := s.known(digest); e != nil {
		if err := s.removeLocal(e); err != nil || e.meta.old != nil {
			return err
		}
	} else if _, err := s.blobs.Stat(ctx, blobKey(digest, partManifest)); notFound(err) {
		return noLayer(digest)
	} else if err != nil {
		return err
	}
	return s.removeBlobs(ctx, digest)
}

// removeLocal removes what this node has of a layer, which is gone from here
// without its metadata, whatever happens next.
func (s *Store) removeLocal(e *entry) error {
	digest := e.meta.Digest
	s.names.Lock()
	defer s.names.Unlock()
	if err := s.unlist(e); err != nil {
		return err
	}
	s.scrubs.forget(digest)
	files := []string{s.file(digest, metaExt), s.file(digest, indexExt), s.file(digest, chunksExt)}
	if e.meta.old != nil {
		files = []string{s.oldFile(digest, metaExt), s.oldFile(digest, imageExt)}
	}
	for i, f := range files {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			if i == 0 { // it is still there
				s.list(e)
			}
			return fmt.Errorf("remove layer: %w", err)
		}
	}
	return hostos.SyncDir(filepath.Dir(files[0]))
}

// unlist has nobody find a layer that nobody holds.
func (s *Store) unlist(e *entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.layers[e.meta.Digest] != e {
		return noLayer(e.meta.Digest)
	}
	if e.holds > 0 {
		return dsec.Errorf(dsec.CodeConflict, "layer %s is used by %d sandboxes or calls", e.meta.Digest, e.holds)
	}
	delete(s.layers, e.meta.Digest)
	return nil
}

// list has a layer be found, in place of one that is damaged.
func (s *Store) list(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.layers[e.meta.Digest]; old == nil || old.bad != nil {
		s.layers[e.meta.Digest] = e
	}
}

// removeBlobs removes a layer from the blob store: the manifest first, without
// which it is gone.
func (s *Store) removeBlobs(ctx context.Context, digest string) error {
	for _, part := range []string{partManifest, partAbout, partTrace, partPacked, partIndex, partChunks, partData} {
		if err := s.blobs.Delete(ctx, blobKey(digest, part)); err != nil {
			return err
		}
	}
	return nil
}

// addLocal makes a layer known to this node, whose index is in the file index and
// whose hashes of chunks are given. Both files and then the metadata get their
// names. None is written to disk at once: after a crash of the host what is not as
// it was is found at first use, and fetched again.
func (s *Store) addLocal(e *entry, index *os.File, chunks []byte) error {
	digest := e.meta.Digest
	doc, err := json.Marshal(e.meta)
	if err != nil {
		return err
	}
	name := filepath.Base(index.Name())
	temp := map[string]string{chunksExt: filepath.Join(s.tmp(), name+chunksExt), metaExt: filepath.Join(s.tmp(), name+metaExt)}
	defer func() {
		for _, f := range temp {
			_ = os.Remove(f)
		}
	}()
	err = errors.Join(index.Chmod(0o444), os.WriteFile(temp[chunksExt], chunks, 0o644), os.WriteFile(temp[metaExt], doc, 0o644))
	if err != nil {
		return storeError("keep layer", err)
	}
	s.names.Lock()
	defer s.names.Unlock()
	// One that is there is replaced: mounts of the old file go on with it.
	for from, to := range map[string]string{index.Name(): indexExt, temp[chunksExt]: chunksExt} {
		if err := os.Rename(from, s.file(digest, to)); err != nil {
			return storeError("keep layer", err)
		}
	}
	if err := os.Rename(temp[metaExt], s.file(digest, metaExt)); err != nil {
		return storeError("keep layer", err)
	}
	s.list(e)
	return nil
}

// storeError types what the disk says.
func storeError(what string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "the layer store's disk is full", Err: err}
	}
	return fmt.Errorf("%s: %w", what, err)
}
