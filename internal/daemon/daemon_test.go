package daemon

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/testutil"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestUnixSocketIsPrivateAndReplacedWhenDead(t *testing.T) {
	path := filepath.Join(testutil.Dir(t), "run", "x.sock")
	l, err := ListenUnix(path)
	check(t, err)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("second listener: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // as a process that was killed leaves it
	check(t, l.Close())
	l, err = ListenUnix(path)
	check(t, err)
	check(t, l.Close())
}

func TestLockIsForOne(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	l, err := Lock(dir, "data_dir")
	check(t, err)
	if _, err := Lock(dir, "data_dir"); err == nil || !strings.Contains(err.Error(), "another dsec; stop that one, or give this one another data_dir") {
		t.Errorf("second lock: %v", err)
	}
	check(t, l.Close())
	l, err = Lock(dir, "data_dir")
	check(t, err)
	check(t, l.Close())
}

func TestStackStopsBackwardsAndTellsAll(t *testing.T) {
	var s Stack
	var order []int
	for i := range 3 {
		s.Push(func(context.Context) error { order = append(order, i); return errors.New("e") })
	}
	err := s.Stop(t.Context())
	if !slices.Equal(order, []int{2, 1, 0}) || err == nil || strings.Count(err.Error(), "e") != 3 {
		t.Errorf("%v, %v", order, err)
	}
	if err := s.Stop(t.Context()); err != nil || len(order) != 3 {
		t.Errorf("stopped twice: %v", order)
	}
}

func TestServeAndStatus(t *testing.T) {
	var s Stack
	path := filepath.Join(testutil.Dir(t), "s.sock")
	l, err := ListenUnix(path)
	check(t, err)
	allowed := true
	var notReady error
	allow := func(*http.Request) bool { return allowed }
	h := WithStatus(WithProfiles(http.NotFoundHandler(), allow), Registry(), func() error { return notReady }, allow)
	s.Serve(HTTPServer(h, testutil.Logger(t)), l, make(chan error, 1))
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}
	get := func(path string) (int, string) {
		res, err := (&http.Client{Transport: tr}).Get("http://x" + path)
		check(t, err)
		defer func() { _ = res.Body.Close() }()
		b, err := io.ReadAll(res.Body)
		check(t, err)
		return res.StatusCode, string(b)
	}
	if code, body := get("/healthz"); code != 200 || body != "ok\n" {
		t.Errorf("%d %q", code, body)
	}
	notReady = errors.New("no backend")
	if code, body := get("/healthz"); code != 503 || body != "not ready: no backend\n" {
		t.Errorf("%d %q", code, body)
	}
	if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "go_goroutines") {
		t.Errorf("%d", code)
	}
	if code, body := get("/debug/pprof/goroutine?debug=1"); code != 200 || !strings.Contains(body, "goroutine profile") {
		t.Errorf("%d %.200q", code, body)
	}
	allowed = false
	if code, body := get("/healthz"); code != 503 || body != "not ready\n" {
		t.Errorf("%d %q", code, body)
	}
	for _, path := range []string{"/metrics", "/debug/pprof/", "/debug/pprof/profile?seconds=1"} {
		if code, _ := get(path); code != 403 {
			t.Errorf("%s for a refused caller: %d", path, code)
		}
	}
	tr.CloseIdleConnections()
	check(t, s.Stop(t.Context()))
}

func TestLoopback(t *testing.T) {
	for addr, want := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "10.0.0.1:1": false, "[2001:db8::1]:1": false, "@": true, "bufconn": true, "x:1": false} {
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = addr
		if Loopback(r) != want {
			t.Errorf("%s: %v", addr, !want)
		}
	}
}

func TestNotify(t *testing.T) {
	path := filepath.Join(testutil.Dir(t), "n.sock")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	check(t, err)
	defer func() { _ = l.Close() }()
	t.Setenv("NOTIFY_SOCKET", path)
	Notify("READY=1")
	buf := make([]byte, 64)
	n, err := l.Read(buf)
	if err != nil || string(buf[:n]) != "READY=1" {
		t.Errorf("%q %v", buf[:n], err)
	}
}
