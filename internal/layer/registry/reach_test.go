package registry

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opendsec/dsec"
)

// forbidden is a server that must not be spoken to.
func forbidden(t *testing.T, secure bool) (host string, seen *atomic.Int64) {
	t.Helper()
	seen = new(atomic.Int64)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { seen.Add(1) }))
	srv.Config.ConnState = func(net.Conn, http.ConnState) { seen.Add(1) }
	if secure {
		srv.StartTLS()
	} else {
		srv.Start()
	}
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String(), seen
}

// Wherever a registry leads to, by a redirect or by the place where tokens are, no
// connection is made to what the operator did not name and is not public.
func TestARegistryLeadsNowhere(t *testing.T) {
	s := newServer(t, false)
	layer := noise(1000, 8)
	s.push("app", image(t, layer))
	plain, seen := forbidden(t, false)
	secure, seenSecure := forbidden(t, true)
	_, port, err := net.SplitHostPort(secure)
	check(t, err)
	targets := []string{
		"http://169.254.169.254/latest/meta-data/", "https://169.254.169.254/", "http://[fd00:ec2::254]/", "http://" + plain + "/x", "https://" + plain + "/x",
		"https://" + secure + "/x", "https://localhost:" + port + "/x", "https://[::ffff:127.0.0.1]:" + port + "/x", "https://127.1:" + port + "/x",
		"file:///etc/passwd", "gopher://127.0.0.1/", "http://0.0.0.0:" + port + "/", "https://0x7f000001:" + port + "/",
	}
	for _, to := range targets {
		for what, part := range map[string]string{"manifest": "/manifests/", "blob": "/blobs/", "ping": "/v2/"} {
			s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, part) && (what != "ping" || r.URL.Path == "/v2/") {
					http.Redirect(w, r, to, http.StatusTemporaryRedirect)
					return true
				}
				return false
			})
			_, err := pull(t.Context(), s.client(), Request{Ref: s.host + "/app"})
			if err == nil {
				t.Errorf("%s redirected to %s: no error", what, to)
			} else if code := dsec.CodeOf(err); code != dsec.CodeDenied && code != dsec.CodeUnavailable {
				t.Errorf("%s redirected to %s: %v", what, to, err)
			} else if strings.HasPrefix(to, "https://"+secure) && code != dsec.CodeDenied {
				t.Errorf("%s redirected to %s: %v, want denied", what, to, err)
			}
		}
		s.misbehave(func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+to+`",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		})
		if _, err := s.client().Resolve(t.Context(), Request{Ref: s.host + "/app", Credentials: &Credentials{Username: "u", Password: "p"}}); err == nil {
			t.Errorf("tokens of %s: no error", to)
		}
	}
	// And the caller's own words.
	s.misbehave(nil)
	for _, host := range []string{plain, secure, "localhost:" + port, "[::1]:" + port, "169.254.169.254", "127.0.0.1"} {
		_, err := s.client().Resolve(t.Context(), Request{Ref: host + "/app"})
		wantError(t, err, dsec.CodeDenied, "ref")
		if err != nil && strings.Contains(err.Error(), "refused") {
			t.Errorf("%s: the error tells what is there: %v", host, err)
		}
	}
	if n := seen.Load() + seenSecure.Load(); n > 0 {
		t.Errorf("%d connections were made", n)
	}
	// The control: what the operator names is spoken to.
	c := s.client(func(c *Config) { c.Private = []string{secure} })
	if _, err := c.Resolve(t.Context(), Request{Ref: secure + "/app"}); err == nil {
		t.Error("a server that is no registry resolves")
	}
	if seenSecure.Load() == 0 {
		t.Error("the control: no connection was made")
	}
}

// URLs that a layer brings along are not followed.
func TestForeignLayers(t *testing.T) {
	s := newServer(t, false)
	host, seen := forbidden(t, false)
	img := image(t, []byte("x"))
	s.push("app", img)
	raw, err := img.RawManifest()
	check(t, err)
	var m map[string]any
	check(t, json.Unmarshal(raw, &m))
	layer := m["layers"].([]any)[0].(map[string]any)
	layer["urls"], layer["mediaType"] = []string{"http://" + host + "/blob", "file:///etc/passwd"}, "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
	raw, err = json.Marshal(m)
	check(t, err)
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			_, _ = w.Write(raw)
			return true
		}
		return false
	})
	c := s.client()
	if files, err := pull(t.Context(), c, Request{Ref: s.host + "/app"}); err != nil || string(files["blobs/sha256/"+digestOf([]byte("x"))[7:]]) != "x" {
		t.Errorf("from the registry: %v", err)
	}
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.Contains(r.URL.Path, "/manifests/"):
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			_, _ = w.Write(raw)
		case strings.HasSuffix(r.URL.Path, digestOf([]byte("x"))):
			http.NotFound(w, r)
		default:
			return false
		}
		return true
	})
	_, err = pull(t.Context(), c, Request{Ref: s.host + "/app"})
	wantError(t, err, dsec.CodeNotFound, "ref")
	if seen.Load() > 0 {
		t.Error("a layer's URL was followed")
	}
}

// guarded asks for a name and a password, by itself or for a token.
func (s *server) guarded(token bool, user, password string) {
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		u, p, ok := r.BasicAuth()
		known := ok && u == user && p == password
		switch {
		case !token && known:
			return false
		case !token:
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		case r.URL.Path == "/token" && known:
			if scope := r.URL.Query().Get("scope"); scope != "repository:app:pull" {
				s.t.Errorf("token of scope %q", scope)
			}
			_, _ = fmt.Fprint(w, `{"token":"a-token"}`)
			return true
		case r.Header.Get("Authorization") == "Bearer a-token":
			return false
		default:
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="x",scope="repository:app:pull"`, s.host))
		}
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
}

