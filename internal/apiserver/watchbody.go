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

	turn struct { // whose it is
		sync.Mutex
		clients bool      // a read waits for the client
		since   time.Time // else: when the last one returned
		// armed timers are left to fire too early: one set anew at each read
		// would wake the runtime's poller each time.
		armed bool
	}

	mu    sync.Mutex // held while body is read
	ahead []byte     // in buf
	err   error      // after ahead
	buf   [512]byte
}

// watchBody returns body, which calls gone where the client goes away.
func watchBody(body io.Reader, gone context.CancelFunc) *watchedBody {
	b := &watchedBody{body: body, gone: gone}
	b.turn.Lock() // readAhead may run before AfterFunc has returned
	defer b.turn.Unlock()
	b.turn.since, b.turn.armed = time.Now(), true
	b.timer = time.AfterFunc(readAhead, b.readAhead)
	return b
}

// due reports whether the client has been served for long enough.
func (b *watchedBody) due() bool {
	b.turn.Lock()
	defer b.turn.Unlock()
	rest := readAhead - time.Since(b.turn.since)
	b.turn.armed = !b.turn.clients && rest > 0
	if b.turn.armed {
		b.timer.Reset(rest)
	}
	return !b.turn.clients && rest <= 0
}

func (b *watchedBody) readAhead() {
	if !b.due() {
		return
	}
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
	b.turn.Lock()
	b.turn.clients = true
	b.turn.Unlock()
	n, err := b.read(p)
	b.turn.Lock()
	defer b.turn.Unlock()
	b.turn.clients, b.turn.since = false, time.Now()
	if !b.turn.armed {
		b.turn.armed = true
		b.timer.Reset(readAhead)
	}
	return n, err
}

func (b *watchedBody) read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := copy(p, b.ahead); n > 0 {
		b.ahead = b.ahead[n:]
		return n, nil
	}
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.body.Read(p)
	b.err = err
	return n, err
}

// Close leaves it to the server to close the body: that waits for its end, and
// must not before the answer was sent.
func (b *watchedBody) Close() error { return nil }
