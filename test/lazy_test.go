package test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/s3server"
)

// layerd are the processes that fill the data of layers for the server in dir.
func layerd(t testing.TB, dir string) (pids []int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	check(t, err)
	for _, p := range all {
		cmdline, _ := os.ReadFile(p + "/cmdline")
		if !strings.HasSuffix(string(cmdline), "\x00layerd\x00") {
			continue
		}
		fds, _ := filepath.Glob(p + "/fd/*")
		for _, fd := range fds {
			if to, _ := os.Readlink(fd); strings.HasPrefix(to, dir+"/") {
				pid, err := strconv.Atoi(filepath.Base(p))
				check(t, err)
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// killLayerd kills them, and returns when they are gone.
func killLayerd(t testing.TB, dir string) {
	t.Helper()
	for _, pid := range layerd(t, dir) {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			t.Error(err)
		}
		testutil.WaitFor(t, time.Minute, "layerd ends", func() error {
			if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !strings.Contains(string(stat), ") Z ") {
				return errors.New("it lives")
			}
			return nil
		})
	}
}

// diskUse is what the files below dir take.
func diskUse(t testing.TB, dir string) (bytes int64) {
	t.Helper()
	check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && d.Type().IsRegular() && unix.Lstat(path, &st) == nil {
			bytes += st.Blocks * 512
		}
		return err
	}))
	return bytes
}

// Data of layers are fetched when they are read, whatever dies meanwhile; what
// may have read other bytes is lost.
func TestLayersAreReadOnDemand(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	for _, frontEnd := range []string{"fanotify", "fuse"} {
		t.Run(frontEnd, func(t *testing.T) {
			readOnDemand(t, "DSEC_LAYERS_VERIFY=always", "DSEC_LAYERS_FRONT_END="+frontEnd)
		})
	}
}

func readOnDemand(t *testing.T, env ...string) {
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir, env: env}
	t.Cleanup(func() {
		c.destroy(t)
		killLayerd(t, dir)
	})
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })

	const size = 24 << 20
	seed := [32]byte{1}
	sums := map[string]string{}
	load := func(layer string) {
		t.Helper()
		seed[1]++
		data := make([]byte, size)
		_, _ = rand.NewChaCha8(seed).Read(data)
		sums[layer] = fmt.Sprintf("%x", sha256.Sum256(data))
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		check(t, w.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: size}))
		_, err := w.Write(data)
		check(t, errors.Join(err, w.Close()))
		_, _, err = c.client(t).ImportLayer(t.Context(), layer, client.ImportOptions{Kind: dsec.LayerToolkit}, &b)
		check(t, err)
	}
	_, _, err := c.client(t).ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	create := func(layer string) *client.Sandbox {
		t.Helper()
		sb, err := c.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base", layer}})
		check(t, err)
		return sb
	}
	reads := func(what string, sb *client.Sandbox, layer string) {
		t.Helper()
		out, o, err := sb.Command("/bin/sha256sum", "/big").Output(t.Context())
		if err != nil || o.Code != 0 || !strings.HasPrefix(string(out), sums[layer]+" ") {
			t.Errorf("%s: %q, %+v, %v", what, out, o, err)
		}
	}
	for _, layer := range []string{"one", "two", "three"} {
		load(layer)
	}
	cache := filepath.Join(dir, "data", "layers", "cache")
	whole := create("one")
	if used := diskUse(t, cache); used > size/2 {
		t.Errorf("%d bytes are fetched before anything is read", used)
	}
	p, err := whole.Command("/bin/sha256sum", "/big").Detach(t.Context())
	check(t, err)
	killLayerd(t, dir)
	var out strings.Builder
	if o, err := p.Attach(t.Context(), 0, &out, &out, nil); err != nil || o.Code != 0 || !strings.HasPrefix(out.String(), sums["one"]+" ") {
		t.Errorf("while layerd is killed: %q, %+v, %v", out.String(), o, err)
	}
	if used := diskUse(t, cache); used < size {
		t.Errorf("%d bytes are on the disk when all were read", used)
	}

	load("whole")
	check(t, c.client(t).PrefetchLayer(t.Context(), "whole", func(bytes, size int64) {
		if bytes < 0 || bytes > size || size < 24<<20 {
			t.Errorf("prefetched %d of %d bytes", bytes, size)
		}
	}))
	if used := diskUse(t, cache); used < 2*size {
		t.Errorf("%d bytes are on the disk after a prefetch", used)
	}

	part := create("two")
	if _, o, err := part.Command("/bin/head", "-c", "1", "/big").Output(t.Context()); err != nil || o.Code != 0 {
		t.Fatal(o, err)
	}
	c.kill()
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	part, whole = c.client(t).Sandbox(string(part.ID())), c.client(t).Sandbox(string(whole.ID()))
	reads("after the server was killed", whole, "one")
	reads("of a layer that was partly there when the server was killed", part, "two")

	half := create("three")
	if _, o, err := half.Command("/bin/head", "-c", "1", "/big").Output(t.Context()); err != nil || o.Code != 0 {
		t.Fatal(o, err)
	}
	c.kill()
	killLayerd(t, dir)
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	if s, err := c.client(t).Sandbox(string(half.ID())).Info(t.Context()); err != nil || s.State != dsec.StateLost || !strings.Contains(s.Reason, "layer") {
		t.Errorf("of a layer that was partly there when both were killed: %+v, %v", s, err)
	}
	reads("a new one of the same layer", create("three"), "three")
}

