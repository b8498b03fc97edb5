package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/layer/scrub"
	"github.com/opendsec/dsec/internal/testutil"
)

// The test program is its own import helper, as dsec is, and plays bad ones.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		if os.Args[1] == HelperVerb {
			HelperMain()
		}
		if os.Args[1] == scrub.Verb {
			if err := scrub.Main(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
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
func archive(t testing.TB, content string) []byte { return archiveOf(t, "file", content) }

// archiveOf is the tar of a tree with one file.
func archiveOf(t testing.TB, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}); err != nil {
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

// files are the names below a store's directory, its lock and the blob store's identity not among them.
func files(t testing.TB, s *Store) (names []string) {
	t.Helper()
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" && d.Name() != ".dsec-id" {
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

// ofLayer are the files of a layer: in the blob store, and beside it.
func ofLayer(m Meta) []string {
	hex := strings.TrimPrefix(m.Digest, "sha256:")
	var names []string
	for _, part := range []string{partAbout, partChunks, partData, partPacked, partManifest} {
		names = append(names, "blobs/layers/"+hex+"/"+part)
	}
	for _, ext := range []string{chunksExt, indexExt, metaExt} {
		names = append(names, "local/"+hex+ext)
	}
	return names
}

// ofMeta is the file that makes a layer known here.
func ofMeta(m Meta) string { return ofLayer(m)[7] }

func TestLife(t *testing.T) {
	s := openStore(t, Options{})
	meta := build(t, s, "one")
	if meta.Source != SourceRootFS || meta.Files != 1 || meta.Size%4096 != 0 || meta.SourceSize != int64(len(archive(t, "one"))) {
		t.Errorf("%+v", meta)
	}
	wantFiles(t, s, ofLayer(meta)...)
	if got, err := s.Get(t.Context(), meta.Digest); err != nil || got.Digest != meta.Digest {
		t.Errorf("get: %+v, %v", got, err)
	}
	packed := testutil.Gzip(t, archive(t, "one")) // another archive of the same layer: that is told, and the layer stays
	again, _, err := s.Build(t.Context(), BuildOptions{}, bytes.NewReader(packed))
	if err != nil || again.Digest != meta.Digest || again.SourceSize != int64(len(packed)) || again.SourceDigest == meta.SourceDigest {
		t.Errorf("the same, packed: %+v, %v", again, err)
	}
	if got, err := s.Get(t.Context(), meta.Digest); err != nil || got.Created != meta.Created || got.SourceDigest != meta.SourceDigest {
		t.Errorf("get: %+v, %v", got, err)
	}
	other := build(t, s, "two")
	if list := s.List(); len(list) != 2 || list[0].Digest != meta.Digest || list[1].Digest != other.Digest {
		t.Errorf("list: %+v", list)
	}

	release, err := s.Hold(t.Context(), meta.Digest)
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Hold(t.Context(), meta.Digest)
	if err != nil {
		t.Fatal(err)
	}
	release()
	release() // counts once
	wantCode(t, s.Remove(t.Context(), meta.Digest), dsec.CodeConflict)
	if _, _, err := s.Open(t.Context(), meta.Digest); err != nil {
		t.Error("a held layer is gone")
	}
	second()
	if err := s.Remove(t.Context(), meta.Digest); err != nil {
		t.Error(err)
	}
	wantFiles(t, s, ofLayer(other)...)
	wantCode(t, s.Remove(t.Context(), meta.Digest), dsec.CodeNotFound)
	_, err = s.Hold(t.Context(), meta.Digest)
	wantCode(t, err, dsec.CodeNotFound)
	_, err = s.Get(t.Context(), meta.Digest)
	wantCode(t, err, dsec.CodeNotFound)
	if again := build(t, s, "one"); again.Digest != meta.Digest {
		t.Error("a removed layer came back as another")
	}
}

func TestDigestForm(t *testing.T) {
	s := openStore(t, Options{})
	hex := strings.Repeat("a", 64)
	for _, d := range []string{"", "sha256:", hex, "sha256:" + hex + "a", "sha256:" + strings.ToUpper(hex), "sha256:../../../../etc/passwd", "sha256:" + strings.Repeat("g", 64), "sha512:" + hex} {
		_, err := s.Get(t.Context(), d)
		wantCode(t, err, dsec.CodeInvalid)
		wantCode(t, s.Remove(t.Context(), d), dsec.CodeInvalid)
	}
	_, err := s.Get(t.Context(), "sha256:"+hex)
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
	got, err := s.Get(t.Context(), meta.Digest)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(meta) {
		t.Errorf("%+v, %v; want %+v", got, err, meta)
	}
	if _, err := s.Hold(t.Context(), meta.Digest); err != nil {
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
	// Killed between the names of a layer here, and before it was in the store.
	for _, name := range []string{ofMeta(half), ofLayer(half)[4]} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s = openStoreIn(t, dir, Options{})
	wantFiles(t, s, ofLayer(meta)...)
	if len(s.List()) != 1 {
		t.Errorf("list: %+v", s.List())
	}
}

// spoil changes a file of a store that is closed.
func spoil(t *testing.T, path string, change func(b []byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(bytes.Clone(b)), 0o600); err != nil {
		t.Fatal(err)
	}
}

func replace(old, new string) func([]byte) []byte {
	return func(b []byte) []byte { return bytes.Replace(b, []byte(old), []byte(new), 1) }
}

// What of a layer is not as it was written is never used: what this node has is
// fetched again, what the store has damaged is an error until it is imported again.
func TestDamage(t *testing.T) {
	flip := func(at int) func([]byte) []byte {
		return func(b []byte) []byte { b[(at+len(b))%len(b)] ^= 1; return b }
	}
	short := func(n int) func([]byte) []byte { return func(b []byte) []byte { return b[:len(b)-n] } }
	half := func(b []byte) []byte { return b[:len(b)/2] }
	const inStore, here = true, false
	for name, tc := range map[string]struct {
		in    bool
		part  int // of ofLayer
		spoil func(b []byte) []byte
	}{
		"superblock here":       {here, 6, flip(1100)},
		"index here":            {here, 6, flip(-4000)},
		"short index here":      {here, 6, short(4096)},
		"torn metadata here":    {here, 7, half},
		"empty metadata here":   {here, 7, func([]byte) []byte { return nil }},
		"version here":          {here, 7, replace(`"version":3`, `"version":9`)},
		"digest here":           {here, 7, replace(`"digest":"sha256:`, `"digest":"sha256:f`)},
		"kind here":             {here, 7, replace(`"kind":"base"`, `"kind":"toolkit"`)},
		"chunks here":           {here, 5, flip(0)},
		"index in the store":    {inStore, 3, flip(-20)},
		"torn index":            {inStore, 3, half},
		"empty index":           {inStore, 3, func([]byte) []byte { return nil }},
		"no index":              {inStore, 3, func([]byte) []byte { return []byte("index") }},
		"chunks in the store":   {inStore, 1, flip(0)},
		"short chunks":          {inStore, 1, short(1)},
		"manifest in the store": {inStore, 4, replace(`"kind":"base"`, `"kind":"toolkit"`)},
		"torn manifest":         {inStore, 4, half},
		"short data":            {inStore, 2, short(4096)},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := openStoreIn(t, dir, Options{})
			content := strings.Repeat("content", 2000)
			meta := build(t, s, content)
			_ = s.Close()
			spoil(t, filepath.Join(dir, ofLayer(meta)[tc.part]), tc.spoil)
			if tc.in && tc.part != 2 { // another node fetches it
				if err := os.RemoveAll(filepath.Join(dir, "local")); err != nil {
					t.Fatal(err)
				}
			}
			s = openStoreIn(t, dir, Options{})
			for range 2 {
				release, err := s.Hold(t.Context(), meta.Digest)
				if err == nil {
					_, _, err = s.Open(t.Context(), meta.Digest)
					release()
				}
				if tc.in {
					wantCode(t, err, dsec.CodeInternal)
				} else if err != nil {
					t.Error(err)
				}
			}
			if !tc.in {
				return
			}
			build(t, s, content)
			if _, _, err := s.Open(t.Context(), meta.Digest); err != nil {
				t.Error(err)
			}
		})
	}
}

// A user is told which layer it is whose data are not a file in the store.
func TestDataThatAreNoFile(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	meta := build(t, s, strings.Repeat("content", 2000))
	data := filepath.Join(dir, ofLayer(meta)[2])
	for name, put := range map[string]func() error{
		"nothing": func() error { return nil },
		"link":    func() error { return os.Symlink("/etc/passwd", data) },
		"pipe":    func() error { return unix.Mkfifo(data, 0o600) },
	} {
		if err := errors.Join(os.RemoveAll(data), put()); err != nil {
			t.Fatal(err)
		}
		_, _, err := s.Open(t.Context(), meta.Digest)
		wantCode(t, err, dsec.CodeInternal)
		if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Field != "layers" || !strings.Contains(e.Message, meta.Digest) {
			t.Errorf("%s: %v, want it to name the layer", name, err)
		}
	}
}

// A layer whose manifest is a directory is damaged, and not one that nobody has.
func TestManifestThatIsADirectory(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	meta := build(t, s, "content")
	manifest := filepath.Join(dir, ofLayer(meta)[4])
	if err := errors.Join(s.Close(), os.RemoveAll(filepath.Join(dir, "local")), os.Remove(manifest), os.Mkdir(manifest, 0o700)); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir, Options{Logger: testutil.Logger(t), Blobs: mustDir(t, filepath.Join(dir, "blobs"))}) // an own one sweeps it
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = s.Hold(t.Context(), meta.Digest)
	wantCode(t, err, dsec.CodeInternal)
	if e, ok := errors.AsType[*dsec.Error](err); !ok || !strings.Contains(e.Message, meta.Digest) || !strings.Contains(e.Message, "manifest") {
		t.Errorf("%v, want it to name the layer and its manifest", err)
	}
}

func mustDir(t testing.TB, dir string) blob.Store {
	t.Helper()
	s, err := dirblob.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// What tells where a layer came from may be anything: nothing depends on it.
func TestDamagedAbout(t *testing.T) {
	for name, b := range map[string][]byte{"missing": nil, "torn": []byte("{"), "huge": make([]byte, metaBytes+1)} {
		dir := t.TempDir()
		s := openStoreIn(t, dir, Options{})
		meta := build(t, s, "content")
		key := blobKey(meta.Digest, partAbout)
		err := s.blobs.Delete(t.Context(), key)
		if err == nil && b != nil {
			err = s.blobs.Put(t.Context(), key, bytes.NewReader(b), int64(len(b)))
		}
		if err = errors.Join(err, s.Close(), os.RemoveAll(filepath.Join(dir, "local"))); err != nil {
			t.Fatal(err)
		}
		s = openStoreIn(t, dir, Options{})
		release, err := s.Hold(t.Context(), meta.Digest)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		release()
	}
}

// What this node cannot read of the store can be removed from it.
func TestRemoveOfADamagedLayer(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	meta := build(t, s, "one")
	_ = s.Close()
	spoil(t, filepath.Join(dir, ofLayer(meta)[4]), func([]byte) []byte { return []byte("no manifest") })
	if err := os.RemoveAll(filepath.Join(dir, "local")); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	_, err := s.Hold(t.Context(), meta.Digest)
	wantCode(t, err, dsec.CodeInternal)
	if err := s.Remove(t.Context(), meta.Digest); err != nil {
		t.Error(err)
	}
	wantFiles(t, s)
	wantCode(t, s.Remove(t.Context(), meta.Digest), dsec.CodeNotFound)
}

// What OpenFS shows is what was imported, large files as well as those whose bytes
// are with their inodes.
func TestOpenFS(t *testing.T) {
	s := openStore(t, Options{})
	for _, content := range []string{"", "small", strings.Repeat("x", 4096), strings.Repeat("0123456789", 200_000)} {
		meta := build(t, s, content)
		files, closer, err := s.OpenFS(t.Context(), meta.Digest)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := fs.ReadFile(files, "file"); err != nil || string(got) != content {
			t.Errorf("a file of %d bytes: %d bytes, %v", len(content), len(got), err)
		}
		if err := closer.Close(); err != nil {
			t.Error(err)
		}
	}
	_, _, err := s.OpenFS(t.Context(), "sha256:"+strings.Repeat("0", 64))
	wantCode(t, err, dsec.CodeNotFound)
}
