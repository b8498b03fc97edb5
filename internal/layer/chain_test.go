package layer

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
)

// imageOf is an OCI layout of an image of these tar streams.
func imageOf(t testing.TB, env string, layers ...[]byte) []byte {
	t.Helper()
	type object = map[string]any
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(name string, data []byte) {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	blob := func(kind string, data []byte) object {
		sum := fmt.Sprintf("%x", sha256.Sum256(data))
		add("blobs/sha256/"+sum, data)
		return object{"mediaType": kind, "digest": "sha256:" + sum, "size": len(data)}
	}
	encode := func(v any) []byte {
		doc, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return doc
	}
	var descs []object
	var diffs []any
	for _, l := range layers {
		d := blob("application/vnd.oci.image.layer.v1.tar", l)
		descs, diffs = append(descs, d), append(diffs, d["digest"])
	}
	config := blob("application/vnd.oci.image.config.v1+json", encode(object{
		"architecture": runtime.GOARCH, "os": "linux", "config": object{"Env": []string{env}}, "rootfs": object{"type": "layers", "diff_ids": diffs},
	}))
	manifest := blob("application/vnd.oci.image.manifest.v1+json", encode(object{"schemaVersion": 2, "config": config, "layers": descs}))
	add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	add("index.json", encode(object{"schemaVersion": 2, "manifests": []object{manifest}}))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func buildImage(t testing.TB, s *Store, opt BuildOptions, env string, layers ...[]byte) Meta {
	t.Helper()
	meta, _, err := s.Build(t.Context(), opt, bytes.NewReader(imageOf(t, env, layers...)))
	if err != nil {
		t.Fatal(err)
	}
	return meta
}

// An image becomes several layers, of which the topmost names the others. Images with
// the same layers at the bottom share those; one that is not cut is the layer that it
// would be without cuts, also where its kind is another.
func TestImagesBecomeSeveralLayers(t *testing.T) {
	big := func(name string) []byte { return archiveOf(t, name, strings.Repeat(name, 10_000)) }
	whole, s := openStore(t, Options{}), openStore(t, Options{CollapseBytes: 25_000})
	small := archiveOf(t, "small", "x")
	one := buildImage(t, s, BuildOptions{}, "A=1", big("a"), small)
	if want := buildImage(t, whole, BuildOptions{}, "A=1", big("a"), small); one.Digest != want.Digest || one.Version != manifestVersion || one.Parents != nil {
		t.Errorf("one layer: %+v, want %s", one, want.Digest)
	}
	if kept := buildImage(t, whole, BuildOptions{}, "A=1", big("a"), big("b"), big("c")); kept.Parents != nil {
		t.Errorf("without a bound: %v", kept.Parents)
	}
	first := buildImage(t, s, BuildOptions{}, "A=1", big("a"), small, big("b"), big("c"))
	second := buildImage(t, s, BuildOptions{}, "A=2", big("a"), small, big("b"), big("d"))
	if len(first.Parents) != 1 || first.Version != parentsVersion || !slices.Equal(first.Parents, second.Parents) || first.Digest == second.Digest {
		t.Errorf("two images with the same at the bottom go on %v and %v", first.Parents, second.Parents)
	}
	below, err := s.Get(t.Context(), first.Parents[0])
	if err != nil || below.Files != 2 || below.Config.Env != nil || first.Files != 2 || fmt.Sprint(first.Config.Env) != "[A=1]" || below.Kind != dsec.LayerBase {
		t.Errorf("%+v, %v; below is %+v", first.Manifest, err, below.Manifest)
	}
	if fmt.Sprint(first.Chain()) != fmt.Sprint([]string{below.Digest, first.Digest}) {
		t.Errorf("the chain is %v", first.Chain())
	}
	tool := buildImage(t, s, BuildOptions{Kind: dsec.LayerToolkit, At: "/opt"}, "A=1", big("a"), big("b"), big("c"))
	if len(tool.Parents) != 1 || tool.Files != 2 || tool.Kind != dsec.LayerToolkit { // opt and c
		t.Errorf("a toolkit: %+v", tool.Manifest)
	}
	other := openStoreIn(t, s.dir+"-other", Options{Blobs: s.blobs}) // as of another node
	if again, err := other.Get(t.Context(), first.Digest); err != nil || !slices.Equal(again.Parents, first.Parents) {
		t.Errorf("another node: %+v, %v", again, err)
	}
	// That one forgets it, and then has it anew, or finds that it is gone.
	release, err := other.Hold(t.Context(), first.Digest)
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, other.Forget(first.Digest), dsec.CodeConflict)
	release()
	for _, want := range []dsec.Code{"", dsec.CodeNotFound} {
		for range 2 {
			if err := other.Forget(first.Digest); err != nil {
				t.Error(err)
			}
		}
		if _, err := other.Get(t.Context(), first.Digest); err != nil && dsec.CodeOf(err) != want || err == nil && want != "" {
			t.Errorf("after it was forgotten: %v, want %q", err, want)
		}
		if err := s.Remove(t.Context(), first.Digest); err != nil && want == "" {
			t.Error(err)
		}
	}
}

// An image of more layers than there may be is cut no more at some point.
func TestAnImageHasSoManyLayersAtMost(t *testing.T) {
	s := openStore(t, Options{CollapseBytes: 1})
	var layers [][]byte
	for i := range maxCollapsed + 3 {
		layers = append(layers, archiveOf(t, fmt.Sprint(i), "x"))
	}
	top := buildImage(t, s, BuildOptions{}, "A=1", layers...)
	if len(top.Parents) != maxCollapsed-1 || top.Files != 4 {
		t.Errorf("%d files on %d layers", top.Files, len(top.Parents))
	}
}

// What an import that failed left of an image's lower layers goes as all that has no
// name, and is of use to the next.
func TestAnImportThatEndsBetweenLayers(t *testing.T) {
	dir := t.TempDir()
	blobs, err := dirblob.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, Options{CollapseBytes: 1, Blobs: blobs})
	a, b := archiveOf(t, "a", "x"), archiveOf(t, "b", "x")
	top := buildImage(t, s, BuildOptions{}, "A=1", a, b)
	if err := s.Remove(t.Context(), top.Digest); err != nil {
		t.Fatal(err)
	}
	stored, err := s.Sweep(t.Context(), 0)
	if err != nil || len(stored) != 1 || stored[0].Digest != top.Parents[0] {
		t.Errorf("stored are %v, %v", stored, err)
	}
	if again := buildImage(t, s, BuildOptions{}, "A=1", a, b); again.Digest != top.Digest {
		t.Errorf("%s, want %s", again.Digest, top.Digest)
	}
}

// A manifest that says of its parents what this program writes in none is refused.
func TestManifestsOfParents(t *testing.T) {
	s := openStore(t, Options{CollapseBytes: 1})
	good := buildImage(t, s, BuildOptions{}, "A=1", archiveOf(t, "a", "x"), archiveOf(t, "b", "x")).Manifest
	for name, spoil := range map[string]func(m *Manifest){
		"none":         func(m *Manifest) { m.Parents = nil },
		"of version 3": func(m *Manifest) { m.Version = manifestVersion },
		"too many":     func(m *Manifest) { m.Parents = slices.Repeat(m.Parents, dsec.MaxLayers) },
		"no digest":    func(m *Manifest) { m.Parents = []string{"../x"} },
		"of version 5": func(m *Manifest) { m.Version = 5 },
		"as they are":  nil,
	} {
		m := good
		if spoil != nil {
			spoil(&m)
		}
		doc, digest, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeManifest(doc, digest); (err == nil) != (spoil == nil) {
			t.Errorf("parents %s: %v", name, err)
		}
	}
}
