package convert

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"maps"
	"testing"

	"github.com/erofs/go-erofs"

	"github.com/opendsec/dsec"
)

// whiteout is a name that overlayfs hides.
const whiteout = "Dc---------"

func opaque(t *testing.T, image []byte, path string) bool {
	t.Helper()
	fsys, err := erofs.Open(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	fi, err := fs.Stat(fsys, path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Sys().(*erofs.Stat).Xattrs["trusted.overlay.opaque"] == "y"
}

// A layer that goes on others keeps what its archive hides of them, in either form.
func TestUpperLayersHide(t *testing.T) {
	device := func(name string) entry { return entry{name: name, kind: tar.TypeChar} }
	marked := func(name, attribute, value string) entry {
		return entry{name: name, kind: tar.TypeDir, pax: map[string]string{xattrPAX + attribute: value}}
	}
	for name, tt := range map[string]struct {
		entries []entry
		want    map[string]string
		opaque  []string
	}{
		"a file":                               {[]entry{dir("a"), file("a/.wh.b")}, map[string]string{"a": "dir", "a/b": whiteout}, nil},
		"overlayfs's device":                   {[]entry{dir("a"), device("a/b")}, map[string]string{"a": "dir", "a/b": whiteout}, nil},
		"names of overlayfs's device":          {[]entry{device("a"), link("d/b", "a"), link("./c", "d/b"), file("a")}, map[string]string{"a": "= a", "d": "dir", "d/b": whiteout, "c": whiteout}, nil},
		"in a directory that it does not have": {[]entry{file("a/.wh.b")}, map[string]string{"a": "dir", "a/b": whiteout}, nil},
		"what it has itself":                   {[]entry{text("b", "mine"), file(".wh.b")}, map[string]string{"b": "= mine"}, nil},
		"what it has itself, later":            {[]entry{file(".wh.b"), text("b", "mine")}, map[string]string{"b": "= mine"}, nil},
		"a directory made anew":                {[]entry{file(".wh.d"), dir("d"), text("d/f", "mine")}, map[string]string{"d": "dir", "d/f": "= mine"}, []string{"d"}},
		"a directory made anew, told later":    {[]entry{dir("d"), text("d/f", "mine"), file(".wh.d")}, map[string]string{"d": "dir", "d/f": "= mine"}, []string{"d"}},
		"all of a directory":                   {[]entry{dir("d"), file("d/.wh..wh..opq"), text("d/f", "mine")}, map[string]string{"d": "dir", "d/f": "= mine"}, []string{"d"}},
		"overlayfs's mark":                     {[]entry{marked("d", "trusted.overlay.opaque", "y"), text("d/f", "mine")}, map[string]string{"d": "dir", "d/f": "= mine"}, []string{"d"}},
		"overlayfs's mark without rights":      {[]entry{marked("d", "user.overlay.opaque", "y")}, map[string]string{"d": "dir"}, []string{"d"}},
		"overlayfs's mark in place of a file":  {[]entry{device("d"), marked("d", "trusted.overlay.opaque", "y")}, map[string]string{"d": "dir"}, []string{"d"}},
		"another of its marks":                 {[]entry{marked("d", "trusted.overlay.opaque", "x")}, map[string]string{"d": "dir"}, nil},
		"all of one, attributes later":         {[]entry{file("d/.wh..wh..opq"), dir("d")}, map[string]string{"d": "dir"}, []string{"d"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := convertBytes(t, tarOf(t, tt.entries...), Options{Kind: dsec.LayerToolkit})
			if err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(got.tree, tt.want) {
				t.Errorf("the layer has %v, want %v", got.tree, tt.want)
			}
			for path := range got.tree {
				want := len(tt.opaque) > 0 && path == tt.opaque[0]
				if opaque(t, got.image, path) != want {
					t.Errorf("/%s is opaque: %v, want %v", path, !want, want)
				}
			}
		})
	}
	upper := Options{Kind: dsec.LayerWorkspace}
	wantInvalid(t, tarOf(t, file(".wh..wh..opq")), upper, "opaque root")
	wantInvalid(t, tarOf(t, file(".wh.proc")), upper, "/proc in the image is not a directory")
	wantInvalid(t, tarOf(t, file("a/.wh..")), upper, "want the name of a file")
	wantInvalid(t, tarOf(t, file(".wh.b"), link("c", "b")), upper, "which no earlier entry made")
	// A base has nothing below it: such names are names.
	if got := mustConvert(t, tarOf(t, text(".wh.b", "x"))); got.tree[".wh.b"] != "= x" {
		t.Errorf("a base has %v", got.tree)
	}
}

// The root of an archive can become a directory of the sandbox.
func TestLayerAtADirectory(t *testing.T) {
	archive := tarOf(t, entry{name: "./", kind: tar.TypeDir, uid: 7, mode: 0o750}, text("f", "x"), file(".wh.g"))
	got, err := convertBytes(t, archive, Options{Kind: dsec.LayerWorkspace, At: "/work//p/"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"work": "dir", "work/p": "dir", "work/p/f": "= x", "work/p/g": whiteout}
	if !maps.Equal(got.tree, want) || got.Files != 4 {
		t.Errorf("%d files: %v, want %v", got.Files, got.tree, want)
	}
	fsys, err := erofs.Open(bytes.NewReader(got.image))
	if err != nil {
		t.Fatal(err)
	}
	fi, err := fs.Stat(fsys, "work/p")
	if err != nil || fi.Mode().Perm() != 0o750 || fi.Sys().(*erofs.Stat).UID != 7 {
		t.Errorf("the archive's root is %v, %v", fi, err)
	}
	again, err := convertBytes(t, archive, Options{Kind: dsec.LayerToolkit, At: "/work/p"})
	if err != nil || bytes.Equal(again.image, got.image) {
		t.Errorf("a toolkit of the same files is the same layer, %v", err)
	}
	for at, opt := range map[string]Options{
		"a base":      {At: "/work"},
		"relative":    {At: "work", Kind: dsec.LayerToolkit},
		"with dots":   {At: "/a/../b", Kind: dsec.LayerToolkit},
		"unseen":      {At: "/proc/x", Kind: dsec.LayerToolkit},
		"also unseen": {At: "/.//dev", Kind: dsec.LayerToolkit},
		"with NUL":    {At: "/a\x00b", Kind: dsec.LayerToolkit},
	} {
		if _, err := convertBytes(t, archive, opt); dsec.CodeOf(err) != dsec.CodeInvalid || err.(*dsec.Error).Field != "at" {
			t.Errorf("%s: %v, want invalid: at", at, err)
		}
	}
	if _, err := convertBytes(t, archive, Options{Kind: "tools"}); dsec.CodeOf(err) != dsec.CodeInvalid || err.(*dsec.Error).Field != "kind" {
		t.Errorf("unknown kind: %v, want invalid: kind", err)
	}
}

// Strict refuses what the lint finds, and not what is merely left out.
func TestStrict(t *testing.T) {
	key := "-----BEGIN OPENSSH PRIVATE KEY-----\n"
	wantInvalid(t, tarOf(t, text("root/.ssh/id", key)), Options{Strict: true}, "the lint finds 1 things, the first: \"/root/.ssh/id\"")
	left := tarOf(t, entry{name: "dev/null", kind: tar.TypeChar}, file("f"))
	if got, err := convertBytes(t, left, Options{Strict: true}); err != nil || len(got.Findings) != 1 {
		t.Errorf("an archive with a device: %v, %q", err, got.Findings)
	}
}

// Of an image that goes on others its layers hide what is below them in the image, and
// all of it what is below the image.
func TestImagesThatGoOnOthersHide(t *testing.T) {
	device := func(name string) entry { return entry{name: name, kind: tar.TypeBlock} }
	for name, tt := range map[string]struct {
		layers [][]byte
		want   map[string]string
		opaque string
	}{
		"below the image": {[][]byte{tarOf(t, dir("a"), file("a/.wh.b"))}, map[string]string{"a": "dir", "a/b": whiteout}, ""},
		"in the image, and below": {
			[][]byte{tarOf(t, text("b", "low"), text("c", "low")), tarOf(t, file(".wh.b"))}, map[string]string{"b": whiteout, "c": "= low"}, "",
		},
		"and back again": {
			[][]byte{tarOf(t, text("b", "low")), tarOf(t, file(".wh.b")), tarOf(t, text("b", "top"))}, map[string]string{"b": "= top"}, "",
		},
		"a directory, back again": {
			[][]byte{tarOf(t, text("d/low", "low")), tarOf(t, file(".wh.d")), tarOf(t, text("d/top", "top"))}, map[string]string{"d": "dir", "d/top": "= top"}, "d",
		},
		"all of a directory": {
			[][]byte{tarOf(t, text("d/low", "low")), tarOf(t, file("d/.wh..wh..opq"), text("d/top", "top"))}, map[string]string{"d": "dir", "d/top": "= top"}, "d",
		},
		"all of a directory, by overlayfs's mark": {
			[][]byte{tarOf(t, text("d/low", "low")), tarOf(t, entry{name: "d", kind: tar.TypeDir, pax: map[string]string{xattrPAX + "trusted.overlay.opaque": "y"}}, text("d/top", "top"))}, map[string]string{"d": "dir", "d/top": "= top"}, "d",
		},
		"what is not in the image": {
			[][]byte{tarOf(t, text("a", "low")), tarOf(t, file("x/y/.wh.z"))}, map[string]string{"a": "= low", "x": "dir", "x/y": "dir", "x/y/z": whiteout}, "",
		},
		"and a device node in its place": {
			[][]byte{tarOf(t, text("a", "low"), file(".wh.b"), text("c/d", "low")), tarOf(t, device("a"), device("b"), device("c"), device("e"))},
			map[string]string{"a": whiteout, "b": whiteout, "c": whiteout}, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := convertBytes(t, layout(t, testImage{layers: tt.layers}), Options{Kind: dsec.LayerToolkit})
			if err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(got.tree, tt.want) {
				t.Errorf("the layer has %v, want %v", got.tree, tt.want)
			}
			for path := range got.tree {
				if opaque(t, got.image, path) != (path == tt.opaque) {
					t.Errorf("/%s is opaque: %v", path, path != tt.opaque)
				}
			}
		})
	}
	wantInvalid(t, layout(t, testImage{layers: [][]byte{tarOf(t, file(".wh..wh..opq"))}}), Options{Kind: dsec.LayerWorkspace}, "opaque root")
}

// Another name of a device node is left out as the node is: in an archive of one, across
// the layers of an image, and of what goes on others.
func TestNamesOfDeviceNodesAreLeftOut(t *testing.T) {
	node, names := entry{name: "./dev/a", kind: tar.TypeBlock, mode: 0o600}, []entry{link("b", "dev/a"), link("dev/c", "/b"), file("d")}
	for name, archive := range map[string][]byte{
		"one": tarOf(t, append([]entry{node}, names...)...), "layers": layout(t, testImage{layers: layers(t, []entry{node}, names)}),
	} {
		for _, kind := range []dsec.LayerKind{dsec.LayerBase, dsec.LayerToolkit} {
			got, err := convertBytes(t, archive, Options{Kind: kind})
			if err != nil {
				t.Errorf("%s, %s: %v", name, kind, err)
				continue
			}
			want := map[string]string{"dev": "dir", "d": "= d"}
			if !maps.Equal(got.tree, want) || len(got.Findings) != 1 || got.Findings[0] != `device nodes left out: 3, the first at "/dev/a"` {
				t.Errorf("%s, %s: %v, %q", name, kind, got.tree, got.Findings)
			}
		}
	}
	wantInvalid(t, tarOf(t, node, file("x"), link("b", "dev/other")), Options{}, "which no earlier entry made")
}
