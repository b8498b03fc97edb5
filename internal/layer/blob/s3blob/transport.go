package s3blob

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"time"
)

var (
	errStalled = errors.New("nothing moved in time")
	errTooLong = errors.New("an answer that is too long")
)

// What the SDK reads into memory is bounded: all answers but objects.
const (
	maxAnswer = 4 << 20 // a list of 1,000 keys is a tenth of it
	maxError  = 64 << 10
)

// completeStall is how long the server may put parts together.
const completeStall = 5 * time.Minute

// client does one request, and gives it up once nothing has moved for a while,
// however long all of it takes. It follows no redirects, which would take what is
// signed to another host.
type client struct {
	base  http.RoundTripper
	stall time.Duration
}

// Do implements the SDK's HTTPClient.
func (c *client) Do(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	w := &watch{stall: c.stall, cancel: cancel, ctx: ctx}
	if req.Method == http.MethodPost && req.URL.Query().Has("uploadId") {
		w.stall = max(w.stall, completeStall)
	}
	w.timer = time.AfterFunc(w.stall, func() { cancel(errStalled) })
	isObject := req.Header.Get("Range") != ""
	req = req.WithContext(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		req.Body, req.GetBody = &body{ReadCloser: req.Body, watch: w}, nil
	}
	resp, err := c.base.RoundTrip(req)
	if err != nil {
		err = w.why(err)
		w.end()
		return nil, err
	}
	b := &body{ReadCloser: resp.Body, watch: w, last: true, left: maxAnswer}
	switch {
	case resp.StatusCode >= 300:
		b.left = maxError
	case isObject:
		b.left = math.MaxInt64
	}
	resp.Body = b
	return resp, nil
}

// watch ends a request that stalls.
type watch struct {
	stall  time.Duration
	timer  *time.Timer
	ctx    context.Context // of the request that it watches
	cancel context.CancelCauseFunc
}

// why is what ended the request.
func (w *watch) why(err error) error {
	if context.Cause(w.ctx) == errStalled {
		return errStalled
	}
	return err
}

func (w *watch) end() {
	w.timer.Stop()
	w.cancel(nil)
}

// body is what a request sends or is answered with.
type body struct {
	io.ReadCloser
	watch *watch
	last  bool  // the request is over with it
	left  int64 // bytes that may come, of an answer
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.watch.timer.Reset(b.watch.stall)
	}
	if !b.last {
		return n, err
	}
	if b.left -= int64(n); b.left < 0 {
		return 0, errTooLong
	}
	if err != nil && err != io.EOF {
		err = b.watch.why(err)
	}
	return n, err
}

// Close implements io.Closer.
func (b *body) Close() error {
	err := b.ReadCloser.Close()
	if b.last {
		b.watch.end()
	}
	return err
}
