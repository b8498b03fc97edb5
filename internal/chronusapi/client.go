package chronusapi

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/rawnet"
)

// Limits of the connections that a Client keeps.
const (
	maxIdleCalls = 2
	maxIdleFiles = 2
	// The other side closes a connection for files after 10 s without a call.
	// Well before that it is not used any more, so that no call meets its end.
	maxIdleTime = 5 * time.Second
)

// Client makes calls to one chronus. It dials as needed and keeps at most two
// idle connections for files, and two for other calls. It is safe for
// concurrent use; each call has a connection of its own.
//
// Every error is a *dsec.Error, or that of the call's context where it was
// canceled. Code unavailable means that nothing was done, or that a stream
// broke: the process may go on, so attach again by its ID. Code
// outcome_unknown means that the connection broke after the request was sent
// and before an answer came.
type Client struct {
	dial      func(context.Context) (net.Conn, error)
	dialFiles func(context.Context) (net.Conn, error) // for FileHandler's calls

	mu     sync.Mutex
	calls  []*conn // idle, oldest first
	files  []*conn // idle, for FileHandler's calls
	closed bool
}

// NewClient returns a client that makes its connections by dial.
func NewClient(dial func(context.Context) (net.Conn, error)) *Client {
	return &Client{dial: dial, dialFiles: dial}
}

// WithFiles has the calls of FileHandler made over connections that dial makes, for
// a sandbox whose files are served by another process than its chronus. It returns
// c, and is called before the first of these calls.
func (c *Client) WithFiles(dial func(context.Context) (net.Conn, error)) *Client {
	c.dialFiles = dial
	return c
}

// Close closes the idle connections. Running calls go on, and theirs are
// closed when they end.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, list := range [][]*conn{c.calls, c.files} {
		for _, cn := range list {
			cn.nc.Close()
		}
	}
	c.calls, c.files = nil, nil
	return nil
}

// pool is where connections for calls of this type wait, and how many may.
// The caller holds c.mu.
func (c *Client) pool(typ uint8) (list *[]*conn, limit int) {
	if isFileCall(typ) {
		return &c.files, maxIdleFiles
	}
	return &c.calls, maxIdleCalls
}

// takeIdle returns the connection that was idle for the shortest time of those that
// speak a version that has the call, or nil.
func (c *Client) takeIdle(typ uint8) *conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	list, _ := c.pool(typ)
	for i, cn := range slices.Backward(*list) {
		if cn.version >= versionOf(typ) {
			*list = slices.Delete(*list, i, i+1)
			return cn
		}
	}
	return nil
}

// take returns an idle connection that still looks alive, or a new one.
func (c *Client) take(ctx context.Context, typ uint8) (cn *conn, reused bool, err error) {
	for {
		cn := c.takeIdle(typ)
		if cn == nil {
			break
		}
		if (!isFileCall(typ) || time.Since(cn.idleSince) < maxIdleTime) && cn.r.Buffered() == 0 && rawnet.Peek(cn.nc) == rawnet.Quiet {
			return cn, true, nil
		}
		cn.nc.Close()
	}
	dial := c.dial
	if isFileCall(typ) {
		dial = c.dialFiles
	}
	nc, err := dial(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, false, context.Cause(ctx)
		}
		if _, ok := errors.AsType[*dsec.Error](err); ok {
			return nil, false, err
		}
		return nil, false, &dsec.Error{Code: dsec.CodeUnavailable, Message: "chronus cannot be reached", Err: err}
	}
	cn = newConn(nc)
	cn.version = versionOf(typ)
	cn.out = append(append(cn.out, preface[:]...), cn.version) // goes out with the first request
	return cn, false, nil
}

