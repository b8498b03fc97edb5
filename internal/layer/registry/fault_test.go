package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
)

func isBlob(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blobs/") }

// noise is what a compressor would make nothing of.
func noise(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		seed = seed*181 + 13
		b[i] = seed ^ byte(i>>8)
	}
	return b
}

// A body that breaks off is gone on with, and a blob that came is not fetched twice.
func TestABlobIsResumed(t *testing.T) {
	s := newServer(t, false)
	layer := noise(300_000, 1)
	img := image(t, layer)
	s.push("app", img)
	for _, ranges := range []bool{true, false} {
		n := 0
		s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
			if !isBlob(r) || !strings.HasSuffix(r.URL.Path, digestOf(layer)) {
				return false
			}
			from := 0
			if v := r.Header.Get("Range"); v != "" && ranges {
				var to int
				if _, err := fmt.Sscanf(v, "bytes=%d-%d", &from, &to); err != nil || to != len(layer)-1 {
					t.Errorf("range %q", v)
				}
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(layer)-1, len(layer)))
			}
			w.Header().Set("Content-Length", strconv.Itoa(len(layer)-from))
			if from > 0 {
				w.WriteHeader(http.StatusPartialContent)
			}
			n++
			_, _ = w.Write(layer[from:min(len(layer), n*70_000)]) // the rest is missing
			return true
		})
		wantImage(t, s.client(), Request{Ref: s.host + "/app"}, img)
		asked := s.fetched("/blobs/" + digestOf(layer))
		if len(asked) != 5 || !strings.Contains(asked[4], "bytes=") {
			t.Errorf("ranges %v: asked %q", ranges, asked)
		}
	}
	// One that refuses ranges is asked for the whole.
	n := 0
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digestOf(layer)) {
			return false
		}
		if r.Header.Get("Range") != "" {
			http.Error(w, "", http.StatusRequestedRangeNotSatisfiable)
			return true
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(layer)))
		n++
		_, _ = w.Write(layer[:min(len(layer), n*200_000)])
		return true
	})
	wantImage(t, s.client(), Request{Ref: s.host + "/app"}, img)
	if n != 2 {
		t.Errorf("the whole was asked for %d times", n)
	}
	// A registry that never gets further is given up.
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if isBlob(r) {
			w.Header().Set("Content-Length", strconv.Itoa(len(layer)))
			w.WriteHeader(http.StatusOK)
		}
		return isBlob(r)
	})
	_, err := pull(t.Context(), s.client(), Request{Ref: s.host + "/app"})
	if err == nil {
		t.Error("a blob without bytes was taken")
	}
}

// A body from which nothing comes is dropped, and asked for again.
func TestAStalledBody(t *testing.T) {
	s := newServer(t, false)
	layer := noise(10_000, 2)
	img := image(t, layer)
	s.push("app", img)
	stalled := false
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if stalled || !strings.HasSuffix(r.URL.Path, digestOf(layer)) {
			return false
		}
		stalled = true
		w.Header().Set("Content-Length", strconv.Itoa(len(layer)))
		_, _ = w.Write(layer[:5000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	})
	c := s.client(func(c *Config) { c.times.stall = 50 * time.Millisecond })
	wantImage(t, c, Request{Ref: s.host + "/app"}, img)
	if !stalled {
		t.Error("nothing stalled")
	}
}

// What fails for a moment is asked for again, a few times; what fails for good is an
// error of its kind.
func TestStatuses(t *testing.T) {
	s := newServer(t, false)
	img := image(t, []byte("x"))
	s.push("app", img)
	for _, tt := range []struct {
		status, times int
		code          dsec.Code
		asked         int
	}{
		{500, 2, "", 3}, {503, 99, dsec.CodeUnavailable, attempts}, {429, 1, "", 2}, {429, 99, dsec.CodeExhausted, attempts},
		{401, 99, dsec.CodeUnauthenticated, 1}, {403, 99, dsec.CodeDenied, 1}, {404, 99, dsec.CodeNotFound, 1}, {400, 99, dsec.CodeUnavailable, 1},
	} {
		left := tt.times
		s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") || left == 0 {
				return false
			}
			left--
			http.Error(w, "secret details", tt.status)
			return true
		})
		s.fetched("")
		_, err := s.client().Resolve(t.Context(), Request{Ref: s.host + "/app"})
		if tt.code == "" {
			check(t, err)
		} else {
			wantError(t, err, tt.code, "ref")
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("%d: %v", tt.status, err)
			}
		}
		if asked := s.fetched("/manifests/"); len(asked) != tt.asked {
			t.Errorf("%d: asked %d times, want %d", tt.status, len(asked), tt.asked)
		}
	}
	// More patience than a caller has is not had.
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Retry-After", "3000")
		http.Error(w, "", http.StatusTooManyRequests)
		return true
	})
	_, err := s.client().Resolve(t.Context(), Request{Ref: s.host + "/app"})
	wantError(t, err, dsec.CodeExhausted, "ref")
	s.http.Close()
	_, err = s.client().Resolve(t.Context(), Request{Ref: s.host + "/app"})
	wantError(t, err, dsec.CodeUnavailable, "ref")
}

