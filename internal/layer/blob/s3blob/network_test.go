package s3blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/faultnet"
	"github.com/opendsec/dsec/internal/testutil/s3server"
)

// behindProxy is a configuration that goes through a bad network.
func behindProxy(t *testing.T) (Config, *faultnet.Proxy) {
	t.Helper()
	cfg := config(t)
	p, err := faultnet.Listen(server(t).Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	cfg.Endpoint = "http://" + p.Addr()
	return cfg, p
}

func TestSuiteOverTLSAndHostNames(t *testing.T) {
	for _, style := range []string{"path", "host"} {
		t.Run(style, func(t *testing.T) {
			opt := s3server.Options{TLS: style == "path"}
			if style == "host" {
				opt.Domain = "s3.test"
			}
			srv, err := s3server.Start(t.Context(), testutil.Dir(t), opt)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = srv.Close() })
			blobtest.Run(t, func(t *testing.T) blob.Store {
				cfg := config(t)
				cfg.Endpoint, cfg.CAFile = srv.Endpoint(srv.Addr), srv.CAFile
				if style == "host" {
					cfg.PathStyle, cfg.Endpoint = false, "http://s3.test"
					cfg.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
						if addr != "dsec-test.s3.test:80" {
							return nil, fmt.Errorf("dials %s", addr)
						}
						return new(net.Dialer).DialContext(ctx, network, srv.Addr)
					}
				}
				return mustOpen(t, cfg)
			})
		})
	}
}

func TestUnknownAuthority(t *testing.T) {
	srv, err := s3server.Start(t.Context(), testutil.Dir(t), s3server.Options{TLS: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	cfg := config(t)
	cfg.Endpoint = srv.Endpoint(srv.Addr)
	_, err = Open(t.Context(), cfg)
	blobtest.WantCode(t, "open", err, dsec.CodeUnavailable, "")
}

func TestOpenRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		code   dsec.Code
		field  string
	}{
		"no such bucket":    {func(c *Config) { c.Bucket = "no-such-bucket" }, dsec.CodeInvalid, "store"},
		"unknown key":       {func(c *Config) { c.Credentials = keys("WRONGID", "wrong-secret") }, dsec.CodeInvalid, "store_credentials"},
		"wrong secret":      {func(c *Config) { c.Credentials = keys("DSECTESTID", "wrong-secret") }, dsec.CodeInvalid, "store_credentials"},
		"no keys":           {func(c *Config) { c.Credentials = keys("", "") }, dsec.CodeInvalid, "store_credentials"},
		"no keys at all":    {func(c *Config) { c.Credentials = blob.Credentials{} }, dsec.CodeInvalid, "store_credentials"},
		"another region":    {func(c *Config) { c.Region = "eu-west-9" }, dsec.CodeInvalid, "store"},
		"nobody there":      {func(c *Config) { c.Endpoint = "http://127.0.0.1:1" }, dsec.CodeUnavailable, ""},
		"no authority file": {func(c *Config) { c.CAFile = "/no/such/file" }, dsec.CodeInvalid, "store"},
		"no authority":      {func(c *Config) { c.CAFile = "/proc/self/comm" }, dsec.CodeInvalid, "store"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(t)
			test.change(&cfg)
			_, err := Open(t.Context(), cfg)
			blobtest.WantCode(t, "open", err, test.code, test.field)
			for e := err; e != nil; e = errors.Unwrap(e) {
				for _, text := range []string{e.Error(), fmt.Sprintf("%+v", e), fmt.Sprintf("%#v", cfg.Credentials)} {
					if strings.Contains(text, "wrong-secret") || strings.Contains(text, "WRONGID") || strings.Contains(text, server(t).Secret) {
						t.Errorf("a key in an error: %s", text)
					}
				}
			}
		})
	}
}

// TestBadNetwork has the calls of a wrapped store meet what a network does, for a
// while, and then not.
func TestBadNetwork(t *testing.T) {
	want := blobtest.Bytes(11 << 20)
	for name, fault := range map[string]faultnet.Fault{
		"late":                  {Delay: 5 * time.Millisecond},
		"narrow":                {BytesPerSecond: 100 << 20},
		"cut in the answer":     {CutAfter: 300_000},
		"cut before the answer": {CutAfter: 1},
		"refused":               {Refuse: true},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, proxy := behindProxy(t)
			bad := mustOpen(t, cfg)
			blobtest.MustPut(t, bad, "a/b", want)
			proxy.Set(fault)
			passes := fault.CutAfter == 0 && !fault.Refuse
			p := make([]byte, len(want))
			n, err := bad.ReadAt(t.Context(), "a/b", p, 0)
			if passes && (n != len(want) || err != nil || !bytes.Equal(p, want)) {
				t.Errorf("read: %d bytes, %v", n, err)
			}
			if !passes {
				blobtest.WantCode(t, "read", err, dsec.CodeUnavailable, "")
				if !bytes.Equal(p[:n], want[:n]) {
					t.Errorf("%d wrong bytes", n)
				}
				if fault.CutAfter < 1000 { // the answers to a put are short
					blobtest.WantCode(t, "put", bad.Put(t.Context(), "a/c", bytes.NewReader(want), int64(len(want))), dsec.CodeUnavailable, "")
				}
			}

			// A wrapped store repeats until it is better.
			var requests atomic.Int64
			backoff := blob.Backoff{Attempts: 100, Base: time.Millisecond, Max: time.Millisecond, Total: time.Minute}
			good := blob.Wrap(counted{bad, func() {
				if requests.Add(1) == 3 {
					proxy.Set(faultnet.Fault{})
				}
			}}, blob.Options{Backoff: backoff})
			n, err = good.ReadAt(t.Context(), "a/b", p, 0)
			if n != len(want) || err != nil || !bytes.Equal(p, want) {
				t.Errorf("read that is repeated: %d bytes, %v", n, err)
			}
			proxy.Set(faultnet.Fault{})
			blobtest.MustPut(t, good, "a/c", want)
			blobtest.WantBlob(t, good, "a/c", want)
		})
	}
}

