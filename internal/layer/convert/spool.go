package convert

import (
	"bytes"
	"errors"
	"io"
	"syscall"

	"github.com/opendsec/dsec"
)

// spool is the scratch file: appended to, read at any place.
type spool struct {
	f   File
	off int64
}

func (s *spool) Write(p []byte) (int, error) {
	n, err := s.f.WriteAt(p, s.off)
	s.off += int64(n)
	return n, diskError(err)
}

func (s *spool) section(off, size int64) *io.SectionReader {
	return io.NewSectionReader(s.f, off, size)
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
