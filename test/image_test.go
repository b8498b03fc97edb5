package test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// A container is made of an image that its create names, in a project that never saw
// it; and what another project makes of the same name changes nothing there.
func TestTagOfARegistryMoves(t *testing.T) {
	r := newImages(t)
	s := upWith(t, r)
	a, _ := s.project(t, "a")
	b, _ := s.project(t, "b")
	ref := r.host + "/team/app:v1"
	layerOf := func(c *client.Client) string {
		t.Helper()
		_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
		check(t, err)
		l, _, _, err := c.InspectLayer(t.Context(), ref)
		check(t, err)
		return l.Digest
	}
	r.push(t, "team/app:v1", nil, tarOfOne(t, "file", "1"))
	before := layerOf(a)
	r.push(t, "team/app:v1", nil, tarOfOne(t, "file", "2")) // as whoever may push does
	moved := layerOf(b)
	if moved == before {
		t.Error("another project has the old image")
	}
	if after := layerOf(a); after != before {
		t.Errorf("the project's image became %s", after)
	}
	// To have the new one is to import it.
	if _, _, err := a.ImportImage(t.Context(), ref, ref, client.ImageOptions{}); err != nil || layerOf(a) != moved {
		t.Errorf("imported again: %v", err)
	}
}

// An image that is imported again is fetched again only where its layer is damaged in
// the store, which mends it; bytes that only a read tells of are looked for on demand.
func TestImportOfAnImageMends(t *testing.T) {
	r := newImages(t)
	s := upWith(t, r, "DSEC_REGISTRY_CACHE_BYTES=0")
	c := s.client(t)
	ref := r.host + "/team/app:v1"
	r.push(t, "team/app:v1", nil, tarOfOne(t, "file", strings.Repeat("content", 1000)))
	again := func(o client.ImageOptions, fetched int) client.Layer {
		t.Helper()
		l, _, err := c.ImportImage(t.Context(), "app", ref, o)
		check(t, err)
		if n := r.fetched(); n != fetched {
			t.Errorf("%d blobs were fetched, want %d", n, fetched)
		}
		return l
	}
	l := again(client.ImageOptions{}, 2)
	again(client.ImageOptions{}, 0)
	again(client.ImageOptions{Verify: true}, 0)
	data := filepath.Join(s.dir, "data", "layers", "blobs", "layers", strings.TrimPrefix(l.Digest, "sha256:"), "data")
	whole, err := os.ReadFile(data)
	check(t, err)
	for name, damage := range map[string]struct {
		spoil  func() error
		verify bool
	}{
		"cut":   {func() error { return os.Truncate(data, int64(len(whole)-1)) }, false},
		"gone":  {func() error { return os.Remove(data) }, false},
		"other": {func() error { return os.WriteFile(data, bytes.ToUpper(whole), 0o600) }, true},
	} {
		check(t, damage.spoil())
		if damage.verify {
			again(client.ImageOptions{}, 0)
		}
		if mended := again(client.ImageOptions{Verify: damage.verify}, 2); mended.Digest != l.Digest {
			t.Errorf("%s: it became %s", name, mended.Digest)
		}
		if b, err := os.ReadFile(data); err != nil || !bytes.Equal(b, whole) {
			t.Errorf("%s: the data are not whole: %v", name, err)
		}
		again(client.ImageOptions{Verify: true}, 0)
	}
}

