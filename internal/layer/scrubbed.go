package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// scrubbed is what reading a layer's data in the store over again has shown.
type scrubbed struct {
	Next   int64     `json:"next,omitempty"`  // chunk at which the pass under way goes on
	Passed time.Time `json:"passed,omitzero"` // the end of the last one
	Bad    []int64   `json:"bad,omitempty"`   // chunks that are not what they were, the first maxBad
	Lost   bool      `json:"lost,omitempty"`  // what has the layer mounted is to end, see Store.Lost
	Found  bool      `json:"found,omitempty"` // the pass under way has found some bad
}

// maxBad is how many bad chunks of a layer are kept in mind.
const maxBad = 64

// scrubs are those of all layers, by digest, as they are in the file scrub.json.
type scrubs struct {
	path, temp string

	writing sync.Mutex // held while the file is written: not mu, which creates wait for

	mu     sync.Mutex
	layers map[string]*scrubbed
}

// loadScrubs reads the file. One that is not whole, as after a loss of power, which
// no sandbox outlives, is begun anew.
func loadScrubs(path, temp string) (*scrubs, error) {
	c := &scrubs{path: path, temp: temp, layers: map[string]*scrubbed{}}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	} else if err != nil {
		return nil, err
	}
	var file scrubFile
	if json.Unmarshal(b, &file) == nil && file.Version == scrubVersion {
		maps.DeleteFunc(file.Layers, func(_ string, l *scrubbed) bool { return l == nil })
		maps.Copy(c.layers, file.Layers)
	}
	return c, nil
}

type scrubFile struct {
	Version int                  `json:"version"`
	Layers  map[string]*scrubbed `json:"layers"`
}

const scrubVersion = 1

// change calls f with what is known of a layer, and writes all down if it says so.
func (c *scrubs) change(digest string, f func(l *scrubbed) (write bool)) error {
	c.mu.Lock()
	l := c.layers[digest]
	if l == nil {
		l = &scrubbed{}
	}
	write := f(l)
	c.layers[digest] = l
	c.mu.Unlock()
	if !write {
		return nil
	}
	return c.write()
}

// write puts the file in the place of the one before, whole.
func (c *scrubs) write() error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.mu.Lock()
	b, err := json.Marshal(scrubFile{scrubVersion, c.layers})
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err = os.WriteFile(c.temp, b, 0o600); err == nil {
		err = os.Rename(c.temp, c.path)
	}
	if err != nil {
		return storeError("write down the scrub", err)
	}
	return nil
}

// of is what is known of a layer.
func (c *scrubs) of(digest string) scrubbed {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.layers[digest]
	if l == nil {
		return scrubbed{}
	}
	known := *l
	known.Bad = slices.Clone(l.Bad)
	return known
}

// keep forgets all layers but those that are known, and those that are lost.
func (c *scrubs) keep(known map[string]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.layers, func(d string, l *scrubbed) bool { return !l.Lost && !known[d] })
}

// forget is told that a layer was removed.
func (c *scrubs) forget(digest string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l := c.layers[digest]; l != nil && l.Lost {
		*l = scrubbed{Lost: true}
		return
	}
	delete(c.layers, digest)
}

// lost are the layers that are to be settled.
func (c *scrubs) lost() (digests []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range slices.Sorted(maps.Keys(c.layers)) {
		if c.layers[d].Lost {
			digests = append(digests, d)
		}
	}
	return digests
}

// chunkHashes are the SHA-256 of the chunks of a layer's data, one after another,
// from this node's file, which is held against the layer's digest.
func (s *Store) chunkHashes(meta Meta) ([]byte, error) {
	hashes, err := os.ReadFile(s.file(meta.Digest, chunksExt))
	if err != nil {
		return nil, storeError("read chunks", err)
	}
	if got := fmt.Sprintf("sha256:%x", sha256.Sum256(hashes)); got != meta.ChunksDigest {
		return nil, fmt.Errorf("this node's hashes of its chunks have digest %s, want %s", got, meta.ChunksDigest)
	}
	return hashes, nil
}

