package chronusfiles

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// describe lists a tree with what a tar keeps of it.
func describe(t testing.TB, root string) string {
	t.Helper()
	var lines []string
	inodes := make(map[uint64]string)
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := os.Lstat(path)
		if err != nil {
			return err
		}
		sys := st.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%q %v %d:%d", strings.TrimPrefix(path, root), st.Mode(), sys.Uid, sys.Gid)
		switch {
		case st.Mode().IsRegular():
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %q", st.ModTime().Unix(), text)
			if sys.Nlink > 1 {
				if first, ok := inodes[sys.Ino]; ok {
					line += " = " + first
				} else {
					inodes[sys.Ino] = strings.TrimPrefix(path, root)
				}
			}
		case st.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(path)
			line += " -> " + target
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

func TestDownloadAndUploadKeepATree(t *testing.T) {
	f := newFixture(t)
	src := filepath.Join(t.TempDir(), "src")
	at := func(name string) string { return filepath.Join(src, name) }
	long := strings.Repeat("n", 200)
	err := errors.Join(
		os.MkdirAll(at("dir/"+long+"/"+long), 0o750),
		os.WriteFile(at("dir/"+long+"/"+long+"/f"), []byte("deep"), 0o600),
		os.WriteFile(at("file"), bytes.Repeat([]byte("x"), 300_000), 0o644),
		os.WriteFile(at("bin\xff\n"), []byte("name"), 0o4755),
		os.Chmod(at("bin\xff\n"), 0o755|os.ModeSetuid),
		os.WriteFile(at("empty"), nil, 0o400),
		os.Link(at("file"), at("hard")),
		os.Symlink("../nowhere", at("link")),
		os.Symlink("/abs/"+long, at("dir/l\xfe")),
		syscall.Mkfifo(at("fifo"), 0o640),
		os.Mkdir(at("tmp"), 0o777),
		os.Chmod(at("tmp"), 0o777|os.ModeSticky),
	)
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Lchown(at("link"), 1234, 5678); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(at("empty"), 70000, 1); err != nil {
			t.Fatal(err)
		}
	}
	r, err := f.Download(t.Context(), src)
	if err != nil {
		t.Fatal(err)
	}
	dst := filepath.Join(t.TempDir(), "new", "dst")
	res, err := f.Upload(t.Context(), chronusapi.UploadRequest{Path: dst}, r)
	if err != nil {
		t.Fatal(err)
	}
	if want, got := describe(t, src), describe(t, dst); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if res.Bytes != 300_008 || res.Entries != 12 {
		t.Errorf("got %+v", res)
	}
	// Over what is there.
	r, err = f.Download(t.Context(), src)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = f.Upload(t.Context(), chronusapi.UploadRequest{Path: dst}, r); err != nil {
		t.Fatal(err)
	}
	if want, got := describe(t, src), describe(t, dst); got != want {
		t.Errorf("again: got\n%s\nwant\n%s", got, want)
	}
}

func TestDownloadOfOneFile(t *testing.T) {
	f := newFixture(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("text"), 0o640); err != nil {
		t.Fatal(err)
	}
	r, err := f.Download(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	tr := tar.NewReader(r)
	h, err := tr.Next()
	if err != nil || h.Name != "file" || h.Mode != 0o640 {
		t.Fatal(h, err)
	}
	if text, err := io.ReadAll(tr); err != nil || string(text) != "text" {
		t.Fatal(string(text), err)
	}
	if _, err := tr.Next(); err != io.EOF {
		t.Fatal(err)
	}
	_, err = f.Download(t.Context(), path+"x")
	wantError(t, err, dsec.CodeNotFound, "path")
}

type entry struct {
	name, link, text string
	typ              byte
}

func tarOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.typ, Size: int64(len(e.text)), Mode: 0o644}
		if e.typ == tar.TypeDir {
			h.Mode = 0o755
		}
		if os.Geteuid() != 0 {
			h.Uid, h.Gid = os.Geteuid(), os.Getegid()
		}
		if err := errors.Join(w.WriteHeader(h)); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestUploadNeverLeavesItsTarget(t *testing.T) {
	f := newFixture(t)
	for _, entries := range [][]entry{
		{{name: "../escaped", typ: tar.TypeReg, text: "x"}},
		{{name: "/abs", typ: tar.TypeReg, text: "x"}},
		{{name: "a/../../escaped", typ: tar.TypeReg, text: "x"}},
		{{name: "l", link: "..", typ: tar.TypeSymlink}, {name: "l/escaped", typ: tar.TypeReg, text: "x"}},
		{{name: "l", link: "/tmp", typ: tar.TypeSymlink}, {name: "l/escaped", typ: tar.TypeReg, text: "x"}},
		{{name: "l", link: "/proc/self/cwd", typ: tar.TypeSymlink}, {name: "l/escaped", typ: tar.TypeReg, text: "x"}},
		{{name: "l", link: "..", typ: tar.TypeSymlink}, {name: "l/d", typ: tar.TypeDir}},
		{{name: "l", link: "..", typ: tar.TypeSymlink}, {name: "h", link: "l/outside", typ: tar.TypeLink}},
		{{name: "h", link: "../outside", typ: tar.TypeLink}},
		{{name: "h", link: "/etc/passwd", typ: tar.TypeLink}},
		{{name: "dev", typ: tar.TypeBlock}},
		{{name: "dev", typ: tar.TypeChar}},
		{{name: ".", typ: tar.TypeReg, text: "x"}},
		{{name: "./", typ: tar.TypeSymlink, link: "/"}},
	} {
		parent := t.TempDir()
		if err := os.WriteFile(filepath.Join(parent, "outside"), []byte("outside"), 0o600); err != nil {
			t.Fatal(err)
		}
		before := describe(t, parent)
		dst := filepath.Join(parent, "dst")
		_, err := f.Upload(t.Context(), chronusapi.UploadRequest{Path: dst}, bytes.NewReader(tarOf(t, entries...)))
		wantError(t, err, dsec.CodeInvalid, "tar")
		if err := os.RemoveAll(dst); err != nil {
			t.Fatal(err)
		}
		if after := describe(t, parent); after != before {
			t.Errorf("%v: outside is\n%s\nand was\n%s", entries, after, before)
		}
	}
}

func TestUploadThroughLinksThatStayInside(t *testing.T) {
	f := newFixture(t)
	dst := t.TempDir()
	data := tarOf(t, entry{name: "usr/lib", typ: tar.TypeDir}, entry{name: "lib", link: "usr/lib", typ: tar.TypeSymlink},
		entry{name: "lib/file", typ: tar.TypeReg, text: "x"})
	if _, err := f.Upload(t.Context(), chronusapi.UploadRequest{Path: dst}, bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dst, "usr/lib/file")); err != nil {
		t.Error(err)
	}
}

