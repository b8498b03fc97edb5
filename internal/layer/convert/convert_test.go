package convert

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/erofs/go-erofs"

	"github.com/opendsec/dsec"
)

// memFile is a File in memory.
type memFile struct{ b []byte }

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(f.b).ReadAt(p, off)
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	if err := f.Truncate(max(int64(len(f.b)), off+int64(len(p)))); err != nil {
		return 0, err
	}
	return copy(f.b[off:], p), nil
}

func (f *memFile) Truncate(size int64) error {
	if size <= int64(cap(f.b)) {
		old := len(f.b)
		f.b = f.b[:size]
		if int(size) > old {
			clear(f.b[old:])
		}
		return nil
	}
	f.b = append(f.b, make([]byte, size-int64(len(f.b)))...)
	return nil
}

// entry makes a header; files hold their own name unless content is given.
type entry struct {
	name    string
	kind    byte
	target  string
	content string
	mode    int64
	pax     map[string]string
	uid     int
	format  tar.Format
}

func (e entry) header() *tar.Header {
	h := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.target, Mode: e.mode, Uid: e.uid, PAXRecords: e.pax, Format: e.format, ModTime: time.Unix(1e9, 0)}
	if h.Mode == 0 {
		h.Mode = 0o755
	}
	if e.kind == tar.TypeReg {
		h.Size = int64(len(e.data()))
	}
	return h
}

func (e entry) data() string {
	if e.content == "" {
		return e.name
	}
	return e.content
}

func dir(name string) entry           { return entry{name: name, kind: tar.TypeDir} }
func file(name string) entry          { return entry{name: name, kind: tar.TypeReg} }
func text(name, content string) entry { return entry{name: name, kind: tar.TypeReg, content: content} }
func symlink(name, target string) entry {
	return entry{name: name, kind: tar.TypeSymlink, target: target}
}
func link(name, target string) entry { return entry{name: name, kind: tar.TypeLink, target: target} }

func tarOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(e.header()); err != nil {
			t.Fatalf("%q: %v", e.name, err)
		}
		if e.kind == tar.TypeReg {
			if _, err := io.WriteString(w, e.data()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// converted is the result of a conversion as its image shows it.
type converted struct {
	Result
	image []byte
	tree  map[string]string // path: type and content or target
}

func convertBytes(t testing.TB, archive []byte, opt Options) (converted, error) {
	t.Helper()
	var image, scratch memFile
	res, err := Convert(bytes.NewReader(archive), &image, &scratch, opt)
	if err != nil {
		if _, ok := errors.AsType[*dsec.Error](err); !ok {
			t.Errorf("error without a code: %v", err)
		}
		return converted{}, err
	}
	return converted{res, image.b, readImage(t, image.b)}, nil
}

func mustConvert(t testing.TB, archive []byte) converted {
	t.Helper()
	c, err := convertBytes(t, archive, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func readImage(t testing.TB, image []byte) map[string]string {
	t.Helper()
	fsys, err := erofs.Open(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	tree := map[string]string{}
	err = fs.WalkDir(fsys, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == "." {
			return err
		}
		switch d.Type() {
		case fs.ModeDir:
			tree[path] = "dir"
		case fs.ModeSymlink:
			target, err := fsys.(fs.ReadLinkFS).ReadLink(path)
			if err != nil {
				return err
			}
			tree[path] = "-> " + target
		case 0:
			content, err := fs.ReadFile(fsys, path)
			if err != nil {
				return err
			}
			tree[path] = "= " + string(content)
		default:
			tree[path] = d.Type().String()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

// wantInvalid checks that an archive is refused with a message that says why.
func wantInvalid(t *testing.T, archive []byte, opt Options, message string) {
	t.Helper()
	_, err := convertBytes(t, archive, opt)
	if err == nil {
		t.Fatalf("accepted, want an error with %q", message)
	}
	if code := dsec.CodeOf(err); code != dsec.CodeInvalid || !strings.Contains(err.Error(), message) {
		t.Fatalf("%s: %v, want invalid with %q", code, err, message)
	}
}

func TestDeterministic(t *testing.T) {
	archive := tarOf(t, dir("a/"), file("a/x"), link("a/y", "a/x"), symlink("z", "a"), file("b/implied"),
		entry{name: "q", kind: tar.TypeReg, pax: map[string]string{"SCHILY.xattr.user.b": "1", "SCHILY.xattr.user.a": "2", "SCHILY.xattr.user.c": "3"}})
	first := sha256.Sum256(mustConvert(t, archive).image)
	for range 20 {
		if sha256.Sum256(mustConvert(t, archive).image) != first {
			t.Fatal("the same archive gave another image")
		}
	}
}

func TestFileBoundaries(t *testing.T) {
	var entries []entry
	want := map[string]string{}
	for _, size := range []int{1, 31, 32, 4031, 4032, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20, 1<<20 + 3, 3 << 20} {
		e := text(fmt.Sprintf("f%d", size), strings.Repeat("0123456789abcde", size/15+1)[:size])
		entries = append(entries, e)
		want[e.name] = "= " + e.content
	}
	got := mustConvert(t, tarOf(t, entries...)).tree
	for name, content := range want {
		if got[name] != content {
			t.Errorf("%s: %d bytes differ", name, len(content))
		}
	}
}

// Long runs of zeros are holes in the image file, and zeros in the image.
func TestZeros(t *testing.T) {
	content := strings.Repeat("\x00", 1<<20) + "middle" + strings.Repeat("\x00", 3<<20)
	got := mustConvert(t, tarOf(t, text("sparse", content), file("after")))
	if got.tree["sparse"] != "= "+content || got.tree["after"] != "= after" {
		t.Error("content differs")
	}
	if got.Size != int64(len(got.image)) {
		t.Errorf("%d bytes, result says %d", len(got.image), got.Size)
	}
}