// A registry's image that is damaged, hostile or huge is refused, and nothing of it
// is there afterwards.
func TestDamagedImageOfARegistry(t *testing.T) {
	r := newImages(t)
	s := upWith(t, r)
	c := s.client(t)
	disk := func() (names []string) {
		check(t, filepath.WalkDir(filepath.Join(s.dir, "data", "layers"), func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				names = append(names, path)
			}
			return err
		}))
		return names
	}
	before := disk()
	// A tar of one file of zeros, whose megabytes are compressed once.
	const size = 2 << 30
	var header bytes.Buffer
	check(t, tar.NewWriter(&header).WriteHeader(&tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Size: size}))
	zip := func(b []byte) []byte {
		var member bytes.Buffer
		z := gzip.NewWriter(&member)
		_, err := z.Write(b)
		check(t, errors.Join(err, z.Close()))
		return member.Bytes()
	}
	zeros := zip(make([]byte, 1<<20))
	bomb := slices.Concat(zip(header.Bytes()), bytes.Repeat(zeros, size>>20), zip(make([]byte, 1024)))
	for name, layer := range map[string][]byte{
		"bomb": bomb, "breakout": tarOfOne(t, "../../etc/passwd", "x"), "cut": tarOfOne(t, "file", strings.Repeat("x", 1000))[:700], "none": []byte("not a tar"),
	} {
		r.pushAs(t, "bad/"+name+":v1", types.OCILayer, layer)
		_, _, err := c.ImportImage(t.Context(), "bad", r.host+"/bad/"+name+":v1", client.ImageOptions{})
		if wantCode(t, err, dsec.CodeInvalid); err != nil && !strings.HasPrefix(err.Error(), "ref: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.push(t, "good:v1", nil, tarOfOne(t, "file", "content"))
	r.mu.Lock()
	r.change = func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			_, _ = w.Write([]byte("something else"))
			return true
		}
		return false
	}
	r.mu.Unlock()
	_, _, err := c.ImportImage(t.Context(), "good", r.host+"/good:v1", client.ImageOptions{})
	wantCode(t, err, dsec.CodeInvalid)
	if layers, err := c.Layers(t.Context()); err != nil || len(layers) != 0 {
		t.Errorf("layers %+v, %v", layers, err)
	}
	if after := disk(); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("in the store are %q, before there were %q", after, before)
	}
}

// A container is made of an image, by a create that imports it.
func TestContainerOfAnImage(t *testing.T) {
	r := newImages(t)
	s := containersIn(t, "DSEC_REGISTRY_INSECURE="+r.host)
	t.Cleanup(r.close)
	r.push(t, "team/app:v1", []string{"FROM=registry"}, busyboxTar(t), tarOfOne(t, "etc/two", "2"), tarOfOne(t, "etc/.wh.two", ""))
	sb, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{r.host + "/team/app:v1"}})
	check(t, err)
	out, _, err := sb.Command("sh", "-c", "echo $FROM; cat /etc/two; ls /etc/passwd").Output(t.Context())
	if err != nil || strings.TrimSpace(string(out)) != "registry\n/etc/passwd" {
		t.Errorf("%q, %v", out, err)
	}
}

// What is exported is run by podman and crun, with what the upper layers hide hidden.
func TestExportRunsElsewhere(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Program("podman"), testutil.Program("crun"), testutil.Program("busybox"))
	if b, err := os.ReadFile("/sys/fs/cgroup/unified/cgroup.controllers"); err == nil && len(bytes.TrimSpace(b)) > 0 {
		t.Skipf("crun runs nothing on a hybrid of cgroups whose v2 has controllers: %s", bytes.TrimSpace(b))
	}
	s := up(t)
	c := s.client(t)
	ctx := t.Context()
	importTar := func(name string, kind dsec.LayerKind, archive []byte) {
		t.Helper()
		_, _, err := c.ImportLayer(ctx, name, client.ImportOptions{Kind: kind}, bytes.NewReader(archive))
		check(t, err)
	}
	importTar("base", "", ociLayout(t, busyboxTar(t), `{"Env":["PATH=/bin","FROM=base"],"WorkingDir":"/tmp","Cmd":["sh","-c","echo $FROM; pwd; cat /work/file; ls /bin/cat"]}`))
	importTar("work", dsec.LayerWorkspace, tarOfOne(t, "work/file", "work\n"))
	importTar("tool", dsec.LayerToolkit, tarOfOne(t, "etc/.wh.passwd", ""))
	dir := testutil.Dir(t)
	layout := filepath.Join(dir, "layout.tar")
	f, err := os.Create(layout)
	check(t, err)
	_, err = c.ExportLayers(ctx, []string{"base", "work", "tool"}, f, nil)
	check(t, err)
	check(t, f.Close())

	podman := func(args ...string) (string, error) {
		base := []string{
			"--root", filepath.Join(dir, "podman"), "--runroot", filepath.Join(dir, "run"), "--cgroup-manager", "cgroupfs",
			"--events-backend", "none", "--log-level", "error", "--runtime", "crun", "--storage-driver", "vfs",
		}
		out, err := exec.CommandContext(context.WithoutCancel(ctx), "podman", append(base, args...)...).CombinedOutput()
		return string(out), err
	}
	t.Cleanup(func() {
		if out, err := podman("system", "reset", "--force"); err != nil {
			t.Logf("podman system reset: %v: %s", err, out)
		}
	})
	out, err := podman("pull", "--quiet", "oci-archive:"+layout)
	if err != nil {
		t.Fatalf("podman pull: %v: %s", err, out)
	}
	lines := strings.Fields(out)
	image := lines[len(lines)-1]
	if out, err := podman("run", "--rm", "--network", "none", "--cgroups", "disabled", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", image); err != nil || out != "base\n/tmp\nwork\n/bin/cat\n" {
		t.Errorf("podman run: %v: %q", err, out)
	}
	if out, err := podman("run", "--rm", "--network", "none", "--cgroups", "disabled", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", image, "cat", "/etc/passwd"); err == nil || !strings.Contains(out, "No such file") {
		t.Errorf("what a layer hides is there: %v: %q", err, out)
	}
}

