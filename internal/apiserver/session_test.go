package apiserver

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/h1"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/watcher"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// eachWay runs f over HTTP/1.1 and HTTP/2, before an edge that is reached by
// connections and one of this process.
func eachWay(t *testing.T, f func(t *testing.T, stub *stubEdge, sb *client.Sandbox)) {
	stub := newStub("fake")
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(h2.CloseIdleConnections)
	for edge, endpoint := range map[string]watcher.Endpoint{
		"socket": stub.endpoint(t), "process": {Name: "p", Transport: &daemon.Local{Handler: stub.handler()}},
	} {
		r := newRigOver(t, []watcher.Endpoint{endpoint})
		for name, tr := range map[string]http.RoundTripper{"HTTP/1.1": nil, "HTTP/2": h2} {
			t.Run(edge+"/"+name, func(t *testing.T) {
				c, err := client.New(client.Options{URL: r.url, APIKey: r.secret, Transport: tr})
				check(t, err)
				t.Cleanup(c.Close)
				f(t, stub, c.Sandbox(string(dsec.NewSandboxID(stub.id))))
			})
		}
	}
}

// The events of a command arrive before the next command is sent.
func TestSessionStream(t *testing.T) {
	eachWay(t, func(t *testing.T, stub *stubEdge, sb *client.Sandbox) {
		sess := sb.Session("s")
		// The server of a test that fails waits for the stream that is open.
		t.Cleanup(func() { _ = sess.Close(context.Background()) })
		for _, cmd := range []string{"one", "two", strings.Repeat("long", 50_000), "three"} {
			var out strings.Builder
			outcome, err := sess.Run(t.Context(), cmd, 0, &out, nil)
			if err != nil || !outcome.OK() || out.String() != cmd {
				t.Fatalf("%.10s: %.10q %+v %v", cmd, out.String(), outcome, err)
			}
		}
		stub.set(func() { stub.fail = apierr.Encode(dsec.Errorf(dsec.CodeNotFound, "no session")) })
		defer stub.set(func() { stub.fail = nil })
		if _, err := sess.Run(t.Context(), "four", 0, nil, nil); dsec.CodeOf(err) != dsec.CodeNotFound {
			t.Errorf("an edge's error: %v", err)
		}
	})
}

// A client that cannot send and receive at once sends all commands first.
func TestSessionCommandsInOneBody(t *testing.T) {
	stub := newStub("fake")
	r := newRig(t, stub)
	id, other := string(dsec.NewSandboxID(stub.id)), string(dsec.NewSandboxID(stub.id))
	send := func(sandboxes ...string) string {
		var body strings.Builder
		for _, id := range sandboxes {
			msg := `{"sandboxId":"` + id + `","command":"x"}`
			body.Write(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(msg))))
			body.WriteString(msg)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+dsecv1connect.SessionServiceRunCommandsProcedure, strings.NewReader(body.String()))
		check(t, err)
		req.Header.Set("Authorization", "Bearer "+r.secret)
		req.Header.Set("Content-Type", "application/connect+json")
		res, err := http.DefaultClient.Do(req)
		check(t, err)
		defer func() { _ = res.Body.Close() }()
		b, err := io.ReadAll(res.Body)
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := send(id, id); strings.Count(got, "exited") != 2 || strings.Contains(got, "error") {
		t.Errorf("two commands: %q", got)
	}
	if got := send(id, other); strings.Count(got, "exited") != 1 || !strings.Contains(got, "sandbox_id") {
		t.Errorf("another sandbox: %q", got)
	}
}

// A stop does not wait for a client that has a session open and says nothing.
func TestStoppingEndsIdleSessionStreams(t *testing.T) {
	stub := newStub("fake")
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(h2.CloseIdleConnections)
	for _, name := range []string{"HTTP/1.1", "HTTP/2"} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, stub)
			// The client's own transport, but for the minute that it waits for
			// a server that is away.
			var tr http.RoundTripper = h2
			if name == "HTTP/1.1" {
				one := &h1.Transport{Dial: r.dial, IdleTimeout: time.Minute, Duplex: true}
				t.Cleanup(one.CloseIdleConnections)
				tr = one
			}
			c, err := client.New(client.Options{URL: r.url, APIKey: r.secret, Transport: tr})
			check(t, err)
			t.Cleanup(c.Close)
			sess := c.Sandbox(string(dsec.NewSandboxID(stub.id))).Session("s")
			_, err = sess.Run(t.Context(), "one", 0, nil, nil)
			check(t, err)
			r.http.Config.RegisterOnShutdown(r.server.Stopping)
			check(t, r.http.Config.Shutdown(t.Context())) // returns when no call is left
			if _, err := sess.Run(t.Context(), "two", 0, nil, nil); dsec.CodeOf(err) != dsec.CodeUnavailable {
				t.Errorf("after the stop: %v", err)
			}
		})
	}
}

// dial makes a connection to the server.
func (r *rig) dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", r.http.Listener.Addr().String())
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A client that gives a command up, or is gone, is seen at the edge at once,
// whatever the way and although nobody says anything more.
func TestSessionCommandIsGivenUp(t *testing.T) {
	eachWay(t, func(t *testing.T, stub *stubEdge, sb *client.Sandbox) {
		sess := sb.Session("s")
		for range 2 { // on a new stream, and on one that has served a command
			ctx, cancel := context.WithCancel(t.Context())
			_, err := sess.Run(ctx, "hang", 0, writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil }), nil)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("a canceled run: %v", err)
			}
			select {
			case <-stub.gone:
			case <-time.After(time.Minute):
				t.Fatal("the edge was not told")
			}
			var out strings.Builder
			if _, err := sess.Run(t.Context(), "one", 0, &out, nil); err != nil || out.String() != "one" {
				t.Errorf("the next one: %q, %v", out.String(), err)
			}
		}
		check(t, sess.Interrupt(t.Context()))
		_ = sess.Close(t.Context()) // ends its stream; the stub closes no sessions
		if err := sb.Session("t").Interrupt(t.Context()); dsec.CodeOf(err) != dsec.CodeNotFound {
			t.Errorf("no session: %v", err)
		}
	})
}

// Where the server stops, a client that says nothing has not gone.
func TestWatchedBodyTellsAStopFromAClientThatIsGone(t *testing.T) {
	for err, want := range map[error]bool{io.EOF: false, os.ErrDeadlineExceeded: false, io.ErrUnexpectedEOF: true} {
		gone := make(chan struct{})
		in, out := io.Pipe()
		b := watchBody(in, func() {})
		if _, err := out.Write([]byte("words")); err != nil { // until it is read ahead
			t.Fatal(err)
		}
		_ = out.CloseWithError(err)
		got, rerr := io.ReadAll(b)
		if string(got) != "words" || !errors.Is(rerr, err) && err != io.EOF {
			t.Errorf("%v: read %q, %v", err, got, rerr)
		}
		b = watchBody(in, func() { close(gone) })
		testutil.WaitFor(t, time.Minute, "the body was read ahead", func() error {
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.err == nil {
				return errors.New("not yet")
			}
			return nil
		})
		select {
		case <-gone:
			if !want {
				t.Errorf("%v counts as gone", err)
			}
		default:
			if want {
				t.Errorf("%v does not count as gone", err)
			}
		}
	}
}
