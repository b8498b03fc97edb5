package daemon

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"

	"golang.org/x/sys/unix"
)

// TestConnectionsAreBounded: idle connections beyond the bound are closed, the
// oldest first, while those that serve a request and new ones work.
func TestConnectionsAreBounded(t *testing.T) {
	const most = 8
	busy, release := make(chan struct{}), make(chan struct{})
	srv := HTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" {
			close(busy)
			<-release
		}
		_, _ = io.WriteString(w, "ok")
	}), slog.New(slog.DiscardHandler))
	bound := boundConns()
	bound.most = most
	srv.ConnState = bound.state
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var stack Stack
	stack.Serve(srv, l, make(chan error, 1))
	defer func() { _ = stack.Stop(context.Background()) }()

	ask := func(c net.Conn, path string) {
		t.Helper()
		if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(c net.Conn) {
		t.Helper()
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		if b, err := io.ReadAll(res.Body); err != nil || string(b) != "ok" {
			t.Fatalf("answer %q, %v", b, err)
		}
	}
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	first := dial()
	ask(first, "/busy")
	<-busy
	var idle []net.Conn
	for range 4 * most {
		idle = append(idle, dial())
	}
	last := dial()
	ask(last, "/")
	answered(last)
	for i, c := range idle[:3*most] { // an end: nobody waits for what was never asked
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("connection %d is still open", i)
		}
	}
	close(release)
	answered(first)
	bound.mu.Lock()
	defer bound.mu.Unlock()
	if n := len(bound.conns); n > most {
		t.Errorf("%d connections are counted, at most %d may be", n, most)
	}
}

// TestConnectionsByDescriptors: the bound leaves most descriptors to the rest.
func TestConnectionsByDescriptors(t *testing.T) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		t.Fatal(err)
	}
	if most := boundConns().most; most < 1 || uint64(most) > l.Cur/2 {
		t.Fatalf("%d connections of %d descriptors", most, l.Cur)
	}
	if srv := HTTPServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler)); srv.ConnState == nil {
		t.Fatal("a server without a bound")
	}
}
