package journal

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// reserve is how much is allocated beyond the end of the file: records of a
// thousand sandboxes, so that each that lives can be ended on a full disk.
const reserve = 1 << 20

// file is one append-only file with space allocated ahead.
type file struct {
	f         *os.File
	size      int64
	allocated int64 // bytes from the start that are sure to have blocks
	noReserve bool  // the file system cannot allocate ahead
}

const tmpName = fileName + ".tmp"

// prepare writes a new journal file in dir, under a temporary name, and syncs
// it: once installed, a crash finds the old or the new one, whole.
func prepare(dir string, content []byte) (*file, error) {
	tmp := filepath.Join(dir, tmpName)
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	out := &file{f: f, size: int64(len(content))}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close(), removeIfThere(tmp))
	}
	out.allocate()
	return out, nil
}

// install puts a prepared file in the place of the old one.
func (f *file) install(dir string) error {
	return os.Rename(filepath.Join(dir, tmpName), filepath.Join(dir, fileName))
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// append writes b after the end in one call.
func (f *file) append(b []byte) error {
	if f.size+int64(len(b)) > f.allocated-reserve/2 {
		f.allocate()
	}
	// os.File.WriteAt tries again after a short write and then does not tell
	// how much of it went through.
	n, err := pwrite(f.f, b, f.size)
	if err == nil && n < len(b) {
		err = unix.ENOSPC // the one cause of a short write to a regular file
	}
	if err != nil {
		// Nothing may be left of half a record. Cutting the file would give
		// the blocks allocated ahead away, so what was written becomes zeros,
		// which read as a torn tail until the next record takes their place.
		if n > 0 {
			if _, werr := f.f.WriteAt(make([]byte, n), f.size); werr != nil {
				return &brokenError{errors.Join(err, werr)}
			}
		}
		return err
	}
	f.size += int64(n)
	return nil
}

func pwrite(f *os.File, b []byte, off int64) (int, error) {
	for {
		n, err := unix.Pwrite(int(f.Fd()), b, off)
		if !errors.Is(err, unix.EINTR) {
			return max(n, 0), err
		}
	}
}

// brokenError means that the file may end in half a record.
type brokenError struct{ err error }

func (e *brokenError) Error() string { return e.err.Error() }
func (e *brokenError) Unwrap() error { return e.err }

// allocate asks for blocks up to reserve bytes beyond the end. Where there is
// no room the file keeps what it has.
func (f *file) allocate() {
	err := unix.Fallocate(int(f.f.Fd()), unix.FALLOC_FL_KEEP_SIZE, f.size, reserve)
	switch {
	case err == nil:
		f.allocated = f.size + reserve
	case errors.Is(err, unix.EOPNOTSUPP):
		f.noReserve = true
	}
}

func (f *file) reserved() bool {
	if f.noReserve {
		return true // nothing better to tell
	}
	if f.allocated-f.size < reserve/2 {
		f.allocate()
	}
	return f.allocated-f.size >= reserve/2
}

// close of a nil file does nothing.
func (f *file) close() error {
	if f == nil {
		return nil
	}
	return f.f.Close()
}
