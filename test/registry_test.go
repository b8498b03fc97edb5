package test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// images is a registry in this process.
type images struct {
	host  string
	close func() // its connections, for who counts descriptors at the test's end

	mu    sync.Mutex
	blobs int           // fetched
	hold  chan struct{} // where set, blobs wait for it
	// change, where set, may answer in place of the registry.
	change func(w http.ResponseWriter, r *http.Request) bool
}

func newImages(t testing.TB) *images {
	t.Helper()
	r := &images{}
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			r.mu.Lock()
			r.blobs++
			hold := r.hold
			r.mu.Unlock()
			if hold != nil {
				<-hold
			}
		}
		r.mu.Lock()
		change := r.change
		r.mu.Unlock()
		if change == nil || !change(w, req) {
			h.ServeHTTP(w, req)
		}
	}))
	r.close = srv.CloseClientConnections
	t.Cleanup(srv.Close)
	r.host = strings.TrimPrefix(srv.URL, "http://")
	return r
}

func (r *images) fetched() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.blobs
	r.blobs = 0
	return n
}

// push puts an image of the tars into the registry, and gives its digest.
func (r *images) push(t testing.TB, ref string, env []string, layers ...[]byte) string {
	t.Helper()
	return r.pushImage(t, ref, env, types.OCIUncompressedLayer, layers)
}

// pushAs is push of layers of another type.
func (r *images) pushAs(t testing.TB, ref string, kind types.MediaType, layers ...[]byte) {
	t.Helper()
	r.pushImage(t, ref, nil, kind, layers)
}

func (r *images) pushImage(t testing.TB, ref string, env []string, kind types.MediaType, layers [][]byte) string {
	t.Helper()
	img := empty.Image
	var err error
	for _, b := range layers {
		img, err = mutate.AppendLayers(img, static.NewLayer(b, kind))
		check(t, err)
	}
	cf, err := img.ConfigFile()
	check(t, err)
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, cf.Config.Env = "linux", runtime.GOARCH, env
	img, err = mutate.ConfigFile(img, cf)
	check(t, err)
	img = mutate.ConfigMediaType(mutate.MediaType(img, types.OCIManifestSchema1), types.OCIConfigJSON)
	to, err := name.ParseReference(r.host+"/"+ref, name.Insecure)
	check(t, err)
	once := remote.DefaultTransport.(*http.Transport).Clone()
	once.DisableKeepAlives = true
	check(t, remote.Write(to, img, remote.WithTransport(once)))
	digest, err := img.Digest()
	check(t, err)
	return digest.String()
}

// upWith is up with a registry that may be spoken to.
func upWith(t testing.TB, r *images, env ...string) *server {
	t.Helper()
	dir := t.TempDir()
	args := []string{"--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run")}
	p := startEnv(t, append([]string{"DSEC_REGISTRY_INSECURE=" + r.host}, env...), "up", args...)
	return &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
}

func wantCode(t testing.TB, err error, code dsec.Code) {
	t.Helper()
	if err == nil || dsec.CodeOf(err) != code {
		t.Errorf("%v, want %s", err, code)
	}
}

