package chronusfiles

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
)

func read(t testing.TB, f *chronusapi.Client, path string, offset, length int64) (string, error) {
	t.Helper()
	r, err := f.Read(t.Context(), path, offset, length)
	if err != nil {
		return "", err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	return string(b), err
}

func write(t testing.TB, f *chronusapi.Client, path, text string) error {
	t.Helper()
	n, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: path}, strings.NewReader(text))
	if err == nil && n != int64(len(text)) {
		t.Errorf("wrote %d of %d bytes", n, len(text))
	}
	return err
}

func TestReadAndWrite(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "na\nme\xff")
	big := strings.Repeat("0123456789", 100_000)
	for _, text := range []string{"", "short", big, "short again"} {
		if err := write(t, f, path, text); err != nil {
			t.Fatal(err)
		}
		if got, err := read(t, f, path, 0, -1); err != nil || got != text {
			t.Fatalf("read %d bytes of %d, %v", len(got), len(text), err)
		}
	}
	if got, err := read(t, f, path, 2, 3); err != nil || got != "ort" {
		t.Errorf("a range: %q, %v", got, err)
	}
	if got, err := read(t, f, path, 1000, 3); err != nil || got != "" {
		t.Errorf("past the end: %q, %v", got, err)
	}
	if got, err := read(t, f, "/proc/self/status", 0, -1); err != nil || !strings.Contains(got, "Pid:") {
		t.Errorf("a file of unknown size: %q, %v", got, err)
	}
	if n, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: path, Append: true}, strings.NewReader("++")); err != nil || n != 2 {
		t.Fatal(n, err)
	}
	if got, err := read(t, f, path, 0, -1); err != nil || got != "short again++" {
		t.Errorf("appended: %q, %v", got, err)
	}
	if names := dirNames(t, dir); len(names) != 1 {
		t.Errorf("left behind: %q", names)
	}
}

func dirNames(t testing.TB, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestWriteKeepsModeAndFollowsLinks(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "sub", "file")
	if err := os.Mkdir(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("old"), 0o751); err != nil {
		t.Fatal(err)
	}
	link, link2 := filepath.Join(dir, "link"), filepath.Join(dir, "link2")
	if err := errors.Join(os.Symlink("sub/file", link), os.Symlink(link, link2)); err != nil {
		t.Fatal(err)
	}
	if err := write(t, f, link2, "new"); err != nil {
		t.Fatal(err)
	}
	st, err := os.Lstat(file)
	if err != nil || st.Mode() != 0o751 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if got, _ := os.ReadFile(file); string(got) != "new" {
		t.Errorf("got %q", got)
	}
	if st, err := os.Lstat(link); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link became %v", st.Mode())
	}
	if _, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: file, Mode: 0o4711}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Lstat(file); st.Mode() != os.ModeSetuid|0o711 {
		t.Errorf("mode %v", st.Mode())
	}
	// A link to nothing makes its target, as a shell's redirection does.
	dangling := filepath.Join(dir, "dangling")
	if err := os.Symlink("sub/made", dangling); err != nil {
		t.Fatal(err)
	}
	if err := write(t, f, dangling, "made"); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(filepath.Join(dir, "sub/made")); string(got) != "made" {
		t.Errorf("got %q", got)
	}
}

func TestFailedWriteLeavesTheOldFile(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := write(t, f, path, "old"); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	src := io.MultiReader(strings.NewReader("new"), &failingReader{broken})
	if _, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: path}, src); err != broken {
		t.Fatalf("got %v", err)
	}
	if got, _ := os.ReadFile(path); string(got) != "old" {
		t.Errorf("got %q", got)
	}
	if names := dirNames(t, dir); len(names) != 1 {
		t.Errorf("left behind: %q", names)
	}
}

type failingReader struct{ err error }

func (r *failingReader) Read([]byte) (int, error) { return 0, r.err }

