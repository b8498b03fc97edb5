package container

import (
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/erofs/go-erofs"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/chronusbin"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "inside" {
		insideMain()
		os.Exit(0)
	}
	if IsLauncher() {
		LauncherMain()
	}
	if os.Getenv(victimEnv) != "" {
		victim() // see crash_test.go
	}
	code := m.Run()
	if dir := scratch(); dir != "" {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// scratch is a directory of this test binary.
var scratch = sync.OnceValue(func() string {
	dir, err := os.MkdirTemp("", "dsec-container")
	if err != nil {
		panic(err)
	}
	return dir
})

// programs has chronus, and this test binary as inside: static, since nothing
// else of the host is in a sandbox. Where there is no Go (a test guest, whose
// test binary is static) chronus is the one that was built for dsec.
var programs = sync.OnceValues(func() (dir string, err error) {
	dir = scratch()
	self, err := elf.Open("/proc/self/exe")
	if err != nil {
		return "", err
	}
	defer self.Close()
	dynamic := slices.ContainsFunc(self.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
	if _, err := exec.LookPath("go"); err != nil && !dynamic {
		bin, err := chronusbin.Binary()
		if err != nil {
			return "", err
		}
		files, err := chronusbin.Files()
		if err != nil {
			return "", err
		}
		me, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			return "", err
		}
		return dir, errors.Join(os.WriteFile(dir+"/chronus", bin, 0o700), os.WriteFile(dir+"/chronus-files", files, 0o700), os.WriteFile(dir+"/inside", me, 0o755))
	}
	for _, args := range [][]string{
		{"../../../chronus/build", dir + "/chronus"},
		{"go", "build", "-o", dir + "/chronus-files", "../../../cmd/chronus-files"},
		{"go", "test", "-c", "-o", dir + "/inside", "."},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%q: %w\n%s", args, err, out)
		}
	}
	return dir, nil
})

// image is an EROFS image of a tree with busybox and inside, after change has
// changed it. The one that nothing changes is made once for all tests: none may
// write to its file, and the tests of an image's safety compare its bytes.
func image(t testing.TB, change func(root string)) backend.Layer {
	t.Helper()
	testutil.Require(t, testutil.Program("busybox"))
	if change != nil {
		return makeImage(t, t.TempDir(), change)
	}
	unchanged.Lock()
	defer unchanged.Unlock()
	if unchanged.layer.Digest == "" {
		dir := filepath.Join(scratch(), "image")
		check(t, os.MkdirAll(dir, 0o700))
		unchanged.layer = makeImage(t, dir, func(string) {})
	}
	return unchanged.layer
}

// unchanged is the image that most tests have.
var unchanged struct {
	sync.Mutex
	layer backend.Layer
}

func makeImage(t testing.TB, to string, change func(root string)) backend.Layer {
	t.Helper()
	dir, err := programs()
	check(t, err)
	root := filepath.Join(t.TempDir(), "root")
	for _, d := range []string{"bin", "etc", "proc", "sys", "dev", "tmp", "root"} {
		check(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	busybox, err := exec.LookPath("busybox")
	check(t, err)
	copyTo(t, busybox, root+"/bin/busybox")
	copyTo(t, filepath.Join(dir, "inside"), root+"/bin/inside")
	applets, err := exec.Command(busybox, "--list").Output()
	check(t, err)
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" {
			check(t, os.Symlink("busybox", root+"/bin/"+name))
		}
	}
	check(t, os.WriteFile(root+"/etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\n"), 0o644))
	check(t, os.WriteFile(root+"/etc/shared", []byte(strings.Repeat("the layer's bytes\n", 1000)), 0o644))
	change(root)
	file := filepath.Join(to, "image.erofs")
	out, err := os.Create(file)
	check(t, err)
	w := erofs.Create(out, erofs.WithBlockSize(4096))
	check(t, w.CopyFrom(os.DirFS(root)))
	check(t, errors.Join(w.Close(), out.Close()))
	l := backend.FileLayer("sha256:"+sum(t, file), file)
	imagePaths.Store(l.Digest, file)
	return l
}

// imagePaths are the files of the images that makeImage made, by digest.
var imagePaths sync.Map

func imagePath(l backend.Layer) string {
	path, _ := imagePaths.Load(l.Digest)
	return path.(string)
}

func copyTo(t testing.TB, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	check(t, err)
	check(t, os.WriteFile(to, data, 0o755))
}

func sum(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	check(t, err)
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}

// imageBytes is the size of the image of the volumes.
const imageBytes = 512 << 20

// host is a backend of a test, with an image.
type host struct {
	testing.TB
	config Config
	b      *Backend
	image  backend.Layer
}

