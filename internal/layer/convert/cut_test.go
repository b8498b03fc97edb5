package convert

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/erofs/go-erofs"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
)

// cutImages converts an archive into at most n layers, lowest first.
func cutImages(t testing.TB, archive []byte, n int, opt Options) (images [][]byte, res Result, err error) {
	t.Helper()
	files := make([]File, n)
	for i := range files {
		files[i] = &memFile{}
	}
	res, err = Chain(bytes.NewReader(archive), files, &memFile{}, opt)
	if err != nil {
		return nil, res, err
	}
	for i, img := range append(res.Below, res.Image) {
		b := files[i].(*memFile).b
		if int64(len(b)) != img.Size {
			t.Errorf("image %d has %d bytes, the result says %d", i, len(b), img.Size)
		}
		images = append(images, b)
	}
	for _, f := range files[len(images):] {
		if len(f.(*memFile).b) > 0 {
			t.Error("an image that is not used has bytes")
		}
	}
	return images, res, nil
}

// overlaid is what overlayfs shows of images, lowest first: of each path what stat(2)
// and reads tell, and, of a file with several names, the first of them.
type overlaid struct {
	layers []fs.FS
	files  map[string]string
	first  map[string]string // by layer and inode
}

func overlay(t testing.TB, images ...[]byte) map[string]string {
	t.Helper()
	o := &overlaid{files: map[string]string{}, first: map[string]string{}}
	var all []int
	for i, image := range images {
		fsys, err := erofs.Open(bytes.NewReader(image))
		if err != nil {
			t.Fatal(err)
		}
		o.layers = append(o.layers, fsys)
		all = append(all, i)
	}
	if err := o.dir(".", all); err != nil {
		t.Fatal(err)
	}
	return o.files
}

