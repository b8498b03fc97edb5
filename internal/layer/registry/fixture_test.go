package registry

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	impl "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// server is go-containerregistry's registry behind a handler that can be made to
// misbehave.
type server struct {
	t    *testing.T
	http *httptest.Server
	host string
	real http.Handler

	mu    sync.Mutex
	asked []string // "METHOD path range", of what was not pushed
	// handle, where set, may answer in place of the registry; false leaves it to that.
	handle func(w http.ResponseWriter, r *http.Request) bool
}

func newServer(t *testing.T, secure bool) *server {
	t.Helper()
	s := &server{t: t, real: impl.New(impl.Logger(log.New(io.Discard, "", 0)))}
	h := http.HandlerFunc(s.serve)
	if secure {
		s.http = httptest.NewTLSServer(h)
	} else {
		s.http = httptest.NewServer(h)
	}
	s.http.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(s.http.Close)
	u, err := url.Parse(s.http.URL)
	check(t, err)
	s.host = u.Host
	return s
}

func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	handle := s.handle
	if r.Method == http.MethodGet {
		s.asked = append(s.asked, strings.TrimSpace(r.URL.Path+" "+r.Header.Get("Range")))
	}
	s.mu.Unlock()
	if handle == nil || !handle(w, r) {
		s.real.ServeHTTP(w, r)
	}
}

func (s *server) misbehave(f func(w http.ResponseWriter, r *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handle = f
}

// fetched tells what was asked for below a path since the last call.
func (s *server) fetched(part string) (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.asked {
		if strings.Contains(a, part) {
			list = append(list, a)
		}
	}
	s.asked = nil
	return list
}

// caFile is the server's certificate as a file.
func (s *server) caFile() string {
	s.t.Helper()
	file := filepath.Join(s.t.TempDir(), "ca.pem")
	check(s.t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.http.Certificate().Raw}), 0o600))
	return file
}

// push puts an image, or an index, into the registry.
func (s *server) push(ref string, what remote.Taggable) {
	s.t.Helper()
	r, err := name.ParseReference(s.host + "/" + ref)
	check(s.t, err)
	opt := remote.WithTransport(s.http.Client().Transport)
	switch v := what.(type) {
	case v1.Image:
		err = remote.Write(r, v, opt)
	case v1.ImageIndex:
		err = remote.WriteIndex(r, v, opt)
	default:
		err = remote.Put(r, what, opt)
	}
	check(s.t, err)
	s.fetched("")
}

// client is one whose waits are short.
func (s *server) client(change ...func(*Config)) *Client {
	s.t.Helper()
	cfg := Config{
		Insecure: []string{s.host}, Logger: testutil.Logger(s.t),
		times: times{backoff: time.Millisecond, longest: 20 * time.Millisecond, stall: 10 * time.Second},
	}
	for _, f := range change {
		f(&cfg)
	}
	c, err := New(cfg)
	check(s.t, err)
	return c
}

// image is one of layers with the given contents.
func image(t *testing.T, layers ...[]byte) v1.Image {
	t.Helper()
	img := empty.Image
	for _, b := range layers {
		var err error
		img, err = mutate.AppendLayers(img, static.NewLayer(b, types.OCILayer))
		check(t, err)
	}
	cf, err := img.ConfigFile()
	check(t, err)
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", "amd64"
	img, err = mutate.ConfigFile(img, cf)
	check(t, err)
	return mutate.ConfigMediaType(mutate.MediaType(img, types.OCIManifestSchema1), types.OCIConfigJSON)
}

func digest(t *testing.T, i interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	h, err := i.Digest()
	check(t, err)
	return h.String()
}

// pull fetches an image whole, and gives the files of its layout.
func pull(ctx context.Context, c *Client, req Request) (map[string][]byte, error) {
	img, err := c.Resolve(ctx, req)
	if err != nil {
		return nil, err
	}
	l := img.Open(ctx)
	defer func() { _ = l.Close() }()
	files := map[string][]byte{}
	for r := tar.NewReader(l); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files, nil
		}
		if err != nil {
			return files, err
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			return files, err
		}
	}
}

// wantImage pulls and compares with what was pushed.
func wantImage(t *testing.T, c *Client, req Request, want v1.Image) {
	t.Helper()
	files, err := pull(t.Context(), c, req)
	if err != nil {
		t.Fatalf("%s: %v", req.Ref, err)
	}
	raw, err := want.RawManifest()
	check(t, err)
	m, err := want.Manifest()
	check(t, err)
	if got := files["blobs/sha256/"+strings.TrimPrefix(digest(t, want), "sha256:")]; !bytes.Equal(got, raw) {
		t.Errorf("%s: manifest %q, want %q", req.Ref, got, raw)
	}
	for _, d := range append(m.Layers, m.Config) {
		if digestOf(files["blobs/sha256/"+d.Digest.Hex]) != d.Digest.String() {
			t.Errorf("%s: blob %s is missing or another", req.Ref, d.Digest)
		}
	}
	if !strings.Contains(string(files["index.json"]), digest(t, want)) {
		t.Errorf("%s: index %q", req.Ref, files["index.json"])
	}
}

// wantError checks an error's code and field.
func wantError(t *testing.T, err error, code dsec.Code, field string) {
	t.Helper()
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Code != code || e.Field != field {
		t.Errorf("%v (%T), want %s of %s", err, err, code, field)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
