// Package test runs whole stories against the real binary, as a user would:
// nothing here reaches into the program. Stories are in testdata/script, one a
// file; those that need a container say so in their name.
package test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// dsecBinary is dsec, built once for all tests.
var dsecBinary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "dsec-test-")
	if err != nil {
		panic(err)
	}
	dsecBinary = filepath.Join(dir, "dsec")
	build := exec.Command("go", "build", "-o", dsecBinary, "../cmd/dsec")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "go build: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// process is a running dsec.
type process struct {
	t      testing.TB
	cmd    *exec.Cmd
	name   string
	ready  string // what the ready line says
	stderr *bytes.Buffer
	done   chan error
}

// start runs a server verb and returns once it says that it is ready. It is
// stopped, and must have stopped well, when the test ends.
func start(t testing.TB, verb string, args ...string) *process {
	t.Helper()
	return startEnv(t, nil, verb, args...)
}

// startEnv is start with more in the environment.
func startEnv(t testing.TB, env []string, verb string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: verb, stderr: &bytes.Buffer{}, done: make(chan error, 1)}
	p.cmd = exec.Command(dsecBinary, append([]string{verb}, args...)...)
	p.cmd.Env = append(environ(), env...)
	p.cmd.Stderr = p.stderr
	out, err := p.cmd.StdoutPipe()
	check(t, err)
	check(t, p.cmd.Start())
	t.Cleanup(p.stop)
	lines := bufio.NewReader(out)
	first, err := lines.ReadString('\n')
	rest := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, lines)
		close(rest)
	}()
	go func() {
		<-rest // Wait closes the pipe
		p.done <- p.cmd.Wait()
	}()
	var ok bool
	if p.ready, ok = strings.CutPrefix(strings.TrimSpace(first), "ready "); err != nil || !ok {
		<-p.done
		p.done <- nil
		t.Fatalf("dsec %s: %q, %v\n%s", verb, first, err, p.stderr)
	}
	return p
}

// stop asks the process to end, and fails the test where that takes for ever
// or goes wrong.
func (p *process) stop() {
	if p.cmd.ProcessState != nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-p.done:
		if err != nil {
			p.t.Errorf("dsec %s: %v\n%s", p.name, err, p.stderr)
		}
	case <-time.After(time.Minute):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT)
		<-p.done
		p.t.Errorf("dsec %s did not stop\n%s", p.name, p.stderr)
	}
	if p.t.Failed() {
		p.t.Logf("dsec %s:\n%s", p.name, p.stderr)
	}
}

// kill ends the process as a power cut would.
func (p *process) kill() {
	p.t.Helper()
	check(p.t, p.cmd.Process.Kill())
	<-p.done
}

// environ is this process's environment without what configures dsec.
func environ() []string {
	var env []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "DSEC_") || strings.HasPrefix(kv, "DSEC_MUST=") {
			env = append(env, kv)
		}
	}
	return env
}

// server is a running `dsec up` or the pair of its halves.
type server struct {
	*process
	url, keyFile, dir string
}

// up starts everything on the fake backend.
func up(t testing.TB, args ...string) *server {
	t.Helper()
	dir := testutil.Dir(t)
	return upIn(t, dir, args...)
}

func upIn(t testing.TB, dir string, args ...string) *server {
	t.Helper()
	all := append([]string{"--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run")}, args...)
	p := start(t, "up", all...)
	return &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
}

// client is one with the admin key.
func (s *server) client(t testing.TB) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{URL: s.url, KeyFile: s.keyFile})
	check(t, err)
	t.Cleanup(c.Close)
	return c
}

// project is a client for a project of its own.
func (s *server) project(t testing.TB, name string) (c *client.Client, secret string) {
	t.Helper()
	_, secret, err := s.client(t).CreateKey(context.WithoutCancel(t.Context()), name, time.Time{})
	check(t, err)
	c, err = client.New(client.Options{URL: s.url, APIKey: secret})
	check(t, err)
	t.Cleanup(c.Close)
	return c, secret
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
