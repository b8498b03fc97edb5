package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/erofs/go-erofs"
)

// OpenFS opens a layer's files for reading, as go-erofs shows them. Whoever calls
// holds the layer, and closes what it got.
func (s *Store) OpenFS(ctx context.Context, digest string) (fs.FS, io.Closer, error) {
	files, err := s.Open(ctx, digest)
	if err != nil {
		return nil, nil, err
	}
	all := closers(files)
	var opts []erofs.OpenOpt
	for _, f := range files[1:] {
		opts = append(opts, erofs.WithExtraDevices(f))
	}
	img, err := erofs.Open(files[0], opts...)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open layer %s: %w", digest, err), all.Close())
	}
	return img, all, nil
}

type closers []*os.File

// Close closes all.
func (c closers) Close() error {
	var errs []error
	for _, f := range c {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
