package dirblob

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// statBatch is how many names one call looks at, so that it ends in time where
// each takes a question to the server.
const statBatch = 64

// ReadAt implements blob.Store.
func (s *Store) ReadAt(ctx context.Context, key string, p []byte, off int64) (n int, err error) {
	if err := blob.CheckKey(key); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, dsec.Invalid("off", "a blob's bytes from %d", off)
	}
	for n < len(p) && err == nil {
		var m int
		m, err = s.readAt(ctx, key, p[n:min(len(p), n+ioSize)], off+int64(n))
		n += m
	}
	return n, err
}

// readAt reads at most ioSize bytes.
func (s *Store) readAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	buf := buffers.Get().(*[ioSize]byte)
	b := buf[:len(p)]
	n, err := call(ctx, &s.calls, s.calls.timeout, func() (int, error) {
		n, err := s.readFile(key, b, off)
		if err == io.EOF {
			return n, err
		}
		return n, storeError(reading, err)
	}, nil)
	if leftBehind(err) {
		return 0, err
	}
	copy(p, b[:n])
	buffers.Put(buf)
	return n, err
}

// readFile reads from a file that is open, or opens it: also where one that was
// open fails, which may be another server's, or has no name any more, in whose place
// there may be another one.
func (s *Store) readFile(key string, b []byte, off int64) (int, error) {
	if f := s.files.get(key); f != nil {
		var st unix.Stat_t
		if unix.Fstat(int(f.Fd()), &st) == nil && st.Nlink > 0 {
			n, err := f.ReadAt(b, off)
			if err == nil || err == io.EOF {
				return n, err
			}
		}
		s.closeFiles(s.files.drop(key, f))
	}
	var f *os.File
	err := s.withDir(func(root *os.File) (err error) {
		f, err = openBlob(root, key, 0)
		return err
	})
	if err != nil {
		return 0, err
	}
	n, err := f.ReadAt(b, off)
	if err == nil || err == io.EOF {
		s.closeFiles(s.files.add(key, f))
	} else {
		s.closeFiles([]*os.File{f})
	}
	return n, err
}

// List implements blob.Store. A blob that comes or goes meanwhile may be told of or not.
func (s *Store) List(ctx context.Context, prefix string, f func(blob.Info) error) error {
	if err := blob.CheckPrefix(prefix); err != nil {
		return err
	}
	dir := ""
	if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
		dir = prefix[:i]
	}
	return s.list(ctx, dir, prefix, f)
}

// entry is a name in a directory.
type entry struct {
	blob.Info
	isDir bool
}

// order is what an entry sorts as: a directory by the slash that follows its name
// in the keys below it.
func (e entry) order() string {
	if e.isDir {
		return e.Key + "/"
	}
	return e.Key
}

// list walks a directory in the order of the keys below it.
func (s *Store) list(ctx context.Context, dir, prefix string, f func(blob.Info) error) error {
	names, err := s.names(ctx, dir)
	if err != nil {
		return err
	}
	names = slices.DeleteFunc(names, func(name string) bool {
		key := path.Join(dir, name)
		return !blob.ValidPart(name) || !strings.HasPrefix(key+"/", prefix) && !strings.HasPrefix(prefix, key+"/")
	})
	var entries []entry
	for batch := range slices.Chunk(names, statBatch) {
		of, err := s.entries(ctx, dir, batch)
		if err != nil {
			return err
		}
		entries = append(entries, of...)
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.order(), b.order()) })
	for _, e := range entries {
		switch {
		case e.isDir:
			err = s.list(ctx, e.Key, prefix, f)
		case strings.HasPrefix(e.Key, prefix):
			err = f(e.Info)
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// names are those in a directory. Of one that is not there they are none.
func (s *Store) names(ctx context.Context, dir string) ([]string, error) {
	return call(ctx, &s.calls, s.calls.timeout, func() (names []string, err error) {
		err = s.withDir(func(root *os.File) error {
			d, err := openBeneath(root, path.Join(".", dir), unix.O_RDONLY|unix.O_DIRECTORY, 0)
			if err != nil {
				return err
			}
			defer d.Close()
			names, err = d.Readdirnames(-1)
			return err
		})
		if dir != "" && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR)) {
			return nil, nil
		}
		return names, storeError(reading, err)
	}, nil)
}

// entries looks at names in a directory, and leaves out what is gone.
func (s *Store) entries(ctx context.Context, dir string, names []string) ([]entry, error) {
	return call(ctx, &s.calls, s.calls.timeout, func() (entries []entry, err error) {
		err = s.withDir(func(root *os.File) error {
			entries = nil
			d, err := openBeneath(root, path.Join(".", dir), unix.O_PATH|unix.O_DIRECTORY, 0)
			if err != nil {
				return err
			}
			defer d.Close()
			for _, name := range names {
				var st unix.Stat_t
				err := retry(func() error { return unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) })
				if errors.Is(err, unix.ENOENT) {
					continue
				}
				if err != nil {
					return err
				}
				switch st.Mode & unix.S_IFMT {
				case unix.S_IFDIR:
					entries = append(entries, entry{Info: blob.Info{Key: path.Join(dir, name)}, isDir: true})
				case unix.S_IFREG:
					entries = append(entries, entry{Info: infoFrom(path.Join(dir, name), &st)})
				}
			}
			return nil
		})
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return entries, storeError(reading, err)
	}, nil)
}
