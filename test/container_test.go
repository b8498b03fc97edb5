package test

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/chronusbin"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/testutil"
)

// containers starts `dsec up` on the container backend, in directories and
// cgroups of its own that are gone after the test.
func containers(t testing.TB) *server {
	t.Helper()
	return containersIn(t)
}

// containersIn is containers with more in the server's environment.
func containersIn(t testing.TB, env ...string) *server {
	t.Helper()
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	if _, err := chronusbin.Binary(); err != nil {
		t.Fatal(err)
	}
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir, env: env}
	t.Cleanup(func() { c.destroy(t) })
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	return c.server
}

type containerServer struct {
	*server
	name, dir string
	env       []string
	listen    string // 127.0.0.1 and a free port where empty
	image     int64  // bytes of the disk of all volumes, 512 MiB where 0; it does not grow
	share     int    // percent of it that one volume can have, 80 where 0
}

func (c *containerServer) volumes() string { return filepath.Join(c.dir, "data", "volumes") }

func (c *containerServer) start(t testing.TB) {
	p := startEnv(t, append(c.environ(), c.env...), "up", append(c.args(), "--listen", cmp.Or(c.listen, "127.0.0.1:0"))...)
	c.server = &server{p, p.ready, filepath.Join(c.dir, "data", "admin.key"), c.dir}
}

func (c *containerServer) environ() []string {
	image := cmp.Or(c.image, 512<<20)
	return []string{
		"DSEC_CONTAINER_CGROUP=" + c.name, fmt.Sprint("DSEC_CONTAINER_DISK_IMAGE_BYTES=", image), fmt.Sprint("DSEC_CONTAINER_DISK_IMAGE_MAX_BYTES=", image),
		fmt.Sprint("DSEC_CONTAINER_DISK_SHARE=", cmp.Or(c.share, 80)),
	}
}

func (c *containerServer) args() []string {
	return []string{"--backend", "container", "--data-dir", filepath.Join(c.dir, "data"), "--run-dir", filepath.Join(c.dir, "run")}
}

func (c *containerServer) killAll(t testing.TB) {
	if c.cmd.ProcessState != nil {
		return // the server that was started after it did that
	}
	ctx := context.Background()
	cl, err := client.New(client.Options{URL: c.url, KeyFile: c.keyFile})
	check(t, err)
	defer cl.Close()
	for s, err := range cl.Sandboxes(ctx, client.ListOptions{}) {
		if err == nil {
			err = cl.Sandbox(string(s.ID)).Kill(ctx)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

// destroy takes down what a node keeps over its restarts.
func (c *containerServer) destroy(t testing.TB) {
	tree, err := cgroup.Open(cgroup.Options{Name: c.name})
	if err == nil {
		err = errors.Join(tree.Close(), tree.Destroy())
	}
	store, derr := disk.Open(disk.Options{Dir: c.volumes(), ImageBytes: 512 << 20, MaxImageBytes: 512 << 20})
	if derr == nil {
		derr = store.Destroy(context.Background())
	}
	if err := errors.Join(err, derr); err != nil {
		t.Error(err)
	}
}

// busyboxTar is a root file system of nothing but busybox.
func busyboxTar(t testing.TB) []byte {
	t.Helper()
	path, err := exec.LookPath("busybox")
	check(t, err)
	program, err := os.ReadFile(path)
	check(t, err)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(h *tar.Header, data []byte) {
		h.Size = int64(len(data))
		check(t, w.WriteHeader(h))
		_, err := w.Write(data)
		check(t, err)
	}
	for _, d := range []string{"bin/", "etc/", "tmp/", "root/"} {
		add(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}, nil)
	}
	add(&tar.Header{Name: "bin/busybox", Mode: 0o755}, program)
	for name := range strings.FieldsSeq("sh cat echo ls sleep true false id env nproc stty tty head dd sha256sum kill seq wc readlink uname") {
		add(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox"}, nil)
	}
	add(&tar.Header{Name: "etc/passwd", Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"))
	check(t, w.Close())
	return b.Bytes()
}

// TestContainerStories runs each story with containers.
func TestContainerStories(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	image := busyboxTar(t)
	files, err := filepath.Glob("testdata/container/*.txtar")
	check(t, err)
	if len(files) == 0 {
		t.Fatal("no stories")
	}
	for _, file := range files { // one after the other: the ledger counts what the process holds
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			s := containers(t)
			p := params(t, "", func(testing.TB) *server { return s })
			p.Files = []string{file}
			setup := p.Setup
			p.Setup = func(e *testscript.Env) error {
				return errors.Join(setup(e), os.WriteFile(filepath.Join(e.WorkDir, "base.tar"), image, 0o644))
			}
			runScript(t, p)
		})
	}
}

// runScript runs p as a part of t, and returns when it has ended.
func runScript(t *testing.T, p testscript.Params) {
	t.Run("script", func(t *testing.T) { testscript.Run(t, p) })
}

// TestCommandsGoOnThroughACrash kills the whole platform while a command runs.
func TestCommandsGoOnThroughACrash(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir}
	t.Cleanup(func() { c.destroy(t) })
	c.start(t)
	cl := c.client(t)
	_, _, err := cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	// The command ends only when it is told to, after the restart.
	p, err := sb.Shell("echo before; until [ -e /tmp/go ]; do sleep 0.05; done; echo after; exit 5").Detach(t.Context())
	check(t, err)
	c.kill()
	c.start(t)
	t.Cleanup(func() { c.killAll(t) })
	sb = c.client(t).Sandbox(string(sb.ID()))
	check(t, sb.WriteFile(t.Context(), "/tmp/go", nil, 0))
	var out strings.Builder
	o, err := sb.Process(p.ID).Attach(t.Context(), 0, &out, io.Discard, nil)
	if err != nil || o.Code != 5 || o.Claimed || out.String() != "before\nafter\n" {
		t.Errorf("%+v, %v, %q", o, err, out.String())
	}
}

// A workspace and toolkits override what is below them, and hide it.
func TestLayersOverrideAndHide(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	cl := containers(t).client(t)
	load := func(name string, o client.ImportOptions, headers ...*tar.Header) {
		t.Helper()
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range headers {
			check(t, w.WriteHeader(h))
		}
		check(t, w.Close())
		_, _, err := cl.ImportLayer(t.Context(), name, o, &b)
		check(t, err)
	}
	named := func(name string) *tar.Header { return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644} }
	_, _, err := cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	load("work", client.ImportOptions{Kind: dsec.LayerWorkspace, At: "/work/p"}, named("one"), named("two"), named("d/deep"))
	load("tools", client.ImportOptions{Kind: dsec.LayerToolkit},
		named("opt/tool"), named("work/p/.wh.one"), named("work/p/d/.wh..wh..opq"), named("work/p/d/new"))
	load("more", client.ImportOptions{Kind: dsec.LayerToolkit}, &tar.Header{Name: "opt/tool", Typeflag: tar.TypeDir, Mode: 0o755}, named("opt/tool/in"))
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base", "work", "tools", "more"}})
	check(t, err)
	out, o, err := sb.Shell("cd / && find work opt | sort && echo x > work/p/one && rm work/p/two && find work | sort").Output(t.Context())
	want := "opt\nopt/tool\nopt/tool/in\nwork\nwork/p\nwork/p/d\nwork/p/d/new\nwork/p/two\n" +
		"work\nwork/p\nwork/p/d\nwork/p/d/new\nwork/p/one\n"
	if err != nil || o.Code != 0 || string(out) != want {
		t.Errorf("the sandbox has %q, %+v, %v; want %q", out, o, err, want)
	}
	check(t, sb.Kill(t.Context()))

	l, err := cl.TagLayer(t.Context(), "tools", "tools:2", false)
	check(t, err)
	if _, err := cl.TagLayer(t.Context(), "more", "tools:2", false); dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("a name of another layer: %v, want conflict", err)
	}
	got, names, _, err := cl.InspectLayer(t.Context(), l.Digest)
	if err != nil || got.Kind != dsec.LayerToolkit || fmt.Sprint(names) != "[tools:2 tools:latest]" {
		t.Errorf("%+v, %v, %v", got, names, err)
	}
	if _, err := cl.TagLayer(t.Context(), "more", "tools:2", true); err != nil {
		t.Error(err)
	}
	if _, names, _, _ := cl.InspectLayer(t.Context(), l.Digest); fmt.Sprint(names) != "[tools:latest]" {
		t.Errorf("after another took the name: %v", names)
	}
}

// A file without a byte on the disk may say that it has a terabyte: whoever asks
// for all of it is told so, and does not run out of memory.
func TestAFileTooLargeForMemory(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	cl := containers(t).client(t)
	_, _, err := cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	if _, o, err := sb.Command("/bin/busybox", "truncate", "-s", "1099511627776", "/tmp/huge").Output(t.Context()); err != nil || o.Code != 0 {
		t.Fatal(o, err)
	}
	got, err := sb.ReadFile(t.Context(), "/tmp/huge")
	var e *dsec.Error
	if !errors.As(err, &e) || e.Code != dsec.CodeInvalid || !strings.Contains(e.Message, "1099511627776 bytes") || len(got) != 0 {
		t.Errorf("%d bytes, %v; want invalid, with the size", len(got), err)
	}
	var b bytes.Buffer
	if n, err := sb.Read(t.Context(), "/tmp/huge", 1<<39, 10, &b); err != nil || n != 10 {
		t.Errorf("a part: %d bytes, %v", n, err)
	}
	check(t, sb.Kill(t.Context()))
}