// An image of a registry is imported with where it came from, once, and not again
// under another name or another tag of it.
func TestImageOfARegistry(t *testing.T) {
	r := newImages(t)
	s := upWith(t, r)
	c := s.client(t)
	digest := r.push(t, "team/app:v1", []string{"FROM=registry"}, tarOfOne(t, "etc/one", "1"), tarOfOne(t, "etc/two", "2"))
	r.push(t, "team/app:v2", []string{"FROM=registry"}, tarOfOne(t, "etc/one", "1"), tarOfOne(t, "etc/two", "2"))
	var last, size int64
	l, _, err := c.ImportImage(t.Context(), "app", r.host+"/team/app:v1", client.ImageOptions{Progress: func(n, of int64) { last, size = n, of }})
	check(t, err)
	want := client.LayerOrigin{Type: "registry", Location: r.host + "/team/app:v1", Revision: digest}
	if l.Origin == nil || *l.Origin != want || l.Source != "registry" || l.SourceDigest != digest || l.Files != 3 || fmt.Sprint(l.Env) != "[FROM=registry]" {
		t.Errorf("imported %+v from %+v", l, l.Origin)
	}
	if size == 0 || last > size {
		t.Errorf("progress ended with %d of %d", last, size)
	}
	if n := r.fetched(); n != 3 {
		t.Errorf("%d blobs were fetched, want a configuration and two layers", n)
	}
	again, _, err := c.ImportImage(t.Context(), "other", r.host+"/team/app:v2", client.ImageOptions{})
	if err != nil || again.Digest != l.Digest || again.Name != "other:latest" || again.Origin.Location != r.host+"/team/app:v2" {
		t.Errorf("imported again: %+v, %v", again, err)
	}
	if n := r.fetched(); n != 0 {
		t.Errorf("%d blobs were fetched again", n)
	}
	// Another project does not have it for that.
	p, _ := s.project(t, "second")
	if _, _, err := p.ImportImage(t.Context(), "app", r.host+"/team/app:v1", client.ImageOptions{}); err != nil || r.fetched() != 3 {
		t.Errorf("another project: %v", err)
	}
	_, _, err = c.ImportImage(t.Context(), "none", r.host+"/team/none:v1", client.ImageOptions{})
	wantCode(t, err, dsec.CodeNotFound)
	_, _, err = c.ImportImage(t.Context(), "none", "127.0.0.1:1/team/app:v1", client.ImageOptions{})
	wantCode(t, err, dsec.CodeDenied)
	inspected, _, _, err := c.InspectLayer(t.Context(), "app")
	if err != nil || inspected.Origin == nil || *inspected.Origin != want {
		t.Errorf("inspected %+v, %v", inspected.Origin, err)
	}
}

// A create whose base is an image that nobody imported yet imports it, once however
// many ask, and by its name only what has none.
func TestACreateImportsItsImage(t *testing.T) {
	r := newImages(t)
	s := upWith(t, r)
	c := s.client(t)
	r.push(t, "team/app:v1", []string{"FROM=registry"}, tarOfOne(t, "etc/one", "1"))
	ref := r.host + "/team/app:v1"
	r.hold = make(chan struct{})
	errs := make(chan error)
	for range 8 {
		go func() {
			_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
			errs <- err
		}()
	}
	close(r.hold)
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := r.fetched(); n != 2 {
		t.Errorf("8 creates fetched %d blobs, want 2", n)
	}
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
	check(t, err)
	res, _, err := sb.Command("sh", "-c", "echo $FROM").Output(t.Context())
	if err != nil || strings.TrimSpace(string(res)) != "registry" {
		t.Errorf("a command sees %q, %v", res, err)
	}
	if layers, err := c.Layers(t.Context()); err != nil || len(layers) != 1 || layers[0].Name != ref {
		t.Errorf("layers %+v, %v", layers, err)
	}
	for bad, code := range map[string]dsec.Code{
		r.host + "/team/app:v2": dsec.CodeNotFound, "app:v1": dsec.CodeNotFound, "team/app:v1": dsec.CodeNotFound, "127.0.0.1:1/app": dsec.CodeDenied,
	} {
		_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{bad}})
		wantCode(t, err, code)
	}
	// Only a base is imported so.
	_, err = c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref, r.host + "/team/app:v3"}})
	wantCode(t, err, dsec.CodeNotFound)

	off := upWith(t, r, "DSEC_REGISTRY_AUTO_IMPORT=false").client(t)
	_, err = off.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
	if wantCode(t, err, dsec.CodeNotFound); !strings.Contains(err.Error(), "layer list") {
		t.Errorf("where it is off: %v", err)
	}
	none := upWith(t, r, "DSEC_REGISTRY_ENABLED=false").client(t)
	_, _, err = none.ImportImage(t.Context(), "app", ref, client.ImageOptions{})
	wantCode(t, err, dsec.CodeUnsupported)
}