// newHost opens a backend that leaves nothing behind: the ledger of t says so.
func newHost(t testing.TB, change func(*Config)) *host {
	t.Helper()
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay)
	name := testutil.Name(t)
	img := image(t, nil)
	dir, err := programs()
	check(t, err)
	testutil.Ledger(t, name)
	run := filepath.Join("/run", name)
	check(t, os.MkdirAll(run, 0o700))
	t.Cleanup(func() {
		if err := os.RemoveAll(run); err != nil {
			t.Error(err)
		}
	})
	h := &host{TB: t, image: img, config: Config{
		RunDir: run + "/run", Disk: disk.Options{Dir: run + "/disk", ImageBytes: imageBytes, MaxImageBytes: imageBytes}, Cgroup: name, Chronus: filepath.Join(dir, "chronus"),
		Launcher: []string{"/proc/self/exe"}, Debug: true, Logger: testutil.Logger(t),
	}}
	if change != nil {
		change(&h.config)
	}
	h.open()
	t.Cleanup(func() { h.removeAll(t) })
	// The guest says what its disk must have given.
	if want := os.Getenv("DSEC_TEST_DISK"); want != "" && h.b.disk.Driver() != want {
		t.Fatalf("volumes are bounded by %s, want %s", h.b.disk.Driver(), want)
	}
	check(t, h.b.Sweep(t.Context(), nil))
	return h
}

// removeAll takes down what a failed test may have left too. It ends no
// goroutine, so that a panic of the test is seen.
func (h *host) removeAll(t testing.TB) {
	err := h.b.Close()
	if err == nil {
		err = h.b.tree.Destroy() // fails where a sandbox was left
	}
	if err != nil {
		t.Error(cause(err))
	}
	if t.Failed() { // what a test that failed has left must not fail others
		b, err := New(h.config)
		if err == nil {
			err = errors.Join(b.Sweep(context.Background(), nil), b.Close(), b.tree.Destroy())
		}
		if err != nil {
			t.Error(cause(err))
		}
	}
	store, err := disk.Open(h.config.Disk)
	if err == nil {
		err = store.Destroy(context.Background())
	}
	if err != nil {
		t.Error(cause(err))
	}
}

func (h *host) open() {
	h.Helper()
	b, err := New(h.config)
	check(h, err)
	h.b = b
}

func (h *host) request(layers ...backend.Layer) backend.CreateRequest {
	if len(layers) == 0 {
		layers = []backend.Layer{h.image}
	}
	return backend.CreateRequest{
		ID: dsec.NewSandboxID("aaaaa"),
		Spec: dsec.Spec{Kind: dsec.KindContainer, Limits: dsec.Limits{
			MilliCPU: 1000, MemoryBytes: 128 << 20, DiskBytes: 64 << 20, DiskInodes: 10000, Pids: 64,
		}},
		Layers: layers,
	}
}

// sandbox is one sandbox of a test.
type sandbox struct {
	*host
	id     dsec.SandboxID
	i      backend.Instance
	client *chronusapi.Client
}

func (h *host) create(layers ...backend.Layer) *sandbox {
	h.Helper()
	req := h.request(layers...)
	i, err := h.b.Create(h.Context(), req)
	check(h, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	h.Cleanup(func() {
		_ = s.client.Close()
		check(h, s.i.Destroy(context.Background()))
	})
	return s
}

func (s *sandbox) use(i backend.Instance) {
	s.i, s.client = i, chronusapi.NewClient(i.Dial).WithFiles(i.(backend.FileServer).DialFiles)
}

// outcome is how a command ended, and all it wrote.
type outcome struct {
	dsec.Outcome
	out string
}

func (s *sandbox) sh(script string) outcome { return s.run("/bin/sh", "-c", script) }

func (s *sandbox) run(argv ...string) (o outcome) {
	s.Helper()
	ctx := context.Background() // a cleanup may run it
	start := func() (*chronusapi.Events, error) {
		return s.client.Start(ctx, chronusapi.StartRequest{Command: chronusapi.Command{
			Argv: argv, Env: []string{"PATH=/bin"}, Cwd: "/",
		}})
	}
	stream, err := start()
	if errors.Is(err, chronusapi.ErrNeedGroup) {
		check(s, s.i.(backend.Grouper).AddGroup(ctx))
		stream, err = start()
	}
	check(s, err)
	for {
		ev, err := stream.Next()
		if err == io.EOF {
			return o
		}
		check(s, err)
		o.out += string(ev.Data)
		if ev.Kind == chronusapi.EventExited {
			o.Outcome = ev.Outcome
		}
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(cause(err))
	}
}
