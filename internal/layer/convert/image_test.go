package convert

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

func zstdOf(t testing.TB, b []byte, opts ...zstd.EOption) []byte {
	w, err := zstd.NewWriter(nil, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

type object = map[string]any

// testImage is an image to be put into an archive. Its layers are tar streams;
// pack compresses the one with that index.
type testImage struct {
	tag    string
	layers [][]byte
	config object // "config" of the configuration
	arch   string
	pack   func(i int, tar []byte) []byte
	// spoil changes the documents before they are written; nil leaves them.
	spoil func(config, manifest object)
}

func (img testImage) documents() (config object, blobs [][]byte) {
	diffs := []string{}
	for i, l := range img.layers {
		diffs = append(diffs, digestOf(l))
		if img.pack != nil {
			l = img.pack(i, l)
		}
		blobs = append(blobs, l)
	}
	arch := img.arch
	if arch == "" {
		arch = runtime.GOARCH
	}
	return object{"architecture": arch, "os": "linux", "config": img.config, "rootfs": object{"type": "layers", "diff_ids": diffs}}, blobs
}

func marshal(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func blobEntry(b []byte) entry {
	return text("blobs/sha256/"+strings.TrimPrefix(digestOf(b), "sha256:"), string(b))
}

func descriptor(mediaType string, b []byte) object {
	return object{"mediaType": mediaType, "digest": digestOf(b), "size": len(b)}
}

const (
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// layout puts images into an OCI layout.
func layout(t testing.TB, images ...testImage) []byte {
	t.Helper()
	entries := []entry{text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`)}
	var descs []object
	for _, img := range images {
		config, blobs := img.documents()
		var layers []object
		for _, b := range blobs {
			layers = append(layers, descriptor(typeLayer, b))
			entries = append(entries, blobEntry(b))
		}
		manifest := object{"schemaVersion": 2, "mediaType": typeManifest, "layers": layers}
		if img.spoil != nil {
			img.spoil(config, manifest)
		}
		configDoc := marshal(t, config)
		if _, ok := manifest["config"]; !ok {
			manifest["config"] = descriptor(typeConfig, configDoc)
		}
		manifestDoc := marshal(t, manifest)
		d := descriptor(typeManifest, manifestDoc)
		if img.tag != "" {
			d["annotations"] = object{annotationRef: img.tag}
		}
		descs = append(descs, d)
		entries = append(entries, blobEntry(configDoc), blobEntry(manifestDoc))
	}
	entries = append(entries, text("index.json", string(marshal(t, object{"schemaVersion": 2, "manifests": descs}))))
	return tarOf(t, entries...)
}

// dockerArchive puts images into a docker-archive as `docker save` wrote them.
func dockerArchive(t testing.TB, images ...testImage) []byte {
	t.Helper()
	var entries []entry
	var manifest []object
	for n, img := range images {
		config, blobs := img.documents()
		if img.spoil != nil {
			img.spoil(config, nil)
		}
		doc := marshal(t, config)
		name := strings.TrimPrefix(digestOf(doc), "sha256:") + ".json"
		entries = append(entries, text(name, string(doc)))
		var layers []string
		for i, b := range blobs {
			l := fmt.Sprintf("%d-%d/layer.tar", n, i)
			entries = append(entries, text(l, string(b)))
			layers = append(layers, l)
		}
		manifest = append(manifest, object{"Config": name, "RepoTags": []string{img.tag}, "Layers": layers})
	}
	return tarOf(t, append(entries, text("manifest.json", string(marshal(t, manifest))))...)
}

func layers(t testing.TB, all ...[]entry) (out [][]byte) {
	for _, l := range all {
		out = append(out, tarOf(t, l...))
	}
	return out
}

var packings = map[string]func(testing.TB) func(int, []byte) []byte{
	"plain": func(testing.TB) func(int, []byte) []byte { return nil },
	"gzip": func(t testing.TB) func(int, []byte) []byte {
		return func(_ int, b []byte) []byte { return testutil.Gzip(t, b) }
	},
	"zstd": func(t testing.TB) func(int, []byte) []byte {
		return func(_ int, b []byte) []byte { return zstdOf(t, b) }
	},
	"mixed": func(t testing.TB) func(int, []byte) []byte {
		return func(i int, b []byte) []byte {
			return []func([]byte) []byte{
				func(b []byte) []byte { return b },
				func(b []byte) []byte { return testutil.Gzip(t, b) },
				func(b []byte) []byte { return zstdOf(t, b) },
			}[i%3](b)
		}
	},
}

// One image, in every kind of archive and compression, gives one tree.
func TestImageKinds(t *testing.T) {
	all := layers(t,
		[]entry{dir("etc/"), file("etc/base"), text("etc/conf", "1"), symlink("lib", "usr/lib"), file("usr/lib/a"), file("gone")},
		[]entry{text("etc/conf", "2"), file("lib/b"), link("etc/hard", "etc/base"), file(".wh.gone")},
		[]entry{file("top")})
	want := map[string]string{
		"etc": "dir", "etc/base": "= etc/base", "etc/conf": "= 2", "etc/hard": "= etc/base",
		"lib": "-> usr/lib", "usr": "dir", "usr/lib": "dir", "usr/lib/a": "= usr/lib/a", "usr/lib/b": "= lib/b", "top": "= top",
	}
	config := object{"Env": []string{"PATH=/bin", "LD_PRELOAD=/x.so"}, "User": "1000:1000", "WorkingDir": "/app/", "Entrypoint": []string{"/e"}, "Cmd": []string{"c", "d"}}
	wantConfig := Config{Env: []string{"PATH=/bin", "LD_PRELOAD=/x.so"}, User: "1000:1000", Workdir: "/app", Entrypoint: []string{"/e"}, Cmd: []string{"c", "d"}}
	var digest string
	for kind, build := range map[string]func(testing.TB, ...testImage) []byte{SourceOCILayout: layout, SourceDockerArchive: dockerArchive} {
		for packing, pack := range packings {
			for outer, wrap := range map[string]func([]byte) []byte{
				"plain": func(b []byte) []byte { return b },
				"gzip":  func(b []byte) []byte { return testutil.Gzip(t, b) },
				"zstd":  func(b []byte) []byte { return zstdOf(t, b) },
			} {
				t.Run(kind+"/"+packing+"/"+outer, func(t *testing.T) {
					got := mustConvert(t, wrap(build(t, testImage{tag: "app:1", layers: all, config: config, pack: pack(t)})))
					if got.Source != kind {
						t.Errorf("kind %s, want %s", got.Source, kind)
					}
					if diff := cmp.Diff(want, got.tree); diff != "" {
						t.Errorf("tree (-want +got):\n%s", diff)
					}
					if diff := cmp.Diff(wantConfig, got.Config); diff != "" {
						t.Errorf("config (-want +got):\n%s", diff)
					}
					if d := digestOf(got.image); digest == "" {
						digest = d
					} else if d != digest {
						t.Error("the image differs from that of another kind of archive")
					}
				})
			}
		}
	}
}

// The same files with another configuration are another layer.
func TestConfigIsPartOfDigest(t *testing.T) {
	all := layers(t, []entry{file("a")})
	one := mustConvert(t, layout(t, testImage{layers: all, config: object{"User": "1"}}))
	two := mustConvert(t, layout(t, testImage{layers: all, config: object{"User": "2"}}))
	if digestOf(one.image) == digestOf(two.image) {
		t.Error("two configurations, one digest")
	}
}

func TestSelect(t *testing.T) {
	one := testImage{tag: "repo/app:1", layers: layers(t, []entry{text("f", "1")})}
	two := testImage{tag: "repo/app:2", layers: layers(t, []entry{text("f", "2")})}
	for kind, build := range map[string]func(testing.TB, ...testImage) []byte{SourceOCILayout: layout, SourceDockerArchive: dockerArchive} {
		archive := build(t, one, two)
		for _, sel := range []string{"repo/app:2", "app:2", "2"} {
			t.Run(kind+"/"+sel, func(t *testing.T) {
				got, err := convertBytes(t, archive, Options{Select: sel})
				if err != nil || got.tree["f"] != "= 2" {
					t.Errorf("%v, %v", got.tree, err)
				}
			})
		}
		for sel, message := range map[string]string{"": "holds 2 images", "3": `no image "3", want one of: "repo/app:1", "repo/app:2"`, "pp:1": "no image"} {
			t.Run(kind+"/refused/"+sel, func(t *testing.T) {
				_, err := convertBytes(t, archive, Options{Select: sel})
				var e *dsec.Error
				if e, _ = err.(*dsec.Error); e == nil || e.Code != dsec.CodeInvalid || e.Field != "select" || !strings.Contains(e.Message, message) {
					t.Errorf("%v, want invalid select with %q", err, message)
				}
			})
		}
	}
	wantInvalid(t, tarOf(t, file("a")), Options{Select: "x"}, "no images to select from")
}

// Old docker-archives hold a layer once and link to it from elsewhere.
func TestDockerLayerLinks(t *testing.T) {
	l := tarOf(t, file("a"))
	config := marshal(t, object{"rootfs": object{"type": "layers", "diff_ids": []string{digestOf(l), digestOf(l)}}})
	build := func(target string) []byte {
		return tarOf(t, text("c.json", string(config)), text("one/layer.tar", string(l)), symlink("two/layer.tar", target),
			text("manifest.json", string(marshal(t, []object{{"Config": "c.json", "Layers": []string{"one/layer.tar", "two/layer.tar"}}}))))
	}
	if got := mustConvert(t, build("../one/layer.tar")); got.Source != SourceDockerArchive || got.tree["a"] != "= a" {
		t.Errorf("kind %s, tree %v", got.Source, got.tree)
	}
	for _, target := range []string{"../../../../etc/passwd", "/etc/passwd", "layer.tar", "../one"} {
		if _, err := convertBytes(t, build(target), Options{}); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("link to %s: %v, want invalid", target, err)
		}
	}
}

// What one layer hides of those below it, and nothing else. (S91)
func TestWhiteouts(t *testing.T) {
	type tree = map[string]string
	base := []entry{dir("d/"), file("d/a"), file("d/b"), file("d/sub/c"), file("f"), symlink("l", "/d")}
	keep := tree{"d": "dir", "d/a": "= d/a", "d/b": "= d/b", "d/sub": "dir", "d/sub/c": "= d/sub/c", "f": "= f", "l": "-> /d"}
	but := func(gone string, add tree) tree {
		out := tree{}
		for k, v := range keep {
			if k != gone && !strings.HasPrefix(k, gone+"/") || gone == "" {
				out[k] = v
			}
		}
		maps.Copy(out, add)
		return out
	}
	for _, tc := range []struct {
		name    string
		layer   []entry
		want    tree
		refused string
	}{
		{name: "file", layer: []entry{file(".wh.f")}, want: but("f", nil)},
		{name: "dir", layer: []entry{file(".wh.d")}, want: but("d", nil)},
		{name: "nested", layer: []entry{file("d/.wh.a")}, want: but("d/a", nil)},
		{name: "nothing there", layer: []entry{file(".wh.none"), file("none/.wh.x")}, want: keep},
		{name: "through link", layer: []entry{file("l/.wh.a")}, want: but("d/a", nil)},
		{name: "link itself", layer: []entry{file(".wh.l")}, want: but("l", nil)},
		{name: "opaque", layer: []entry{file("d/.wh..wh..opq")}, want: tree{"d": "dir", "f": "= f", "l": "-> /d"}},
		{name: "opaque at root", layer: []entry{file(".wh..wh..opq"), file("n")}, want: tree{"n": "= n"}},
		{name: "opaque after content", layer: []entry{dir("d/"), file("d/n"), file("d/.wh..wh..opq")}, want: tree{"d": "dir", "d/n": "= d/n", "f": "= f", "l": "-> /d"}},
		{name: "opaque before content", layer: []entry{file("d/.wh..wh..opq"), file("d/n")}, want: tree{"d": "dir", "d/n": "= d/n", "f": "= f", "l": "-> /d"}},
		{name: "opaque keeps own nested", layer: []entry{file("d/sub/n"), file("d/.wh..wh..opq")}, want: tree{"d": "dir", "d/sub": "dir", "d/sub/n": "= d/sub/n", "f": "= f", "l": "-> /d"}},
		{name: "own file stays", layer: []entry{file("n"), file(".wh.n")}, want: but("", tree{"n": "= n"})},
		{name: "replaced and hidden", layer: []entry{text("f", "2"), file(".wh.f")}, want: but("", tree{"f": "= 2"})},
		{name: "hidden and replaced", layer: []entry{file(".wh.f"), text("f", "2")}, want: but("", tree{"f": "= 2"})},
		{name: "dir made anew", layer: []entry{file(".wh.d"), dir("d/"), file("d/n")}, want: but("d", tree{"d": "dir", "d/n": "= d/n"})},
		{name: "own hard link stays", layer: []entry{link("h", "f"), file(".wh.f")}, want: but("f", tree{"h": "= f"})},
		{name: "own hard link, hidden name", layer: []entry{link("h", "f"), file(".wh.h")}, want: but("", tree{"h": "= f"})},
		{name: "meta of aufs", layer: []entry{file(".wh..wh.plnk"), file(".wh..wh.x")}, want: keep},
		{name: "device whiteout of overlayfs", layer: []entry{{name: "n", kind: '3'}}, want: keep},
		{name: "of parent", layer: []entry{file("d/.wh...")}, refused: `whiteout of ".."`},
		{name: "of itself", layer: []entry{file("d/.wh..")}, refused: `whiteout of "."`},
		{name: "of nothing", layer: []entry{file("d/.wh.")}, refused: `whiteout of ""`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			archive := layout(t, testImage{layers: layers(t, base, tc.layer)})
			if tc.refused != "" {
				wantInvalid(t, archive, Options{}, tc.refused)
				return
			}
			if diff := cmp.Diff(tc.want, mustConvert(t, archive).tree); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
		})
	}
}

// A hidden file's bytes are nowhere in the image. (S46)
func TestHiddenContentIsGone(t *testing.T) {
	const canary = "canary-5f1c9a"
	content := strings.Repeat(canary, 1000)
	for name, top := range map[string][]entry{
		"whiteout": {file(".wh.secret")}, "opaque": {file(".wh..wh..opq")}, "replaced": {text("secret", "x")},
	} {
		got := mustConvert(t, layout(t, testImage{layers: layers(t, []entry{text("secret", content)}, top)}))
		if bytes.Contains(got.image, []byte(canary)) {
			t.Errorf("%s: the image holds the hidden file", name)
		}
	}
	got := mustConvert(t, layout(t, testImage{layers: layers(t, []entry{text("secret", content)})}))
	if !bytes.Contains(got.image, []byte(canary)) {
		t.Error("control: the canary is not found where nothing hides it")
	}
}

func digestless(s string) string { return "sha256:" + strings.Repeat(s, 64) }

// What the documents of an archive say and what is in it must agree. (S95)
func TestImageMismatch(t *testing.T) {
	good := layers(t, []entry{file("a")})
	first := func(m object) object { return m["layers"].([]object)[0] }
	for name, tc := range map[string]struct {
		spoil   func(config, manifest object)
		message string
	}{
		"layer digest":     {func(_, m object) { first(m)["digest"] = digestless("a") }, "the layer sha256:aaaa"},
		"layer size":       {func(_, m object) { first(m)["size"] = 5 }, "its descriptor says 5"},
		"negative size":    {func(_, m object) { first(m)["size"] = -1 }, "its descriptor says -1"},
		"layer algorithm":  {func(_, m object) { first(m)["digest"] = "sha512:" + strings.Repeat("a", 128) }, "sha256"},
		"path as digest":   {func(_, m object) { first(m)["digest"] = "sha256:../../etc/passwd" }, "manifest"},
		"config digest":    {func(_, m object) { m["config"] = object{"mediaType": typeConfig, "digest": digestless("b"), "size": 2} }, "the configuration sha256:bbbb"},
		"diff_id":          {func(c, _ object) { c["rootfs"] = object{"type": "layers", "diff_ids": []string{digestless("c")}} }, "unpacks to digest"},
		"too few diff_ids": {func(c, _ object) { c["rootfs"] = object{"type": "layers", "diff_ids": []string{}} }, "names 0 layers, the manifest 1"},
		"no layers":        {func(_, m object) { m["layers"] = []object{} }, "names 1 layers, the manifest 0"},
	} {
		t.Run(name, func(t *testing.T) {
			wantInvalid(t, layout(t, testImage{layers: good, spoil: tc.spoil}), Options{}, tc.message)
		})
	}
	t.Run("docker config digest", func(t *testing.T) {
		archive := dockerArchive(t, testImage{layers: good, config: object{"User": "aaaa"}})
		wantInvalid(t, bytes.Replace(archive, []byte(`"aaaa"`), []byte(`"aaab"`), 1), Options{}, "has digest")
	})
	t.Run("docker layer", func(t *testing.T) {
		archive := dockerArchive(t, testImage{layers: layers(t, []entry{text("a", "content-1")})})
		wantInvalid(t, bytes.Replace(archive, []byte("content-1"), []byte("content-2"), 1), Options{}, "unpacks to digest")
	})
	t.Run("layer flipped", func(t *testing.T) {
		archive := layout(t, testImage{layers: layers(t, []entry{text("a", "content-1")})})
		wantInvalid(t, bytes.Replace(archive, []byte("content-1"), []byte("content-2"), 1), Options{}, "has digest")
	})
	t.Run("manifest flipped", func(t *testing.T) {
		archive := layout(t, testImage{layers: good})
		wantInvalid(t, bytes.Replace(archive, []byte(`"schemaVersion":2}`), []byte(`"schemaVersion":3}`), 1), Options{}, "has digest")
	})
	t.Run("trailing bytes", func(t *testing.T) {
		pack := func(_ int, b []byte) []byte { return append(testutil.Gzip(t, b), testutil.Gzip(t, []byte("more"))...) }
		wantInvalid(t, layout(t, testImage{layers: good, pack: pack}), Options{}, "unpacks to digest")
	})
}

func TestOtherPlatform(t *testing.T) {
	_, err := convertBytes(t, layout(t, testImage{layers: layers(t, []entry{file("a")}), arch: "s390x"}), Options{})
	if err == nil || dsec.CodeOf(err) != dsec.CodeUnsupported || !strings.Contains(err.Error(), "linux/s390x") {
		t.Errorf("%v, want unsupported that names the platform", err)
	}
}

// An index of platforms leads to this node's image.
func TestIndexOfPlatforms(t *testing.T) {
	build := func(content, arch string) (entries []entry, desc object) {
		l := tarOf(t, text("f", content))
		config := marshal(t, object{"architecture": arch, "os": "linux", "rootfs": object{"type": "layers", "diff_ids": []string{digestOf(l)}}})
		m := marshal(t, object{"schemaVersion": 2, "mediaType": typeManifest, "config": descriptor(typeConfig, config), "layers": []object{descriptor(typeLayer, l)}})
		d := descriptor(typeManifest, m)
		d["platform"] = object{"os": "linux", "architecture": arch}
		return []entry{blobEntry(l), blobEntry(config), blobEntry(m)}, d
	}
	a, da := build("mine", runtime.GOARCH)
	b, db := build("other", "s390x")
	_, dc := build("attestation", "unknown")
	dc["platform"] = object{"os": "unknown", "architecture": "unknown"}
	inner := marshal(t, object{"schemaVersion": 2, "mediaType": typeIndex, "manifests": []object{db, da, dc}})
	index := marshal(t, object{"schemaVersion": 2, "manifests": []object{descriptor(typeIndex, inner)}})
	entries := append(append(a, b...), blobEntry(inner), text("index.json", string(index)), text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`))
	entries[0].uid = 100000 // of the archive's file, not of the image's
	whole := mustConvert(t, tarOf(t, entries...))
	if len(whole.Findings) > 0 {
		t.Errorf("findings of the archive's own files: %q", whole.Findings)
	}
	if got := whole.tree["f"]; got != "= mine" {
		t.Errorf("%q, want this node's image", got)
	}
}

// Some files of a layout's names do not make an archive of images.
func TestRootFSThatLooksLikeArchive(t *testing.T) {
	for name, entries := range map[string][]entry{
		"manifest.json of an app": {text("manifest.json", `{"name":"app"}`), file("a")},
		"list without images":     {text("manifest.json", `[{"Config":"gone.json"}]`), file("a")},
		"oci-layout of text":      {text("oci-layout", "hello"), file("a")},
		"oci-layout directory":    {dir("oci-layout/"), file("a")},
	} {
		if got := mustConvert(t, tarOf(t, entries...)); got.Source != SourceRootFS || got.tree["a"] != "= a" {
			t.Errorf("%s: kind %s, tree %v", name, got.Source, got.tree)
		}
	}
}

// An image that an index lists twice is one.
func TestPickTakesAnImageOnce(t *testing.T) {
	names := [][]string{{"sha256:a", "x:1"}, {"sha256:b", "y:1"}, {"sha256:b", "y:1"}, {"sha256:b", "y:2"}, {"sha256:c", "z:1"}, {"sha256:d", "z:1"}}
	for sel, want := range map[string]int{"sha256:b": 1, "y:1": 1, "y:2": 3, "x:1": 0} {
		if i, err := pick(names, sel); err != nil || i != want {
			t.Errorf("%s is image %d, %v, want %d", sel, i, err, want)
		}
	}
	if i, err := pick(names[1:4], ""); err != nil || i != 0 {
		t.Errorf("the only one is image %d, %v", i, err)
	}
	for sel, want := range map[string]string{"": "holds 4 images", "z:1": "means 2 images", "w": "no image"} {
		if _, err := pick(names, sel); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", sel, err, want)
		}
	}
}
