package dirblob

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
	"github.com/opendsec/dsec/internal/testutil"
)

func mustOpen(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.late.Wait()
		testutil.WaitFor(t, 10*time.Second, "all calls return", s.calls.idle)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// wantNoTemps fails the test where an unfinished file stays.
func wantNoTemps(t testing.TB, dir string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(dir, tempDir))
	if err != nil || len(left) != 0 {
		t.Errorf("unfinished files: %v, %v", left, err)
	}
}

func TestSuite(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store {
		dir := filepath.Join(t.TempDir(), "new", "store")
		t.Cleanup(func() { wantNoTemps(t, dir) })
		return mustOpen(t, dir)
	})
}

func TestModel(t *testing.T) {
	blobtest.RunModel(t, mustOpen(t, t.TempDir()))
}

// TestNotBlobs has things in the directory that no Put made.
func TestNotBlobs(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	outside := filepath.Join(t.TempDir(), "outside")
	for _, err := range []error{
		os.WriteFile(outside, []byte("a secret of the host"), 0o600),
		os.Mkdir(filepath.Join(dir, "d"), 0o700),
		os.Symlink(outside, filepath.Join(dir, "link")),
		os.Symlink(filepath.Dir(outside), filepath.Join(dir, "out")),
		os.Symlink("d", filepath.Join(dir, "inside")),
		unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600),
		os.WriteFile(filepath.Join(dir, "not a key"), nil, 0o600),
		os.WriteFile(filepath.Join(dir, ".hidden"), nil, 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range []string{"link", "pipe", "out/outside", "inside/x"} {
		_, err := s.Stat(t.Context(), key)
		blobtest.WantCode(t, "stat "+key, err, dsec.CodeInternal, "")
		_, err = s.ReadAt(t.Context(), key, make([]byte, 1), 0)
		blobtest.WantCode(t, "read "+key, err, dsec.CodeInternal, "")
		_, err = s.Open(key)
		blobtest.WantCode(t, "open "+key, err, dsec.CodeInternal, "")
		blobtest.WantCode(t, "put "+key, s.Put(t.Context(), key, strings.NewReader("x"), 1), dsec.CodeInternal, "")
	}
	blobtest.WantCode(t, "put through a link", s.Put(t.Context(), "out/new", strings.NewReader("x"), 1), dsec.CodeInternal, "")
	blobtest.WantCode(t, "delete through a link", s.Delete(t.Context(), "out/outside"), dsec.CodeInternal, "")
	blobtest.WantCode(t, "put where a directory is", s.Put(t.Context(), "d", strings.NewReader("x"), 1), dsec.CodeConflict, "")
	blobtest.MustPut(t, s, "file", []byte("x"))
	blobtest.WantCode(t, "put below a blob", s.Put(t.Context(), "file/x", strings.NewReader("x"), 1), dsec.CodeConflict, "")
	if keys := blobtest.Keys(t, s, ""); keys != "file" {
		t.Errorf("listed %s", keys)
	}
	if b, err := os.ReadFile(outside); err != nil || string(b) != "a secret of the host" {
		t.Errorf("outside: %q, %v", b, err)
	}
	wantNoTemps(t, dir)
}

// TestOpenFiles reads more blobs than are kept open, from many goroutines.
func TestOpenFiles(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	const blobs = maxOpen + 20
	for i := range blobs {
		blobtest.MustPut(t, s, fmt.Sprint("b/", i), []byte(fmt.Sprintf("%04d", i)))
	}
	var g errgroup.Group
	for w := range 8 {
		g.Go(func() error {
			p := make([]byte, 4)
			for i := range 3 * blobs {
				b := i * (w + 1) % blobs
				if _, err := s.ReadAt(context.Background(), fmt.Sprint("b/", b), p, 0); err != nil || string(p) != fmt.Sprintf("%04d", b) {
					return fmt.Errorf("blob %d is %q, %w", b, p, err)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if n := len(s.files.open); n == 0 || n > maxOpen {
		t.Errorf("%d files are open, want at most %d", n, maxOpen)
	}
	for _, o := range s.files.open {
		o.used = o.used.Add(-2 * openIdle)
	}
	blobtest.WantBlob(t, s, "b/0", []byte("0000"))
	blobtest.MustPut(t, s, "new", []byte("x"))
	blobtest.WantBlob(t, s, "new", []byte("x"))
	if n := len(s.files.open); n > 2 {
		t.Errorf("%d files are open, but two of them idle", n)
	}
}

func TestClosed(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	blobtest.MustPut(t, s, "a", nil)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	_, err = s.Stat(t.Context(), "a")
	blobtest.WantCode(t, "stat of a closed store", err, dsec.CodeUnavailable, "")
}

// TestOpenedAtOnce has several hosts make a new store at once: they agree on what it is.
func TestOpenedAtOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	var g errgroup.Group
	ids := make([]string, 8)
	for i := range ids {
		g.Go(func() error {
			s, err := Open(dir)
			if err != nil {
				return err
			}
			ids[i] = s.id
			return s.Close()
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if len(id) < 20 || id != ids[0] {
			t.Errorf("IDs of one directory: %q", ids)
			break
		}
	}
	wantNoTemps(t, dir)
}

func TestTempDirIsMadeAgain(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	if err := os.Remove(filepath.Join(dir, tempDir)); err != nil {
		t.Fatal(err)
	}
	blobtest.MustPut(t, s, "a", []byte("a"))
	if err := os.Remove(filepath.Join(dir, tempDir)); err != nil {
		t.Fatal(err)
	}
	f, err := s.Temp()
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}

func TestOpenRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{file, filepath.Join(file, "below")} {
		if _, err := Open(dir); err == nil || dsec.CodeOf(err) != dsec.CodeConflict || strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// FuzzKey wants a key to be refused, or to be a file in the directory.
func FuzzKey(f *testing.F) {
	for _, key := range append(blobtest.BadKeys, "a", "a/b", "sha256/0a.data", "a../b", "..a") {
		f.Add(key)
	}
	dir := f.TempDir()
	s := mustOpen(f, filepath.Join(dir, "store"))
	f.Fuzz(func(t *testing.T, key string) {
		err := s.Put(t.Context(), key, strings.NewReader("x"), 1)
		if err != nil {
			blobtest.WantCode(t, "put", err, dsec.CodeInvalid, "key")
		} else {
			blobtest.WantBlob(t, s, key, []byte("x"))
			if b, err := os.ReadFile(filepath.Join(dir, "store", key)); err != nil || string(b) != "x" {
				t.Errorf("%q is no file of the store: %v", key, err)
			}
		}
		if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
			t.Fatalf("%q left the directory: %v, %v", key, all, err)
		}
		if err == nil {
			if err := os.RemoveAll(filepath.Join(dir, "store", strings.Split(key, "/")[0])); err != nil {
				t.Fatal(err)
			}
		}
	})
}