// layerd goes on when the server ends, as long as a sandbox reads through it, and
// ends with a server that leaves none.
func TestLayerdEndsWithTheLastSandbox(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"), testutil.Kernel(6, 14))
	for _, frontEnd := range []string{"fanotify", "fuse"} {
		t.Run(frontEnd, func(t *testing.T) {
			name, dir := testutil.Name(t), testutil.Dir(t)
			testutil.Ledger(t, name, filepath.Base(dir))
			c := &containerServer{name: name, dir: dir, env: []string{"DSEC_LAYERS_VERIFY=always", "DSEC_LAYERS_FRONT_END=" + frontEnd}}
			t.Cleanup(func() {
				c.destroy(t)
				killLayerd(t, dir)
			})
			c.start(t)
			t.Cleanup(func() { c.killAll(t) })
			_, _, err := c.client(t).ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
			check(t, err)
			sb, err := c.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
			check(t, err)
			before := layerd(t, dir)
			c.stop()
			if now := layerd(t, dir); len(now) != 1 || !slices.Equal(now, before) {
				t.Errorf("layerd is %v, was %v", now, before)
			}
			c.start(t)
			t.Cleanup(func() { c.killAll(t) })
			sb = c.client(t).Sandbox(string(sb.ID()))
			if _, o, err := sb.Command("/bin/busybox", "true").Output(t.Context()); err != nil || o.Code != 0 {
				t.Error(o, err)
			}
			check(t, sb.Kill(t.Context()))
			c.stop()
			testutil.WaitFor(t, 20*time.Second, "the end of layerd", func() error {
				if now := layerd(t, dir); len(now) > 0 {
					return fmt.Errorf("processes %v", now)
				}
				return nil
			})
		})
	}
}

// What the first node that opens a layer reads of it, the next one fetches before
// anyone reads it.
func TestTraceOfALayer(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir, env: []string{"DSEC_LAYERS_VERIFY=always", "DSEC_LAYERS_TRACE_FOR=1s"}}
	t.Cleanup(func() {
		c.destroy(t)
		killLayerd(t, dir)
	})
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	const size, part = 24 << 20, 3 << 20
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{11}).Read(data)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(t, w.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: size}))
	_, err := w.Write(data)
	check(t, errors.Join(err, w.Close()))
	cl := c.client(t)
	_, _, err = cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	big, _, err := cl.ImportLayer(t.Context(), "big", client.ImportOptions{Kind: dsec.LayerToolkit}, &b)
	check(t, err)
	create := func() *client.Sandbox {
		t.Helper()
		sb, err := c.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base", "big"}})
		check(t, err)
		return sb
	}
	// The two ends of the file, the later one first.
	read := func(sb *client.Sandbox) {
		t.Helper()
		want := sha256.New()
		want.Write(data[size-part:])
		want.Write(data[:part])
		out, o, err := sb.Command("/bin/sh", "-c", fmt.Sprintf("{ tail -c %d /big; head -c %[1]d /big; } | sha256sum", part)).Output(t.Context())
		if err != nil || o.Code != 0 || !strings.HasPrefix(string(out), fmt.Sprintf("%x ", want.Sum(nil))) {
			t.Errorf("%q, %+v, %v", out, o, err)
		}
	}
	sb := create()
	read(sb)
	trace := filepath.Join(dir, "data", "layers", "blobs", "layers", strings.TrimPrefix(big.Digest, "sha256:"), "trace")
	testutil.WaitFor(t, time.Minute, "trace", func() error { _, err := os.Stat(trace); return err })
	check(t, sb.Kill(t.Context()))

	another := func() {
		t.Helper()
		c.stop()
		killLayerd(t, dir)
		check(t, errors.Join(os.RemoveAll(filepath.Join(dir, "data", "layers", "local")), os.RemoveAll(filepath.Join(dir, "data", "layers", "cache"))))
		c.start(t)
		t.Cleanup(func() { c.killAll(t) })
	}
	cache := filepath.Join(dir, "data", "layers", "cache")
	another()
	sb = create()
	testutil.WaitFor(t, time.Minute, "data of the trace", func() error {
		if used := diskUse(t, cache); used < 2*part {
			return fmt.Errorf("%d bytes are here", used)
		}
		return nil
	})
	if used := diskUse(t, cache); used > size/2 {
		t.Errorf("%d bytes are here, of a trace of %d", used, 2*part)
	}
	read(sb)
	check(t, sb.Kill(t.Context()))

	// A store with another trace does no harm.
	check(t, os.WriteFile(trace, []byte(`{"version":1,"spans":[{"offset":-1,"length":1}]}`), 0o600))
	another()
	sb = create()
	read(sb)
	check(t, sb.Kill(t.Context()))
	check(t, c.client(t).RemoveLayer(t.Context(), "big"))
	if _, err := os.Stat(trace); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the trace of a removed layer: %v", err)
	}
}

// A bucket is a store too. While it does not answer, what was read can be read
// again, and what was not fails and makes the sandbox degraded, until it answers.
func TestLayersFromABucket(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	bucket, err := s3server.Start(t.Context(), testutil.Dir(t), s3server.Options{})
	check(t, err)
	t.Cleanup(func() { _ = bucket.Close() })
	c := &containerServer{name: name, dir: dir, env: []string{
		fmt.Sprintf("DSEC_LAYERS_STORE=s3://%s/layers?endpoint=%s&path_style=true", bucket.Bucket, bucket.Endpoint(bucket.Addr)),
		"AWS_ACCESS_KEY_ID=" + bucket.ID, "AWS_SECRET_ACCESS_KEY=" + bucket.Secret, "DSEC_LAYERS_RETRY_FOR=1s",
	}}
	t.Cleanup(func() {
		c.destroy(t)
		killLayerd(t, dir)
	})
	c.start(t)
	const size = 24 << 20
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{9}).Read(data)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i, part := range [][]byte{data[:size/2], data[size/2:]} {
		check(t, w.WriteHeader(&tar.Header{Name: fmt.Sprint("part", i), Mode: 0o644, Size: size / 2}))
		_, err := w.Write(part)
		check(t, err)
	}
	check(t, w.Close())
	cl := c.client(t)
	_, _, err = cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	_, _, err = cl.ImportLayer(t.Context(), "big", client.ImportOptions{Kind: dsec.LayerToolkit}, &b)
	check(t, err)

	// Another node has nothing of them yet.
	c.stop()
	killLayerd(t, dir)
	check(t, errors.Join(os.RemoveAll(filepath.Join(dir, "data", "layers", "local")), os.RemoveAll(filepath.Join(dir, "data", "layers", "cache"))))
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	sb, err := c.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base", "big"}})
	check(t, err)
	sum := func(part int) (string, dsec.Outcome) {
		t.Helper()
		out, o, err := sb.Command("/bin/sha256sum", fmt.Sprint("/part", part)).Output(t.Context())
		check(t, err)
		return strings.Split(string(out), " ")[0], o
	}
	want := func(part int) string { return fmt.Sprintf("%x", sha256.Sum256(data[part*size/2:(part+1)*size/2])) }
	if got, o := sum(0); got != want(0) {
		t.Errorf("the first part: %s, %+v", got, o)
	}
	check(t, bucket.Kill())
	if got, o := sum(0); got != want(0) {
		t.Errorf("the first part without the bucket: %s, %+v", got, o)
	}
	if got, o := sum(1); o.Code != 1 || got != "" {
		t.Errorf("the second part without the bucket: %s, %+v", got, o)
	}
	condition := func(want bool) func() error {
		return func() error {
			s, err := sb.Info(t.Context())
			if err == nil && slices.Contains(s.Conditions, "degraded") != want {
				err = fmt.Errorf("conditions %q, reason %q", s.Conditions, s.Reason)
			}
			return err
		}
	}
	testutil.WaitFor(t, time.Minute, "the sandbox is degraded", condition(true))
	check(t, bucket.Restart(t.Context()))
	testutil.WaitFor(t, time.Minute, "the second part can be read", func() error {
		if got, o := sum(1); got != want(1) {
			return fmt.Errorf("%q, %+v", got, o)
		}
		return nil
	})
	testutil.WaitFor(t, time.Minute, "the sandbox is well", condition(false))
}

