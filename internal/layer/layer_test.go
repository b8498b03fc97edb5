package layer

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// The test program is its own import helper, as dsec is, and plays bad ones.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		if os.Args[1] == HelperVerb {
			HelperMain()
		}
		if bad := badHelpers[os.Args[1]]; bad != nil {
			bad()
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

func openStore(t testing.TB, opt Options) *Store {
	t.Helper()
	return openStoreIn(t, t.TempDir(), opt)
}

func openStoreIn(t testing.TB, dir string, opt Options) *Store {
	t.Helper()
	if opt.Logger == nil {
		opt.Logger = testutil.Logger(t)
	}
	s, err := Open(dir, opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// archive is a tar of one file with the given content.
func archive(t testing.TB, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "file", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func build(t testing.TB, s *Store, content string) Meta {
	t.Helper()
	meta, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(archive(t, content)))
	if err != nil {
		t.Fatal(err)
	}
	return meta
}

// wantCode checks an error's code.
func wantCode(t testing.TB, err error, code dsec.Code) {
	t.Helper()
	if err == nil || dsec.CodeOf(err) != code {
		t.Errorf("%v, want %s", err, code)
	}
}

// files are the names below a store's directory, its lock not among them.
func files(t testing.TB, s *Store) (names []string) {
	t.Helper()
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" {
			names = append(names, strings.TrimPrefix(path, s.dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func wantFiles(t testing.TB, s *Store, want ...string) {
	t.Helper()
	if got := files(t, s); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
}

// ofLayer are the two files of a layer.
func ofLayer(m Meta) []string {
	hex := strings.TrimPrefix(m.Digest, "sha256:")
	return []string{"sha256/" + hex + ".erofs", "sha256/" + hex + ".json"}
}

func TestLife(t *testing.T) {
	s := openStore(t, Options{})
	meta := build(t, s, "one")
	if meta.Source != SourceRootFS || meta.Files != 1 || meta.Size%4096 != 0 || meta.SourceSize != int64(len(archive(t, "one"))) {
		t.Errorf("%+v", meta)
	}
	wantFiles(t, s, ofLayer(meta)...)
	if got, err := s.Get(meta.Digest); err != nil || got.Digest != meta.Digest {
		t.Errorf("get: %+v, %v", got, err)
	}
	if again := build(t, s, "one"); again.Created != meta.Created {
		t.Error("the same archive made a second layer")
	}
	other := build(t, s, "two")
	if list := s.List(); len(list) != 2 || list[0].Digest != meta.Digest || list[1].Digest != other.Digest {
		t.Errorf("list: %+v", list)
	}

	release, err := s.Hold(meta.Digest)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Hold(meta.Digest)
	if err != nil {
		t.Fatal(err)
	}
	release()
	release() // counts once
	wantCode(t, s.Remove(meta.Digest), dsec.CodeConflict)
	if _, err := os.Stat(s.Path(meta.Digest)); err != nil {
		t.Error("a held layer is gone")
	}
	second()
	if err := s.Remove(meta.Digest); err != nil {
		t.Error(err)
	}
	wantFiles(t, s, ofLayer(other)...)
	wantCode(t, s.Remove(meta.Digest), dsec.CodeNotFound)
	_, err = s.Hold(meta.Digest)
	wantCode(t, err, dsec.CodeNotFound)
	_, err = s.Get(meta.Digest)
	wantCode(t, err, dsec.CodeNotFound)
	if again := build(t, s, "one"); again.Digest != meta.Digest {
		t.Error("a removed layer came back as another")
	}
}

func TestDigestForm(t *testing.T) {
	s := openStore(t, Options{})
	hex := strings.Repeat("a", 64)
	for _, d := range []string{"", "sha256:", hex, "sha256:" + hex + "a", "sha256:" + strings.ToUpper(hex), "sha256:../../../../etc/passwd", "sha256:" + strings.Repeat("g", 64), "sha512:" + hex} {
		_, err := s.Get(d)
		wantCode(t, err, dsec.CodeInvalid)
		wantCode(t, s.Remove(d), dsec.CodeInvalid)
	}
	_, err := s.Get("sha256:" + hex)
	wantCode(t, err, dsec.CodeNotFound)
}

func TestReopen(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	meta := build(t, s, "one")
	_, err := Open(dir, Options{})
	wantCode(t, err, dsec.CodeConflict)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	got, err := s.Get(meta.Digest)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(meta) {
		t.Errorf("%+v, %v; want %+v", got, err, meta)
	}
	if _, err := s.Hold(meta.Digest); err != nil {
		t.Error(err)
	}
}

// What a crash can leave is gone after the next Open, and nothing else is.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	meta := build(t, s, "one")
	half := build(t, s, "two")
	_ = s.Close()
	for _, name := range []string{"tmp/image-1", "tmp/scratch-2", "tmp/meta-3"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Killed between the two names of a layer.
	if err := os.Remove(filepath.Join(dir, ofLayer(half)[1])); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	wantFiles(t, s, ofLayer(meta)...)
	if len(s.List()) != 1 {
		t.Errorf("list: %+v", s.List())
	}
}

// A layer that is not as it was written is not used.
func TestDamage(t *testing.T) {
	for name, tc := range map[string]struct {
		file  int // 0: image, 1: metadata
		spoil func(b []byte) []byte
		code  dsec.Code // of Hold after a new Open
	}{
		"superblock":  {0, func(b []byte) []byte { b[1100] ^= 1; return b }, dsec.CodeInternal},
		"index":       {0, func(b []byte) []byte { b[len(b)-4000] ^= 1; return b }, dsec.CodeInternal},
		"short image": {0, func(b []byte) []byte { return b[:len(b)-4096] }, dsec.CodeNotFound},
		"torn":        {1, func(b []byte) []byte { return b[:len(b)/2] }, dsec.CodeNotFound},
		"empty":       {1, func([]byte) []byte { return nil }, dsec.CodeNotFound},
		"version":     {1, func(b []byte) []byte { return bytes.Replace(b, []byte(`"version":2`), []byte(`"version":9`), 1) }, dsec.CodeNotFound},
		"digest": {1, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"digest":"sha256:`), []byte(`"digest":"sha256:f`), 1)
		}, dsec.CodeNotFound},
		"offset": {1, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"index_offset":`), []byte(`"index_offset":-`), 1)
		}, dsec.CodeInternal},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := openStoreIn(t, dir, Options{})
			meta := build(t, s, strings.Repeat("content", 2000))
			_ = s.Close()
			path := filepath.Join(dir, ofLayer(meta)[tc.file])
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, tc.spoil(bytes.Clone(b)), 0o600); err != nil {
				t.Fatal(err)
			}
			s = openStoreIn(t, dir, Options{})
			_, err = s.Hold(meta.Digest)
			wantCode(t, err, tc.code)
			_, err = s.Hold(meta.Digest)
			wantCode(t, err, tc.code)
			// A damaged layer is made whole by importing it again.
			build(t, s, strings.Repeat("content", 2000))
			if _, err := s.Hold(meta.Digest); err != nil {
				t.Error(err)
			}
		})
	}
}

// A store reads what the version before it wrote: it had no kinds, and called the source so.
func TestMetadataOfTheVersionBefore(t *testing.T) {
	s := openStore(t, Options{})
	meta := build(t, s, "x")
	file := s.file(meta.Digest, metaExt)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	old := strings.NewReplacer(`"version":2`, `"version":1`, `"kind":"base",`, `"kind":"rootfs",`, `"source":"rootfs",`, "").Replace(string(text))
	if err := os.WriteFile(file, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := readMeta(file); err != nil || got.Kind != dsec.LayerBase || got.Source != SourceRootFS {
		t.Errorf("%+v, %v", got, err)
	}
	bad := strings.Replace(string(text), `"kind":"base"`, `"kind":"cellar"`, 1)
	if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readMeta(file); err == nil {
		t.Error("a kind that there is not is read")
	}
}