func TestUploadOfATornTarIsRefused(t *testing.T) {
	f := newFixture(t)
	data := tarOf(t, entry{name: "file", typ: tar.TypeReg, text: strings.Repeat("x", 10_000)})
	dst := t.TempDir()
	for _, n := range []int{1, 511, 600, 5000} {
		_, err := f.Upload(t.Context(), chronusapi.UploadRequest{Path: dst}, bytes.NewReader(data[:n]))
		if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	_, err := f.Upload(t.Context(), chronusapi.UploadRequest{Path: dst}, strings.NewReader(strings.Repeat("no tar ", 1000)))
	wantError(t, err, dsec.CodeInvalid, "tar")
	if names := dirNames(t, dst); len(names) != 0 {
		t.Errorf("left behind: %q", names)
	}
}

// removeAll also removes directories whose modes forbid it to all but root.
func removeAll(t testing.TB, dir string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, _ error) error {
		if d != nil && d.IsDir() {
			return os.Chmod(path, 0o700) // before its entries are read
		}
		return nil
	})
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
}

// FuzzUpload unpacks any bytes. Nothing outside the target may change.
func FuzzUpload(f *testing.F) {
	f.Add(tarOf(f, entry{name: "../escaped", typ: tar.TypeReg, text: "x"}))
	f.Add(tarOf(f, entry{name: "l", link: "..", typ: tar.TypeSymlink}, entry{name: "l/escaped", typ: tar.TypeReg, text: "x"}))
	f.Add(tarOf(f, entry{name: "a/b/c", typ: tar.TypeReg, text: "x"}, entry{name: "a", typ: tar.TypeDir}, entry{name: "h", link: "a/b/c", typ: tar.TypeLink}))
	f.Add(tarOf(f, entry{name: "f", typ: tar.TypeFifo}, entry{name: "\xff", typ: tar.TypeReg}))
	files := New()
	f.Fuzz(func(t *testing.T, data []byte) {
		parent := t.TempDir()
		if err := os.WriteFile(filepath.Join(parent, "outside"), []byte("outside"), 0o600); err != nil {
			t.Fatal(err)
		}
		before := describe(t, parent)
		dst := filepath.Join(parent, "dst")
		_, err := files.Upload(context.Background(), chronusapi.UploadRequest{Path: dst}, bytes.NewReader(data))
		var de *dsec.Error
		if err != nil && (!errors.As(err, &de) || de.Code == dsec.CodeInternal) {
			t.Errorf("untyped error %v", err)
		}
		removeAll(t, dst)
		if after := describe(t, parent); after != before {
			t.Errorf("outside is\n%s\nand was\n%s", after, before)
		}
	})
}