// counted calls f before each read.
type counted struct {
	blob.Store
	f func()
}

// ReadAt implements blob.Store.
func (c counted) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	c.f()
	return c.Store.ReadAt(ctx, key, p, off)
}

func TestSilentServer(t *testing.T) {
	cfg, proxy := behindProxy(t)
	cfg.Stall = 50 * time.Millisecond
	s := mustOpen(t, cfg)
	want := blobtest.Bytes(6 << 20)
	blobtest.MustPut(t, s, "a", want)
	proxy.Set(faultnet.Fault{Hang: true})
	calls := map[string]func(context.Context) error{
		"stat":   func(ctx context.Context) error { _, err := s.Stat(ctx, "a"); return err },
		"read":   func(ctx context.Context) error { _, err := s.ReadAt(ctx, "a", make([]byte, 10), 0); return err },
		"put":    func(ctx context.Context) error { return s.Put(ctx, "b", bytes.NewReader(want), int64(len(want))) },
		"delete": func(ctx context.Context) error { return s.Delete(ctx, "c") },
		"list":   func(ctx context.Context) error { return s.List(ctx, "", func(blob.Info) error { return nil }) },
		"sweep":  s.Sweep,
	}
	for name, call := range calls {
		blobtest.WantCode(t, name+" of a silent server", call(t.Context()), dsec.CodeUnavailable, "")
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want the context's error", name, err)
		}
		cancel()
	}
	proxy.Set(faultnet.Fault{})
	blobtest.WantBlob(t, s, "a", want)

	// What is slow but moves has not stalled: 6 MiB at 8 MiB a second take 15 times the bound.
	proxy.Set(faultnet.Fault{BytesPerSecond: 8 << 20})
	blobtest.WantBlob(t, s, "a", want)
}

// TestServerKilled kills the server and starts it again, between and within calls.
func TestServerKilled(t *testing.T) {
	srv, err := s3server.Start(t.Context(), testutil.Dir(t), s3server.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	cfg := config(t)
	cfg.Endpoint = srv.Endpoint(srv.Addr)
	cfg.Backoff = blob.Backoff{Attempts: 1000, Base: 5 * time.Millisecond, Max: 20 * time.Millisecond, Total: time.Minute}
	s := mustOpen(t, cfg)
	w := blob.Wrap(s, blob.Options{Backoff: cfg.Backoff})
	want := blobtest.Bytes(11 << 20)
	blobtest.MustPut(t, w, "a", want)
	if err := srv.Kill(); err != nil {
		t.Fatal(err)
	}
	_, err = s.Stat(t.Context(), "a")
	blobtest.WantCode(t, "stat of a dead server", err, dsec.CodeUnavailable, "")
	restarted := make(chan error, 1)
	go func() { restarted <- srv.Restart(t.Context()) }()
	blobtest.WantBlob(t, w, "a", want)
	if err := <-restarted; err != nil {
		t.Fatal(err)
	}
	// In the middle of a put: its source is what kills the server.
	source := &killer{r: bytes.NewReader(want), at: 6 << 20, kill: func() {
		if err := srv.Kill(); err != nil {
			t.Error(err)
		}
		go func() { restarted <- srv.Restart(t.Context()) }()
	}}
	if err := w.Put(t.Context(), "b", source, int64(len(want))); err != nil {
		t.Errorf("put beside a server that dies: %v", err)
	}
	if err := <-restarted; err != nil {
		t.Fatal(err)
	}
	blobtest.WantBlob(t, w, "b", want)
}

type killer struct {
	r    *bytes.Reader
	at   int
	kill func()
}

func (k *killer) Read(p []byte) (int, error) {
	n, err := k.r.Read(p)
	if k.at > 0 && k.at <= n {
		k.kill()
	}
	k.at -= n
	return n, err
}

// between puts a handler before the server, which may do without it.
func between(t *testing.T, handle func(w http.ResponseWriter, r *http.Request, on http.Handler)) Config {
	t.Helper()
	cfg := config(t)
	target, err := url.Parse(cfg.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	on := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host // which is signed
	}}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handle(w, r, on) }))
	t.Cleanup(front.Close)
	cfg.Endpoint = front.URL
	return cfg
}

