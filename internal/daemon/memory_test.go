package daemon

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// A handler's context ends with its request. A listener whose deadlines fire
// late ends it in the middle, now and then, once a connection is reused.
func TestMemoryKeepsTheContextsOfReusedConnections(t *testing.T) {
	l, dial := Memory()
	var cancelled atomic.Int64
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		for range 50 {
			if r.Context().Err() != nil {
				cancelled.Add(1)
				break
			}
		}
		_, _ = io.WriteString(w, "ok")
	})}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	client := &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 8,
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				resp, err := client.Post("http://edge/", "text/plain", strings.NewReader("body"))
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		})
	}
	all.Wait()
	client.CloseIdleConnections()
	if err := srv.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != http.ErrServerClosed {
		t.Errorf("server ended with %v", err)
	}
	if n := cancelled.Load(); n != 0 {
		t.Errorf("%d of 4000 requests were cancelled under their handlers", n)
	}
	if _, err := dial(t.Context()); err == nil {
		t.Error("a closed listener took a connection")
	}
}