// What is not what its digest or its size says ends the stream with an error, and
// leaves nothing in the cache.
func TestMismatch(t *testing.T) {
	s := newServer(t, false)
	layer := noise(50_000, 3)
	img := image(t, layer)
	s.push("app", img)
	other := bytes.Clone(layer)
	other[40_000] ^= 1
	for name, body := range map[string]func(w http.ResponseWriter){
		"another": func(w http.ResponseWriter) { _, _ = w.Write(other) },
		"shorter": func(w http.ResponseWriter) { w.Header().Set("Content-Length", "49999"); _, _ = w.Write(layer[:49_999]) },
		"longer": func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "50001")
			_, _ = w.Write(append(layer, 0))
		},
		"longer without saying so": func(w http.ResponseWriter) {
			_, _ = w.Write(layer)
			w.(http.Flusher).Flush()
			_, _ = w.Write([]byte{0})
		},
	} {
		s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, digestOf(layer)) {
				body(w)
				return true
			}
			return false
		})
		dir := t.TempDir()
		c := s.client(func(c *Config) { c.CacheDir = dir })
		_, err := pull(t.Context(), c, Request{Ref: s.host + "/app"})
		if wantError(t, err, dsec.CodeInvalid, "ref"); err != nil && !strings.Contains(err.Error(), digestOf(layer)) {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 { // the configuration came whole
			t.Errorf("%s: left in the cache: %v, %v", name, left, err)
		}
	}
	// Manifests: by the digest asked for, and by the registry's own word.
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		raw, _ := img.RawManifest()
		w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
		w.Header().Set("Docker-Content-Digest", digestOf(nil))
		_, _ = w.Write(append(raw, ' '))
		return true
	})
	for _, ref := range []string{"/app", "/app@" + digest(t, img)} {
		_, err := s.client().Resolve(t.Context(), Request{Ref: s.host + ref})
		wantError(t, err, dsec.CodeInvalid, "ref")
	}
}

