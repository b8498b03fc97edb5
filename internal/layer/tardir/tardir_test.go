package tardir

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// read gives name, type and target of each entry, and the contents.
func read(t *testing.T, b []byte) (list []string, contents map[string]string, headers map[string]*tar.Header) {
	t.Helper()
	contents, headers = map[string]string{}, map[string]*tar.Header{}
	r := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return list, contents, headers
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, string(h.Typeflag)+" "+h.Name+" "+h.Linkname)
		headers[h.Name] = h
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		contents[h.Name] = string(data)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	must(os.Mkdir(in("sub"), 0o750))
	must(os.WriteFile(in("sub/\xff\xfe\n"), []byte("binary name"), 0o600))
	must(os.WriteFile(in("a"), []byte("content"), 0o644))
	must(os.Link(in("a"), in("sub/hard")))
	must(os.Symlink("../x", in("link")))
	must(unix.Mkfifo(in("pipe"), 0o600))
	must(os.WriteFile(in("sparse"), nil, 0o644))
	must(os.Truncate(in("sparse"), 3000))
	must(os.WriteFile(in("exe"), nil, 0o644))
	must(os.Chmod(in("exe"), 0o755|fs.ModeSetuid))
	must(os.Chtimes(in("a"), time.Time{}, time.Unix(1e9, 123456789)))
	l, err := net.Listen("unix", in("socket"))
	must(err)
	defer l.Close()
	hasXattr := unix.Setxattr(in("a"), "user.k", []byte("v\x00w"), 0) == nil

	var b bytes.Buffer
	left, err := Write(&b, dir)
	must(err)
	list, contents, headers := read(t, b.Bytes())
	want := []string{"5 ./ ", "0 a ", "0 exe ", "2 link ../x", "6 pipe ", "0 sparse ", "5 sub/ ", "1 sub/hard a", "0 sub/\xff\xfe\n "}
	slices.Sort(list)
	slices.Sort(want)
	if diff := cmp.Diff(want, list); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	if contents["a"] != "content" || contents["sub/\xff\xfe\n"] != "binary name" || contents["sparse"] != string(make([]byte, 3000)) {
		t.Errorf("contents %q", contents)
	}
	if h := headers["a"]; h.Mode != 0o644 || !h.ModTime.Equal(time.Unix(1e9, 123456789)) || h.Uid != os.Getuid() || h.Uname != "" {
		t.Errorf("header %+v", h)
	}
	if hasXattr && headers["a"].PAXRecords["SCHILY.xattr.user.k"] != "v\x00w" {
		t.Errorf("attributes %q", headers["a"].PAXRecords)
	}
	want = []string{`sockets left out: 1, the first at "/socket"`}
	if hasXattr && unix.Setxattr(in("a"), "user.k=l", []byte("x"), 0) == nil {
		left, err = Write(io.Discard, dir)
		must(err)
		want = append(want, `attributes left out (a tar has none with = in its name): 1, the first at "/a"`)
	}
	if diff := cmp.Diff(want, left.Findings("")); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}
	if headers["exe"].Mode != 0o4755 {
		t.Errorf("mode %o", headers["exe"].Mode)
	}
}

// TestAttributesOfTheSystem: those that no layer keeps are in the stream all the same, so
// that who imports it tells of them.
func TestAttributesOfTheSystem(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := t.TempDir()
	if err := unix.Setxattr(dir, "trusted.k", []byte("v"), 0); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := Write(&b, dir); err != nil {
		t.Fatal(err)
	}
	if _, _, headers := read(t, b.Bytes()); headers["./"].PAXRecords["SCHILY.xattr.trusted.k"] != "v" {
		t.Errorf("records %q", headers["./"].PAXRecords)
	}
}

func TestErrors(t *testing.T) {
	dir := t.TempDir()
	if _, err := Write(io.Discard, filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(io.Discard, path); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("file: %v", err)
	}
	broken := errors.New("connection reset")
	if _, err := Write(failingWriter{broken}, dir); !errors.Is(err, broken) {
		t.Errorf("broken: %v", err)
	}
	// A file that grows or shrinks while it is read is told, not cut or padded.
	for _, size := range []int64{3 << 20, 10} {
		if _, err := Write(&resizer{path: path, size: size}, dir); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("a file became %d bytes while it was read: %v", size, err)
		}
	}
	// A directory given as a link is what it leads to.
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := Write(&b, link); err != nil {
		t.Fatal(err)
	}
	if list, _, _ := read(t, b.Bytes()); len(list) != 2 {
		t.Errorf("entries of a link's directory: %q", list)
	}
}

type failingWriter struct{ err error }

func (w failingWriter) Write([]byte) (int, error) { return 0, w.err }

// resizer changes the file's size once its first bytes arrive.
type resizer struct {
	path string
	size int64
	n    int
}

func (w *resizer) Write(p []byte) (int, error) {
	if w.n += len(p); w.n > 100<<10 {
		_ = os.Truncate(w.path, w.size)
	}
	return len(p), nil
}