func TestCredentials(t *testing.T) {
	s := newServer(t, false)
	img := image(t, []byte("x"))
	s.push("app", img)
	file := filepath.Join(t.TempDir(), "config.json")
	auth := base64.StdEncoding.EncodeToString([]byte("user:word"))
	check(t, os.WriteFile(file, fmt.Appendf(nil, `{"auths":{"https://%s/v2/":{"auth":%q},"%s/other":{"auth":"eDp5"}}}`, s.host, auth, s.host), 0o600))
	var log strings.Builder
	logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for _, token := range []bool{false, true} {
		s.guarded(token, "user", "word")
		ref := Request{Ref: s.host + "/app"}
		wantImage(t, s.client(func(c *Config) { c.CredentialsFile = file }), ref, img)
		own := ref
		own.Credentials = &Credentials{Username: "user", Password: "word"}
		wantImage(t, s.client(), own, img)
		_, err := s.client().Resolve(t.Context(), ref)
		wantError(t, err, dsec.CodeUnauthenticated, "ref")
		own.Credentials = &Credentials{Username: "user", Password: "wrong-word"}
		_, err = s.client(func(c *Config) { c.CredentialsFile, c.Logger = file, logger }).Resolve(t.Context(), own)
		wantError(t, err, dsec.CodeUnauthenticated, "ref")
		if text := fmt.Sprintf("%v %+v %#v %v %s", err, own, own, err.(*dsec.Error).Err, log.String()); strings.Contains(text, "wrong-word") {
			t.Errorf("told: %s", text)
		}
	}
}

// A registry's credentials go to it, and neither to where it redirects to nor to a
// mirror.
func TestCredentialsStayWithTheirHost(t *testing.T) {
	s, other := newServer(t, false), newServer(t, false)
	layer := noise(1000, 9)
	img := image(t, layer)
	s.push("app", img)
	other.push("app", img)
	s.guarded(false, "user", "word")
	guarded := s.handle
	s.misbehave(func(w http.ResponseWriter, r *http.Request) bool {
		if guarded(w, r) {
			return true
		}
		if isBlob(r) {
			http.Redirect(w, r, "http://"+other.host+r.URL.Path, http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	leaks := 0
	other.misbehave(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") != "" {
			leaks++
		}
		return false
	})
	req := Request{Ref: s.host + "/app", Credentials: &Credentials{Username: "user", Password: "word"}}
	wantImage(t, s.client(func(c *Config) { c.Insecure = append(c.Insecure, other.host) }), req, img)
	if len(other.fetched("/blobs/")) != 2 {
		t.Error("the control: nothing came from where it redirects to")
	}
	wantImage(t, s.client(func(c *Config) { c.Mirrors = map[string][]string{s.host: {"http://" + other.host}} }), req, img)
	if leaks > 0 {
		t.Errorf("credentials went along %d times", leaks)
	}
}

// With TLS the certificate must be of an authority that is trusted; without, the host
// must be named.
func TestTLS(t *testing.T) {
	s := newServer(t, true)
	img := image(t, []byte("x"))
	s.push("app", img)
	private := func(c *Config) { c.Insecure, c.Private = nil, []string{s.host} }
	wantImage(t, s.client(private, func(c *Config) { c.CAFile = s.caFile() }), Request{Ref: s.host + "/app"}, img)
	_, err := s.client(private).Resolve(t.Context(), Request{Ref: s.host + "/app"})
	if wantError(t, err, dsec.CodeUnavailable, "ref"); err != nil && !strings.Contains(err.Error(), "certificate") {
		t.Error(err)
	}
	plain := newServer(t, false)
	plain.push("app", img)
	_, err = plain.client(func(c *Config) { c.Insecure, c.Private = nil, []string{plain.host} }).Resolve(t.Context(), Request{Ref: plain.host + "/app"})
	if wantError(t, err, dsec.CodeDenied, "ref"); err != nil && !strings.Contains(err.Error(), "registry.insecure") {
		t.Error(err)
	}
	if asked := plain.fetched(""); len(asked) > 0 {
		t.Errorf("without TLS was asked %q", asked)
	}
	if _, err := New(Config{CAFile: "/nonexistent"}); dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("no file: %v", err)
	}
}
