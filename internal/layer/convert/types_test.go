package convert

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// What a layer's type says of its compression does not count, its content does. A
// layer that is no tar archive is unsupported, and told of by its type. (S95)
func TestLayerTypes(t *testing.T) {
	tar := layers(t, []entry{text("a", "content")})
	archive := func(mediaType string, pack func(int, []byte) []byte) []byte {
		return layout(t, testImage{layers: tar, pack: pack, spoil: func(_, m object) {
			if m["layers"].([]object)[0]["mediaType"] = mediaType; mediaType == "" {
				delete(m["layers"].([]object)[0], "mediaType")
			}
		}})
	}
	for _, mediaType := range []string{
		"", typeLayer, typeLayer + "+gzip", typeLayer + "+zstd", "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
		"application/vnd.docker.image.rootfs.diff.tar", "application/vnd.docker.image.rootfs.diff.tar.gzip",
		"application/vnd.docker.image.rootfs.diff.tar.zstd", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
	} {
		for how, pack := range packings {
			if got := mustConvert(t, archive(mediaType, pack(t))).tree["a"]; got != "= content" {
				t.Errorf("%q that is %s: %q", mediaType, how, got)
			}
		}
	}
	for _, mediaType := range []string{
		typeLayer + "+gzip+encrypted", typeLayer + "+encrypted", "application/vnd.in-toto+json", "application/vnd.oci.empty.v1+json",
		"application/vnd.cncf.helm.chart.content.v1.tar+gzip", "application/octet-stream", "application/vnd.oci.image.layer.v1.squashfs", strings.Repeat("x", 10_000),
	} {
		_, err := convertBytes(t, archive(mediaType, nil), Options{})
		e, ok := errors.AsType[*dsec.Error](err)
		if !ok || e.Code != dsec.CodeUnsupported || e.Field != "data" || !strings.Contains(e.Message, "layer 1 of 1 is of type "+quote(mediaType)) || len(e.Message) > 1000 {
			t.Errorf("%.80q: %.300v, want unsupported with its type", mediaType, err)
		}
	}
}

// What is in the place of a document or a layer is named. (S95)
func TestDirectoryInPlaceOfADocument(t *testing.T) {
	l := tarOf(t, file("a"))
	config := marshal(t, object{"architecture": runtime.GOARCH, "os": "linux", "rootfs": object{"type": "layers", "diff_ids": []string{digestOf(l)}}})
	m := marshal(t, object{"schemaVersion": 2, "mediaType": typeManifest, "config": descriptor(typeConfig, config), "layers": []object{descriptor(typeLayer, l)}})
	parts := []entry{
		text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`),
		text("index.json", string(marshal(t, object{"schemaVersion": 2, "manifests": []object{descriptor(typeManifest, m)}}))),
		blobEntry(m), blobEntry(config), blobEntry(l),
	}
	mustConvert(t, tarOf(t, parts...))
	for i, what := range map[int]string{1: "index.json of the OCI layout", 2: "the manifest " + digestOf(m), 3: "the configuration " + digestOf(config), 4: "the layer " + digestOf(l)} {
		for kind, in := range map[string]entry{"is a directory": dir(parts[i].name + "/"), "is missing": file("else")} {
			spoiled := append([]entry{}, parts...)
			spoiled[i] = in
			wantInvalid(t, tarOf(t, spoiled...), Options{}, what+" "+kind)
		}
	}
}

// Holes of sparse files count like what a compressor left out. (S93)
func TestSparseBombs(t *testing.T) {
	sparse := func(name string, size int64) []byte {
		b := pax(t, map[string]string{
			"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": name,
			"GNU.sparse.size": strconv.FormatInt(size, 10), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,4",
		}, "data")
		return b[:len(b)-1024]
	}
	end := make([]byte, 1024)
	join := func(all ...[]byte) (b []byte) {
		for _, a := range all {
			b = append(b, a...)
		}
		return append(b, end...)
	}
	dir := t.TempDir()
	run := func(b []byte) error {
		image, err := os.Create(filepath.Join(dir, "image"))
		if err != nil {
			t.Fatal(err)
		}
		defer image.Close()
		_, err = Convert(bytes.NewReader(b), image, &memFile{}, Options{})
		return err
	}
	for name, archive := range map[string][]byte{
		"one file":   join(sparse("a", ratioFloor+1)),
		"many files": join(sparse("a", ratioFloor/2), sparse("b", ratioFloor/2), sparse("c", 4096)),
		"compressed": testutil.Gzip(t, join(sparse("a", ratioFloor+1))),
	} {
		if err := run(archive); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid || !strings.Contains(err.Error(), "sparse files of ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, archive := range map[string][]byte{
		"few holes":      join(sparse("a", ratioFloor)),
		"holes and data": join(sparse("a", 4096), tarOf(t, text("big", strings.Repeat("x", 2<<20)))[:2<<20+512], sparse("b", ratioFloor+1)),
	} {
		if err := run(archive); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
