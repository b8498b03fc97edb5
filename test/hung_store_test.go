package test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/faultfs"
)

// A directory store that does not answer the kernel keeps those waiting that read
// from it, and nobody else: they can be killed, and others go on.
func TestDirectoryStoreHangs(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"), testutil.Kernel(6, 12))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	at, backing := filepath.Join(dir, "at"), filepath.Join(dir, "backing")
	check(t, errors.Join(os.Mkdir(at, 0o700), os.Mkdir(backing, 0o700)))
	store, err := faultfs.Mount(at, backing)
	check(t, err)
	t.Cleanup(func() { check(t, store.Close()) })
	c := &containerServer{name: name, dir: dir, env: []string{"DSEC_LAYERS_STORE=" + filepath.Join(at, "layers")}}
	t.Cleanup(func() { c.destroy(t) })
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	t.Cleanup(func() { store.Set(nil) })

	const size = 24 << 20
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{12}).Read(data)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(t, w.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: size}))
	_, err = w.Write(data)
	check(t, errors.Join(err, w.Close()))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // far more than anything here takes
	defer cancel()
	cl := c.client(t)
	_, _, err = cl.ImportLayer(ctx, "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	_, _, err = cl.ImportLayer(ctx, "big", client.ImportOptions{Kind: dsec.LayerToolkit}, &b)
	check(t, err)
	create := func(layers ...string) *client.Sandbox {
		t.Helper()
		sb, err := cl.CreateSandbox(ctx, client.SandboxOptions{Layers: layers})
		check(t, err)
		return sb
	}
	run := func(sb *client.Sandbox, script, want string) {
		t.Helper()
		out, o, err := sb.Command("/bin/sh", "-c", script).Output(ctx)
		if err != nil || o.Code != 0 || !strings.HasPrefix(string(out), want) {
			t.Errorf("%s: %q, %+v, %v", script, out, o, err)
		}
	}
	reader, other := create("base", "big"), create("base")
	// What runs later is in memory from here on.
	run(reader, "head -c 100000 /big | sha256sum", fmt.Sprintf("%x ", sha256.Sum256(data[:100000])))
	run(other, "true | cat", "")

	store.Set(func(op faultfs.Op) faultfs.Fault { return faultfs.Fault{Hang: op == faultfs.Read} })
	before := store.Count(faultfs.Read)
	waiting, err := reader.Command("/bin/sh", "-c", "tail -c 1000000 /big | sha256sum").Detach(ctx)
	check(t, err)
	testutil.WaitFor(t, time.Minute, "a read of the store", func() error {
		if store.Count(faultfs.Read) == before {
			return errors.New("nothing is read")
		}
		return nil
	})
	run(reader, "head -c 100000 /big | sha256sum", fmt.Sprintf("%x ", sha256.Sum256(data[:100000])))
	run(other, "true | cat", "")
	run(create("base"), "true | cat", "")
	// A process that waits for the store cannot be stopped: nothing is.
	_, err = reader.Pause(ctx, client.PauseOptions{})
	wantCode(t, err, dsec.CodeUnavailable)
	if info, err := reader.Info(ctx); err != nil || info.State != dsec.StateRunning {
		t.Errorf("not paused: %v, %v", info, err)
	}
	run(reader, "true | cat", "")
	check(t, waiting.Kill(ctx))
	if o, err := waiting.Attach(ctx, 0, io.Discard, io.Discard, nil); err != nil || o.Signal == 0 {
		t.Errorf("a reader that was killed: %+v, %v", o, err)
	}
	_, err = reader.Pause(ctx, client.PauseOptions{})
	check(t, err)
	check(t, reader.Kill(ctx))

	store.Set(nil)
	run(create("base", "big"), "sha256sum /big", fmt.Sprintf("%x ", sha256.Sum256(data)))
}
