package convert

import (
	"bytes"
	"errors"
	"io"
	"syscall"

	"github.com/opendsec/dsec"
)

// spool is the scratch file: appended to, read at any place. Both are buffered,
// because archives are full of small files in the order in which they are
// wanted again.
type spool struct {
	f   File
	off int64  // where the next byte goes
	buf []byte // the last bytes before off, not yet in f

	window    []byte // of f, from windowOff
	windowOff int64
	readEnd   int64 // of the last read
}

const spoolBuffer = 1 << 20

func newSpool(f File) *spool {
	return &spool{f: f, buf: make([]byte, 0, spoolBuffer)}
}

func (s *spool) Write(p []byte) (int, error) {
	if len(s.buf)+len(p) > cap(s.buf) {
		if err := s.flush(); err != nil {
			return 0, err
		}
	}
	if len(p) < cap(s.buf) {
		s.buf = append(s.buf, p...)
	} else if _, err := s.f.WriteAt(p, s.off); err != nil {
		return 0, diskError(err)
	}
	s.off += int64(len(p))
	return len(p), nil
}

func (s *spool) flush() error {
	if len(s.buf) == 0 {
		return nil
	}
	_, err := s.f.WriteAt(s.buf, s.off-int64(len(s.buf)))
	s.buf = s.buf[:0]
	return diskError(err)
}

// ReadAt implements io.ReaderAt for one reader at a time. A small read next to
// the one before fills a window.
func (s *spool) ReadAt(p []byte, off int64) (int, error) {
	if err := s.flush(); err != nil {
		return 0, err
	}
	end := off + int64(len(p))
	near := off >= s.readEnd && off-s.readEnd < spoolBuffer/8
	s.readEnd = end
	inside := off >= s.windowOff && end <= s.windowOff+int64(len(s.window))
	if !inside && (!near || len(p) > spoolBuffer/2 || end > s.off) {
		return s.f.ReadAt(p, off)
	}
	if !inside {
		if s.window == nil {
			s.window = make([]byte, spoolBuffer)
		}
		s.window = s.window[:min(int64(cap(s.window)), s.off-off)]
		s.windowOff = off
		if _, err := s.f.ReadAt(s.window, off); err != nil {
			s.window = s.window[:0]
			return 0, err
		}
	}
	return copy(p, s.window[off-s.windowOff:]), nil
}

func (s *spool) section(off, size int64) *io.SectionReader {
	return io.NewSectionReader(s, off, size)
}

// diskError types what the node's disk says; the archive is not at fault.
func diskError(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "the layer store's disk is full", Err: err}
	}
	return err
}

// imageFile is the image as go-erofs wants it: written in order, buffered,
// with long runs of zeros left as holes of the file.
type imageFile struct {
	f    File
	buf  []byte
	off  int64 // of buf's start in the file
	size int64
}

const (
	imageBuffer = 1 << 20
	holeSize    = 64 << 10 // runs of zeros shorter than that are written
)

var zeros [holeSize]byte

func newImageFile(f File) *imageFile {
	return &imageFile{f: f, buf: make([]byte, 0, imageBuffer)}
}

func (w *imageFile) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		n := copy(w.buf[len(w.buf):cap(w.buf)], p)
		w.buf = w.buf[:len(w.buf)+n]
		p = p[n:]
		if len(w.buf) == cap(w.buf) {
			if err := w.flush(); err != nil {
				return total - len(p), err
			}
		}
	}
	return total, nil
}

func (w *imageFile) flush() error {
	buf, off := w.buf, w.off
	w.off += int64(len(buf))
	w.size = max(w.size, w.off)
	w.buf = w.buf[:0]
	for len(buf) > 0 {
		run := 0 // bytes to write before the next hole
		for run < len(buf) && !isHole(buf[run:]) {
			run = min(run+holeSize, len(buf))
		}
		if run > 0 {
			if _, err := w.f.WriteAt(buf[:run], off); err != nil {
				return diskError(err)
			}
		}
		for run < len(buf) && isHole(buf[run:]) {
			run += holeSize
		}
		buf, off = buf[run:], off+int64(run)
	}
	return nil
}

func isHole(b []byte) bool { return len(b) >= holeSize && bytes.Equal(b[:holeSize], zeros[:]) }

// Seek is called once, to write the superblock when all else is written.
func (w *imageFile) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekStart {
		return 0, errors.New("imageFile: only SeekStart")
	}
	if err := w.flush(); err != nil {
		return 0, err
	}
	w.off = off
	return off, nil
}

// close writes what is buffered and sets the file's size.
func (w *imageFile) close() error {
	if err := w.flush(); err != nil {
		return err
	}
	return diskError(w.f.Truncate(w.size))
}
