package apiserver

import (
	"context"
	"errors"
	"io"
	"iter"
	"net/http"
	"os"
	"sync"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// How long a client may take: to send the whole body of a call that has one
// message, and between two reads of an upload. Streams of input have no such
// bound, because a person may type into them.
const (
	unaryBodyTimeout  = 30 * time.Second
	uploadReadTimeout = 2 * time.Minute
	// For a client that goes on sending after the answer, and does not pause.
	drainTimeout = 10 * time.Second
	maxDrain     = 256 << 20
)

type bodyRule struct {
	timeout time.Duration // zero: none
	each    bool          // from each read on, not from the first
}

// bodyRules is read from the API's descriptors, so that a new route has one.
var bodyRules = func() map[string]bodyRule {
	rules := map[string]bodyRule{}
	for route := range Routes() {
		switch {
		case !route.ClientStreaming:
			rules[route.Procedure] = bodyRule{timeout: unaryBodyTimeout}
		case route.Procedure == dsecv1connect.ProcessServiceStreamStdinProcedure:
			rules[route.Procedure] = bodyRule{each: true}
		case !route.ServerStreaming:
			rules[route.Procedure] = bodyRule{timeout: uploadReadTimeout, each: true}
		}
	}
	return rules
}()

// Route is one procedure of the public API.
type Route struct {
	Procedure       string
	ClientStreaming bool
	ServerStreaming bool
	Input           protoreflect.MessageDescriptor
}

// Routes yields every route of the public API, read from its descriptors.
func Routes() iter.Seq[Route] {
	return func(yield func(Route) bool) {
		for _, file := range []protoreflect.FileDescriptor{
			dsecv1.File_dsec_v1_sandbox_proto, dsecv1.File_dsec_v1_process_proto, dsecv1.File_dsec_v1_session_proto,
			dsecv1.File_dsec_v1_file_proto, dsecv1.File_dsec_v1_job_proto, dsecv1.File_dsec_v1_trajectory_proto, dsecv1.File_dsec_v1_snapshot_proto, dsecv1.File_dsec_v1_event_proto, dsecv1.File_dsec_v1_webhook_proto, dsecv1.File_dsec_v1_layer_proto, dsecv1.File_dsec_v1_admin_proto,
		} {
			for i := range file.Services().Len() {
				svc := file.Services().Get(i)
				for j := range svc.Methods().Len() {
					m := svc.Methods().Get(j)
					if !yield(Route{
						Procedure:       "/" + string(svc.FullName()) + "/" + string(m.Name()),
						ClientStreaming: m.IsStreamingClient(),
						ServerStreaming: m.IsStreamingServer(),
						Input:           m.Input(),
					}) {
						return
					}
				}
			}
		}
	}
}

// bodyDeadlines bounds how long a client may take to send a body. The bound
// ends with the body: how long a command runs is not the connection's business.
func bodyDeadlines(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 && r.URL.Path == dsecv1connect.SessionServiceRunCommandsProcedure {
			bothWays(next, w, r)
			return
		}
		rule, ok := bodyRules[r.URL.Path]
		if !ok || r.Body == http.NoBody {
			next.ServeHTTP(w, r)
			return
		}
		body := &timedBody{ReadCloser: r.Body, rule: rule, conn: http.NewResponseController(w), answer: w.Header()}
		r.Body = body
		if !rule.each {
			next.ServeHTTP(w, r)
			return
		}
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, body))
		if r.ProtoMajor > 1 {
			next.ServeHTTP(w, r)
			return
		}
		_ = body.conn.EnableFullDuplex()
		body.drains = true
		next.ServeHTTP(w, r)
		body.drain()
	})
}

// bothWays serves a stream that goes both ways over HTTP/1.1. Many stacks
// cannot do that, so the protocol library asks for HTTP/2; ours can.
func bothWays(next http.Handler, w http.ResponseWriter, r *http.Request) {
	conn := http.NewResponseController(w)
	if conn.EnableFullDuplex() == nil {
		ctx, gone := context.WithCancel(r.Context())
		defer gone()
		body := watchBody(r.Body, gone)
		defer body.timer.Stop()
		r = r.WithContext(ctx)
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
		r.Body = body
	}
	next.ServeHTTP(w, r)
	// What the client may still send is not waited for long.
	_ = conn.SetReadDeadline(time.Now().Add(lastWords))
}

// lastWords is how long a client may take to end its side of a stream after
// the other side has ended, or say nothing of the rest of an upload.
const lastWords = time.Second

// drain takes the rest of an upload that was answered early: a connection that
// is closed under a client that still sends is reset, and the answer may be
// lost with it. HTTP/2 has a way to tell the client.
func (b *timedBody) drain() {
	if b.done {
		return
	}
	if b.conn.Flush() != nil {
		return
	}
	buf := make([]byte, 256<<10)
	end := time.Now().Add(drainTimeout)
	for n := 0; n < maxDrain && time.Now().Before(end); {
		if b.conn.SetReadDeadline(time.Now().Add(lastWords)) != nil {
			return
		}
		m, err := b.ReadCloser.Read(buf)
		if n += m; err != nil {
			return
		}
	}
}

type bodyKey struct{}

type timedBody struct {
	io.ReadCloser
	rule   bodyRule
	conn   *http.ResponseController
	answer http.Header
	set    bool
	drains bool

	mu   sync.Mutex // of the connection's deadline
	done bool
	over bool // nothing of it is waited for any more
}

// giveUp ends a read of an upload that is under way, and those to come: the call is
// answered already, and its client may say nothing for long. One that goes on sending
// gets to the end of that read: after one that failed nothing can be drained. A nil one
// does nothing.
func (b *timedBody) giveUp() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over = true; b.done {
		return
	}
	if b.drains { // as in Read
		b.answer.Set("Connection", "close")
	}
	_ = b.conn.SetReadDeadline(time.Now().Add(lastWords))
}

// begin sets the deadline of a read.
func (b *timedBody) begin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return os.ErrDeadlineExceeded
	}
	if !b.done && b.rule.timeout > 0 && (!b.set || b.rule.each) {
		b.set = true
		_ = b.conn.SetReadDeadline(time.Now().Add(b.rule.timeout))
	}
	return nil
}

// Close implements io.Closer. A body that is to be drained is the server's to
// close, after that: the protocol library closes it as soon as it has failed.
func (b *timedBody) Close() error {
	if b.drains {
		return nil
	}
	return b.ReadCloser.Close()
}

func (b *timedBody) Read(p []byte) (int, error) {
	if err := b.begin(); err != nil {
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case err == nil:
		if b.rule.each && !b.over && !b.drains { // HTTP/2 ends a stream whose deadline passes, whether it is read or not
			_ = b.conn.SetReadDeadline(time.Time{})
		}
	case !errors.Is(err, io.EOF):
		// What else comes on this connection is not the begin of a request.
		b.answer.Set("Connection", "close")
	case !b.done:
		b.done = true
		_ = b.conn.SetReadDeadline(time.Time{})
	}
	return n, err
}
