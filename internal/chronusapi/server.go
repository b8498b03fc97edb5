package chronusapi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/rawnet"
)

// Serve answers the calls of one connection, one after the other, until the
// client goes away, a malformed message comes or ctx is canceled; then it
// closes the connection. The error is nil where the client closed it between
// two calls.
//
// The context of a call is canceled when its connection is gone.
//
// Calls for files are served where h is a FileHandler too.
func Serve(ctx context.Context, nc net.Conn, h Handler) error {
	files, _ := h.(FileHandler)
	s := &server{conn: newConn(nc), h: h, files: files}
	defer nc.Close()
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	if err := s.readPreface(); err != nil {
		return ignoreEOF(err)
	}
	for {
		typ, payload, err := s.read()
		if err != nil {
			return ignoreEOF(err)
		}
		if err := s.serve(ctx, typ, &dec{b: payload}); err != nil {
			return err
		}
	}
}

func ignoreEOF(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

// ServeFiles serves a connection of a process that serves files and nothing
// else: any other call is a malformed message. It ends as Serve does, and, with a
// nil error, when no call came for idle.
func ServeFiles(ctx context.Context, nc net.Conn, h FileHandler, idle time.Duration) error {
	s := &server{conn: newConn(nc), files: h}
	defer nc.Close()
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	for greeted := false; ; greeted = true {
		if err := s.awaitCall(idle); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			}
			return ignoreEOF(err)
		}
		if !greeted {
			if err := s.readPreface(); err != nil {
				return ignoreEOF(err)
			}
			continue
		}
		typ, payload, err := s.read()
		if err != nil {
			return ignoreEOF(err)
		}
		if !isFileCall(typ) {
			return errMalformed
		}
		if err := s.serveFile(ctx, typ, &dec{b: payload}); err != nil {
			return err
		}
	}
}

// awaitCall waits until something comes, for as long as idle. What came is no less
// there where the process was frozen meanwhile and the time is over by now.
func (s *server) awaitCall(idle time.Duration) error {
	for {
		if err := s.nc.SetReadDeadline(time.Now().Add(idle)); err != nil {
			return err
		}
		_, err := s.r.Peek(1)
		if err == nil {
			return s.nc.SetReadDeadline(time.Time{})
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || rawnet.Peek(s.nc) != rawnet.Bytes {
			return err
		}
	}
}

type server struct {
	*conn
	h     Handler
	files FileHandler // nil where files are not served
}

// readPreface checks name and version.
func (s *server) readPreface() error {
	var p [len(preface) + 1]byte
	if _, err := io.ReadFull(s.r, p[:]); err != nil {
		return err
	}
	if !bytes.Equal(p[:4], preface[:]) {
		return errMalformed
	}
	if p[4] != Version && p[4] != Version-1 {
		err := dsec.Errorf(dsec.CodeUnsupported, "chronus speaks versions %d and %d, not %d", Version-1, Version, p[4])
		return errors.Join(err, s.answer(err, nil))
	}
	return nil
}

// answer ends a call. The result is encoded only where err is nil.
func (s *server) answer(err error, result func(*enc)) error {
	var e enc
	if err != nil {
		e.error(err)
		s.put(frameError, e.b)
	} else {
		if result != nil {
			result(&e)
		}
		s.put(frameResult, e.b)
	}
	return s.flush()
}

// watched runs f with a context that is canceled when the client goes away.
// While a call runs the client sends nothing, so a read can only end by that, or
// by what has a command interrupted: then the cause is ErrInterrupt. Its error is
// ctx's, as the server ends, or ErrInterrupt, after which the client reads no
// more: what f said was said of that end and is not an answer.
func (s *server) watched(ctx context.Context, f func(context.Context)) error {
	call, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b, err := s.r.Peek(1)
		switch {
		case err == nil && b[0] == frameAbort:
			cancel(ErrInterrupt)
		case err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
			cancel(nil)
		}
	}()
	f(call)
	_ = s.nc.SetReadDeadline(time.Unix(1, 0)) // wakes the reader; a broken connection shows at the next read
	<-done
	_ = s.nc.SetReadDeadline(time.Time{})
	if context.Cause(call) == ErrInterrupt { // as it was given above
		return ErrInterrupt
	}
	return ctx.Err()
}

// stream runs a call that answers with events.
func (s *server) stream(ctx context.Context, f func(context.Context, Sink) error) error {
	var broken error
	var err error
	ended := s.watched(ctx, func(ctx context.Context) {
		err = f(ctx, func(ev Event) error {
			if broken == nil {
				broken = s.event(&ev)
			}
			return broken
		})
	})
	if err := cmp.Or(broken, ended); err != nil {
		return err
	}
	return s.answer(err, nil)
}

func (s *server) event(ev *Event) error {
	var e enc
	var head [64]byte
	e.b = head[:0]
	e.eventHead(ev)
	if ev.Kind == EventOutput {
		return s.putData(frameEvent, e.b, ev.Data)
	}
	s.put(frameEvent, e.b)
	if ev.Kind == EventExited {
		return nil // goes out with the answer that follows
	}
	return s.flush()
}

// dataWriter sends what a handler writes as data frames.
type dataWriter struct {
	s   *server
	err error
}

func (w *dataWriter) Write(p []byte) (n int, err error) {
	for len(p) > 0 && w.err == nil {
		chunk := p[:min(len(p), MaxChunk)]
		if w.err = w.s.putData(frameData, nil, chunk); w.err == nil {
			n += len(chunk)
			p = p[len(chunk):]
		}
	}
	return n, w.err
}

func (s *server) send(ctx context.Context, f func(context.Context, io.Writer) error) error {
	w := &dataWriter{s: s}
	var err error
	ended := s.watched(ctx, func(ctx context.Context) { err = f(ctx, w) })
	if err := cmp.Or(w.err, ended); err != nil {
		return err
	}
	return s.answer(err, nil)
}

// errSource is what a handler reads where the client's own source failed.
var errSource = errors.New("chronusapi: the client gave up")

// dataReader is the client's data as a handler reads it.
type dataReader struct {
	s    *server
	rest []byte
	err  error // io.EOF after the end, errSource after an abort, else the connection's
}

func (r *dataReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.err != nil {
			return 0, r.err
		}
		r.next()
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *dataReader) next() {
	typ, payload, err := r.s.read()
	switch {
	case err == io.EOF:
		r.err = io.ErrUnexpectedEOF
	case err != nil:
		r.err = err
	case typ == frameData && len(payload) > 0 && len(payload) <= MaxChunk:
		r.rest = payload
	case typ == frameEnd && len(payload) == 0:
		r.err = io.EOF
	case typ == frameAbort && len(payload) == 0:
		r.err = errSource
	default:
		r.err = errMalformed
	}
}

// receive runs a call that the client sends data to. A call that ends early
// is answered at once; what the client sent until it saw that is skipped.
func (s *server) receive(f func(io.Reader) error, result func(*enc)) error {
	r := &dataReader{s: s}
	callErr := f(r)
	if callErr == nil && r.err != io.EOF {
		// The handler saw its own end of the data, as a tar has one.
		_, callErr = io.Copy(io.Discard, r)
	}
	if r.err == nil || r.err == io.EOF || r.err == errSource {
		if err := s.answer(callErr, result); err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, r)
	}
	if r.err != io.EOF && r.err != errSource {
		return r.err
	}
	return nil
}
