package apiserver

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// readAhead is how long a stream's client says nothing before its next words
// are waited for.
const readAhead = 50 * time.Millisecond

// watchedBody is the body of a stream over HTTP/1.1, where nothing but a read
// tells that the client has gone: so while a command is served it is read ahead.
type watchedBody struct {
	body  io.Reader
	gone  context.CancelFunc
	timer *time.Timer // begins to read ahead

	mu    sync.Mutex // held while body is read
	ahead []byte     // in buf
	err   error      // after ahead
	buf   [512]byte
}

// watchBody returns body, which calls gone where the client goes away.
func watchBody(body io.Reader, gone context.CancelFunc) *watchedBody {
	b := &watchedBody{body: body, gone: gone}
	b.timer = time.AfterFunc(readAhead, b.readAhead)
	return b
}

func (b *watchedBody) readAhead() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ahead) > 0 || b.err != nil {
		return
	}
	n, err := b.body.Read(b.buf[:])
	b.ahead, b.err = b.buf[:n], err
	// A deadline is the server's own: it stops, and its commands go on.
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrDeadlineExceeded) {
		b.gone()
	}
}

// Read implements io.Reader.
func (b *watchedBody) Read(p []byte) (int, error) {
	b.timer.Stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ahead) > 0 || b.err != nil {
		n := copy(p, b.ahead)
		b.ahead = b.ahead[n:]
		if len(b.ahead) > 0 || n > 0 {
			b.timer.Reset(readAhead)
			return n, nil
		}
		return 0, b.err
	}
	n, err := b.body.Read(p)
	if err != nil {
		b.err = err
		return n, err
	}
	b.timer.Reset(readAhead)
	return n, nil
}

// Close leaves it to the server to close the body: that waits for its end, and
// must not before the answer was sent.
func (b *watchedBody) Close() error { return nil }
