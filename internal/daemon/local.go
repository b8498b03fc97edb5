package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"runtime/debug"
	"strconv"
	"sync"

	"github.com/opendsec/dsec/internal/h1"
)

// Local is a transport to a handler of this process. It carries requests and
// answers as a connection would, as headers and bytes, so that both sides are
// the same as where they are two processes; but there is no connection whose
// goroutines would have to be woken for each of them.
//
// A unary call of the Connect protocol without a deadline runs on the caller's
// goroutine: where the caller gives up, the handler is told by its context, and
// RoundTrip returns when the handler does. All other calls run beside the
// caller, who reads what the handler has flushed. A handler that writes faster
// than its caller reads waits for it. Trailers are not carried.
type Local struct {
	Handler http.Handler

	workers workers
}

// RoundTrip implements http.RoundTripper.
func (l *Local) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := req.Context().Err(); err != nil {
		closeBody(req)
		return nil, context.Cause(req.Context())
	}
	// The handler gets the caller's cancellation and nothing else of its context.
	ctx, cancel := context.WithCancel(context.Background())
	unhook := context.AfterFunc(req.Context(), cancel)
	r := l.request(ctx, req)
	if _, timed := req.Context().Deadline(); !timed && req.Header.Get("Content-Type") == "application/proto" {
		defer cancel()
		defer unhook()
		w := &wholeAnswer{header: make(http.Header, 4)}
		if err := serve(l.Handler, w, r); err != nil {
			return nil, err
		}
		if err := req.Context().Err(); err != nil {
			return nil, err
		}
		return answer(req, w.statusOrOK(), w.header, io.NopCloser(&w.body), int64(w.body.Len())), nil
	}
	p := newPipe(cancel)
	p.beforeWait = h1.WaitHook(req.Context())
	unhook2 := context.AfterFunc(req.Context(), func() { p.fail(req.Context().Err()) })
	l.workers.run(func() {
		w := &flowingAnswer{p: p, header: make(http.Header, 4)}
		err := serve(l.Handler, w, r)
		if err == nil {
			w.WriteHeader(http.StatusOK)
			err = io.EOF
		}
		p.end(err)
		unhook()
		unhook2()
		cancel()
	})
	status, header, err := p.head()
	if err == nil {
		err = req.Context().Err()
	}
	if err != nil {
		return nil, err
	}
	return answer(req, status, header, p, -1), nil
}

// request is req as the handler sees it.
func (l *Local) request(ctx context.Context, req *http.Request) *http.Request {
	r := &http.Request{
		Method: req.Method, URL: &url.URL{Path: req.URL.Path, RawQuery: req.URL.RawQuery}, RequestURI: req.URL.RequestURI(),
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: maps.Clone(req.Header), Host: req.URL.Host,
		Body: http.NoBody, ContentLength: req.ContentLength,
	}
	if req.Body != nil && req.Body != http.NoBody {
		r.Body = &body{req.Body, req.Context()}
	}
	return r.WithContext(ctx)
}

// body is a request's. That of a call which was given up has no end: whoever
// gives up may close his side of it as if it were complete.
type body struct {
	io.ReadCloser
	ctx context.Context // the caller's
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF && b.ctx.Err() != nil { // a Read's own EOF
		err = context.Cause(b.ctx)
	}
	return n, err
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

func answer(req *http.Request, status int, header http.Header, body io.ReadCloser, length int64) *http.Response {
	return &http.Response{
		Status: strconv.Itoa(status) + " " + http.StatusText(status), StatusCode: status,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: header, Body: body, ContentLength: length, Request: req,
	}
}

// serve runs the handler. Its panic is the failure of this call, as on a
// connection, and not of the caller's goroutine.
func serve(h http.Handler, w http.ResponseWriter, r *http.Request) (err error) {
	defer func() {
		_ = r.Body.Close()
		if p := recover(); p != nil {
			err = fmt.Errorf("handler of %s panicked: %v\n%s", r.URL.Path, p, debug.Stack())
		}
	}()
	h.ServeHTTP(w, r)
	return nil
}

// wholeAnswer holds an answer until it is whole.
type wholeAnswer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (w *wholeAnswer) Header() http.Header { return w.header }

func (w *wholeAnswer) WriteHeader(status int) {
	if w.status == 0 && status >= 200 {
		w.status = status
	}
}

func (w *wholeAnswer) Write(b []byte) (int, error) { return w.body.Write(b) }

// Flush implements http.Flusher.
func (w *wholeAnswer) Flush() {}

func (w *wholeAnswer) statusOrOK() int {
	if w.status == 0 {
		return http.StatusOK
	}
	return w.status
}

// flowingAnswer gives an answer to its reader as it comes.
type flowingAnswer struct {
	p      *pipe
	header http.Header
	wrote  bool
}

func (w *flowingAnswer) Header() http.Header { return w.header }

func (w *flowingAnswer) WriteHeader(status int) {
	if !w.wrote && status >= 200 {
		w.wrote = true
		w.p.begin(status, w.header.Clone())
	}
}

func (w *flowingAnswer) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.p.write(b)
}