// What is exported and imported again is the same layer, whatever is in it.
func TestExportAndBack(t *testing.T) {
	s := up(t)
	c := s.client(t)
	dir := t.TempDir()
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(dsecBinary, args...)
		cmd.Env = append(environ(), "DSEC_URL="+s.url, "DSEC_KEY_FILE="+s.keyFile)
		cmd.Dir = dir
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("dsec %s: %v: %s", strings.Join(args, " "), err, &stderr)
		}
		return string(out)
	}
	check(t, os.WriteFile(filepath.Join(dir, "all.tar"), tarOfAll(t, false), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "upper.tar"), tarOfAll(t, true), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "image.tar"), ociLayout(t, tarOfAll(t, false), `{"Env":["A=1","A=2"],"User":"1:2","WorkingDir":"/dir","Cmd":["x"]}`), 0o600))
	for _, args := range [][]string{
		{"base", "all.tar"}, {"image", "image.tar"}, {"--kind", "workspace", "work", "upper.tar"}, {"--kind", "toolkit", "--at", "/opt/x", "tool", "upper.tar"},
	} {
		run(append([]string{"layer", "import"}, args...)...)
	}
	layers, err := c.Layers(t.Context())
	check(t, err)
	if len(layers) != 4 {
		t.Fatalf("%d layers", len(layers))
	}
	for _, l := range layers {
		out := string(l.Kind) + l.Digest[7:15]
		said := run("layer", "export", l.Name, out)
		if again := run("layer", "export", l.Digest, out+".tar"); strings.Fields(again)[1] != strings.Fields(said)[1] {
			t.Errorf("%s: exported twice: %s and %s", l.Name, said, again)
		}
		for _, from := range []string{out, out + ".tar"} {
			back := strings.Fields(run("layer", "import", "--kind", string(l.Kind), "back", from))
			if back[1] != l.Digest {
				t.Errorf("%s (%s): exported and imported from %s it is %s", l.Name, l.Kind, from, back[1])
			}
		}
	}
	// What is there is replaced on demand alone, and whole.
	for _, out := range []string{"again", "again.tar"} {
		first := run("layer", "export", "work", out)
		second := run("layer", "export", "base", out, "--replace")
		if back := strings.Fields(run("layer", "import", "back", out)); first == second || len(back) < 2 || back[1] != layers[0].Digest {
			t.Errorf("%s: %q, then %q, imported as %q", out, first, second, back)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*.part")); err != nil || len(left) > 0 {
		t.Errorf("left are %q, %v", left, err)
	}
	// Several are an image of several.
	all := strings.Fields(run("layer", "export", "base", "work", "tool", "-o", "json", "all"))
	if len(all) == 0 {
		t.Error("nothing is said")
	}
	var b bytes.Buffer
	var told, of int64
	digest, err := c.ExportLayers(t.Context(), []string{"base", "work", "tool"}, &b, func(n, size int64) { told, of = n, size })
	if err != nil || told != of || of != int64(b.Len()) || !strings.Contains(strings.Join(all, " "), digest) {
		t.Errorf("%s, %d of %d bytes in %d, %v", digest, told, of, b.Len(), err)
	}
	n := 0
	for r := tar.NewReader(&b); ; n++ {
		if _, err := r.Next(); err != nil {
			break
		}
	}
	if n != 7 {
		t.Errorf("%d files in the layout, want 4 documents and 3 layers", n)
	}
	_, err = c.ExportLayers(t.Context(), []string{"base", "none"}, io.Discard, nil)
	wantCode(t, err, dsec.CodeNotFound)
}

// tarOfAll is a root file system with one of everything that a layer can have.
func tarOfAll(t testing.TB, whiteouts bool) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 5},
		{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o2750, Gid: 7, PAXRecords: map[string]string{"SCHILY.xattr.user.d": "x"}},
		{Name: "dir/b", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 1000, Gid: 1001, Size: 5, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "a\x00b"}},
		{Name: "dir/a", Typeflag: tar.TypeLink, Linkname: "dir/b"},
		{Name: "dir/empty", Typeflag: tar.TypeReg},
		{Name: "dir/large", Typeflag: tar.TypeReg, Size: 300_000},
		{Name: "dir/to", Typeflag: tar.TypeSymlink, Linkname: "../../no where"},
		{Name: "dir/to2", Typeflag: tar.TypeLink, Linkname: "dir/to"},
		{Name: "dir/pipe", Typeflag: tar.TypeFifo, Mode: 0o600},
		{Name: "dir/" + strings.Repeat("long", 60), Typeflag: tar.TypeReg, Size: 5},
		{Name: "dir/\xff\xfe\n", Typeflag: tar.TypeReg, Size: 5},
		{Name: "hides/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "hides/.wh.gone", Typeflag: tar.TypeReg},
		{Name: "all/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "all/.wh..wh..opq", Typeflag: tar.TypeReg},
		{Name: "all/kept", Typeflag: tar.TypeReg, Size: 5},
	} {
		if strings.Contains(h.Name, ".wh.") && !whiteouts {
			continue
		}
		h.Format = tar.FormatPAX
		check(t, w.WriteHeader(&h))
		if h.Size > 0 {
			_, err := w.Write(bytes.Repeat([]byte("hello"), int(h.Size/5)))
			check(t, err)
		}
	}
	check(t, w.Close())
	return b.Bytes()
}