// recheck reads the chunks of a layer again that were found to be bad. A layer that
// the kernel would read by itself cannot be used until they are right.
func (s *Store) recheck(ctx context.Context, meta Meta) error {
	bad := s.scrubs.of(meta.Digest).Bad
	if len(bad) == 0 || s.direct() == nil {
		return nil
	}
	hashes, err := s.chunkHashes(meta)
	if err != nil {
		return err
	}
	if r, ok := s.blobs.(blob.Reopener); ok {
		r.Reopen(blobKey(meta.Digest, partData))
	}
	for _, i := range bad {
		if i < 0 || i >= meta.chunks() {
			continue
		}
		b := make([]byte, min(meta.ChunkSize, meta.DataSize-i*meta.ChunkSize))
		n, err := s.blobs.ReadAt(ctx, blobKey(meta.Digest, partData), b, i*meta.ChunkSize)
		if err != nil && err != io.EOF && !notFound(err) {
			return err
		}
		if sum := sha256.Sum256(b[:n]); !bytes.Equal(sum[:], hashes[i*sha256.Size:(i+1)*sha256.Size]) {
			return s.corrupt(meta.Digest, partData, fmt.Errorf("chunk %d is not what it was", i))
		}
	}
	s.opt.Logger.Info("layer is whole again in the store", "digest", meta.Digest)
	// The rest of it is read anew too.
	return s.scrubs.change(meta.Digest, func(l *scrubbed) bool {
		l.Bad, l.Next, l.Passed = nil, 0, time.Time{}
		return true
	})
}

// markBad notes a chunk that the store has other bytes of, and that whoever has
// the layer mounted may have read them. It reports whether that is new.
func (s *Store) markBad(meta Meta, chunk int64) (fresh bool) {
	err := s.scrubs.change(meta.Digest, func(l *scrubbed) bool {
		l.Found = true
		if fresh = len(l.Bad) == 0; fresh {
			l.Lost = true
		}
		if len(l.Bad) < maxBad && !slices.Contains(l.Bad, chunk) {
			l.Bad = append(l.Bad, chunk)
		}
		return true
	})
	if err != nil {
		s.opt.Logger.Error("a damaged layer is not on record", "digest", meta.Digest, "error", err)
	}
	return fresh
}

// lose notes that the data of a layer are about to be replaced in the store: where
// the kernel reads them by itself, what is mounted has other ones.
func (s *Store) lose(digest string) {
	if s.direct() == nil {
		return
	}
	if err := s.scrubs.change(digest, func(l *scrubbed) bool { l.Lost = true; return true }); err != nil {
		s.opt.Logger.Error("a layer that is mended is not on record as lost", "digest", digest, "error", err)
	}
}

// settled notes that nothing has a layer mounted that was lost for its damage. It
// reports whether there was one.
func (s *Store) settled(digest string) (was bool, err error) {
	err = s.scrubs.change(digest, func(l *scrubbed) bool {
		was, l.Lost = l.Lost, false
		return was
	})
	return was, err
}

// inUse are the layers that somebody holds, or whose damage is known, and whose
// data the kernel reads from the store.
func (s *Store) inUse() (metas []Meta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for digest, e := range s.layers {
		if e.meta.old == nil && e.meta.DataSize > 0 && (e.holds > 0 || len(s.scrubs.of(digest).Bad) > 0) {
			metas = append(metas, e.meta)
		}
	}
	return metas
}

// wanted reports whether a layer is one of inUse.
func (s *Store) wanted(digest string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.layers[digest]
	return e != nil && (e.holds > 0 || len(s.scrubs.of(digest).Bad) > 0)
}

func scrubPath(dir string) string { return filepath.Join(dir, "scrub.json") }

var errDirectOnly = dsec.Errorf(dsec.CodeUnsupported, "a layer store that is no directory is not scrubbed: what is read of it is checked then")