// A node that is killed while it fetches an image has no part of it afterwards, and
// fetches once more only what had not come whole; however many ask for it, once.
func TestKilledInAPull(t *testing.T) {
	r := newImages(t)
	dir := t.TempDir()
	env := []string{"DSEC_REGISTRY_INSECURE=" + r.host}
	args := []string{"--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run")}
	serve := func() *server {
		p := startEnv(t, env, "up", args...)
		return &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
	}
	s := serve()
	one, two := tarOfOne(t, "one", strings.Repeat("1", 300_000)), tarOfOne(t, "two", strings.Repeat("2", 300_000))
	r.push(t, "team/app:v1", nil, one, two)
	ref := r.host + "/team/app:v1"
	halfway, over := make(chan struct{}), make(chan struct{})
	blobs := map[string]int{}
	set := func(f func(w http.ResponseWriter, req *http.Request) bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.change = f
	}
	second := "/blobs/sha256:" + sha256Hex(two)
	set(func(w http.ResponseWriter, req *http.Request) bool {
		if !strings.HasSuffix(req.URL.Path, second) {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(two)))
		_, _ = w.Write(two[:100_000])
		w.(http.Flusher).Flush()
		close(halfway)
		<-over
		return true
	})
	failed := make(chan error, 1)
	c := s.client(t)
	go func() {
		_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
		failed <- err
	}()
	<-halfway
	// Blobs are fetched beside each other: the others are to have come whole.
	testutil.WaitFor(t, 10*time.Second, "configuration and first layer are kept", func() error {
		kept, err := filepath.Glob(filepath.Join(dir, "data", "registry", strings.Repeat("?", 64)))
		if err == nil && len(kept) != 2 {
			err = fmt.Errorf("kept %q", kept)
		}
		return err
	})
	s.kill()
	close(over)
	if err := <-failed; err == nil {
		t.Error("a create succeeds on a node that was killed")
	}
	set(func(_ http.ResponseWriter, req *http.Request) bool {
		if _, digest, ok := strings.Cut(req.URL.Path, "/blobs/"); ok {
			r.mu.Lock()
			defer r.mu.Unlock()
			blobs[digest]++
		}
		return false
	})
	s = serve()
	c = s.client(t)
	if layers, err := c.Layers(t.Context()); err != nil || len(layers) != 0 {
		t.Errorf("after the restart there are layers %v, %v", layers, err)
	}
	made, err := c.CreateSandboxes(t.Context(), 50, client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
	check(t, err)
	errs := make(chan error)
	for range 50 {
		go func() {
			_, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{ref}})
			errs <- err
		}()
	}
	for range 50 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for _, m := range made {
		if m.Err != nil {
			t.Error(m.Err)
		}
	}
	r.mu.Lock()
	if len(blobs) != 1 || blobs["sha256:"+sha256Hex(two)] != 1 {
		t.Errorf("after the restart were fetched %v, want the second layer, once", blobs)
	}
	r.mu.Unlock()
	left, err := filepath.Glob(filepath.Join(dir, "data", "registry", "*.part"))
	if err != nil || len(left) > 0 {
		t.Errorf("left in the cache: %v, %v", left, err)
	}
	l, _, _, err := c.InspectLayer(t.Context(), ref)
	check(t, err)
	// It is the layer that an import without an accident makes.
	whole, _, err := upWith(t, r).client(t).ImportImage(t.Context(), "app", ref, client.ImageOptions{})
	if err != nil || whole.Digest != l.Digest {
		t.Errorf("%s, want %s, %v", l.Digest, whole.Digest, err)
	}
}

func sha256Hex(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }
