package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"testing"
)

// The test program is its own import helper, as dsec is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == HelperVerb {
		HelperMain()
	}
	os.Exit(m.Run())
}

func openStore(t testing.TB, opt Options) *Store {
	t.Helper()
	s, err := Open(t.TempDir(), opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func tarOf(t testing.TB, entries ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestBuild(t *testing.T) {
	s := openStore(t, Options{})
	meta, _, err := s.Build(context.Background(), "", bytes.NewReader(tarOf(t,
		&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		&tar.Header{Name: "etc/file", Typeflag: tar.TypeReg, Mode: 0o644, Size: 10000})))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", meta)
}
