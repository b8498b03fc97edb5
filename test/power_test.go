package test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// volume is a file system in a file, whose power can be cut: what was not
// written to the device by then is lost.
type volume struct {
	t          testing.TB
	image, dir string
	mounted    bool
}

// newVolume makes and mounts one.
func newVolume(t testing.TB) *volume {
	t.Helper()
	testutil.Require(t, testutil.Root, testutil.Program("mkfs.ext4"))
	dir := testutil.Dir(t)
	v := &volume{t: t, image: filepath.Join(dir, "image"), dir: filepath.Join(dir, "mnt")}
	check(t, os.Mkdir(v.dir, 0o700))
	f, err := os.Create(v.image)
	check(t, err)
	check(t, f.Truncate(1<<30))
	check(t, f.Close())
	v.command("mkfs.ext4", "-q", "-F", v.image)
	v.mount()
	t.Cleanup(v.unmount)
	return v
}

func (v *volume) command(args ...string) {
	v.t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		v.t.Fatalf("%v: %v\n%s", args, err, out)
	}
}

// mount holds the kernel off from writing anything out by itself for a minute.
func (v *volume) mount() {
	v.t.Helper()
	v.command("mount", "-o", "loop,commit=60", v.image, v.dir)
	v.mounted = true
}

func (v *volume) unmount() {
	v.t.Helper()
	if v.mounted {
		v.mounted = false
		check(v.t, unix.Unmount(v.dir, 0))
	}
}

// keep copies what is on the device now: all that a power cut at this moment
// would leave.
func (v *volume) keep() {
	v.t.Helper()
	v.command("cp", "--sparse=always", v.image, v.image+".kept")
}

// cut goes back to what was kept. Nobody may use the volume.
func (v *volume) cut() {
	v.t.Helper()
	v.unmount()
	check(v.t, os.Rename(v.image+".kept", v.image))
	v.mount()
}

// TestPowerCut is S76: the machine loses its power right after answers that
// promise something. Keys, layers and their names, and the node's own ID are
// there afterwards, no ID is given twice, and sandboxes are not half there.
func TestPowerCut(t *testing.T) {
	v := newVolume(t)
	run := filepath.Join(testutil.Dir(t), "run")
	start := func() *server {
		p := start(t, "up", "--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(v.dir, "data"), "--run-dir", run)
		return &server{p, p.ready, filepath.Join(v.dir, "data", "admin.key"), ""}
	}
	s := start()
	admin := readKey(t, s.keyFile)
	var secrets []string
	for n := range 5 {
		_, secret, err := s.client(t).CreateKey(t.Context(), fmt.Sprint("project-", n), time.Time{})
		check(t, err)
		secrets = append(secrets, secret)
	}
	l, _, err := s.client(t).ImportLayer(t.Context(), "promised", client.ImportOptions{}, bytes.NewReader(tarOfOne(t, "file", strings.Repeat("content", 10_000))))
	check(t, err)
	sb, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{"promised"}})
	check(t, err)
	v.keep() // the last answer was given just now
	// The control: this is promised later than the cut.
	_, lost, err := s.client(t).CreateKey(t.Context(), "lost", time.Time{})
	check(t, err)
	s.kill()
	check(t, os.RemoveAll(run))
	v.cut()

	s = start()
	if got := readKey(t, s.keyFile); got != admin {
		t.Error("the admin's key is another")
	}
	for n, secret := range secrets {
		c, err := client.New(client.Options{URL: s.url, APIKey: secret})
		check(t, err)
		if _, err := c.Layers(t.Context()); err != nil {
			t.Errorf("key %d: %v", n, err)
		}
		c.Close()
	}
	c, err := client.New(client.Options{URL: s.url, APIKey: lost})
	check(t, err)
	defer c.Close()
	if _, err := c.Layers(t.Context()); err == nil {
		t.Error("control: the key that was made after the cut is there: nothing was lost")
	}
	layers, err := s.client(t).Layers(t.Context())
	if err != nil || len(layers) != 1 || layers[0].Digest != l.Digest {
		t.Errorf("layers %+v, %v; want %s", layers, err, l.Digest)
	}
	again, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Layers: []string{"promised"}})
	check(t, err)
	if again.ID() == sb.ID() || again.ID().Edge() != sb.ID().Edge() {
		t.Errorf("before %s, afterwards %s: want another of the same edge", sb.ID(), again.ID())
	}
	for got, err := range s.client(t).Sandboxes(t.Context(), client.ListOptions{}) {
		check(t, err)
		if got.ID != again.ID() {
			t.Errorf("%s is %s, and was in a machine that lost its power", got.ID, got.State)
		}
	}
	s.stop()
}

// tarOfOne is an archive of one file.
func tarOfOne(t testing.TB, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}))
	_, err := w.Write([]byte(content))
	check(t, err)
	check(t, w.Close())
	return b.Bytes()
}
