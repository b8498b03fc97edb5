package chronus

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// stdin is the input of a process: the write end of a pipe, or a terminal.
type stdin struct {
	writing sync.Mutex // held by one writer
	mu      sync.Mutex
	f       *os.File // nil: there is none, or it has ended
	pty     bool
}

// feed writes the first input and, unless more may come, ends it. What the
// pipe does not take at once is written while the process runs; a WriteStdin
// waits for that.
func (s *stdin) feed(data []byte, open bool) {
	f := s.file()
	if f == nil {
		return // the process has ended already
	}
	s.writing.Lock()
	n := 0
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { n, _ = syscall.Write(int(fd), data) })
	}
	data = data[max(n, 0):]
	end := func() {
		if !open {
			s.end()
		}
		s.writing.Unlock()
	}
	if len(data) == 0 {
		end()
		return
	}
	go func() {
		_, _ = f.Write(data) // fails where the process closed its input
		end()
	}()
}

// end ends the input: a pipe is closed, a terminal gets its end-of-file character.
func (s *stdin) end() {
	if f := s.file(); s.pty && f != nil {
		_, _ = f.Write([]byte{4})
		return
	}
	s.close()
}

// close gives the descriptor up, and wakes a blocked writer.
func (s *stdin) close() {
	s.mu.Lock()
	f := s.f
	s.f = nil
	s.mu.Unlock()
	if f != nil && !s.pty {
		f.Close()
	}
}

func (s *stdin) file() *os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.f
}

// WriteStdin implements chronusapi.Handler.
func (c *Chronus) WriteStdin(ctx context.Context, id uint64, data []byte, eof bool) (int, error) {
	p, err := c.lookup(id)
	if err != nil {
		return 0, err
	}
	s := &p.stdin
	s.writing.Lock()
	defer s.writing.Unlock()
	f := s.file()
	if f == nil {
		return 0, stdinClosed(id)
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	n, err := f.Write(data)
	if !stop() {
		_ = f.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		if eof {
			s.end()
		}
		return n, nil
	case ctx.Err() != nil:
		return n, ctx.Err()
	case errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, syscall.EIO):
		s.close()
		return n, stdinClosed(id)
	}
	return n, &dsec.Error{Code: dsec.CodeInternal, Field: "stdin", Message: "not written: " + err.Error(), Err: err}
}

func stdinClosed(id uint64) error {
	return &dsec.Error{Code: dsec.CodeConflict, Field: "stdin",
		Message: "the input of process " + utoa(id) + " is closed, or was not opened by open_stdin"}
}

// Resize implements chronusapi.Handler.
func (c *Chronus) Resize(_ context.Context, id uint64, size chronusapi.WindowSize) error {
	p, err := c.lookup(id)
	if err != nil {
		return err
	}
	if p.pty == nil {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "pty", Message: "process " + utoa(id) + " has no terminal"}
	}
	if err := setSize(p.pty, size); err != nil {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "pty", Message: "the terminal of process " + utoa(id) + " is closed", Err: err}
	}
	return nil
}
