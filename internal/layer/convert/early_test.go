package convert

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opendsec/dsec"
)

// parts are the entries of an OCI layout of one image: its documents, and its layers
// lowest first.
func parts(t testing.TB, img testImage) (docs, blobs []entry) {
	t.Helper()
	r := tar.NewReader(bytes.NewReader(layout(t, img)))
	_, packed := img.documents()
	names := map[string]int{}
	for i, b := range packed {
		names[blobEntry(b).name] = i
	}
	blobs = make([]entry, len(packed))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return docs, blobs
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if i, ok := names[h.Name]; ok {
			blobs[i] = text(h.Name, string(b))
		} else {
			docs = append(docs, text(h.Name, string(b)))
		}
	}
}

// noise is content that no compression makes smaller.
func noise(seed uint64, n int) string {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = r.Read(b)
	return string(b)
}

func threeLayers(t testing.TB, pack func(int, []byte) []byte) testImage {
	return testImage{tag: "app:1", pack: pack, layers: layers(t,
		[]entry{text("a", noise(1, 100<<10)), text("b", noise(2, 50<<10)), text("small", "x"), text("c", noise(3, 1200<<10))},
		[]entry{file(".wh.b"), text("d", noise(4, 70<<10)), text("root/.netrc", "machine m login l password p")},
		[]entry{text("a", noise(5, 5000)), link("e", "c"), file("tail")})}
}

// In whichever order a layout comes, it is the same image with the same findings, and
// layers that come in their turn are not kept anywhere but in the image.
func TestOrdersOfALayout(t *testing.T) {
	for packing, pack := range packings {
		t.Run(packing, func(t *testing.T) {
			docs, blobs := parts(t, threeLayers(t, pack(t)))
			first := mustConvert(t, tarOf(t, slices.Concat(blobs, docs)...))
			if len(first.Findings) != 1 {
				t.Errorf("findings %q", first.Findings)
			}
			for name, tc := range map[string]struct {
				entries []entry
				early   bool // nothing large is kept
			}{
				"documents first":             {slices.Concat(docs, blobs), true},
				"and a file":                  {slices.Concat([]entry{text("x", noise(9, 1000))}, docs, blobs), true},
				"among the layers":            {slices.Concat(blobs[:1], docs, blobs[1:]), false},
				"other order":                 {slices.Concat(docs, blobs[1:], blobs[:1]), false},
				"first again at the end":      {slices.Concat(docs, blobs, blobs[:1]), false},
				"documents again at the end":  {slices.Concat(docs, blobs, docs), true},
				"links lead to the documents": {slices.Concat([]entry{dir("x/"), symlink("blobs", "x")}, docs, blobs), true},
			} {
				t.Run(name, func(t *testing.T) {
					var image, scratch memFile
					res, err := Convert(bytes.NewReader(tarOf(t, tc.entries...)), &image, &scratch, Options{})
					if err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(image.b, first.image) || res.Source != SourceOCILayout {
						t.Errorf("another image, of %d bytes, not %d", len(image.b), len(first.image))
					}
					if diff := cmp.Diff(first.Findings, res.Findings); diff != "" {
						t.Errorf("findings (-want +got):\n%s", diff)
					}
					if kept := len(scratch.b); (kept < 32<<10) != tc.early {
						t.Errorf("%d bytes of scratch", kept)
					}
				})
			}
		})
	}
}

// A layer that is listed twice comes once.
func TestRepeatedLayerOfDocumentsFirst(t *testing.T) {
	all := layers(t, []entry{text("a", noise(1, 50<<10))}, []entry{file(".wh.a"), text("b", noise(2, 50<<10))})
	img := testImage{layers: [][]byte{all[0], all[1], all[0]}}
	docs, blobs := parts(t, img)
	blobs[0] = blobs[2]
	got := mustConvert(t, tarOf(t, slices.Concat(docs, blobs[:2])...))
	if !bytes.Equal(got.image, mustConvert(t, layout(t, img)).image) || len(got.tree) != 2 {
		t.Errorf("%d files", len(got.tree))
	}
}

