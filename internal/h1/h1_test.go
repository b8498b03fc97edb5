package h1

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// server serves h and counts its connections.
func server(t testing.TB, h http.HandlerFunc) (*Transport, string, *atomic.Int64) {
	t.Helper()
	var conns atomic.Int64
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	t.Cleanup(srv.Close)
	other := roundTrip(func(*http.Request) (*http.Response, error) { return nil, errOther })
	tr := &Transport{Dial: dialer(srv.Listener.Addr().String()), IdleTimeout: time.Minute, Other: other}
	t.Cleanup(tr.CloseIdleConnections)
	return tr, srv.URL, &conns
}

func dialer(addr string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", addr) }
}

var errOther = errors.New("left to the other transport")

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func post(ctx context.Context, t testing.TB, tr *Transport, url string, body io.Reader) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/a?b=c", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-A", "a")
	return tr.RoundTrip(req)
}

// echo is one whole call.
func echo(t testing.TB, tr *Transport, url, body string) {
	t.Helper()
	res, err := post(t.Context(), t, tr, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(res.Body)
	if err != nil || string(got) != body {
		t.Fatalf("got %.40q, %v", got, err)
	}
	if err := res.Body.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestCallsFollowEachOtherOnOneConnection(t *testing.T) {
	tr, url, conns := server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.String() != "/a?b=c" || r.Header.Get("X-A") != "a" || r.Host == "" {
			t.Errorf("got %s %v", r.URL, r.Header)
		}
		body, _ := io.ReadAll(r.Body)
		if len(body)%2 == 0 {
			w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		} else {
			_ = http.NewResponseController(w).Flush() // which makes it chunked
		}
		_, _ = w.Write(body)
	})
	for _, n := range []int{0, 1, 2, bufferSize, bufferSize + 1, MaxBody} {
		echo(t, tr, url, strings.Repeat("x", n))
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

func TestAnAnswerThatIsNotReadToItsEndCostsTheConnection(t *testing.T) {
	tr, url, conns := server(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 100)) })
	for range 2 {
		res, err := post(t.Context(), t, tr, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = res.Body.Read(make([]byte, 1))
		_ = res.Body.Close()
		if n, err := res.Body.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Error("a closed body reads on")
		}
	}
	if n := conns.Load(); n != 2 {
		t.Errorf("%d connections", n)
	}
}

func TestAConnectionThatTheServerClosedIsNotUsed(t *testing.T) {
	closed := make(chan struct{}, 1)
	tr, url, conns := server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength == 3 {
			w.Header().Set("Connection", "close")
		}
		_, _ = io.Copy(w, r.Body)
	})
	echo(t, tr, url, "abc") // says that it closes
	echo(t, tr, url, "four")
	if n := conns.Load(); n != 2 {
		t.Errorf("%d connections", n)
	}

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() { // closes after each answer, and does not say so
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			req, err := http.ReadRequest(bufio.NewReader(c))
			if err != nil {
				return
			}
			body, _ := io.ReadAll(req.Body)
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+string(body))
			_ = c.Close()
			closed <- struct{}{}
		}
	}()
	tr.CloseIdleConnections()
	tr.Dial = dialer(l.Addr().String())
	for range 3 {
		echo(t, tr, url, "abc")
		<-closed
	}
}

func TestARequestThatTheServerSawIsNotSentTwice(t *testing.T) {
	var seen atomic.Int64
	tr, url, conns := server(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
		if seen.Add(1) == 2 {
			panic(http.ErrAbortHandler) // closes a connection that was used before, without an answer
		}
	})
	echo(t, tr, url, "abc")
	res, err := post(t.Context(), t, tr, url, strings.NewReader("abc"))
	if err == nil {
		_ = res.Body.Close()
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) || seen.Load() != 2 || conns.Load() != 1 {
		t.Errorf("%v after %d requests on %d connections, want an unexpected end after 2 on 1", err, seen.Load(), conns.Load())
	}
}

func TestUnusedConnectionsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transport{IdleTimeout: time.Minute}
		var closed atomic.Int64
		for range 3 {
			ours, theirs := net.Pipe()
			go func() {
				_, _ = io.Copy(io.Discard, theirs)
				closed.Add(1)
			}()
			tr.put(&conn{t: tr, nc: ours})
			time.Sleep(20 * time.Second) //nolint:forbidigo // of the bubble's clock
		}
		for want := range int64(3) {
			synctest.Wait()
			if n := closed.Load(); n != want+1 {
				t.Errorf("%d are closed after %v, want %d", n, time.Duration(want)*20*time.Second+time.Minute, want+1)
			}
			time.Sleep(20 * time.Second) //nolint:forbidigo // of the bubble's clock
		}
		if tr.expiry != nil {
			t.Error("a timer without connections")
		}
	})
}

func TestACanceledCallEndsOnBothSides(t *testing.T) {
	begun, gone := make(chan struct{}), make(chan struct{})
	tr, url, _ := server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength > 0 {
			_, _ = io.Copy(io.Discard, r.Body)
			_ = http.NewResponseController(w).Flush()
		} else {
			close(begun)
		}
		<-r.Context().Done()
		gone <- struct{}{}
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-begun
		cancel()
	}()
	if _, err := post(ctx, t, tr, url, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("before the head: %v", err)
	}
	<-gone
	ctx, cancel = context.WithCancel(t.Context())
	res, err := post(ctx, t, tr, url, strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.ReadAll(res.Body); !errors.Is(err, context.Canceled) {
		t.Errorf("in the body: %v", err)
	}
	<-gone
	if _, err := post(ctx, t, tr, url, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("before the call: %v", err)
	}
}

