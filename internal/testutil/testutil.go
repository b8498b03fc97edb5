// Package testutil is the test kit of dsec: gates that say what a test needs
// from the host (Require), a ledger that fails a test which left something
// behind in the kernel (Ledger), a logger that writes to the test (Logger),
// short names and directories (Name, Dir), what gzip makes of bytes (Gzip), and
// a wait for state that has no event to wait on (WaitFor).
//
// It is a leaf: it imports no other package of this module, and only tests
// import it.
package testutil

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Logger returns a logger whose lines appear in the output of t. Lines that
// come after the end of t are dropped: a goroutine that outlives its test is
// for Ledger or goleak to report, not for a panic in the test binary.
func Logger(t testing.TB) *slog.Logger {
	t.Helper()
	w := &testWriter{t: t}
	t.Cleanup(w.close)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct {
	mu   sync.Mutex
	t    testing.TB
	done bool
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return len(p), nil
	}
	return w.t.Output().Write(p)
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
}

// Gzip compresses b.
func Gzip(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

var names atomic.Int64

// Name returns a name that nothing else on this machine uses, dsec-t-<pid>-<n>.
// It fits everywhere a kernel object can be named (a cgroup, a mount point, a
// file), except for network links, which hold 15 characters; use LinkName there.
// A test that passes it to Ledger finds what it left, whoever else runs tests.
func Name(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("dsec-t-%d-%04d", os.Getpid(), names.Add(1))
}

// LinkName returns a name of at most 15 characters for a network link.
func LinkName(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("dst%x-%x", os.Getpid(), names.Add(1))
}

// Dir returns a new directory that is removed after the test. Unlike
// t.TempDir its path is short, so that a Unix socket fits below it (108
// bytes), and it holds a Name, so that Ledger finds mounts left below it.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", Name(t)+"-") //nolint:usetesting // its path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove test directory: %v", err)
		}
	})
	return dir
}

// WaitFor calls check until it returns nil, and fails the test with its last
// error once timeout has passed. It is for state that has no event a test
// could block on: the kernel frees namespaces, mounts and cgroups some time
// after their last user is gone, and tells nobody. Where there is a channel, a
// pidfd or a pipe to wait on, wait on that. The pause between two calls starts
// at 1 ms and doubles up to 50 ms.
func WaitFor(t testing.TB, timeout time.Duration, what string, check func() error) {
	t.Helper()
	if err := poll(timeout, check); err != nil {
		t.Fatalf("%s: not within %v: %v", what, timeout, err)
	}
}

func poll(timeout time.Duration, check func() error) error {
	end := time.NewTimer(timeout)
	defer end.Stop()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-end.C:
			return err
		case <-time.After(pause):
		}
	}
}
