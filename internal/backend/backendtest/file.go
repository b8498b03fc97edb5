package backendtest

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// write makes a file and the directories above it.
func (b *box) write(name, data string) {
	b.t.Helper()
	if err := b.Mkdir(b.ctx(), path.Dir(name), 0o755, true); err != nil {
		b.t.Fatalf("directories of %s: %v", name, err)
	}
	if n, err := b.Write(b.ctx(), chronusapi.WriteRequest{Path: name}, strings.NewReader(data)); err != nil || n != int64(len(data)) {
		b.t.Fatalf("write %s: %d bytes, %v", name, n, err)
	}
}

func (b *box) read(name string, offset, length int64) string {
	b.t.Helper()
	r, err := b.Read(b.ctx(), name, offset, length)
	if err != nil {
		b.t.Fatalf("read %s: %v", name, err)
	}
	defer func() { _ = r.Close() }()
	data, err := io.ReadAll(r)
	if err != nil {
		b.t.Fatalf("read %s: %v", name, err)
	}
	return string(data)
}

func testFiles(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	b.write("/tmp/new/dir/file", "content\x00\xff")
	if got := b.read("/tmp/new/dir/file", 0, -1); got != "content\x00\xff" {
		t.Errorf("read back %q", got)
	}
	if got := b.read("/tmp/new/dir/file", 3, 2); got != "te" {
		t.Errorf("range: %q, want te", got)
	}
	if got := b.read("/tmp/new/dir/file", 100, 5); got != "" {
		t.Errorf("beyond the end: %q", got)
	}
	if r := b.shell("cat /tmp/new/dir/file | wc -c"); strings.TrimSpace(r.stdout) != "9" {
		t.Errorf("a command sees %q bytes, want 9", r.stdout)
	}
	if _, err := b.Write(b.ctx(), chronusapi.WriteRequest{Path: "/tmp/mode", Mode: 0o751}, strings.NewReader("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Write(b.ctx(), chronusapi.WriteRequest{Path: "/tmp/mode", Append: true}, strings.NewReader("b")); err != nil {
		t.Fatal(err)
	}
	f, err := b.Stat(b.ctx(), "/tmp/mode", true)
	if err != nil || f.Size != 2 || f.Mode != 0o751 || f.Type != "file" || f.Name != "mode" || time.Since(f.Modified) > hang {
		t.Errorf("stat %+v, %v", f, err)
	}
	big := strings.Repeat("0123456789", 500_000)
	b.write("/tmp/big", big)
	if got := b.read("/tmp/big", 0, -1); got != big {
		t.Errorf("5 MB came back as %d bytes, or others", len(got))
	}
	if err := b.Mkdir(b.ctx(), "/tmp/list", 0o700, false); err != nil {
		t.Fatal(err)
	}
	names := []string{"a", "b\xff\xfe", "c d", "новый", "z"}
	for _, name := range names {
		b.write("/tmp/list/"+name, name)
	}
	var got []string
	for after := ""; ; {
		list, more, err := b.ListDir(b.ctx(), "/tmp/list", after, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			got = append(got, e.Name)
			after = e.Name
		}
		if !more {
			break
		}
	}
	if wantNames := []string{"a", "b\xff\xfe", "c d", "z", "новый"}; strings.Join(got, "|") != strings.Join(wantNames, "|") {
		t.Errorf("list %q, want %q", got, wantNames)
	}
	if err := b.Rename(b.ctx(), "/tmp/list/a", "/tmp/list/z"); err != nil {
		t.Error(err)
	}
	if got := b.read("/tmp/list/z", 0, -1); got != "a" {
		t.Errorf("renamed over z: %q, want a", got)
	}
	if err := b.Remove(b.ctx(), "/tmp/list", true); err != nil {
		t.Error(err)
	}
	if _, err := b.Stat(b.ctx(), "/tmp/list", true); err == nil {
		t.Error("removed directory is there")
	}
}

func testFileErrors(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	b.write("/tmp/dir/file", "x")
	ctx := b.ctx()
	_, err := b.Stat(ctx, "/no/such", true)
	want(t, "stat of nothing", err, "path", dsec.CodeNotFound)
	_, err = b.Write(ctx, chronusapi.WriteRequest{Path: "/no/such"}, strings.NewReader("x"))
	want(t, "write without parents", err, "path", dsec.CodeNotFound)
	_, err = b.Read(ctx, "/no/such", 0, -1)
	want(t, "read of nothing", err, "path", dsec.CodeNotFound)
	_, err = b.Read(ctx, "/tmp/dir", 0, -1)
	want(t, "read of a directory", err, "path", dsec.CodeInvalid)
	_, err = b.Write(ctx, chronusapi.WriteRequest{Path: "/tmp/dir"}, strings.NewReader("x"))
	want(t, "write over a directory", err, "path", dsec.CodeInvalid, dsec.CodeConflict)
	_, err = b.Write(ctx, chronusapi.WriteRequest{Path: "relative"}, strings.NewReader("x"))
	want(t, "relative path", err, "path", dsec.CodeInvalid)
	want(t, "mkdir where a file is", b.Mkdir(ctx, "/tmp/dir/file", 0o755, false), "path", dsec.CodeConflict, dsec.CodeInvalid)
	want(t, "mkdir without parents", b.Mkdir(ctx, "/tmp/x/y/z", 0o755, false), "path", dsec.CodeNotFound)
	want(t, "remove of a full directory", b.Remove(ctx, "/tmp/dir", false), "path", dsec.CodeConflict, dsec.CodeInvalid)
	want(t, "remove of nothing", b.Remove(ctx, "/tmp/none", false), "path", dsec.CodeNotFound)
	want(t, "rename of nothing", b.Rename(ctx, "/tmp/none", "/tmp/other"), "path", dsec.CodeNotFound)
	_, _, err = b.ListDir(ctx, "/tmp/dir/file", "", 10)
	want(t, "list of a file", err, "path", dsec.CodeNotFound, dsec.CodeInvalid)
	if got := b.read("/tmp/dir/file", 0, -1); got != "x" {
		t.Errorf("after refused calls the file holds %q", got)
	}
}

// archive makes a tar of entries.
func archive(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		body := ""
		if h.Typeflag == tar.TypeReg {
			body = "content of " + h.Name
			h.Size = int64(len(body))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func testTar(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	in := archive(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o750},
		tar.Header{Typeflag: tar.TypeReg, Name: "d/file", Mode: 0o640},
		tar.Header{Typeflag: tar.TypeReg, Name: "deep/without/dirs"},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "link", Linkname: "d/file"},
	)
	res, err := b.Upload(b.ctx(), chronusapi.UploadRequest{Path: "/tmp/up"}, bytes.NewReader(in))
	if err != nil || res.Entries != 4 {
		t.Fatalf("upload: %+v, %v", res, err)
	}
	if got := b.read("/tmp/up/link", 0, -1); got != "content of d/file" {
		t.Errorf("through the link: %q", got)
	}
	r, err := b.Download(b.ctx(), "/tmp/up")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	got := map[string]string{}
	tr := tar.NewReader(r)
	for {
		hd, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.Trim(strings.TrimPrefix(strings.TrimPrefix(hd.Name, "./"), "up/"), "/")
		got[name] = fmt.Sprintf("%c %o %s%s", hd.Typeflag, hd.Mode&0o777, hd.Linkname, data)
	}
	for name, wantEntry := range map[string]string{
		"d": "5 750 ", "d/file": "0 640 content of d/file", "deep/without/dirs": "0 644 content of deep/without/dirs", "link": "2 777 d/file",
	} {
		if got[name] != wantEntry {
			t.Errorf("downloaded %s: %q, want %q", name, got[name], wantEntry)
		}
	}
	for what, entry := range map[string][]tar.Header{
		"dot dot":         {{Typeflag: tar.TypeReg, Name: "../../etc/out"}},
		"absolute":        {{Typeflag: tar.TypeReg, Name: "/etc/out"}},
		"through symlink": {{Typeflag: tar.TypeSymlink, Name: "s", Linkname: "/etc"}, {Typeflag: tar.TypeReg, Name: "s/out"}},
	} {
		_, err := b.Upload(b.ctx(), chronusapi.UploadRequest{Path: "/tmp/evil"}, bytes.NewReader(archive(t, entry...)))
		_, statErr := b.Stat(b.ctx(), "/etc/out", false)
		if statErr == nil {
			t.Errorf("%s: an entry was written outside", what)
		}
		if err == nil && what != "absolute" {
			t.Errorf("%s: no error", what)
		}
	}
	_, err = b.Upload(b.ctx(), chronusapi.UploadRequest{Path: "/tmp/bad"}, strings.NewReader(strings.Repeat("not a tar ", 200)))
	if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("not a tar: %v, want invalid", err)
	}
}