// dir adds a directory that is merged of those of layers, lowest first.
func (o *overlaid) dir(path string, layers []int) error {
	if err := o.add(path, layers[len(layers)-1]); err != nil {
		return err
	}
	names := map[string][]int{}  // the layers that show it, highest first
	covered := map[string]bool{} // what is below is hidden
	for _, l := range slices.Backward(layers) {
		entries, err := fs.ReadDir(o.layers[l], path)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if covered[e.Name()] {
				continue
			}
			if !e.IsDir() {
				covered[e.Name()] = true
				if e.Type()&fs.ModeCharDevice == 0 && len(names[e.Name()]) == 0 {
					names[e.Name()] = []int{l}
				}
				continue
			}
			names[e.Name()] = append(names[e.Name()], l)
			fi, err := e.Info()
			if err != nil {
				return err
			}
			covered[e.Name()] = fi.Sys().(*erofs.Stat).Xattrs["trusted.overlay.opaque"] == "y"
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		found, at := names[name], name
		if path != "." {
			at = path + "/" + name
		}
		slices.Reverse(found)
		fi, err := fs.Lstat(o.layers[found[0]], at)
		switch {
		case err != nil:
			return err
		case fi.IsDir():
			err = o.dir(at, found)
		default:
			err = o.add(at, found[0])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *overlaid) add(path string, layer int) error {
	fsys := o.layers[layer]
	fi, err := fs.Lstat(fsys, path)
	if err != nil {
		return err
	}
	st := fi.Sys().(*erofs.Stat)
	delete(st.Xattrs, "trusted.overlay.opaque")
	delete(st.Xattrs, "trusted.overlay.origin")
	what := fmt.Sprintf("%v %v %d:%d %d.%d %q", fi.Mode().Type(), st.Mode, st.UID, st.GID, st.Mtime, st.MtimeNs, st.Xattrs)
	switch fi.Mode().Type() {
	case 0:
		content, err := fs.ReadFile(fsys, path)
		if err != nil {
			return err
		}
		what += fmt.Sprintf(" %s, %d bytes", digestOf(content), len(content))
	case fs.ModeSymlink:
		target, err := fs.ReadLink(fsys, path)
		if err != nil {
			return err
		}
		what += " -> " + target
	}
	if !fi.IsDir() {
		inode := fmt.Sprintf("%d %d", layer, st.Ino)
		if o.first[inode] == "" {
			o.first[inode] = path
		}
		what += " is " + o.first[inode]
	}
	o.files[path] = what
	return nil
}

// randomLayer draws the entries of a layer: few names, so that layers meet. known are
// paths that entries were made at before.
func randomLayer(t *rapid.T, n int, known []string) (layer []entry, paths []string) {
	name := rapid.SampledFrom([]string{"a", "b", "c", "d"})
	paths = slices.Clone(known)
	for i := range rapid.IntRange(0, 12).Draw(t, "entries") {
		parts := rapid.SliceOfN(name, 1, 3).Draw(t, "path")
		at := strings.Join(parts, "/")
		dirOf := strings.TrimSuffix(at, parts[len(parts)-1])
		e := entry{name: at, uid: n, mode: int64(0o700 + i)}
		switch rapid.SampledFrom([]string{"small", "large", "dir", "dir", "attr", "symlink", "link", "link", "whiteout", "whiteout", "opaque"}).Draw(t, "kind") {
		case "small":
			e.kind, e.content = tar.TypeReg, fmt.Sprint(n, i)
		case "large":
			e.kind, e.content = tar.TypeReg, strings.Repeat(fmt.Sprintf("%d %d,", n, i), rapid.IntRange(1000, 3000).Draw(t, "size"))
		case "dir":
			e.kind = tar.TypeDir
		case "attr":
			e.kind, e.pax = tar.TypeDir, map[string]string{"SCHILY.xattr.user.n": fmt.Sprint(n, i)}
		case "symlink":
			e.kind, e.target = tar.TypeSymlink, rapid.SampledFrom([]string{"a", "b", "../c", "/d", "/a/b"}).Draw(t, "target")
		case "link":
			if len(paths) == 0 {
				continue
			}
			e.kind, e.target = tar.TypeLink, rapid.SampledFrom(paths).Draw(t, "target")
		case "whiteout":
			e.kind, e.name = tar.TypeReg, dirOf+".wh."+parts[len(parts)-1]
		case "opaque":
			e.kind, e.name = tar.TypeReg, at+"/.wh..wh..opq"
		}
		if !strings.Contains(e.name, ".wh.") && e.kind != tar.TypeDir {
			paths = append(paths, at)
		}
		layer = append(layer, e)
	}
	return layer, paths
}

// An image that was cut anywhere shows the same files as one that was not.
func TestCutImagesAreTheSame(t *testing.T) {
	cuts, links, refused := 0, 0, 0
	var base []entry // which has all names
	for i, a := range []string{"a", "b", "c", "d"} {
		for j, b := range []string{"a", "b", "c", "d"} {
			base = append(base, file(path.Join(a, b, "base")), file(path.Join(a, b, a)))
			if i == j {
				base = append(base, file(path.Join(a, "base")))
			}
		}
	}
	below := mustConvert(t, tarOf(t, base...)).image
	rapid.Check(t, func(rt *rapid.T) {
		archive := randomImage(t, rt)
		opt := Options{Kind: rapid.SampledFrom([]dsec.LayerKind{dsec.LayerBase, dsec.LayerToolkit}).Draw(rt, "kind")}
		one, whole, wantErr := cutImages(t, archive, 1, opt)
		opt.CollapseBytes = rapid.Int64Range(1, 60_000).Draw(rt, "most")
		all, res, err := cutImages(t, archive, rapid.IntRange(2, 6).Draw(rt, "images"), opt)
		if (err == nil) != (wantErr == nil) || err != nil && err.Error() != wantErr.Error() {
			rt.Fatalf("cut: %v; whole: %v", err, wantErr)
		}
		if err != nil {
			refused++
			return
		}
		got := overlay(t, all...)
		if diff := cmp.Diff(overlay(t, one...), got); diff != "" {
			rt.Errorf("%d layers (-one, +cut):\n%s", len(all), diff)
		}
		if opt.Kind == dsec.LayerToolkit {
			if diff := cmp.Diff(overlay(t, slices.Insert(one, 0, below)...), overlay(t, slices.Insert(all, 0, below)...)); diff != "" {
				rt.Errorf("%d layers on a base (-one, +cut):\n%s", len(all)-1, diff)
			}
		}
		if diff := cmp.Diff(whole.Findings, res.Findings); diff != "" {
			rt.Errorf("findings (-one, +cut):\n%s", diff)
		}
		cuts += len(all) - 1
		links += linked(got)
	})
	t.Logf("%d cuts, %d links, %d refused", cuts, links, refused)
	if cuts == 0 || links == 0 {
		t.Errorf("%d cuts, %d links: nothing was tried", cuts, links)
	}
}

// linked counts the files that are other names of one before.
func linked(files map[string]string) (n int) {
	for path, what := range files {
		if _, first, ok := strings.Cut(what, " is "); ok && first != path {
			n++
		}
	}
	return n
}

// randomImage draws an image of several layers.
func randomImage(t testing.TB, rt *rapid.T) []byte {
	var img testImage
	var known []string
	for i := range rapid.IntRange(1, 6).Draw(rt, "layers") {
		var entries []entry
		entries, known = randomLayer(rt, i, known)
		img.layers = append(img.layers, tarOf(t, entries...))
	}
	img.pack = packings[rapid.SampledFrom([]string{"plain", "mixed"}).Draw(rt, "packing")](t)
	switch rapid.SampledFrom([]string{"layout", "docker", "documents first"}).Draw(rt, "archive") {
	case "docker":
		return dockerArchive(t, img)
	case "documents first":
		docs, blobs := parts(t, img)
		return tarOf(t, append(docs, blobs...)...)
	}
	return layout(t, img)
}

// What is below a cut depends on nothing that is above it, nor on how the image is
// packed.
func TestImagesShareWhatIsBelowACut(t *testing.T) {
	large := func(name string, n uint64) entry { return text(name, noise(n, 20_000)) }
	low := [][]entry{{large("a", 1), file("x")}, {large("b", 2), link("y", "x")}, {file("c")}}
	opt := Options{CollapseBytes: 50_000}
	var first []byte
	for i, top := range [][]entry{{large("d", 3)}, {large("e", 4), file(".wh.a"), link("b2", "b"), link("x2", "x")}, {large("f", 5), dir("a")}} {
		img := testImage{layers: layers(t, append(slices.Clone(low), top)...), config: object{"User": fmt.Sprint(i)}}
		docs, blobs := parts(t, img)
		for how, archive := range map[string][]byte{
			"layout": layout(t, img), "docker": dockerArchive(t, img), "documents first": tarOf(t, append(docs, blobs...)...),
			"packed": layout(t, testImage{layers: img.layers, config: img.config, pack: packings["mixed"](t)}),
		} {
			all, res, err := cutImages(t, archive, 4, opt)
			if err != nil || len(all) != 2 {
				t.Fatalf("%s: %d layers, %v", how, len(all), err)
			}
			if first == nil {
				first = all[0]
			}
			if !bytes.Equal(all[0], first) {
				t.Errorf("image %d, %s: the lower layer differs", i, how)
			}
			if res.Config.User != fmt.Sprint(i) {
				t.Errorf("the configuration is %+v", res.Config)
			}
		}
	}
}

// The lint tells the same of an image that was cut: what a layer above a cut hides is
// as gone as below it.
func TestLintOfACutImage(t *testing.T) {
	secret := text("root/.netrc", "machine m login l password p")
	pad := text("pad", noise(1, 10_000))
	for name, tc := range map[string]struct {
		top  entry
		want int
	}{"kept": {file("other"), 1}, "hidden": {file("root/.wh..netrc"), 0}, "replaced": {text("root/.netrc", "x"), 0}} {
		img := testImage{layers: layers(t, []entry{secret, pad}, []entry{tc.top, pad})}
		all, res, err := cutImages(t, layout(t, img), 2, Options{CollapseBytes: 1})
		if err != nil || len(all) != 2 {
			t.Fatalf("%s: %d layers, %v", name, len(all), err)
		}
		if len(res.Findings) != tc.want {
			t.Errorf("%s: found %q", name, res.Findings)
		}
		_, _, err = cutImages(t, layout(t, img), 2, Options{CollapseBytes: 1, Strict: true})
		if (err != nil) != (tc.want > 0) {
			t.Errorf("%s, strict: %v", name, err)
		}
	}
}

// A layer that is in the archive under a name that no layer has is read after a cut
// all the same.
func TestCutWithLayersUnderOtherNames(t *testing.T) {
	var tars [][]byte
	for i := range 4 {
		tars = append(tars, tarOf(t, text(fmt.Sprint(i), noise(uint64(i), 9000))))
	}
	config, blobs := testImage{layers: tars}.documents()
	var names []string
	entries := []entry{text("config", string(marshal(t, config)))}
	for i, b := range blobs {
		names = append(names, fmt.Sprintf("layers/%d", i))
		entries = append(entries, text(names[i], string(b)))
	}
	doc := marshal(t, []object{{"Config": "config", "Layers": names}})
	all, _, err := cutImages(t, tarOf(t, append(entries, text("manifest.json", string(doc)))...), 4, Options{CollapseBytes: 15_000})
	if err != nil || len(all) != 4 {
		t.Fatalf("%d layers, %v", len(all), err)
	}
	if files := overlay(t, all...); len(files) != 5 {
		t.Errorf("%v", files)
	}
}

// A document under a name that none has, in an image that a cut has ended since, is told:
// something else may be in its place.
func TestCutWithDocumentsUnderOtherNames(t *testing.T) {
	img := threeLayers(t, nil)
	img.config = object{"Labels": object{"x": noise(7, 3000)}} // escaped, it is long
	docs, blobs := parts(t, img)
	for i, e := range docs {
		if len(e.content) > smallSize {
			docs[i] = symlink(e.name, "/doc")
			docs = append([]entry{text("doc", e.content)}, docs...)
		}
	}
	archive := tarOf(t, slices.Concat(docs, blobs)...)
	if _, _, err := cutImages(t, archive, 1, Options{}); err != nil {
		t.Fatal(err)
	}
	_, _, err := cutImages(t, archive, 3, Options{CollapseBytes: 1})
	if dsec.CodeOf(err) != dsec.CodeInvalid || !strings.Contains(err.Error(), "under another name") {
		t.Errorf("%v", err)
	}
}