func TestServerWithoutConditions(t *testing.T) {
	var conditional atomic.Int64
	cfg := between(t, func(w http.ResponseWriter, r *http.Request, on http.Handler) {
		if r.Header.Get("If-None-Match") != "" {
			conditional.Add(1)
			w.WriteHeader(http.StatusNotImplemented)
			fmt.Fprint(w, `<Error><Code>NotImplemented</Code><Message>A header you provided implies functionality that is not implemented</Message></Error>`)
			return
		}
		on.ServeHTTP(w, r)
	})
	s := mustOpen(t, cfg)
	for _, size := range []int{100, 6 << 20, 101} {
		key := fmt.Sprint("a/", size)
		blobtest.MustPut(t, s, key, blobtest.Bytes(size))
		blobtest.WantBlob(t, s, key, blobtest.Bytes(size))
	}
	if n := conditional.Load(); n != 1 {
		t.Errorf("asked %d times with a condition that the server does not know, want once", n)
	}
}

// TestLostAnswers cuts connections after the server has done its work.
func TestLostAnswers(t *testing.T) {
	var lost atomic.Int64
	cfg := between(t, func(w http.ResponseWriter, r *http.Request, on http.Handler) {
		if r.Method == http.MethodPut || r.Method == http.MethodPost || r.Method == http.MethodDelete {
			if lost.Add(1)%2 == 1 {
				on.ServeHTTP(httptest.NewRecorder(), r)
				panic(http.ErrAbortHandler)
			}
		}
		on.ServeHTTP(w, r)
	})
	s := mustOpen(t, cfg)
	for _, size := range []int{100, 11 << 20} {
		key := fmt.Sprint("a/", size)
		lost.Store(0)
		blobtest.MustPut(t, s, key, blobtest.Bytes(size))
		blobtest.WantBlob(t, s, key, blobtest.Bytes(size))
	}
	lost.Store(0)
	w := blob.Wrap(s, blob.Options{Backoff: quick})
	if err := w.Delete(t.Context(), "a/100"); err != nil {
		t.Error(err)
	}
	blobtest.WantNone(t, s, "a/100")
}

// uploads is how many are unfinished.
func uploads(t *testing.T, s *Store) int {
	t.Helper()
	s.aborts.Wait()
	out, err := s.client.ListMultipartUploads(t.Context(), &s3.ListMultipartUploadsInput{Bucket: &s.cfg.Bucket, Prefix: s.object("")})
	if err != nil {
		t.Fatal(err)
	}
	return len(out.Uploads)
}

func TestUploadsThatFail(t *testing.T) {
	s := mustOpen(t, config(t))
	ctx, cancel := context.WithCancel(t.Context())
	source := &killer{r: bytes.NewReader(blobtest.Bytes(20 << 20)), at: 12 << 20, kill: cancel}
	if err := s.Put(ctx, "a", source, 20<<20); !errors.Is(err, context.Canceled) {
		t.Errorf("put: %v", err)
	}
	blobtest.WantCode(t, "put", s.Put(t.Context(), "b", bytes.NewReader(blobtest.Bytes(12<<20)), 20<<20), dsec.CodeInvalid, "size")
	if n := uploads(t, s); n != 0 {
		t.Errorf("%d uploads of puts that failed", n)
	}

	// As after a crash.
	for range 3 {
		if _, err := s.client.CreateMultipartUpload(t.Context(), &s3.CreateMultipartUploadInput{Bucket: &s.cfg.Bucket, Key: s.object("c")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context()); err != nil || uploads(t, s) != 3 {
		t.Errorf("sweep: %v, %d uploads, want all of them: they are young", err, uploads(t, s))
	}
	if err := s.sweep(t.Context(), 0); err != nil || uploads(t, s) != 0 {
		t.Errorf("sweep: %v, %d uploads, want none", err, uploads(t, s))
	}
}

func TestFullServer(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.SmallDisk(t, "size=24m")
	srv, err := s3server.Start(t.Context(), dir, s3server.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = srv.Close() })
	cfg := config(t)
	cfg.Endpoint = srv.Endpoint(srv.Addr)
	s := mustOpen(t, cfg)
	testutil.Fill(t, dir)
	for _, size := range []int{1 << 20, 11 << 20} {
		err := s.Put(t.Context(), "a", bytes.NewReader(blobtest.Bytes(size)), int64(size))
		blobtest.WantCode(t, "put", err, dsec.CodeExhausted, "")
		t.Log(err, errors.Unwrap(err))
		blobtest.WantNone(t, s, "a")
	}
}
