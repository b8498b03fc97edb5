package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opendsec/dsec/internal/layer/convert"
)

// names are those in a tar that ends as it must.
func names(t *testing.T, r io.Reader) (all []string) {
	t.Helper()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, h.Name)
	}
}

func smallTree(t *testing.T) tree {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "hello", Mode: 0o644, Size: 5}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tree.tar")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return tree{path: path, size: int64(b.Len()), files: 1}
}

func TestVariantsDiffer(t *testing.T) {
	tree := smallTree(t)
	var seen [][]byte
	for n := range 2 {
		r, err := tree.variant(n)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err := errors.Join(err, r.Close()); err != nil {
			t.Fatal(err)
		}
		if got := names(t, bytes.NewReader(b)); !slices.Equal(got, []string{"variant", "hello"}) {
			t.Errorf("variant %d has %q", n, got)
		}
		seen = append(seen, b)
	}
	if bytes.Equal(seen[0], seen[1]) {
		t.Error("two variants are the same image")
	}
}

// TestLayoutIsOne has the converter, which checks each digest, read the layout.
func TestLayoutIsOne(t *testing.T) {
	tree := smallTree(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "layout.tar")
	if err := tree.writeLayout(path, 7); err != nil {
		t.Fatal(err)
	}
	var files []*os.File
	for _, name := range []string{"image", "scratch"} {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files = append(files, f)
	}
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	res, err := convert.Convert(in, files[0], files[1], convert.Options{})
	if err != nil || res.Source != convert.SourceOCILayout || !slices.Contains(res.Config.Env, "VARIANT=7") {
		t.Errorf("%+v, %v", res, err)
	}
}
