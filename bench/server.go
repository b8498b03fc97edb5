package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

const layerName = "bench:1"

// server is a `dsec up` of our own, with directories of its own.
type server struct {
	*client.Client
	cmd      *exec.Cmd
	features []string
	kind     dsec.Kind
	dir      string
	url, key string
	exited   chan error
}

// startServer starts one that holds warm containers ready and has the bench's layer.
func startServer(ctx context.Context, o options, work string, warm int) (*server, error) {
	binary, err := filepath.Abs(o.binary)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(work, "up-")
	if err != nil {
		return nil, err
	}
	address, err := freeAddress()
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(binary, "up")
	cmd.Env = append(os.Environ(),
		"DSEC_DATA_DIR="+filepath.Join(dir, "data"),
		"DSEC_RUN_DIR="+filepath.Join(dir, "run"),
		"DSEC_API_LISTEN="+address,
		"DSEC_EDGE_BACKENDS="+o.backend,
		"DSEC_EDGE_MAX_SANDBOXES="+strconv.Itoa(o.density+1000),
		"DSEC_CONTAINER_WARM="+strconv.Itoa(warm),
		"DSEC_CONTAINER_DISK_IMAGE_BYTES="+strconv.FormatInt(4*o.copySize+(4<<30), 10),
		"DSEC_LOG_LEVEL=warn",
	)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // ^C is ours to handle
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s := &server{cmd: cmd, kind: dsec.Kind(o.backend), dir: dir, exited: make(chan error, 1)}
	go func() { s.exited <- cmd.Wait() }()
	if err := s.ready(ctx, address, filepath.Join(dir, "data", "admin.key")); err != nil {
		end := tail(log.Name())
		return nil, errors.Join(err, s.stop(), fmt.Errorf("its log ends with: %s", end))
	}
	return s, nil
}

// ready waits until the server answers, and imports the layer.
func (s *server) ready(ctx context.Context, address, keyFile string) error {
	url := "http://" + address
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	for !answers(url + "/healthz") {
		select {
		case err := <-s.exited:
			s.exited <- err
			return fmt.Errorf("dsec up ended: %w", cmp.Or(err, errors.New("status 0")))
		case <-deadline.C:
			return errors.New("dsec up does not answer after a minute")
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond): // a server that is not there yet sends no event
		}
	}
	var err error
	s.url, s.key = url, strings.TrimSpace(readFile(keyFile))
	if s.Client, err = client.New(client.Options{URL: url, APIKey: s.key}); err != nil {
		return err
	}
	image, err := busyboxTar()
	if err != nil {
		return err
	}
	if _, _, err = s.ImportLayer(ctx, layerName, client.ImportOptions{}, bytes.NewReader(image)); err != nil {
		return err
	}
	s.features, err = s.observe(ctx)
	return err
}

// profile takes CPU profiles of the server, one after another, until the
// returned function is called. They are files whose names start with prefix.
func (s *server) profile(ctx context.Context, prefix string) func() error {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		for n := 0; ; n++ {
			b, err := s.get(ctx, "/debug/pprof/profile?seconds=3")
			if ctx.Err() != nil {
				done <- nil
				return
			}
			if err == nil {
				err = os.WriteFile(fmt.Sprintf("%s-%d.pprof", prefix, n), b, 0o600)
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	return func() error { cancel(); return <-done }
}

// get reads what the server serves beside its API to whom has its key.
func (s *server) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.key)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", path, res.Status)
	}
	return io.ReadAll(res.Body)
}

// stop ends the server as a person would, and reports one that cannot. What it
// keeps for its next start, which will not come, is taken away.
func (s *server) stop() error {
	defer func() {
		unmountBelow(s.dir)
		_ = os.RemoveAll(s.dir)
	}()
	if s.Client != nil {
		s.Close()
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-s.exited:
		return err
	case <-time.After(time.Minute):
		_ = s.cmd.Process.Kill()
		return errors.New("dsec up did not end within a minute of SIGTERM")
	}
}

// create makes a sandbox of the bench's layer.
func (s *server) create(ctx context.Context) (*client.Sandbox, error) {
	return s.createWith(ctx, pids)
}

const pids = 64

// createWith makes one with a limit of pids of its own.
func (s *server) createWith(ctx context.Context, pids int64) (*client.Sandbox, error) {
	return s.CreateSandbox(ctx, client.SandboxOptions{
		Backend: s.kind, Layers: []string{layerName},
		Limits: dsec.Limits{MemoryBytes: 128 << 20, DiskBytes: 64 << 20, Pids: pids, MilliCPU: 1000},
	})
}

// first creates one and runs its first command.
func (s *server) first(ctx context.Context) (*client.Sandbox, error) {
	sb, err := s.create(ctx)
	if err != nil {
		return nil, err
	}
	return sb, runTrue(ctx, sb)
}

// runTrue runs the static /bin/true and takes any other end than exit 0 for an error.
func runTrue(ctx context.Context, sb *client.Sandbox) error {
	_, outcome, err := sb.Command("/bin/true").Output(ctx)
	if err == nil && !outcome.OK() {
		err = fmt.Errorf("/bin/true ended with %+v", outcome)
	}
	return err
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

func answers(url string) bool {
	res, err := http.Get(url) //nolint:gosec,noctx // our own server on loopback
	if err != nil {
		return false
	}
	_ = res.Body.Close()
	return res.StatusCode == http.StatusOK
}

func tail(path string) string {
	text := readFile(path)
	return text[max(0, len(text)-600):]
}

// busyboxTar is the root file system of every contestant: static busybox.
func busyboxTar() ([]byte, error) {
	binary, err := busybox()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, dir := range []string{"bin", "dev", "etc", "proc", "root", "sys", "tmp"} {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755})
	}
	files := []struct {
		name string
		mode int64
		data []byte
	}{
		{"bin/busybox", 0o755, binary},
		{"etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\n")},
		{"etc/group", 0o644, []byte("root:x:0:\n")},
	}
	for _, f := range files {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.data))})
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"sh", "true", "cat", "ls", "sleep", "tar"} {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox", Mode: 0o777})
	}
	err = w.Close() // writes the end mark
	return b.Bytes(), err
}

func busybox() ([]byte, error) {
	for _, path := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		if b, err := os.ReadFile(path); err == nil {
			return b, nil
		}
	}
	return nil, errors.New("no busybox: install busybox-static")
}
