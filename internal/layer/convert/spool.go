package convert

import (
	"errors"
	"sync"
	"syscall"

	"github.com/opendsec/dsec"
)

// spool is the scratch file: appended to, read at any place, by several goroutines
// at once. Both are buffered, because archives are full of small files in the order
// in which they are wanted again.
type spool struct {
	mu  sync.Mutex
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

// Write implements io.Writer.
func (s *spool) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
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

// next is where the next byte that is written will be.
func (s *spool) next() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.off
}

// ReadAt implements io.ReaderAt. A small read next to the one before fills a window.
func (s *spool) ReadAt(p []byte, off int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	end := off + int64(len(p))
	if end > s.off-int64(len(s.buf)) {
		if err := s.flush(); err != nil {
			return 0, err
		}
	}
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
		s.window = s.window[:min(int64(cap(s.window)), s.off-int64(len(s.buf))-off)]
		s.windowOff = off
		if _, err := s.f.ReadAt(s.window, off); err != nil {
			s.window = s.window[:0]
			return 0, err
		}
	}
	return copy(p, s.window[off-s.windowOff:]), nil
}

// diskError types what the node's disk says; the archive is not at fault.
func diskError(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "the layer store's disk is full", Err: err}
	}
	return err
}
