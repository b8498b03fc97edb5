package convert

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// More shapes of S89 and S90: names by extended headers, and links that change
// between entries.
func TestShapes(t *testing.T) {
	type tree = map[string]string
	long := strings.Repeat("n", 200)
	gnu := func(kind byte, value string, rest ...entry) []byte {
		head := tarOf(t, text("././@LongLink", value+"\x00"))
		head[156] = kind
		head = setSize(head, []byte(fmt.Sprintf("%011o\x00", len(value)+1)))
		return append(head[:len(head)-1024], tarOf(t, rest...)...)
	}
	global := func(records string, rest ...entry) []byte {
		head := tarOf(t, text("pax_global_header", records))
		head[156] = 'g'
		head = setSize(head, []byte(fmt.Sprintf("%011o\x00", len(records))))
		return append(head[:len(head)-1024], tarOf(t, rest...)...)
	}
	for name, tc := range map[string]struct {
		archive []byte
		want    tree
		refused string
	}{
		"PAX path up":              {archive: pax(t, map[string]string{"path": "a/../../x"}, "x"), refused: `".." part`},
		"PAX path absolute":        {archive: pax(t, map[string]string{"path": "/etc/x"}, "x"), want: tree{"etc": "dir", "etc/x": "= x"}},
		"PAX size of another":      {archive: pax(t, map[string]string{"size": "9223372036854775807"}, "x"), refused: "truncated"},
		"PAX size negative":        {archive: pax(t, map[string]string{"size": "-5"}, "x"), refused: "malformed"},
		"PAX owner beyond":         {archive: pax(t, map[string]string{"uid": "99999999999999999999"}, "x"), refused: "malformed"},
		"GNU name up":              {archive: gnu('L', "../../"+long, file("short")), refused: `".." part`},
		"GNU name twice":           {archive: append(gnu('L', "../"+long)[:1024], gnu('L', long, text("short", "x"))...), want: tree{long: "= x"}},
		"GNU link up":              {archive: gnu('K', "../../etc/passwd", entry{name: "h", kind: tar.TypeLink, target: "x"}), refused: `".." part`},
		"global header of a path":  {archive: global("16 path=../../x\n", text("a", "1")), want: tree{"a": "= 1"}},
		"newlines in a name":       {archive: tarOf(t, text("a\nb\x1b[0m", "1")), want: tree{"a\nb\x1b[0m": "= 1"}},
		"not UTF-8":                {archive: tarOf(t, entry{name: "a\xff", kind: tar.TypeReg, content: "1", format: tar.FormatGNU}), want: tree{"a\xff": "= 1"}},
		"a dash":                   {archive: tarOf(t, text("-rf", "1"), text("--", "2")), want: tree{"-rf": "= 1", "--": "= 2"}},
		"link exchanged":           {archive: tarOf(t, symlink("a", "b"), dir("b/"), file("a/x"), symlink("a", "c"), dir("c/"), file("a/y")), want: tree{"a": "-> c", "b": "dir", "b/x": "= a/x", "c": "dir", "c/y": "= a/y"}},
		"dir exchanged for a link": {archive: tarOf(t, dir("a/"), dir("a/b/"), symlink("a", "/"), file("a/b/x")), want: tree{"a": "-> /", "b": "dir", "b/x": "= a/b/x"}},
		"hard link then link":      {archive: tarOf(t, text("a", "1"), link("b", "a"), symlink("a", "/etc/passwd"), text("b", "2")), want: tree{"a": "-> /etc/passwd", "b": "= 2"}},
		"hard link to a later link": {archive: tarOf(t, file("d/x"), symlink("l", "d"), link("h", "l/x"), symlink("l", "/etc")),
			want: tree{"d": "dir", "d/x": "= d/x", "l": "-> /etc", "h": "= d/x"}},
		"write through a hard-linked link": {archive: tarOf(t, symlink("l", "/etc/passwd"), link("h", "l"), text("h", "2")), want: tree{"l": "-> /etc/passwd", "h": "= 2"}},
		"links that leave at the end":      {archive: tarOf(t, symlink("a", "b/../../.."), file("a/x")), want: tree{"a": "-> b/../../..", "b": "dir", "x": "= a/x"}},
		"through a file":                   {archive: tarOf(t, text("a", "1"), symlink("l", "a"), file("l/x")), refused: ""},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.refused != "" {
				wantInvalid(t, tc.archive, Options{}, tc.refused)
				return
			}
			got, err := convertBytes(t, tc.archive, Options{})
			if tc.want == nil { // inside or refused
				if err != nil && dsec.CodeOf(err) != dsec.CodeInvalid {
					t.Errorf("%v, want invalid", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got.tree); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
		})
	}
}