// A layerd that is stopped makes sandboxes degraded; in the end it is killed, and
// what they were reading comes from another.
func TestAStoppedLayerd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir, env: []string{"DSEC_LAYERS_VERIFY=always"}}
	t.Cleanup(func() {
		c.destroy(t)
		killLayerd(t, dir)
	})
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	_, _, err := c.client(t).ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	data := make([]byte, 24<<20)
	_, _ = rand.NewChaCha8([32]byte{5}).Read(data)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	check(t, w.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: int64(len(data))}))
	_, err = w.Write(data)
	check(t, errors.Join(err, w.Close()))
	_, _, err = c.client(t).ImportLayer(t.Context(), "big", client.ImportOptions{Kind: dsec.LayerToolkit}, &b)
	check(t, err)
	sb, err := c.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base", "big"}})
	check(t, err)
	if _, o, err := sb.Command("/bin/sha256sum", "/bin/busybox").Output(t.Context()); err != nil || o.Code != 0 {
		t.Fatal(o, err)
	}
	conditions := func(what string, want ...string) {
		t.Helper()
		testutil.WaitFor(t, 2*time.Minute, what, func() error {
			s, err := sb.Info(t.Context())
			if err == nil && (s.State != dsec.StateRunning || !slices.Equal(s.Conditions, want)) {
				err = fmt.Errorf("%s, %q, %q", s.State, s.Reason, s.Conditions)
			}
			return err
		})
	}
	stopped := layerd(t, dir)
	if len(stopped) != 1 {
		t.Fatalf("layerd: %v", stopped)
	}
	check(t, unix.Kill(stopped[0], unix.SIGSTOP))
	p, err := sb.Command("/bin/sha256sum", "/big").Detach(t.Context())
	check(t, err)
	conditions("degraded", "degraded")
	if s, err := sb.Info(t.Context()); err != nil || !strings.Contains(s.Reason, "layerd") {
		t.Errorf("%+v, %v", s, err)
	}
	var out strings.Builder
	if o, err := p.Attach(t.Context(), 0, &out, &out, nil); err != nil || o.Code != 0 || !strings.HasPrefix(out.String(), fmt.Sprintf("%x ", sha256.Sum256(data))) {
		t.Errorf("%q, %+v, %v", out.String(), o, err)
	}
	conditions("well again")
	if now := layerd(t, dir); len(now) != 1 || now[0] == stopped[0] {
		t.Errorf("layerd: %v, then %v", stopped, now)
	}
}
