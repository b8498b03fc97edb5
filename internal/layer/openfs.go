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
	img, err := erofs.Open(wholeImage(files), opts...)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open layer %s: %w", digest, err), all.Close())
	}
	return img, all, nil
}

// wholeImage reads an image whose data are on another device as if they were not:
// go-erofs takes a file that is not of chunks from the first device wherever the
// table says that its blocks are, and would find the hole there.
type wholeImage []*os.File

// ReadAt implements io.ReaderAt.
func (w wholeImage) ReadAt(p []byte, off int64) (n int, err error) {
	if len(w) == 1 {
		return w[0].ReadAt(p, off)
	}
	fi, err := w[1].Stat()
	if err != nil {
		return 0, err
	}
	end := firstBlock + fi.Size() // of the data in the image
	for n < len(p) {
		at := off + int64(n)
		from, file, part := at, w[0], p[n:]
		switch {
		case at < firstBlock:
			part = part[:min(int64(len(part)), firstBlock-at)]
		case at < end:
			from, file, part = at-firstBlock, w[1], part[:min(int64(len(part)), end-at)]
		}
		m, err := file.ReadAt(part, from)
		if n += m; err != nil && (err != io.EOF || m < len(part)) {
			return n, err
		}
	}
	return n, nil
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
