package dirblob

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// ioSize is the most that one system call moves, so that a slow store is not taken
// for one that hangs.
const ioSize = 1 << 20

// buffers are what system calls read into and write from: a call that was left
// behind keeps its buffer, which therefore is never the caller's own.
var buffers = sync.Pool{New: func() any { return new([ioSize]byte) }}

// Put implements blob.Store.
func (s *Store) Put(ctx context.Context, key string, r io.Reader, size int64) error {
	if size < 0 {
		return dsec.Invalid("size", "a blob of %d bytes", size)
	}
	if there, err := s.isThere(ctx, key, size); there || err != nil {
		return err
	}
	t, err := s.createTemp(ctx)
	if err != nil {
		return err
	}
	err = s.fill(ctx, t.f, r, size)
	if err == nil {
		err = s.finish(ctx, t, size)
	}
	if err == nil {
		err = s.publish(ctx, t, key, size)
	}
	if leftBehind(err) {
		s.late.Go(func() { s.discard(ctx, t) }) // it may hang as well
	} else if err != nil {
		s.discard(ctx, t)
	}
	return err
}

// isThere also finds a blob of that key which cannot be the one that is put. Who
// put one that is there may not have come to making its name durable.
func (s *Store) isThere(ctx context.Context, key string, size int64) (bool, error) {
	if err := blob.CheckKey(key); err != nil {
		return false, err
	}
	_, err := call(ctx, &s.calls, s.calls.timeout, func() (struct{}, error) {
		err := s.withDir(func(root *os.File) error { return confirm(root, key, size) })
		return struct{}{}, storeError(reading, err)
	}, nil)
	if err == nil {
		return true, nil
	}
	if dsec.CodeOf(err) == dsec.CodeNotFound {
		return false, nil
	}
	return false, err
}

// confirm is nil where a blob is there, durably.
func confirm(root *os.File, key string, size int64) error {
	info, err := stat(root, key)
	if err == nil {
		err = sameSize(info, size)
	}
	if err != nil {
		return err
	}
	parent, _, err := openParent(root, key)
	if err != nil {
		return err
	}
	defer parent.Close()
	return syncDir(parent)
}

func sameSize(info blob.Info, size int64) error {
	if info.Size == size {
		return nil
	}
	return dsec.Errorf(dsec.CodeConflict, "blob store: the blob of this key has %d bytes, not %d", info.Size, size)
}

// temp is a file on its way to being a blob.
type temp struct {
	name string // below the store's directory
	f    *os.File
}

// tempName is one that no other writer has.
func (s *Store) tempName() string { return path.Join(tempDir, s.writer+"."+rand.Text()) }

func (s *Store) createTemp(ctx context.Context) (*temp, error) {
	return call(ctx, &s.calls, s.calls.timeout, func() (*temp, error) {
		t := &temp{name: s.tempName()}
		err := s.withTempDir(func(root *os.File) (err error) {
			t.f, err = openBeneath(root, t.name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, fileMode)
			return err
		})
		if err != nil {
			return nil, storeError(writing, err)
		}
		return t, nil
	}, func(t *temp) {
		if t != nil {
			s.discard(ctx, t)
		}
	})
}

// withTempDir is withDir, which makes the directory of unfinished files where it is
// missing: the store was read-only when it was opened.
func (s *Store) withTempDir(f func(root *os.File) error) error {
	return s.withDir(func(root *os.File) error {
		err := f(root)
		if !errors.Is(err, unix.ENOENT) {
			return err
		}
		if err := mkdir(root, tempDir); err != nil {
			return err
		}
		return f(root)
	})
}

// fill copies size bytes of r to f.
func (s *Store) fill(ctx context.Context, f *os.File, r io.Reader, size int64) error {
	buf := buffers.Get().(*[ioSize]byte)
	for off := int64(0); off < size; {
		b := buf[:min(ioSize, size-off)]
		if n, err := io.ReadFull(r, b); err != nil {
			buffers.Put(buf)
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				return dsec.Invalid("size", "the blob's source ended after %d bytes, want %d", off+int64(n), size)
			}
			return fmt.Errorf("read the blob's source: %w", err)
		}
		_, err := call(ctx, &s.calls, s.calls.timeout, func() (int, error) {
			n, err := f.WriteAt(b, off)
			return n, storeError(writing, err)
		}, nil)
		if err != nil {
			if !leftBehind(err) {
				buffers.Put(buf)
			}
			return err
		}
		off += int64(len(b))
	}
	buffers.Put(buf)
	return nil
}

// finish makes t's bytes durable and closes it: some file systems settle a file's
// size only then.
func (s *Store) finish(ctx context.Context, t *temp, size int64) error {
	_, err := call(ctx, &s.calls, syncTimeout, func() (struct{}, error) {
		var st unix.Stat_t
		err := retry(func() error { return unix.Fsync(int(t.f.Fd())) })
		if err == nil {
			err = unix.Fstat(int(t.f.Fd()), &st)
		}
		err = errors.Join(err, t.f.Close())
		if err == nil && st.Size != size {
			err = fmt.Errorf("a file of %d bytes after %d were written", st.Size, size)
		}
		return struct{}{}, storeError(writing, err)
	}, nil)
	return err
}