// What was applied before the archive's end is what it means at its end.
func TestDocumentsThatChange(t *testing.T) {
	img := threeLayers(t, nil)
	docs, blobs := parts(t, img)
	other := threeLayers(t, nil)
	other.layers = other.layers[:2]
	otherDocs, _ := parts(t, other)
	config := threeLayers(t, nil)
	config.config = object{"Env": []string{"A=b"}}
	configDocs, _ := parts(t, config)
	for name, last := range map[string][]entry{
		"fewer layers":        otherDocs,
		"other configuration": configDocs,
		"no layout":           {text("oci-layout", "x")},
		"no index":            {text("index.json", "{}")},
		"an index that is a layer": {
			{name: "index.json", kind: tar.TypeLink, target: blobs[1].name},
		},
		"a layer that is a document": {
			{name: "oci-layout", kind: tar.TypeSymlink, target: blobs[0].name},
		},
		"a directory in place of the blobs": {text("blobs", "")},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := convertBytes(t, tarOf(t, slices.Concat(docs, blobs, last)...), Options{})
			if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
				t.Errorf("%v, want invalid", err)
			}
		})
	}
}

// Errors of layers that are applied early are those of layers that are not.
func TestSpoiltLayersOfDocumentsFirst(t *testing.T) {
	for packing, pack := range packings {
		docs, blobs := parts(t, threeLayers(t, pack(t)))
		whole := tarOf(t, slices.Concat(docs, blobs)...)
		for name, tc := range map[string]struct {
			archive []byte
			message string
		}{
			"flipped": {func() []byte {
				b := bytes.Clone(whole)
				b[len(b)-2048] ^= 1
				return b
			}(), "digest"},
			"cut off": {whole[:len(whole)/2], ""},
			"longer":  {tarOf(t, slices.Concat(docs, []entry{text(blobs[0].name, blobs[0].content+"x")}, blobs[1:])...), "its descriptor says"},
			"of another": {tarOf(t, slices.Concat(docs, []entry{text(blobs[0].name, strings.Repeat("\x00", len(blobs[0].content)))}, blobs[1:])...),
				"layer 1 of 3: layer sha256:" + strings.TrimPrefix(blobs[0].name, "blobs/sha256/") + " has digest"},
		} {
			t.Run(fmt.Sprintf("%s/%s", packing, name), func(t *testing.T) { wantInvalid(t, tc.archive, Options{}, tc.message) })
		}
	}
}

// Content that is hidden by what comes later is moved over: nothing of it is left,
// and holes stay zeros.
func TestHiddenContentIsMovedOver(t *testing.T) {
	zeros := strings.Repeat("\x00", 2<<20)
	visible := []entry{text("d/a", noise(1, 2<<20)), text("d/zeros", zeros), text("e", noise(2, 5000)), text("f", zeros+noise(3, 4097)), text("g", zeros)}
	hidden := noise(9, 900<<10)
	mixed := []entry{text("d/a", hidden), text("d/zeros", hidden), text("f", hidden), text("x", hidden)}
	var entries []entry
	for i, e := range visible {
		if i < len(mixed) {
			entries = append(entries, mixed[i])
		}
		entries = append(entries, e)
	}
	entries = append(entries, text("x", "small"), text("last", "x"))
	want := mustConvert(t, tarOf(t, append(slices.Clone(visible), text("x", "small"), text("last", "x"))...))
	got := mustConvert(t, tarOf(t, entries...))
	if diff := cmp.Diff(want.tree, got.tree); diff != "" {
		t.Error("the tree differs")
	}
	if !bytes.Equal(want.image, got.image) {
		t.Errorf("the image has %d bytes, without what was hidden %d", len(got.image), len(want.image))
	}
	for i := 0; i+64 < len(hidden); i += 4096 {
		if bytes.Contains(got.image, []byte(hidden[i:i+64])) {
			t.Fatal("hidden content is in the image")
		}
	}
}
