package layer

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
)

// Store is a directory of layers. Its methods may be called from any
// goroutine. One process at a time owns the directory.
type Store struct {
	dir    string // <dir>/sha256/<hex>.erofs and .json, <dir>/tmp, <dir>/lock
	opt    Options
	lock   *os.File
	builds chan struct{} // one token for each build that may run

	mu     sync.Mutex
	layers map[string]*entry
}

// entry is one layer of the store.
type entry struct {
	meta  Meta
	holds int
	check sync.Once // the image against meta, at first use
	bad   error     // what check found
}

const (
	imageExt  = ".erofs"
	metaExt   = ".json"
	hexLength = 64
	metaBytes = 8 << 20 // the largest metadata file read
)

// Open takes over the store in dir, which is made if missing, and removes what
// an earlier owner left unfinished. The error is conflict while another
// process owns it. A layer whose metadata cannot be read is left out and
// logged; its files stay for a person to look at.
func Open(dir string, opt Options) (*Store, error) {
	s := &Store{dir: dir, opt: opt.withDefaults(), layers: map[string]*entry{}}
	s.builds = make(chan struct{}, s.opt.Builds)
	for _, d := range []string{dir, s.tmp(), s.blobs()} {
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
	if err := s.load(); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

// Close gives the directory up, once no Build runs. Layers stay; holds are
// forgotten.
func (s *Store) Close() error { return s.lock.Close() }

func (s *Store) tmp() string   { return filepath.Join(s.dir, "tmp") }
func (s *Store) blobs() string { return filepath.Join(s.dir, "sha256") }

// file is the path of one of a layer's two files.
func (s *Store) file(digest, ext string) string {
	return filepath.Join(s.blobs(), strings.TrimPrefix(digest, "sha256:")+ext)
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
	files, err := os.ReadDir(s.blobs())
	if err != nil {
		return fmt.Errorf("read layer store: %w", err)
	}
	names := map[string]bool{}
	for _, f := range files {
		names[f.Name()] = true
	}
	for name := range names {
		base, isMeta := strings.CutSuffix(name, metaExt)
		if isMeta {
			s.loadMeta("sha256:" + base)
		} else if base, ok := strings.CutSuffix(name, imageExt); ok && !names[base+metaExt] {
			// Named, but the build or the removal did not get to its end.
			if err := os.Remove(filepath.Join(s.blobs(), name)); err != nil {
				return fmt.Errorf("sweep layer store: %w", err)
			}
		}
	}
	return nil
}

func (s *Store) loadMeta(digest string) {
	meta, err := readMeta(s.file(digest, metaExt))
	if err == nil && meta.Digest != digest {
		err = errors.New("its metadata are of another layer")
	}
	if err == nil {
		err = s.checkSize(meta)
	}
	if err != nil {
		s.opt.Logger.Error("layer left out", "digest", digest, "error", err)
		return
	}
	s.layers[digest] = &entry{meta: meta}
}

func (s *Store) checkSize(meta Meta) error {
	fi, err := os.Lstat(s.file(meta.Digest, imageExt))
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() || fi.Size() != meta.Size {
		return fmt.Errorf("the image has %d bytes, its metadata say %d", fi.Size(), meta.Size)
	}
	return nil
}

func readMeta(path string) (Meta, error) {
	var meta Meta
	fi, err := os.Stat(path)
	if err != nil {
		return meta, err
	}
	if fi.Size() > metaBytes {
		return meta, fmt.Errorf("metadata of %d bytes", fi.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return meta, err
	}
	if err := json.Unmarshal(b, &meta); err != nil {
		return meta, err
	}
	if meta.Version < 1 || meta.Version > metaVersion {
		return meta, fmt.Errorf("metadata of version %d, want %d", meta.Version, metaVersion)
	}
	if meta.Version == 1 {
		meta.Source, meta.Kind = string(meta.Kind), dsec.LayerBase
	}
	if !meta.Kind.Valid() {
		return meta, fmt.Errorf("metadata of a layer of kind %.40q", meta.Kind)
	}
	return meta, meta.Config.Validate()
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

func (s *Store) find(digest string) (*entry, error) {
	if _, err := ParseDigest(digest); err != nil {
		return nil, err
	}
	e := s.layers[digest]
	if e == nil {
		return nil, dsec.Errorf(dsec.CodeNotFound, "no layer %s", digest)
	}
	return e, nil
}

// Get tells what the store knows of a layer. The error is not_found where
// there is none, invalid for what is no digest.
func (s *Store) Get(digest string) (Meta, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.find(digest)
	if err != nil {
		return Meta{}, err
	}
	return e.meta, nil
}

// List gives all layers, oldest first.
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

// Path is where the image of a layer is, for whoever holds it.
func (s *Store) Path(digest string) string { return s.file(digest, imageExt) }

// Hold keeps a layer from being removed until release is called, any number
// of times. The first hold after Open checks the image's size and metadata;
// where they are not as they were written the error is internal. It is
// not_found where there is no such layer.
func (s *Store) Hold(digest string) (release func(), err error) {
	s.mu.Lock()
	e, err := s.find(digest)
	if err != nil {
		s.mu.Unlock()
		return nil, err
	}
	e.holds++
	s.mu.Unlock()
	release = sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		e.holds--
	})
	e.check.Do(func() { e.bad = s.verify(e.meta) })
	if e.bad != nil {
		release()
		s.opt.Logger.Error("layer is damaged", "digest", digest, "error", e.bad)
		return nil, &dsec.Error{Code: dsec.CodeInternal, Message: "layer " + digest + " is damaged on this node", Err: e.bad}
	}
	return release, nil
}

// Remove removes a layer. The error is conflict while it is held, not_found
// where there is none.
func (s *Store) Remove(digest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.find(digest)
	if err != nil {
		return err
	}
	if e.holds > 0 {
		return dsec.Errorf(dsec.CodeConflict, "layer %s is used by %d sandboxes or calls", digest, e.holds)
	}
	// Without its metadata the layer is gone, whatever happens next.
	if err := os.Remove(s.file(digest, metaExt)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove layer: %w", err)
	}
	delete(s.layers, digest)
	if err := os.Remove(s.file(digest, imageExt)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove layer: %w", err)
	}
	return hostos.SyncDir(s.blobs())
}

// storeError types what the disk says.
func storeError(what string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "the layer store's disk is full", Err: err}
	}
	return fmt.Errorf("%s: %w", what, err)
}