// publish gives t its key.
func (s *Store) publish(ctx context.Context, t *temp, key string, size int64) error {
	_, err := call(ctx, &s.calls, s.calls.timeout, func() (struct{}, error) {
		err := s.withDir(func(root *os.File) error {
			moved := false
			err := inParent(root, key, func(parent *os.File, name string) error {
				if err := s.move(root, t.name, parent, name); err != nil {
					return err
				}
				moved = true
				return syncDir(parent)
			})
			if err != nil && !moved {
				err = movedAnyway(root, t, key, size, err)
			}
			return err
		})
		return struct{}{}, storeError(writing, err)
	}, nil)
	return err
}

// move gives a file its name without replacing another.
func (s *Store) move(root *os.File, from string, parent *os.File, name string) error {
	rootFD, parentFD := int(root.Fd()), int(parent.Fd())
	if !s.noMove.Load() {
		err := retry(func() error { return unix.Renameat2(rootFD, from, parentFD, name, unix.RENAME_NOREPLACE) })
		if !cannot(err) {
			return err
		}
	}
	err := retry(func() error { return unix.Linkat(rootFD, from, parentFD, name, 0) })
	if cannot(err) || errors.Is(err, unix.EPERM) {
		return &dsec.Error{
			Code: dsec.CodeUnsupported, Err: err,
			Message: "blob store: its file system can neither rename a file without replacing another nor link one",
		}
	}
	if err != nil {
		return err
	}
	s.noMove.Store(true)
	// The blob is there; a second name that stays is the sweep's.
	_ = retry(func() error { return unix.Unlinkat(rootFD, from, 0) })
	return nil
}

// movedAnyway looks at what is there after err: another writer's blob, or t itself
// where a server did its work but its answer was lost and the question repeated.
func movedAnyway(root *os.File, t *temp, key string, size int64, err error) error {
	if !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	switch there := confirm(root, key, size); {
	case errors.Is(there, unix.ENOENT) && errors.Is(err, unix.EEXIST):
		return unix.EISDIR
	case errors.Is(there, unix.ENOENT):
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "blob store: the unfinished blob was swept", Err: err}
	case there != nil:
		return there
	}
	_ = retry(func() error { return unix.Unlinkat(int(root.Fd()), t.name, 0) })
	return nil
}

// discard removes what a Put that failed has made. What stays where the store
// hangs is the sweep's.
func (s *Store) discard(ctx context.Context, t *temp) {
	_, _ = call(context.WithoutCancel(ctx), &s.calls, s.calls.timeout/4, func() (struct{}, error) {
		_ = t.f.Close()
		err := s.withDir(func(root *os.File) error {
			return retry(func() error { return unix.Unlinkat(int(root.Fd()), t.name, 0) })
		})
		return struct{}{}, err
	}, nil)
}

// Temp implements blob.Linker.
func (s *Store) Temp() (*os.File, error) {
	return call(context.Background(), &s.calls, s.calls.timeout, func() (f *os.File, err error) {
		name := s.tempName()
		err = s.withTempDir(func(root *os.File) (err error) {
			f, err = openBeneath(root, tempDir, unix.O_RDWR|unix.O_TMPFILE, fileMode)
			if !cannot(err) && !errors.Is(err, unix.EISDIR) {
				return err
			}
			if f, err = openBeneath(root, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, fileMode); err != nil {
				return err
			}
			return retry(func() error { return unix.Unlinkat(int(root.Fd()), name, 0) })
		})
		if err != nil {
			closeLate(f)
			return nil, storeError(writing, err)
		}
		return f, nil
	}, closeLate)
}

// Link implements blob.Linker. It copies the file where the file system has no
// files without a name, or f is of another one.
func (s *Store) Link(ctx context.Context, key string, f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return storeError(reading, err)
	}
	size := fi.Size()
	if there, err := s.isThere(ctx, key, size); there || err != nil {
		return err
	}
	_, err = call(ctx, &s.calls, syncTimeout, func() (struct{}, error) {
		return struct{}{}, storeError(writing, f.Sync())
	}, nil)
	if err != nil {
		return err
	}
	linked, err := call(ctx, &s.calls, s.calls.timeout, func() (linked bool, err error) {
		err = s.withDir(func(root *os.File) error {
			linked, err = link(root, key, f, size)
			return err
		})
		return linked, storeError(writing, err)
	}, nil)
	if linked || err != nil {
		return err
	}
	return s.Put(ctx, key, io.NewSectionReader(f, 0, size), size)
}

// link gives f its key. It is false where that needs a copy.
func link(root *os.File, key string, f *os.File, size int64) (bool, error) {
	from, linked := fmt.Sprintf("/proc/self/fd/%d", f.Fd()), false
	err := inParent(root, key, func(parent *os.File, name string) error {
		err := retry(func() error {
			return unix.Linkat(unix.AT_FDCWD, from, int(parent.Fd()), name, unix.AT_SYMLINK_FOLLOW)
		})
		if err != nil {
			return err
		}
		linked = true
		return syncDir(parent)
	})
	switch {
	case linked:
		return true, err
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EXDEV), errors.Is(err, unix.EPERM), cannot(err):
		return false, nil
	case errors.Is(err, unix.EEXIST):
		err := confirm(root, key, size)
		if errors.Is(err, unix.ENOENT) {
			err = unix.EISDIR
		}
		return err == nil, err
	}
	return false, err
}