func TestABrokenAnswerIsNotAWholeOne(t *testing.T) {
	for name, raw := range map[string]string{
		"nothing":         "",
		"half a head":     "HTTP/1.1 200 OK\r\nContent-",
		"half a body":     "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
		"half a chunk":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
		"no last chunk":   "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
		"other protocol":  "HTTP/1.1 101 Switching Protocols\r\n\r\n",
		"an endless head": "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n",
		"no HTTP at all":  "220 smtp ready\r\n",
	} {
		if a, err := answerTo(t, []byte(raw)); err == nil || err == io.EOF { // io.EOF itself would be a good end
			t.Errorf("%s: read %.20q, %v", name, a.body, err)
		}
	}
	if a, err := answerTo(t, []byte("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")); err != nil || string(a.body) != "abc" {
		t.Errorf("after an answer before the answer: %q, %v", a.body, err)
	}
}

// script is a connection to a server that answers with what it is given, hears
// nothing, and has nothing more to say.
type script struct {
	net.Conn // nil: nothing else is called
	*bytes.Reader
}

func (s script) Read(p []byte) (int, error)  { return s.Reader.Read(p) }
func (s script) Write(p []byte) (int, error) { return len(p), nil }
func (s script) Close() error                { return nil }

// answerTo makes a call to a server that answers with raw, and then a second
// one: no bytes of the first answer may be taken for the answer to it.
func answerTo(t testing.TB, raw []byte) (answer, error) {
	dialed := false
	tr := &Transport{IdleTimeout: time.Minute, Dial: func(context.Context) (net.Conn, error) {
		if dialed {
			return nil, errOther
		}
		dialed = true
		return script{Reader: bytes.NewReader(raw)}, nil
	}}
	defer tr.CloseIdleConnections()
	a, err := read(post(t.Context(), t, tr, "http://x", strings.NewReader("x")))
	if next, err := read(post(t.Context(), t, tr, "http://x", strings.NewReader("y"))); err == nil {
		t.Errorf("after %.80q a second call was answered by %v", raw, next)
	}
	return a, err
}

// answer is what a caller sees of a response.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func read(res *http.Response, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	return answer{res.StatusCode, res.Header, body}, err
}

// reference reads an answer as net/http does where nothing else may follow it.
func reference(raw []byte) (answer, error) {
	r := bufio.NewReader(bytes.NewReader(raw))
	for {
		res, err := http.ReadResponse(r, &http.Request{Method: http.MethodPost})
		if err == nil && res.StatusCode == http.StatusSwitchingProtocols {
			err = http.ErrNotSupported
		}
		if err != nil || res.StatusCode >= 200 {
			return read(res, err)
		}
	}
}

// FuzzAnswer: whatever a server sends, a caller sees what net/http reads in it,
// fails where that fails, and the connection's next call sees nothing of it.
func FuzzAnswer(f *testing.F) {
	for _, raw := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nabc", "HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
		"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n",
		"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nab", "HTTP/1.1 101 Switching Protocols\r\n\r\n",
	} {
		f.Add([]byte(raw))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > bufferSize {
			return // what is left in a pipe cannot be seen, as it can in a socket
		}
		got, err := answerTo(t, raw)
		want, wantErr := reference(raw)
		switch {
		case (err == nil) != (wantErr == nil):
			t.Errorf("%.80q: %v, net/http says %v", raw, err, wantErr)
		case err == nil && !reflect.DeepEqual(got, want):
			t.Errorf("%.80q: got %v, net/http reads %v", raw, got, want)
		}
	})
}

func TestLongBodiesAreLeftToTheOtherTransport(t *testing.T) {
	tr, url, _ := server(t, func(http.ResponseWriter, *http.Request) {})
	if _, err := post(t.Context(), t, tr, url, strings.NewReader(strings.Repeat("x", MaxBody+1))); !errors.Is(err, errOther) {
		t.Errorf("got %v", err)
	}
}

func TestTheReaderTellsBeforeItWaits(t *testing.T) {
	next := make(chan struct{})
	tr, url, _ := server(t, func(w http.ResponseWriter, _ *http.Request) {
		for range 3 {
			_, _ = io.WriteString(w, "ab")
			_ = http.NewResponseController(w).Flush()
			<-next
		}
	})
	waits := 0
	ctx := BeforeWait(t.Context(), func() {
		waits++
		next <- struct{}{}
	})
	res, err := post(ctx, t, tr, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Two reads for each piece that the server sends, of which it sends the
	// next only when the reader waits.
	for i := range 6 {
		if _, err := io.ReadFull(res.Body, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if waits > (i+1)/2 {
			t.Errorf("told %d times that it waits after %d reads", waits, i+1)
		}
	}
	if waits != 2 {
		t.Errorf("told %d times", waits)
	}
	if _, err := io.ReadAll(res.Body); err != nil {
		t.Error(err)
	}
}