func TestFullDiskIsExhausted(t *testing.T) {
	testutil.Require(t, testutil.Root)
	f := newFixture(t)
	dir := t.TempDir()
	if err := syscall.Mount("dsec-test", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	path := filepath.Join(dir, "file")
	_, err := f.Write(t.Context(), chronusapi.WriteRequest{Path: path}, bytes.NewReader(make([]byte, 10<<20)))
	wantError(t, err, dsec.CodeExhausted, "path")
	if names := dirNames(t, dir); len(names) != 0 {
		t.Errorf("left behind: %q", names)
	}
	if err := write(t, f, path, "fits"); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// TestHostileFilesNeitherHangNorEscape is S35: whatever an artifact's path
// turned into, the answer is bytes of the sandbox or a typed error, soon.
func TestHostileFilesNeitherHangNorEscape(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	err := errors.Join(
		syscall.Mkfifo(at("fifo"), 0o600),
		os.Symlink("/proc/self/root/etc/passwd", at("magic-root")),
		os.Symlink("/proc/self/fd/0", at("magic-fd")),
		os.Symlink("/proc/self/exe", at("magic-exe")),
		os.Symlink(at("loop"), at("loop")),
		os.Symlink("/dev/zero", at("zero")),
		os.Mkdir(at("dir"), 0o755),
	)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"fifo", "magic-root", "magic-fd", "magic-exe", "loop", "zero", "dir"} {
		_, err := read(t, f, at(name), 0, -1)
		wantError(t, err, dsec.CodeInvalid, "path")
		if name != "zero" {
			wantError(t, write(t, f, at(name), "x"), dsec.CodeInvalid, "path")
		}
		_, err = f.Write(t.Context(), chronusapi.WriteRequest{Path: at(name), Append: true}, strings.NewReader("x"))
		wantError(t, err, dsec.CodeInvalid, "path")
	}
	for _, path := range []string{"/proc/self/root/etc/passwd", "/proc/self/cwd/x", "/dev/zero", "/proc/self/fd/1"} {
		_, err := read(t, f, path, 0, -1)
		wantError(t, err, dsec.CodeInvalid, "path")
	}
	_, err = f.Write(t.Context(), chronusapi.WriteRequest{Path: "/proc/self/mem", Append: true}, strings.NewReader("x"))
	wantError(t, err, dsec.CodeInvalid, "path")
	_, err = read(t, f, at("none"), 0, -1)
	wantError(t, err, dsec.CodeNotFound, "path")
	wantError(t, write(t, f, at("none/file"), "x"), dsec.CodeNotFound, "path")
	if err := os.WriteFile(at("file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantError(t, write(t, f, at("file/x"), "x"), dsec.CodeInvalid, "path")
}

func TestStatAndList(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	err := errors.Join(
		os.WriteFile(filepath.Join(dir, "b\xff"), []byte("12345"), 0o640),
		os.Symlink("b\xff", filepath.Join(dir, "link")),
		os.Mkdir(filepath.Join(dir, "a"), 0o755),
		syscall.Mkfifo(filepath.Join(dir, "z"), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	link, err := f.Stat(t.Context(), filepath.Join(dir, "link"), false)
	if err != nil || link.Type != "symlink" || link.Target != "b\xff" || link.Name != "link" {
		t.Errorf("got %+v, %v", link, err)
	}
	file, err := f.Stat(t.Context(), filepath.Join(dir, "link"), true)
	if err != nil || file.Type != "file" || file.Size != 5 || file.Mode != 0o640 || file.Modified.IsZero() {
		t.Errorf("got %+v, %v", file, err)
	}
	_, err = f.Stat(t.Context(), filepath.Join(dir, "none"), true)
	wantError(t, err, dsec.CodeNotFound, "path")

	var names, types []string
	after := ""
	for more := true; more; {
		var list []chronusapi.FileInfo
		list, more, err = f.ListDir(t.Context(), dir, after, 3)
		if err != nil || len(list) == 0 {
			t.Fatal(list, err)
		}
		for _, e := range list {
			names, types = append(names, e.Name), append(types, e.Type)
			after = e.Name
		}
	}
	if got := strings.Join(names, ",") + " " + strings.Join(types, ","); got != "a,b\xff,link,z dir,file,symlink,fifo" {
		t.Errorf("got %q", got)
	}
	_, _, err = f.ListDir(t.Context(), filepath.Join(dir, "b\xff"), "", 1)
	wantError(t, err, dsec.CodeInvalid, "path")
}

func TestMkdirRenameRemove(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	ctx := t.Context()
	wantError(t, f.Mkdir(ctx, at("a/b/c"), 0, false), dsec.CodeNotFound, "path")
	if err := f.Mkdir(ctx, at("a/b/c"), 0o2775, true); err != nil {
		t.Fatal(err)
	}
	if err := f.Mkdir(ctx, at("a/b/c"), 0, true); err != nil {
		t.Errorf("again, with parents: %v", err)
	}
	wantError(t, f.Mkdir(ctx, at("a"), 0, false), dsec.CodeConflict, "path")
	if st, err := f.Stat(ctx, at("a/b/c"), true); err != nil || st.Mode != 0o2775 {
		t.Errorf("mode 0%o, %v", st.Mode, err)
	}
	if err := write(t, f, at("a/file"), "x"); err != nil {
		t.Fatal(err)
	}
	if err := f.Rename(ctx, at("a/file"), at("a/b/moved")); err != nil {
		t.Fatal(err)
	}
	wantError(t, f.Rename(ctx, at("a/file"), at("x")), dsec.CodeNotFound, "path")
	wantError(t, f.Rename(ctx, at("a/b/moved"), at("none/x")), dsec.CodeNotFound, "to")
	wantError(t, f.Rename(ctx, at("a/b/moved"), at("a")), dsec.CodeConflict, "to")
	wantError(t, f.Remove(ctx, at("a"), false), dsec.CodeConflict, "path")
	wantError(t, f.Remove(ctx, "/", true), dsec.CodeInvalid, "path")
	wantError(t, f.Remove(ctx, dir+"/a/..", true), dsec.CodeInvalid, "path")
	// What links in a tree lead to is not part of it.
	keep := filepath.Join(t.TempDir(), "keep")
	if err := errors.Join(os.WriteFile(keep, nil, 0o600), os.Symlink(filepath.Dir(keep), at("a/b/out"))); err != nil {
		t.Fatal(err)
	}
	for i := range 600 {
		if err := os.WriteFile(at("a/b/f"+string(rune('0'+i%10))+strings.Repeat("x", i/10)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Remove(ctx, at("a"), true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(keep); err != nil {
		t.Errorf("a link was followed: %v", err)
	}
	wantError(t, f.Remove(ctx, at("a"), true), dsec.CodeNotFound, "path")
	if names := dirNames(t, dir); len(names) != 0 {
		t.Errorf("left behind: %q", names)
	}
}
