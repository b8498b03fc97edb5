package test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// A layer that is damaged in a store that the kernel believes is found out: what is
// made of it is lost, nothing more is made of it, and importing it again mends it.
func TestADamagedLayerIsFoundOut(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	store := filepath.Join(dir, "store")
	c := &containerServer{name: name, dir: dir, env: []string{"DSEC_LAYERS_STORE=" + store, "DSEC_LAYERS_SCRUB_BYTES_PER_SECOND=268435456"}}
	t.Cleanup(func() { c.destroy(t) })
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	data := make([]byte, 8<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(data)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(t, w.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: int64(len(data))}))
	_, err := w.Write(data)
	check(t, errors.Join(err, w.Close()))
	cl := c.client(t)
	_, _, err = cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	big := func() client.Layer {
		l, _, err := cl.ImportLayer(t.Context(), "big", client.ImportOptions{Kind: dsec.LayerToolkit}, bytes.NewReader(b.Bytes()))
		check(t, err)
		return l
	}
	l := big()
	create := func(layers ...string) (*client.Sandbox, error) {
		return cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: layers})
	}
	has, err := create("base", "big")
	check(t, err)
	other, err := create("base")
	check(t, err)

	file, err := os.OpenFile(filepath.Join(store, "layers", strings.TrimPrefix(l.Digest, "sha256:"), "data"), os.O_RDWR, 0)
	check(t, err)
	defer file.Close()
	var at [1]byte
	_, err = file.ReadAt(at[:], 5<<20)
	check(t, err)
	at[0] ^= 1
	_, err = file.WriteAt(at[:], 5<<20)
	check(t, err)

	testutil.WaitFor(t, 2*time.Minute, "it is found out", func() error {
		s, err := has.Info(t.Context())
		if err == nil && (s.State != dsec.StateLost || !strings.Contains(s.Reason, l.Digest)) {
			err = fmt.Errorf("%s, %q", s.State, s.Reason)
		}
		return err
	})
	if s, err := other.Info(t.Context()); err != nil || s.State != dsec.StateRunning {
		t.Errorf("a sandbox without it: %+v, %v", s, err)
	}
	if _, err := create("base", "big"); dsec.CodeOf(err) != dsec.CodeInternal {
		t.Errorf("made of a damaged layer: %v", err)
	}
	c.kill()
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	cl = c.client(t)
	if _, err := create("base", "big"); dsec.CodeOf(err) != dsec.CodeInternal {
		t.Errorf("made of a damaged layer after the server was killed: %v", err)
	}
	big()
	again, err := create("base", "big")
	check(t, err)
	out, o, err := again.Command("/bin/sha256sum", "/big").Output(t.Context())
	if err != nil || o.Code != 0 || !strings.HasPrefix(string(out), fmt.Sprintf("%x ", sha256.Sum256(data))) {
		t.Errorf("%q, %+v, %v", out, o, err)
	}
}
