package export

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/erofs/go-erofs"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// made is a layer of an archive, as the import helper makes it.
func made(t testing.TB, kind dsec.LayerKind, archive []byte) (image []byte, l Layer) {
	t.Helper()
	dir := t.TempDir()
	var files [2]*os.File
	for i, name := range []string{"image", "scratch"} {
		f, err := os.Create(filepath.Join(dir, name))
		check(t, err)
		t.Cleanup(func() { _ = f.Close() })
		files[i] = f
	}
	res, err := convert.Convert(bytes.NewReader(archive), files[0], files[1], convert.Options{Kind: kind})
	check(t, err)
	image, err = os.ReadFile(files[0].Name())
	check(t, err)
	img, err := erofs.Open(bytes.NewReader(image))
	check(t, err)
	return image, Layer{Digest: "sha256:test", FS: img, Config: res.Config}
}

// exported writes layers as an image.
func exported(t testing.TB, layers ...Layer) []byte {
	t.Helper()
	img, err := Plan(t.Context(), layers)
	check(t, err)
	var b bytes.Buffer
	check(t, img.Write(t.Context(), &b))
	if int64(b.Len()) != img.Size {
		t.Errorf("the stream has %d bytes, %d were told", b.Len(), img.Size)
	}
	return b.Bytes()
}

type entry struct {
	tar.Header
	content string
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size, e.Format = int64(len(e.content)), tar.FormatPAX
		check(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.content)
		check(t, err)
	}
	check(t, w.Close())
	return b.Bytes()
}

func file(name, content string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content}
}

// What is exported and converted again is the same image.
func TestRoundTrip(t *testing.T) {
	long := strings.Repeat("long", 60)
	cases := map[string][]entry{
		"file":     {file("a", "hello")},
		"root":     {{tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o1777, Uid: 5}, ""}},
		"dir":      {{tar.Header{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o2750, Gid: 7, PAXRecords: map[string]string{"SCHILY.xattr.user.d": "x"}}, ""}},
		"owner":    {{tar.Header{Name: "b", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 1000, Gid: 1001}, "x"}},
		"xattr":    {{tar.Header{Name: "b", Typeflag: tar.TypeReg, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "a\x00b"}}, ""}},
		"link":     {file("b", "x"), {tar.Header{Name: "a", Typeflag: tar.TypeLink, Linkname: "b"}, ""}},
		"symlink":  {{tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "../no where"}, ""}},
		"symlinks": {{tar.Header{Name: "s", Typeflag: tar.TypeSymlink, Linkname: "to"}, ""}, {tar.Header{Name: "r", Typeflag: tar.TypeLink, Linkname: "s"}, ""}},
		"pipe":     {{tar.Header{Name: "p", Typeflag: tar.TypeFifo, Mode: 0o600}, ""}},
		"names":    {file(long, "x"), file("\xff\xfe\n", "x"), file("d/"+long, strings.Repeat("x", 10_000))},
		"deep":     {file(strings.Repeat("d/", 100)+"f", "x")},
	}
	upper := map[string][]entry{
		"whiteout": {file("d/.wh.gone", ""), file(".wh.top", "")},
		"opaque":   {file("d/.wh..wh..opq", ""), file("d/kept", "x")},
	}
	for _, kind := range []dsec.LayerKind{dsec.LayerBase, dsec.LayerToolkit} {
		all := cases
		if kind == dsec.LayerToolkit {
			all = upper
			maps.Copy(all, cases)
		}
		for name, entries := range all {
			want, l := made(t, kind, archive(t, entries...))
			out := exported(t, l)
			if got, _ := made(t, kind, out); !bytes.Equal(got, want) {
				t.Errorf("%s, %s: another image came back", name, kind)
			}
			if again := exported(t, l); !bytes.Equal(out, again) {
				t.Errorf("%s, %s: a second export is another", name, kind)
			}
		}
	}
}

// A base has ordinary files whose names an image's layer would read otherwise.
func TestWhatAnImageCannotHaveIsRefused(t *testing.T) {
	_, l := made(t, dsec.LayerBase, archive(t, file("d/.wh.x", "ordinary")))
	_, err := Plan(t.Context(), []Layer{l})
	if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Code != dsec.CodeUnsupported || !strings.Contains(e.Message, "d/.wh.x") {
		t.Errorf("%v, want unsupported and the file", err)
	}
}
