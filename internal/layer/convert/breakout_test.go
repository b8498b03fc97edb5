package convert

import (
	"archive/tar"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Shapes that made unpackers write outside of their root. Here a name can only
// lead through the image's own tree; each is either refused, with a message
// that says why, or stays inside as want shows. (S89 S90)
func TestBreakouts(t *testing.T) {
	type tree = map[string]string
	long := strings.Repeat("d/", 2100)
	for _, tc := range []struct {
		name    string
		entries []entry
		want    tree
		refused string
	}{
		// Names.
		{name: "parent", entries: []entry{file("../x")}, refused: `".." part`},
		{name: "parent inside", entries: []entry{dir("a/"), file("a/../../x")}, refused: `".." part`},
		{name: "parent at the end", entries: []entry{dir("a/..")}, refused: `".." part`},
		{name: "parent within the root", entries: []entry{dir("a/"), file("a/../x")}, refused: `".." part`},
		{name: "absolute", entries: []entry{file("/etc/x")}, want: tree{"etc": "dir", "etc/x": "= /etc/x"}},
		{name: "slashes", entries: []entry{file("//etc///x")}, want: tree{"etc": "dir", "etc/x": "= //etc///x"}},
		{name: "dots", entries: []entry{file("./a/././x")}, want: tree{"a": "dir", "a/x": "= ./a/././x"}},
		{name: "root as a file", entries: []entry{file(".")}, refused: "the root is not a directory"},
		{name: "root as a link", entries: []entry{symlink("./", "/etc")}, refused: "the root is not a directory"},
		{name: "root by slash", entries: []entry{symlink("/", "/etc")}, refused: "the root is not a directory"},
		{name: "empty", entries: []entry{{name: "", kind: tar.TypeReg, content: "x"}}, refused: "empty name"},
		{name: "longest part", entries: []entry{file(strings.Repeat("n", 255))}, want: tree{strings.Repeat("n", 255): "= " + strings.Repeat("n", 255)}},
		{name: "part too long", entries: []entry{file(strings.Repeat("n", 256))}, refused: "name part of 256 bytes"},
		{name: "path too long", entries: []entry{file(long + "x")}, refused: "at most 4095"},
		{name: "dots as a name", entries: []entry{file("..."), file("..a"), file("a..")}, want: tree{"...": "= ...", "..a": "= ..a", "a..": "= a.."}},
		{name: "backslash is a character", entries: []entry{file(`..\x`)}, want: tree{`..\x`: `= ..\x`}},

		// Symbolic links are followed inside the image, with its root as root.
		{name: "through absolute link", entries: []entry{symlink("a", "/etc"), file("a/x")}, want: tree{"a": "-> /etc", "etc": "dir", "etc/x": "= a/x"}},
		{name: "through relative link out", entries: []entry{symlink("a", "../../../../etc"), file("a/x")}, want: tree{"a": "-> ../../../../etc", "etc": "dir", "etc/x": "= a/x"}},
		{name: "through link to the root", entries: []entry{symlink("a", "/"), file("a/x")}, want: tree{"a": "-> /", "x": "= a/x"}},
		{name: "through link to parent", entries: []entry{dir("b/"), symlink("b/a", ".."), file("b/a/x")}, want: tree{"b": "dir", "b/a": "-> ..", "x": "= b/a/x"}},
		{name: "through two links", entries: []entry{symlink("a", "b"), symlink("b", "/c"), file("a/x")}, want: tree{"a": "-> b", "b": "-> /c", "c": "dir", "c/x": "= a/x"}},
		{name: "link in the middle", entries: []entry{dir("r/"), symlink("r/l", "../q"), file("r/l/m/x")}, want: tree{"r": "dir", "r/l": "-> ../q", "q": "dir", "q/m": "dir", "q/m/x": "= r/l/m/x"}},
		{name: "link to itself", entries: []entry{symlink("a", "a"), file("a/x")}, refused: "symbolic links on the way"},
		{name: "links in a ring", entries: []entry{symlink("a", "b"), symlink("b", "a"), file("a/x")}, refused: "symbolic links on the way"},
		{name: "link to proc", entries: []entry{symlink("a", "/proc/self/root"), file("a/x")}, want: tree{"a": "-> /proc/self/root", "proc": "dir", "proc/self": "dir", "proc/self/root": "dir", "proc/self/root/x": "= a/x"}},
		{name: "usr merge", entries: []entry{dir("usr/lib/"), symlink("lib", "usr/lib"), file("lib/ld.so")}, want: tree{"usr": "dir", "usr/lib": "dir", "lib": "-> usr/lib", "usr/lib/ld.so": "= lib/ld.so"}},
		{name: "empty target", entries: []entry{{name: "a", kind: tar.TypeSymlink, target: ""}}, refused: "link target of 0 bytes"},
		{name: "target too long", entries: []entry{symlink("a", strings.Repeat("t", 4096))}, refused: "link target of 4096 bytes"},

		// Last writer wins.
		{name: "file over link", entries: []entry{symlink("a", "/etc/passwd"), text("a", "x")}, want: tree{"a": "= x"}},
		{name: "dir over link", entries: []entry{symlink("a", "/etc"), dir("a/"), file("a/x")}, want: tree{"a": "dir", "a/x": "= a/x"}},
		{name: "link over dir", entries: []entry{file("a/x"), symlink("a", "/etc"), file("a/y")}, want: tree{"a": "-> /etc", "etc": "dir", "etc/y": "= a/y"}},
		{name: "dir over file", entries: []entry{file("a"), file("a/x")}, want: tree{"a": "dir", "a/x": "= a/x"}},
		{name: "file over dir", entries: []entry{file("a/x"), text("a", "y")}, want: tree{"a": "= y"}},
		{name: "twice", entries: []entry{text("a", "1"), text("a", "2")}, want: tree{"a": "= 2"}},
		{name: "dir twice keeps content", entries: []entry{dir("a/"), file("a/x"), dir("a/")}, want: tree{"a": "dir", "a/x": "= a/x"}},
		{name: "device over file", entries: []entry{file("a"), {name: "a", kind: tar.TypeChar}}, want: tree{}},

		// Hard links.
		{name: "hard link", entries: []entry{file("a"), link("b", "a")}, want: tree{"a": "= a", "b": "= a"}},
		{name: "hard link, absolute", entries: []entry{file("a"), link("b", "/a")}, want: tree{"a": "= a", "b": "= a"}},
		{name: "hard link out", entries: []entry{file("a"), link("b", "../a")}, refused: `hard link target: name with a ".." part`},
		{name: "hard link to nothing", entries: []entry{link("b", "/etc/passwd")}, refused: "which no earlier entry made"},
		{name: "hard link to later", entries: []entry{link("b", "a"), file("a")}, refused: "which no earlier entry made"},
		{name: "hard link to itself", entries: []entry{file("a"), link("a", "a")}, want: tree{"a": "= a"}},
		{name: "hard link to a directory", entries: []entry{dir("a/"), link("b", "a")}, refused: "hard link to the directory"},
		{name: "hard link to the root", entries: []entry{link("b", "/")}, refused: "hard link to the directory"},
		{name: "hard link to a link", entries: []entry{symlink("a", "/etc/passwd"), link("b", "a")}, want: tree{"a": "-> /etc/passwd", "b": "-> /etc/passwd"}},
		{name: "hard link through a link", entries: []entry{symlink("a", "/d"), file("d/x"), link("b", "a/x")}, want: tree{"a": "-> /d", "d": "dir", "d/x": "= d/x", "b": "= d/x"}},
		{name: "write to hard link", entries: []entry{text("a", "1"), link("b", "a"), text("b", "2")}, want: tree{"a": "= 1", "b": "= 2"}},
		{name: "hard link then replace", entries: []entry{text("a", "1"), link("b", "a"), text("a", "2")}, want: tree{"a": "= 2", "b": "= 1"}},

		// Places that the platform mounts on.
		{name: "proc is a link", entries: []entry{symlink("proc", "/etc")}, refused: "/proc in the image is not a directory"},
		{name: "sys is a file", entries: []entry{file("sys")}, refused: "/sys in the image is not a directory"},
		{name: "dev is a link", entries: []entry{symlink("dev", "/")}, refused: "/dev in the image is not a directory"},

		// Whiteouts mean nothing in a root file system.
		{name: "whiteout name", entries: []entry{file("a"), text(".wh.a", "x")}, want: tree{"a": "= a", ".wh.a": "= x"}},
		{name: "unknown type", entries: []entry{{name: "a", kind: 'Z'}}, refused: "unknown type"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			archive := tarOf(t, tc.entries...)
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

func TestNULName(t *testing.T) {
	// archive/tar does not write such a record; the length stays the same.
	archive := tarOf(t, entry{name: "etc/long-name-for-pax-\u00e9-x", kind: tar.TypeReg, format: tar.FormatPAX})
	i := strings.Index(string(archive), "path=etc/long")
	if i < 0 {
		t.Fatal("no PAX path in the archive")
	}
	archive[i+len("path=etc/")] = 0
	wantInvalid(t, archive, Options{}, "malformed tar header")
}

func TestDroppedFromEntries(t *testing.T) {
	got := mustConvert(t, tarOf(t,
		entry{name: "a", kind: tar.TypeReg, pax: map[string]string{
			"SCHILY.xattr.user.keep":               "v",
			"SCHILY.xattr.user.overlay.opaque":     "y",
			"SCHILY.xattr.trusted.overlay.opaque":  "y",
			"SCHILY.xattr.security.capability":     "\x01\x00",
			"SCHILY.xattr.system.posix_acl_access": "x",
		}},
		entry{name: "null", kind: tar.TypeChar}, entry{name: "sda", kind: tar.TypeBlock},
		entry{name: "big", kind: tar.TypeReg, uid: 70000},
	))
	want := []string{
		`attributes left out (all but user.* of files and directories): 4, the first at "/a"`,
		`device nodes left out: 2, the first at "/null"`,
		`owners above 65535, unmapped in a sandbox: 1, the first at "/big"`,
	}
	if diff := cmp.Diff(want, got.Findings); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"a": "= a", "big": "= big"}, got.tree); diff != "" {
		t.Errorf("tree (-want +got):\n%s", diff)
	}
}

func TestOwners(t *testing.T) {
	wantInvalid(t, tarOf(t, entry{name: "a", kind: tar.TypeReg, uid: 1<<32 - 1, format: tar.FormatGNU}), Options{}, "owner 4294967295:0")
	wantInvalid(t, tarOf(t, entry{name: "a", kind: tar.TypeReg, uid: -2, format: tar.FormatGNU}), Options{}, "owner -2:0")
	mustConvert(t, tarOf(t, entry{name: "a", kind: tar.TypeReg, uid: 1<<32 - 2, format: tar.FormatGNU}))
}