// Manifests that lie, that are two things at once or that are no image's are refused
// before anything else is fetched.
func TestManifestShapes(t *testing.T) {
	s := newServer(t, false)
	img := image(t, []byte("x"))
	m, err := img.Manifest()
	check(t, err)
	cfg := fmt.Sprintf(`"config":{"mediaType":%q,"digest":%q,"size":%d}`, types.OCIConfigJSON, m.Config.Digest, m.Config.Size)
	layer := func(kind string, digest string, size int64) string {
		return fmt.Sprintf(`{"mediaType":%q,"digest":%q,"size":%d}`, kind, digest, size)
	}
	ok := layer(string(types.OCILayer), digestOf([]byte("x")), 1)
	doc := func(parts ...string) string { return `{"schemaVersion":2,` + strings.Join(parts, ",") + `}` }
	many := strings.Repeat(ok+",", maxLayers) + ok
	for name, tt := range map[string]struct {
		doc  string
		kind types.MediaType
		code dsec.Code
	}{
		"two things":      {doc(cfg, `"layers":[]`, `"manifests":[]`), types.OCIManifestSchema1, dsec.CodeUnsupported},
		"says another":    {doc(`"mediaType":"`+string(types.OCIImageIndex)+`"`, cfg, `"layers":[]`), types.OCIManifestSchema1, dsec.CodeUnsupported},
		"first schema":    {`{"schemaVersion":1,"fsLayers":[]}`, types.DockerManifestSchema1, dsec.CodeUnsupported},
		"nothing":         {`{}`, types.OCIManifestSchema1, dsec.CodeUnsupported},
		"no JSON":         {`{"schemaVersion":2,`, types.OCIManifestSchema1, dsec.CodeInvalid},
		"another config":  {doc(`"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","digest":"`+digestOf(nil)+`","size":2}`, `"layers":[]`), types.OCIManifestSchema1, dsec.CodeUnsupported},
		"encrypted":       {doc(cfg, `"layers":[`+layer(string(types.OCILayer)+"+encrypted", digestOf([]byte("x")), 1)+`]`), types.OCIManifestSchema1, dsec.CodeUnsupported},
		"sha512":          {doc(cfg, `"layers":[`+layer(string(types.OCILayer), "sha512:"+strings.Repeat("a", 128), 1)+`]`), types.OCIManifestSchema1, dsec.CodeUnsupported},
		"negative":        {doc(cfg, `"layers":[`+layer(string(types.OCILayer), digestOf([]byte("x")), -1)+`]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"two sizes":       {doc(cfg, `"layers":[`+ok+","+layer(string(types.OCILayer), digestOf([]byte("x")), 2)+`]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"too large":       {doc(cfg, `"layers":[`+layer(string(types.OCILayer), digestOf([]byte("x")), 33<<30)+`]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"overflow":        {doc(cfg, `"layers":[`+layer(string(types.OCILayer), digestOf([]byte("x")), 1<<62)+","+layer(string(types.OCILayer), digestOf([]byte("y")), 1<<62)+`]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"many layers":     {doc(cfg, `"layers":[`+many+`]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"large config":    {doc(`"config":{"mediaType":"`+string(types.OCIConfigJSON)+`","digest":"`+digestOf(nil)+`","size":5000000}`, `"layers":[]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"long":            {doc(cfg, `"layers":[]`, `"x":"`+strings.Repeat("x", maxManifest)+`"`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"deep":            {strings.Repeat(`{"config":`, 20_000), types.OCIManifestSchema1, dsec.CodeInvalid},
		"traversal":       {doc(cfg, `"layers":[`+layer(string(types.OCILayer), "sha256:../../x", 1)+`]`), types.OCIManifestSchema1, dsec.CodeInvalid},
		"index in index":  {doc(`"manifests":[{"mediaType":"` + string(types.OCIImageIndex) + `","digest":"` + digestOf(nil) + `","size":1,"platform":{"os":"linux","architecture":"amd64"}}]`), types.OCIImageIndex, dsec.CodeUnsupported},
		"list of nothing": {doc(`"manifests":[]`), types.OCIImageIndex, dsec.CodeUnsupported},
	} {
		s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				w.Header().Set("Content-Type", string(tt.kind))
				_, _ = io.WriteString(w, tt.doc)
				return true
			}
			return false
		})
		_, err := s.client().Resolve(t.Context(), Request{Ref: s.host + "/app"})
		if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Code != tt.code || e.Field != "ref" {
			t.Errorf("%s: %v, want %s of ref", name, err, tt.code)
		}
		if asked := s.fetched("/blobs/"); len(asked) > 0 {
			t.Errorf("%s: asked for %q", name, asked)
		}
	}
}

// A registry has mirrors that are tried first, in their order, and itself at last;
// a blob that a mirror has lost comes from the next.
func TestMirrors(t *testing.T) {
	real, empty, second := newServer(t, false), newServer(t, false), newServer(t, false)
	layer := noise(1000, 4)
	img := image(t, layer)
	real.push("team/app", img)
	second.push("cache/team/app", img)
	broken := newServer(t, false)
	broken.misbehave(func(w http.ResponseWriter, _ *http.Request) bool { http.Error(w, "", 500); return true })
	c := real.client(func(c *Config) {
		c.Mirrors = map[string][]string{real.host: {"http://" + broken.host, "http://" + empty.host, "http://" + second.host + "/cache/"}}
	})
	wantImage(t, c, Request{Ref: real.host + "/team/app"}, img)
	if asked := real.fetched(""); len(asked) > 0 {
		t.Errorf("the registry was asked %q", asked)
	}
	if asked := second.fetched("/v2/cache/team/app/"); len(asked) != 3 {
		t.Errorf("the mirror was asked %q", asked)
	}
	second.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, digestOf(layer)) {
			http.NotFound(w, r)
			return true
		}
		return false
	})
	wantImage(t, c, Request{Ref: real.host + "/team/app"}, img)
	if asked := real.fetched("/blobs/" + digestOf(layer)); len(asked) != 1 {
		t.Errorf("the registry was asked for the blob %d times", len(asked))
	}
	_, err := c.Resolve(t.Context(), Request{Ref: real.host + "/team/none"})
	wantError(t, err, dsec.CodeNotFound, "ref")
	for _, bad := range []string{"ftp://x", "https://user:x@host", "host", "https://host/UP", "https://host?x"} {
		if _, err := New(Config{Mirrors: map[string][]string{"docker.io": {bad}}}); dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("mirror %q: %v", bad, err)
		}
	}
}

// A repeated import does not fetch what came whole; another project and another
// repository do, for who may read a blob there need not be who may read it here.
func TestCache(t *testing.T) {
	s := newServer(t, false)
	one, two := noise(40_000, 5), noise(60_000, 6)
	img := image(t, one, two)
	s.push("a/app", img)
	s.push("b/app", img)
	dir := t.TempDir()
	c := s.client(func(c *Config) { c.CacheDir = dir })
	req := Request{Ref: s.host + "/a/app", Scope: "p"}
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool { // the second layer never comes
		if strings.HasSuffix(r.URL.Path, digestOf(two)) {
			http.Error(w, "", http.StatusServiceUnavailable)
			return true
		}
		return false
	})
	_, err := pull(t.Context(), c, req)
	wantError(t, err, dsec.CodeUnavailable, "ref")
	s.misbehave(nil)
	s.fetched("")
	wantImage(t, c, req, img)
	if asked := s.fetched("/blobs/"); len(asked) != 1 || !strings.HasSuffix(asked[0], digestOf(two)) {
		t.Errorf("the repeated import asked for %q", asked)
	}
	wantImage(t, c, req, img)
	if asked := s.fetched("/blobs/"); len(asked) != 0 {
		t.Errorf("the third asked for %q", asked)
	}
	for _, other := range []Request{{Ref: req.Ref, Scope: "q"}, {Ref: s.host + "/b/app", Scope: "p"}} {
		wantImage(t, c, other, img)
		if asked := s.fetched("/blobs/"); len(asked) != 3 {
			t.Errorf("%+v asked for %q", other, asked)
		}
	}
	// What the disk made of a blob is noticed, once.
	entries, err := os.ReadDir(dir)
	check(t, err)
	for _, e := range entries {
		f := filepath.Join(dir, e.Name())
		if b, err := os.ReadFile(f); err == nil && bytes.Equal(b, two) {
			b[9] ^= 1
			check(t, os.WriteFile(f, b, 0o600))
		}
	}
	_, err = pull(t.Context(), c, req)
	wantError(t, err, dsec.CodeInvalid, "ref")
	s.fetched("")
	wantImage(t, c, req, img)
	if asked := s.fetched("/blobs/"); len(asked) != 1 {
		t.Errorf("after damage asked for %q", asked)
	}
}