// Flush implements http.Flusher.
func (w *flowingAnswer) Flush() {
	w.WriteHeader(http.StatusOK)
	w.p.flush()
}

// pipeSize is how much of an answer waits for its reader at most.
const pipeSize = 64 << 10

// pipe is the answer of one call on its way from the handler to the caller.
// Each side waits on a condition of its own.
type pipe struct {
	cancel     context.CancelFunc // tells the handler that nobody reads any more
	beforeWait func()             // or nil

	mu       sync.Mutex
	readable sync.Cond
	writable sync.Cond
	status   int // 0: the head is not there yet
	header   http.Header
	shown    bool // the reader may have the head
	buf      []byte
	read     int   // of buf
	flushed  int   // of buf: the reader sees no more
	err      error // after the last byte: io.EOF where the answer is whole
	gone     error // the reader is
}

func newPipe(cancel context.CancelFunc) *pipe {
	p := &pipe{cancel: cancel}
	p.readable.L, p.writable.L = &p.mu, &p.mu
	return p
}

// head waits for the begin of the answer.
func (p *pipe) head() (int, http.Header, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.gone != nil:
			return 0, nil, p.gone
		case p.shown:
			return p.status, p.header, nil
		case p.err != nil:
			return 0, nil, p.err
		}
		p.readable.Wait()
	}
}

// begin sets the head of the answer.
func (p *pipe) begin(status int, header http.Header) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status, p.header = status, header
}

func (p *pipe) write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	total := len(b)
	for {
		if p.gone != nil {
			return total - len(b), p.gone
		}
		n := min(pipeSize-len(p.buf), len(b))
		p.buf = append(p.buf, b[:n]...)
		if b = b[n:]; len(b) == 0 {
			return total, nil
		}
		p.publish()
		p.writable.Wait()
	}
}

func (p *pipe) flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.publish()
}

// publish shows the reader all that was written. The caller holds mu.
func (p *pipe) publish() {
	if !p.shown || p.flushed < len(p.buf) {
		p.shown, p.flushed = p.status != 0, len(p.buf)
		p.readable.Signal()
	}
}

// end ends the answer.
func (p *pipe) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	p.publish()
	p.readable.Signal()
}

// Read implements io.Reader.
func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for told := p.beforeWait == nil; ; {
		switch {
		case p.gone != nil:
			return 0, p.gone
		case p.read < p.flushed:
			n := copy(b, p.buf[p.read:p.flushed])
			if p.read += n; p.read == len(p.buf) {
				p.buf, p.read, p.flushed = p.buf[:0], 0, 0
				p.writable.Signal()
			}
			return n, nil
		case p.err != nil:
			return 0, p.err
		case !told:
			told = true
			p.mu.Unlock()
			p.beforeWait()
			p.mu.Lock()
			continue
		}
		p.readable.Wait()
	}
}

var errBodyClosed = errors.New("body of an answer is closed")

// Close implements io.Closer: the handler learns that nobody reads.
func (p *pipe) Close() error {
	p.fail(errBodyClosed)
	p.cancel()
	return nil
}

// fail breaks the answer off, on both sides.
func (p *pipe) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone == nil {
		p.gone = err
		p.readable.Signal()
		p.writable.Signal()
	}
}
