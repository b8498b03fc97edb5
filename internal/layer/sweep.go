package layer

import (
	"context"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec/internal/layer/blob"
)

// Stored is a layer in the blob store.
type Stored struct {
	Digest  string
	Size    int64 // bytes of all its parts
	Created time.Time
}

// Sweep gives the layers that are in the blob store, by digest. It removes what is
// of none of them, and was stored longer than age ago: parts whose manifest an
// import or a removal did not get to.
func (s *Store) Sweep(ctx context.Context, age time.Duration) ([]Stored, error) {
	type found struct {
		Stored
		parts  []string
		whole  bool
		newest time.Time
	}
	if sweeper, ok := s.blobs.(blob.Sweeper); ok {
		if err := sweeper.Sweep(ctx); err != nil {
			return nil, err
		}
	}
	layers := map[string]*found{} // by the layer's part of the key
	err := s.blobs.List(ctx, layersPrefix, func(b blob.Info) error {
		dir, part := path.Split(b.Key)
		l := layers[dir]
		if l == nil {
			l = &found{Stored: Stored{Digest: "sha256:" + strings.TrimPrefix(path.Clean(dir), layersPrefix)}}
			layers[dir] = l
		}
		l.parts = append(l.parts, b.Key)
		l.Size += b.Size
		if b.Created.After(l.newest) {
			l.newest = b.Created
		}
		if part == partManifest {
			l.whole, l.Created = true, b.Created
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var stored []Stored
	before := time.Now().Add(-age)
	for _, dir := range slices.Sorted(maps.Keys(layers)) {
		l := layers[dir]
		if l.whole {
			stored = append(stored, l.Stored)
			continue
		}
		if l.newest.After(before) {
			continue
		}
		for _, key := range l.parts {
			if err := s.blobs.Delete(ctx, key); err != nil {
				return nil, err
			}
		}
	}
	return stored, nil
}
