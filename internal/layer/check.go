package layer

import (
	"context"
	"errors"
	"fmt"
)

// Check looks whether the store has a layer as it should be, for whoever is about to
// say that it need not be stored again. Manifest, index and hashes are read and held
// against the layer's digest: 1 or 2 % of it. Of the data it looks whether they are
// there, as many as they were, and whether the scrub knows of damage; with data they
// are read as well. The error is internal where the layer is damaged or not there; any
// other one says nothing of it.
func (s *Store) Check(ctx context.Context, digest string, data bool) error {
	if _, err := ParseDigest(digest); err != nil {
		return err
	}
	if e := s.known(digest); e != nil && e.meta.old != nil {
		if err := s.verify(e.meta); err != nil {
			return s.corrupt(digest, partIndex, err)
		}
		return nil
	}
	err := s.checkParts(ctx, digest, data)
	if notFound(err) {
		return s.corrupt(digest, partManifest, errors.New("it is not there"))
	}
	return err
}

func (s *Store) checkParts(ctx context.Context, digest string, data bool) error {
	meta, err := s.fetchManifest(ctx, digest)
	if err != nil {
		return err
	}
	info, err := s.blobs.Stat(ctx, blobKey(digest, partData))
	switch {
	case notFound(err):
		return s.missing(ctx, digest, partData)
	case err != nil:
		return err
	case info.Size != meta.DataSize:
		return s.corrupt(digest, partData, fmt.Errorf("it has %d bytes, not %d", info.Size, meta.DataSize))
	}
	if n := len(s.scrubs.of(digest).Bad); n > 0 && s.direct() != nil {
		return s.corrupt(digest, partData, fmt.Errorf("%d of its chunks were found to be wrong when they were read over again", n))
	}
	chunks, err := s.fetchChunks(ctx, meta)
	if err != nil {
		return err
	}
	if err := s.checkIndex(ctx, meta); err != nil || !data {
		return err
	}
	same, err := s.sameData(ctx, meta, chunks)
	if err == nil && !same {
		err = s.corrupt(digest, partData, errors.New("it is not what it was"))
	}
	return err
}
