package convert

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// fuzzLimits keep one input's work small.
var fuzzLimits = Limits{ArchiveBytes: 1 << 20, ContentBytes: 8 << 20, Entries: 2000, MetadataBytes: 1 << 20, WindowBytes: 1 << 20}

// fuzzConvert checks what holds for every input: an error has a code, and an
// image is one that can be read to its last byte.
func fuzzConvert(t *testing.T, archive []byte, sel string) {
	var image, scratch memFile
	res, err := Convert(bytes.NewReader(archive), &image, &scratch, Options{Select: sel, Limits: fuzzLimits})
	if err != nil {
		var e *dsec.Error
		if !errors.As(err, &e) || e.Code != dsec.CodeInvalid && e.Code != dsec.CodeUnsupported {
			t.Fatalf("error without a code: %v", err)
		}
		return
	}
	if err := res.Config.Validate(); err != nil {
		t.Fatalf("result with a bad configuration: %v", err)
	}
	tree := readImage(t, image.b)
	if int64(len(tree)) != res.Files {
		t.Fatalf("%d files, result says %d", len(tree), res.Files)
	}
	for name := range tree {
		for part := range strings.SplitSeq(name, "/") {
			if part == "" || part == "." || part == ".." || strings.IndexByte(part, 0) >= 0 {
				t.Fatalf("name %q in the image", name)
			}
		}
	}
}

func FuzzArchive(f *testing.F) {
	f.Add(tarOf(f, dir("a/"), file("a/b"), link("c", "a/b"), symlink("d", "/a"), file("d/e"), entry{name: "x", kind: '6'}))
	f.Add(tarOf(f, entry{name: "p\u00e9", kind: '0', pax: map[string]string{"SCHILY.xattr.user.a": "v"}}))
	f.Add(testutil.Gzip(f, tarOf(f, file("a"))))
	f.Add(zstdOf(f, tarOf(f, file("a"))))
	f.Add(layout(f, testImage{tag: "t:1", layers: layers(f, []entry{file("a")}, []entry{file(".wh.a"), file("b")}), config: object{"User": "u"}}))
	f.Add(dockerArchive(f, testImage{tag: "t:1", layers: layers(f, []entry{file("a")})}))
	f.Fuzz(func(t *testing.T, archive []byte) { fuzzConvert(t, archive, "") })
}

// FuzzLayer mutates a layer that is taken for what it is: digests are right.
func FuzzLayer(f *testing.F) {
	f.Add(tarOf(f, file("d/.wh..wh..opq"), file(".wh.f"), file("d/n")))
	f.Add(tarOf(f, symlink("l", ".."), file("l/.wh.d"), link("h", "d/a")))
	f.Fuzz(func(t *testing.T, layer []byte) {
		fuzzConvert(t, layout(t, testImage{layers: append(layers(t, []entry{file("d/a"), file("f"), symlink("s", "/d")}), layer)}), "")
	})
}

// FuzzDocuments mutates the index, a manifest and a configuration; the blobs
// are stored under the digests that they have.
func FuzzDocuments(f *testing.F) {
	l := tarOf(f, file("a"))
	config := marshal(f, object{"rootfs": object{"type": "layers", "diff_ids": []string{digestOf(l)}}, "config": object{"Env": []string{"A=b"}}})
	manifest := marshal(f, object{"schemaVersion": 2, "config": descriptor(typeConfig, config), "layers": []object{descriptor(typeLayer, l)}})
	index := marshal(f, object{"manifests": []object{descriptor(typeManifest, manifest)}})
	docker := marshal(f, []object{{"Config": "blobs/sha256/" + digestOf(config)[7:], "RepoTags": []string{"a:1"}, "Layers": []string{"l"}}})
	f.Add(index, manifest, config, docker, "a:1")
	f.Add([]byte("{}"), manifest, config, docker, "")
	f.Fuzz(func(t *testing.T, index, manifest, config, docker []byte, sel string) {
		blobs := []entry{blobEntry(l), blobEntry(config), blobEntry(manifest)}
		for i := range blobs {
			if blobs[i].content == "" {
				return // a test entry without content holds its name
			}
		}
		if len(index) > 0 {
			fuzzConvert(t, tarOf(t, append(blobs, text("index.json", string(index)), text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`))...), sel)
		}
		if len(docker) > 0 {
			fuzzConvert(t, tarOf(t, append(blobs, text("manifest.json", string(docker)), text("l", string(l)))...), sel)
		}
	})
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"config":{"Env":["A=b"],"User":"1:2","WorkingDir":"/a/","Cmd":["x"]}}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		cf, err := v1.ParseConfigFile(bytes.NewReader(doc))
		if err != nil {
			return
		}
		cfg, err := newConfig(cf.Config)
		if err != nil {
			if dsec.CodeOf(err) != dsec.CodeInvalid {
				t.Fatal(err)
			}
			return
		}
		if strings.Contains(cfg.User+cfg.Workdir, "\x00") || strings.HasPrefix(cfg.Workdir, "/proc/") {
			t.Fatalf("accepted %+v", cfg)
		}
	})
}
