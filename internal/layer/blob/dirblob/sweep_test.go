package dirblob

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
)

// TestMain is also a process that puts a blob which never ends, to be killed.
func TestMain(m *testing.M) {
	if dir := os.Getenv("DSEC_TEST_PUT"); dir != "" {
		s, err := Open(dir)
		if err == nil {
			err = s.Put(context.Background(), "never/ends", endless{}, 1<<40)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// endless says on stdout that a first part was written, and has no second.
type endless struct{}

var asked int

func (endless) Read(p []byte) (int, error) {
	if asked += len(p); asked > ioSize {
		fmt.Println("written")
		select {}
	}
	return len(p), nil
}

// startPut starts such a process, and returns once part of its blob is written.
func startPut(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DSEC_TEST_PUT="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func temps(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, tempDir))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestCrashedPutIsSwept(t *testing.T) {
	dir := t.TempDir()
	cmd := startPut(t, dir)
	s := mustOpen(t, dir) // sweeps, beside a writer that lives
	if n := temps(t, dir); len(n) != 1 {
		t.Fatalf("unfinished files of a writer that lives: %v", n)
	}
	blobtest.WantNone(t, s, "never/ends")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if err := s.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	wantNoTemps(t, dir)
	blobtest.WantNone(t, s, "never/ends")
}

func TestSweepKnowsItsOwn(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	own := strings.Split(s.writer, ".")
	name := func(boot, ns, pid, began string) string {
		return strings.Join([]string{boot, ns, pid, began, "x"}, ".")
	}
	young := []string{
		name(own[0], own[1], own[2], own[3]), // this process
		name("another", own[1], "4194304", own[3]),
		name(own[0], "1", "4194304", own[3]), // a PID there may be anybody's here
		name(own[0], own[1], "0", own[3]), name(own[0], own[1], "-1", own[3]), name(own[0], own[1], "self", own[3]),
		"of nobody", own[0] + "." + own[1],
	}
	dead := []string{
		name(own[0], own[1], "4194304", own[3]), // PIDs end below 2^22
		name(own[0], own[1], own[2], "1"),       // the PID is another process's now
	}
	old := []string{"of-nobody-and-old", name("another", own[1], own[2], own[3]+"0")}
	for _, n := range slices.Concat(young, dead, old) {
		if err := os.WriteFile(filepath.Join(dir, tempDir, n), []byte("part"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	long := time.Now().Add(-staleAfter - time.Minute)
	for _, n := range append(old, young[0]) { // this process lives, however long it takes
		if err := os.Chtimes(filepath.Join(dir, tempDir, n), long, long); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	slices.Sort(young)
	if got := temps(t, dir); !slices.Equal(got, young) {
		t.Errorf("left %q, want %q", got, young)
	}
}

// FuzzSweep wants that no name in the directory ends a file of this process.
func FuzzSweep(f *testing.F) {
	s := &Store{writer: "b00t.42.1.7"}
	for _, name := range []string{"", ".", "b00t.42.1.7.x", "b00t.42.99999999999999999999.7.x", "b00t.42.-1.7.x", "....", "b00t.42.0x1.7.x"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if dead, known := s.isDead(name); dead && (!known || !strings.HasPrefix(name, "b00t.42.")) {
			t.Errorf("%q is dead %t, known %t", name, dead, known)
		}
	})
}

// dirs are the directories below a store's own, without that of unfinished files.
func dirs(t testing.TB, root string) (found []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && p != root && d.Name() != tempDir {
			rel, rerr := filepath.Rel(root, p)
			found, err = append(found, rel), rerr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// A directory goes with the last blob in it, and those above it that then have none;
// what a crash left of them is swept.
func TestEmptyDirectoriesGo(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	want := func(after string, want ...string) {
		t.Helper()
		if got := dirs(t, dir); !slices.Equal(got, want) {
			t.Errorf("after %s there are the directories %q, want %q", after, got, want)
		}
	}
	for _, key := range []string{"a/b/one", "a/b/two", "a/c/three"} {
		blobtest.MustPut(t, s, key, []byte(key))
	}
	for _, step := range []struct {
		key  string
		left []string
	}{
		{"a/b/one", []string{"a", "a/b", "a/c"}}, {"a/b/none", []string{"a", "a/b", "a/c"}}, {"a/b/two", []string{"a", "a/c"}},
		{"a/b/two", []string{"a", "a/c"}}, {"a/c/three", nil},
	} {
		if err := s.Delete(t.Context(), step.key); err != nil {
			t.Fatal(err)
		}
		want("the delete of "+step.key, step.left...)
	}
	blobtest.MustPut(t, s, "a/b/one", nil)
	old := time.Now().Add(-2 * staleAfter)
	for _, left := range []string{"a/d/e", "a/f", "g", "not a key/h", "new"} {
		err := os.MkdirAll(filepath.Join(dir, left), 0o700)
		if err == nil && left != "new" { // which is of a put under way
			err = os.Chtimes(filepath.Join(dir, left), old, old)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("the sweep", "a", "a/b", "new", "not a key", "not a key/h")
	blobtest.WantBlob(t, s, "a/b/one", nil)
}

// Blobs are put where the last of their directory is deleted, by this host or another.
func TestPutsWhileDirectoriesGo(t *testing.T) {
	dir := t.TempDir()
	hosts := []*Store{mustOpen(t, dir), mustOpen(t, dir)}
	var g errgroup.Group
	for i := range 4 {
		s, put := hosts[i%2], putLinked
		if i < 2 {
			put = func(s *Store, key string) error {
				return s.Put(context.Background(), key, strings.NewReader(key), int64(len(key)))
			}
		}
		g.Go(func() error {
			for n := range 300 {
				key := fmt.Sprintf("a/b/%d-%d", i, n)
				err := put(s, key)
				if err == nil {
					err = s.Delete(context.Background(), key)
				}
				if err != nil {
					return fmt.Errorf("%s: %w", key, err)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if left := dirs(t, dir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

// putLinked is a Put of a file that the store takes over.
func putLinked(s *Store, key string) error {
	f, err := s.Temp()
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(key); err != nil {
		return err
	}
	return s.Link(context.Background(), key, f)
}