// put keeps a connection for the next call, in place of the one that was idle
// for the longest time if there are enough.
func (c *Client) put(typ uint8, cn *conn) {
	cn.idleSince = time.Now()
	c.mu.Lock()
	if !c.closed {
		list, limit := c.pool(typ)
		*list = append(*list, cn)
		if cn = nil; len(*list) > limit {
			cn = (*list)[0]
			*list = slices.Delete(*list, 0, 1)
		}
	}
	c.mu.Unlock()
	if cn != nil {
		cn.nc.Close()
	}
}

// dropFiles closes the idle connections for files: their server, which was killed,
// closes them one after the other, and each would cost a try.
func (c *Client) dropFiles() {
	c.mu.Lock()
	list := c.files
	c.files = nil
	c.mu.Unlock()
	for _, cn := range list {
		cn.nc.Close()
	}
}

// call is one call under way. It owns its connection until end.
type call struct {
	c    *Client
	typ  uint8
	cn   *conn
	ctx  context.Context
	stop func() bool
	// lost is what a connection that breaks before the first answer means.
	lost dsec.Code
	once sync.Once
}

// begin sends a request. A request that could not be written whole was not
// accepted, so on a connection that had been idle it is sent once more; one for
// files also on a new one, whose server may have been ending.
func (c *Client) begin(ctx context.Context, typ uint8, payload []byte, lost dsec.Code) (*call, error) {
	if len(payload) > maxMessage {
		return nil, dsec.Invalid("command", "want at most %d bytes in all", maxMessage)
	}
	for n := 1; ; n++ {
		cn, reused, err := c.take(ctx, typ)
		if err != nil {
			return nil, err
		}
		k := &call{c: c, typ: typ, cn: cn, ctx: ctx, lost: lost}
		k.stop = context.AfterFunc(ctx, k.giveUp)
		cn.put(typ, payload)
		if err = cn.flush(); err == nil {
			return k, nil
		}
		k.end(false)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if isFileCall(typ) {
			c.dropFiles()
		}
		if n == fileTries || !isFileCall(typ) && (!reused || n > 1) {
			return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: "chronus closed the connection", Err: err}
		}
	}
}

// giveUp closes the connection of a call whose context has ended. What is sent
// before cannot come into the middle of the request: each is one write.
func (k *call) giveUp() {
	if k.typ == callRunCommand && context.Cause(k.ctx) == ErrInterrupt { // wrapped it is another's
		_ = k.cn.nc.SetWriteDeadline(time.Now().Add(giveUpTimeout))
		_, _ = k.cn.nc.Write(abortMessage[:])
	}
	k.cn.nc.Close()
}

// giveUpTimeout is how long chronus may take to take what has a command
// interrupted, where its request is still being sent.
const giveUpTimeout = 5 * time.Second

var abortMessage = [headerLen]byte{frameAbort}

// end gives the connection back, or closes it where it is not clean. Only the
// first call counts.
func (k *call) end(clean bool) {
	k.once.Do(func() {
		switch {
		case !k.stop(): // ctx ended: giveUp closes it
		case clean:
			k.c.put(k.typ, k.cn)
		default:
			k.cn.nc.Close() // an answer is outstanding
		}
	})
}

// next reads one message of the answer. After frameResult or an error the
// call is over.
func (k *call) next() (typ uint8, d *dec, err error) {
	typ, payload, err := k.cn.read()
	if err != nil {
		return 0, nil, k.broken(err)
	}
	switch typ {
	case frameResult:
		return typ, &dec{b: payload}, nil
	case frameError:
		err := (&dec{b: payload}).error()
		if err == errMalformed {
			return 0, nil, k.broken(err)
		}
		k.end(dsec.CodeOf(err) != dsec.CodeUnsupported) // of the version, which ends the connection too
		return 0, nil, err
	case frameEvent, frameData:
		k.lost = dsec.CodeUnavailable
		return typ, &dec{b: payload}, nil
	}
	return 0, nil, k.broken(errMalformed)
}