// More shapes of S91: whiteouts of every kind of entry, and through what layers
// below have made.
func TestWhiteoutShapes(t *testing.T) {
	type tree = map[string]string
	for name, tc := range map[string]struct {
		layers [][]entry
		want   tree
	}{
		"opaque as a directory":   {[][]entry{{file("d/a")}, {dir("d/.wh..wh..opq/")}}, tree{"d": "dir"}},
		"opaque as a link":        {[][]entry{{file("d/a")}, {symlink("d/.wh..wh..opq", "/etc")}}, tree{"d": "dir"}},
		"whiteout as a link":      {[][]entry{{file("a"), file("b")}, {symlink(".wh.a", "b")}}, tree{"b": "= b"}},
		"whiteout as a directory": {[][]entry{{file("a"), file("b")}, {dir(".wh.a/")}}, tree{"b": "= b"}},
		"through a link up":       {[][]entry{{symlink("l", "../../.."), file("etc/x")}, {file("l/etc/.wh.x")}}, tree{"l": "-> ../../..", "etc": "dir"}},
		"of the root by a link":   {[][]entry{{symlink("l", "/"), file("a")}, {file("l/.wh..wh..opq"), file("n")}}, tree{"n": "= n"}},
		"three layers":            {[][]entry{{text("a", "1")}, {file(".wh.a")}, {text("a", "3")}}, tree{"a": "= 3"}},
		"link of a layer below":   {[][]entry{{symlink("a", "/etc")}, {file("a/x")}}, tree{"a": "-> /etc", "etc": "dir", "etc/x": "= a/x"}},
		"hidden link":             {[][]entry{{symlink("a", "/etc")}, {file(".wh.a"), file("a/x")}}, tree{"a": "dir", "a/x": "= a/x"}},
		"hidden twice":            {[][]entry{{file("a")}, {file(".wh.a")}, {file(".wh.a")}}, tree{}},
		"hidden dir made again":   {[][]entry{{file("d/a")}, {file(".wh.d")}, {file("d/b")}}, tree{"d": "dir", "d/b": "= d/b"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := convertBytes(t, layout(t, testImage{layers: layers(t, tc.layers...)}), Options{})
			if err != nil {
				if dsec.CodeOf(err) != dsec.CodeInvalid {
					t.Errorf("%v, want invalid", err)
				}
				t.Logf("refused: %v", err)
				return
			}
			if diff := cmp.Diff(tc.want, got.tree); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
		})
	}
}

// More shapes of S95, S97 and S98: documents that lead elsewhere, in circles, or
// to what is no layer. Nothing is fetched: there is no network in a conversion.
func TestDocumentShapes(t *testing.T) {
	good := layers(t, []entry{file("a")})
	oci := func(spoil func(config, manifest object)) []byte {
		return layout(t, testImage{layers: good, spoil: spoil})
	}
	first := func(m object) object { return m["layers"].([]object)[0] }
	docker := func(config, layer string) []byte {
		doc := marshal(t, object{"rootfs": object{"type": "layers", "diff_ids": []string{digestOf(good[0])}}})
		return tarOf(t, text("c.json", string(doc)), text("layer.tar", string(good[0])),
			text("manifest.json", string(marshal(t, []object{{"Config": config, "Layers": []string{layer}}}))))
	}
	index := func(descs ...object) []byte {
		return tarOf(t, text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`), text("index.json", string(marshal(t, object{"schemaVersion": 2, "manifests": descs}))))
	}
	loop := object{"mediaType": typeIndex, "digest": digestless("a"), "size": 10}
	packed := func(b []byte) []byte {
		return layout(t, testImage{layers: good, pack: func(int, []byte) []byte { return b }})
	}
	for name, archive := range map[string][]byte{
		"foreign layer that is not there": oci(func(_, m object) {
			first(m)["urls"] = []string{"http://169.254.169.254/latest", "file:///etc/passwd"}
			first(m)["digest"] = digestless("d")
		}),
		"index of itself":      index(loop, loop),
		"index of nothing":     index(),
		"index of a layer":     index(descriptor(typeManifest, good[0])),
		"deep document":        tarOf(t, text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`), text("index.json", strings.Repeat(`{"a":[`, 50_000))),
		"layout of a future":   tarOf(t, text("oci-layout", `{"imageLayoutVersion":"9.0.0"}`), text("index.json", `{"schemaVersion":2,"manifests":[]}`)),
		"docker layer up":      docker("c.json", "../layer.tar"),
		"docker layer at root": docker("c.json", "/etc/passwd"),
		"docker layer in proc": docker("c.json", "/proc/self/fd/0"),
		"layer is EROFS":       packed(mustConvert(t, good[0]).image),
		"layer is qcow2":       packed([]byte("QFI\xfb\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x10/etc/passwd")),
		"layer is gzip twice":  packed(testutil.Gzip(t, testutil.Gzip(t, good[0]))),
		"layer is xz":          packed([]byte("\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4\x46")),
		"layer is nothing":     packed(nil),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := convertBytes(t, archive, Options{})
			var e *dsec.Error
			if !errors.As(err, &e) || e.Code != dsec.CodeInvalid || strings.Contains(e.Message, "root:x") {
				t.Errorf("%v, want invalid", err)
			}
		})
	}
	// Without its configuration it is no image but a tree with such files.
	for _, config := range []string{"../c.json", "/etc/passwd", "/proc/self/environ"} {
		got := mustConvert(t, docker(config, "layer.tar"))
		if got.Source != SourceRootFS || len(got.tree) != 3 {
			t.Errorf("%s: %s of %v", config, got.Source, got.tree)
		}
	}
	// A foreign layer that is there is taken from the archive.
	got := mustConvert(t, oci(func(_, m object) { first(m)["urls"] = []string{"http://169.254.169.254/"} }))
	if got.tree["a"] != "= a" || bytes.Contains(got.image, []byte("169.254")) {
		t.Errorf("tree %v", got.tree)
	}
}
