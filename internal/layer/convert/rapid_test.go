package convert

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/erofs/go-erofs"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// modelFile is one inode of a random tree.
type modelFile struct {
	kind    byte
	mode    int64
	uid     int
	mtime   time.Time
	content string
	target  string
	xattrs  map[string]string
}

func (f *modelFile) String() string {
	size := len(f.content)
	return fmt.Sprintf("%c %o %d %d %q %q %q %d", f.kind, f.mode, f.uid, f.mtime.UnixNano(), f.content, f.target, f.xattrs, size)
}

var genName = rapid.Custom(func(t *rapid.T) string {
	// Few names, so that directories fill and paths collide; odd bytes.
	return rapid.OneOf(
		rapid.SampledFrom([]string{"a", "b", "c", "d", "lib", "..x", ".wh.a", "\xff\xfe", " ", "-", "name with\nnewline", "\u00e9"}),
		rapid.StringMatching(`[a-z]{1,8}`),
	).Draw(t, "name")
})

var genFile = rapid.Custom(func(t *rapid.T) *modelFile {
	f := &modelFile{
		kind:  rapid.SampledFrom([]byte{tar.TypeReg, tar.TypeReg, tar.TypeSymlink, tar.TypeFifo}).Draw(t, "kind"),
		mode:  rapid.Int64Range(0, 0o7777).Draw(t, "mode"),
		uid:   rapid.IntRange(0, 1<<32-2).Draw(t, "uid"),
		mtime: time.Unix(rapid.Int64Range(-1<<31, 1<<33).Draw(t, "seconds"), rapid.Int64Range(0, 999999999).Draw(t, "ns")),
	}
	switch f.kind {
	case tar.TypeReg:
		n := rapid.OneOf(rapid.IntRange(0, 200), rapid.IntRange(3900, 4200), rapid.IntRange(0, 40000)).Draw(t, "size")
		f.content = string(bytes.Repeat([]byte{byte(n)}, n))
		f.xattrs = genXattrs.Draw(t, "xattrs")
	case tar.TypeSymlink:
		f.target = rapid.StringMatching(`/?([a-z.]{1,5}/){0,4}[a-z]{1,9}`).Draw(t, "target")
		f.mode = 0o777
	}
	return f
})

var genXattrs = rapid.MapOfN(rapid.StringMatching(`user\.[a-z]{1,20}`), rapid.StringN(0, 40, 200), 0, 4)

// A random tree comes out of its image as it was put into the archive.
func TestRandomTrees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		files := map[string]*modelFile{} // every name; hard links share
		dirs := []string{""}
		for range rapid.IntRange(0, 40).Draw(t, "entries") {
			name := rapid.SampledFrom(dirs).Draw(t, "dir") + genName.Draw(t, "name")
			if files[name] != nil || slices.Contains([]string{"proc", "sys", "dev"}, name) {
				continue
			}
			var f *modelFile
			switch known := linkable(files); {
			case rapid.IntRange(0, 3).Draw(t, "is dir") == 0:
				f = &modelFile{kind: tar.TypeDir, mode: 0o750, uid: 7, mtime: time.Unix(1e9, 5), xattrs: genXattrs.Draw(t, "xattrs")}
				dirs = append(dirs, name+"/")
			case len(known) > 0 && rapid.IntRange(0, 4).Draw(t, "is link") == 0:
				target := rapid.SampledFrom(known).Draw(t, "target")
				f = files[target]
				header(t, w, name, &modelFile{kind: tar.TypeLink, target: target})
				files[name] = f
				continue
			default:
				f = genFile.Draw(t, "file")
			}
			header(t, w, name, f)
			files[name] = f
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		var image, scratch memFile
		res, err := Convert(&b, &image, &scratch, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if res.Files != int64(len(files)) {
			t.Errorf("%d files, want %d", res.Files, len(files))
		}
		checkTree(t, image.b, files)
	})
}

// linkable gives the names that a hard link can lead to, in a fixed order.
func linkable(files map[string]*modelFile) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if files[name].kind != tar.TypeDir {
			names = append(names, name)
		}
	}
	return names
}

func header(t *rapid.T, w *tar.Writer, name string, f *modelFile) {
	h := &tar.Header{Name: name, Typeflag: f.kind, Mode: f.mode, Uid: f.uid, Gid: f.uid / 2, Linkname: f.target, Size: int64(len(f.content)), ModTime: f.mtime, Format: tar.FormatPAX}
	for k, v := range f.xattrs {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[xattrPAX+k] = v
	}
	if err := w.WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, f.content); err != nil {
		t.Fatal(err)
	}
}

func checkTree(t *rapid.T, image []byte, files map[string]*modelFile) {
	fsys, err := erofs.Open(bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	want, got := map[string]string{}, map[string]string{}
	inodes := map[int64]*modelFile{}
	for name, f := range files {
		want[name] = f.String()
		info, err := fs.Lstat(fsys, name)
		if err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		st := info.Sys().(*erofs.Stat)
		g := &modelFile{mode: int64(st.Mode.Perm()), uid: int(st.UID), mtime: time.Unix(int64(st.Mtime), int64(st.MtimeNs)), xattrs: st.Xattrs}
		if int(st.GID) != g.uid/2 && f.kind != tar.TypeDir {
			t.Errorf("%q: group %d of owner %d", name, st.GID, st.UID)
		}
		for bit, mode := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
			if st.Mode&mode != 0 { // info.Mode has the permission bits only
				g.mode |= bit
			}
		}
		switch info.Mode().Type() {
		case 0:
			g.kind = tar.TypeReg
			content, err := fs.ReadFile(fsys, name)
			if err != nil {
				t.Fatal(err)
			}
			g.content = string(content)
		case fs.ModeDir:
			g.kind = tar.TypeDir
		case fs.ModeSymlink:
			g.kind = tar.TypeSymlink
			if g.target, err = fsys.(fs.ReadLinkFS).ReadLink(name); err != nil {
				t.Fatal(err)
			}
		case fs.ModeNamedPipe:
			g.kind = tar.TypeFifo
		}
		got[name] = g.String()
		if other := inodes[st.Ino]; other != nil && other != f {
			t.Errorf("%q shares an inode with another file", name)
		}
		inodes[st.Ino] = f
		names := 0
		for _, o := range files {
			if o == f {
				names++
			}
		}
		if f.kind != tar.TypeDir && st.Nlink != names {
			t.Errorf("%q: link count %d, want %d", name, st.Nlink, names)
		}
	}
	distinct := map[*modelFile]bool{}
	for _, f := range files {
		distinct[f] = true
	}
	if len(inodes) != len(distinct) {
		t.Errorf("%d inodes, want %d", len(inodes), len(distinct))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}