// broken ends the call for a connection that cannot be used any more.
func (k *call) broken(err error) error {
	k.end(false)
	if k.ctx.Err() != nil {
		return context.Cause(k.ctx)
	}
	if isFileCall(k.typ) {
		k.c.dropFiles()
	}
	if err == errMalformed {
		return &dsec.Error{Code: k.lost, Message: "chronus sent a malformed message", Err: err}
	}
	if err == io.EOF {
		// Nobody who asks errors.Is(err, io.EOF) may take it for a good end.
		err = io.ErrUnexpectedEOF
	}
	return &dsec.Error{Code: k.lost, Message: "the connection to chronus broke", Err: brokenError{err}}
}

// brokenError marks the error of a connection that broke in a call.
type brokenError struct{ error }

func (e brokenError) Unwrap() error { return e.error }

// fileTries is how often a call for files is sent that could not be sent whole,
// and, where it only reads, made whose connection broke before there was an
// answer: what serves files may be killed for want of memory while its connections
// are still open, and then another serves the next.
const fileTries = 3

// retry makes a call, again if it only reads and nothing was answered.
func retry(typ uint8, call func() error) error {
	for n := 1; ; n++ {
		err := call()
		var broken brokenError
		if !isFileRead(typ) || n == fileTries || !errors.As(err, &broken) {
			return err
		}
	}
}

// simple makes a call whose answer is one result.
func (c *Client) simple(ctx context.Context, typ uint8, payload []byte, lost dsec.Code, result func(*dec)) error {
	return retry(typ, func() error {
		k, err := c.begin(ctx, typ, payload, lost)
		if err != nil {
			return err
		}
		return k.finish(result)
	})
}

// finish reads the result of a call that has no other answer.
func (k *call) finish(result func(*dec)) error {
	typ, d, err := k.next()
	if err != nil {
		return err
	}
	if typ != frameResult {
		return k.broken(errMalformed)
	}
	if result != nil {
		result(d)
	}
	if !d.ok() {
		return k.broken(errMalformed)
	}
	k.end(true)
	return nil
}

// Events is the stream of one process's events. Next must not be called concurrently;
// Close may be called at any time.
type Events struct {
	k     *call
	first *Event // read ahead by stream
	err   error  // what Next returns from now on
}

// stream opens a call that answers with events, and waits for the first, so
// that a call that started nothing returns its error here.
func (c *Client) stream(ctx context.Context, typ uint8, payload []byte, lost dsec.Code) (*Events, error) {
	k, err := c.begin(ctx, typ, payload, lost)
	if err != nil {
		return nil, err
	}
	s := &Events{k: k}
	ev, err := s.Next()
	if err == io.EOF {
		err = k.broken(errMalformed) // no stream is empty
	}
	if err != nil {
		return nil, err
	}
	s.first = &ev
	return s, nil
}

// Ready reports whether Next has something to return at once. It must not be
// called at the same time as Next.
func (s *Events) Ready() bool { return s.first != nil || s.err != nil || s.k.cn.ready() }

// Next returns the next event. The error is io.EOF after the stream's end:
// after EventExited, or after EventStarted of a detached start. Any other
// error says nothing about the process.
func (s *Events) Next() (Event, error) {
	if s.first != nil {
		ev := *s.first
		s.first = nil
		return ev, nil
	}
	if s.err != nil {
		return Event{}, s.err
	}
	typ, d, err := s.k.next()
	if err != nil {
		s.err = err
		return Event{}, err
	}
	switch typ {
	case frameResult:
		if !d.ok() {
			break
		}
		s.k.end(true)
		s.err = io.EOF
		return Event{}, io.EOF
	case frameEvent:
		if ev := d.event(); d.ok() {
			return ev, nil
		}
	}
	s.err = s.k.broken(errMalformed)
	return Event{}, s.err
}

// Close gives the stream up. Where it has not ended, the connection is closed,
// which is what a command without Detach or Orphan lives by.
func (s *Events) Close() error {
	s.k.end(false)
	return nil
}
