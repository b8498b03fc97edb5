package convert

import "io"

// windows are the parts of a file that were read or changed last, in memory. A small
// read or write is not one of the file.
type windows struct {
	f    File
	all  [windowCount]window
	tick int64
}

type window struct {
	buf   []byte // nil: not used yet
	off   int64
	end   int64 // of the file in the window
	dirty bool
	used  int64 // when
}

const (
	// An image's inodes, directories that are among the data of files, and its end.
	windowCount = 4
	windowSize  = 64 << 10
)

// ReadAt fills p. What is behind the file's end is zeros.
func (w *windows) ReadAt(p []byte, off int64) error {
	return w.each(p, off, func(v *window, part []byte, at int64) { copy(part, v.buf[at:]) })
}

// WriteAt is not in the file before flush.
func (w *windows) WriteAt(p []byte, off int64) error {
	return w.each(p, off, func(v *window, part []byte, at int64) {
		v.end = max(v.end, at+int64(copy(v.buf[at:], part)))
		v.dirty = true
	})
}

func (w *windows) each(p []byte, off int64, f func(v *window, part []byte, at int64)) error {
	for len(p) > 0 {
		v, err := w.show(off)
		if err != nil {
			return err
		}
		at := off - v.off
		n := min(int64(len(p)), windowSize-at)
		f(v, p[:n], at)
		p, off = p[n:], off+n
	}
	return nil
}

// show gives the window that off is in.
func (w *windows) show(off int64) (*window, error) {
	w.tick++
	oldest := &w.all[0]
	for i := range w.all {
		v := &w.all[i]
		if v.buf != nil && off >= v.off && off < v.off+windowSize {
			v.used = w.tick
			return v, nil
		}
		if v.used < oldest.used {
			oldest = v
		}
	}
	if err := w.write(oldest); err != nil {
		return nil, err
	}
	v := window{buf: oldest.buf, off: off / windowSize * windowSize, used: w.tick}
	*oldest = window{}
	if v.buf == nil {
		v.buf = make([]byte, windowSize)
	}
	n, err := w.f.ReadAt(v.buf, v.off)
	if err != nil && err != io.EOF {
		return nil, err
	}
	clear(v.buf[n:])
	v.end = int64(n)
	*oldest = v
	return oldest, nil
}

func (w *windows) write(v *window) error {
	if !v.dirty {
		return nil
	}
	v.dirty = false
	_, err := w.f.WriteAt(v.buf[:v.end], v.off)
	return err
}

// flush writes what was changed.
func (w *windows) flush() error {
	for i := range w.all {
		if err := w.write(&w.all[i]); err != nil {
			return err
		}
	}
	return nil
}