// The cache stays within its bound, and drops what a crash left and what is old.
func TestCacheIsSwept(t *testing.T) {
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "a-1.part"), []byte("x"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "old"), []byte("x"), 0o600))
	day := time.Now().Add(-25 * time.Hour)
	check(t, os.Chtimes(filepath.Join(dir, "old"), day, day))
	check(t, os.WriteFile(filepath.Join(dir, "new"), []byte("x"), 0o600))
	c, err := openCache(dir, 100)
	check(t, err)
	names := func() (list []string) {
		entries, err := os.ReadDir(dir)
		check(t, err)
		for _, e := range entries {
			list = append(list, e.Name())
		}
		return list
	}
	if got := names(); fmt.Sprint(got) != "[new]" {
		t.Errorf("left %q", got)
	}
	for i := range 6 {
		k := c.start("key"+strconv.Itoa(i), 30)
		k.write(make([]byte, 30))
		k.finish()
		at := time.Now().Add(time.Duration(i-100) * time.Second)
		check(t, os.Chtimes(filepath.Join(dir, "key"+strconv.Itoa(i)), at, at))
	}
	if got := names(); fmt.Sprint(got) != "[key3 key4 key5 new]" {
		t.Errorf("after more than fits: %q", got)
	}
	if c.start("large", 51) != nil {
		t.Error("a blob of more than half of the cache is kept")
	}
	// An importer that is gone leaves nothing.
	k := c.start("part", 10)
	k.write([]byte("x"))
	k.drop()
	k.drop()
	for _, name := range names() {
		if strings.HasSuffix(name, partSuffix) {
			t.Errorf("%s is left", name)
		}
	}
}

// A caller that goes away ends the fetch, and nothing is left running.
func TestCancel(t *testing.T) {
	s := newServer(t, false)
	s.push("app", image(t, noise(3_000_000, 7)))
	ctx, cancel := context.WithCancel(t.Context())
	c := s.client(func(c *Config) { c.CacheDir = t.TempDir() })
	img, err := c.Resolve(ctx, Request{Ref: s.host + "/app"})
	check(t, err)
	l := img.Open(ctx)
	_, err = io.ReadFull(l, make([]byte, 100_000))
	check(t, err)
	cancel()
	check(t, l.Close())
	if _, err := l.Read(make([]byte, 1)); err == nil {
		t.Error("a closed layout can be read")
	}
	if left, err := os.ReadDir(c.cache.dir); err != nil || len(left) > 1 {
		t.Errorf("left in the cache: %v, %v", left, err)
	}
	s.http.CloseClientConnections()
}
