package convert

import (
	"archive/tar"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// The kernel, too, shows the same files of an image that was cut.
func TestKernelShowsCutImagesAsTheSame(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay)
	cuts := 0
	rapid.Check(t, func(rt *rapid.T) {
		archive := randomImage(t, rt)
		one, _, err := cutImages(t, archive, 1, Options{})
		if err != nil {
			rt.Skip(err)
		}
		most := rapid.Int64Range(1, 60_000).Draw(rt, "most")
		all, _, err := cutImages(t, archive, 6, Options{CollapseBytes: most})
		if err != nil {
			rt.Fatal(err)
		}
		if diff := cmp.Diff(shown(t, one), shown(t, all)); diff != "" {
			rt.Errorf("%d layers (-one, +cut):\n%s", len(all), diff)
		}
		cuts += len(all) - 1
	})
	if cuts == 0 {
		t.Error("nothing was cut")
	}
}

// What a layer hides is not listed, also where nothing is below that could be hidden: in a
// directory that no other layer has, or that is opaque.
func TestKernelListsNoWhiteouts(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay)
	base := mustConvert(t, tarOf(t, file("d/low"), file("e/low"))).image
	for name, archive := range map[string][]byte{
		"of OCI":       tarOf(t, file("alone/.wh.x"), file("alone/y"), file("d/.wh..wh..opq"), file("d/.wh.low"), file("d/z"), file("e/.wh.low"), file("e/f/.wh.g")),
		"of overlayfs": tarOf(t, entry{name: "alone/x", kind: tar.TypeChar}, file("alone/y"), file("d/.wh..wh..opq"), entry{name: "d/low", kind: tar.TypeChar}, file("d/z"), entry{name: "e/low", kind: tar.TypeChar}, entry{name: "e/f/g", kind: tar.TypeChar}),
	} {
		top, err := convertBytes(t, archive, Options{Kind: dsec.LayerToolkit})
		if err != nil {
			t.Fatal(err)
		}
		got := slices.Sorted(maps.Keys(shown(t, [][]byte{base, top.image}))) // which fails for a name that is listed and not there
		if want := []string{".", "alone", "alone/y", "d", "d/z", "e", "e/f"}; !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// shown is what the kernel shows of images, lowest first, in a mount namespace that
// ends with its only thread.
func shown(t testing.TB, images [][]byte) (files map[string]string) {
	t.Helper()
	dir := t.TempDir()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked: the namespace ends with the goroutine
		done <- func() (err error) {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			var lower []string
			for i, image := range images {
				file, at := filepath.Join(dir, fmt.Sprint("image", i)), filepath.Join(dir, fmt.Sprint(i))
				if err := os.WriteFile(file, image, 0o600); err != nil {
					return err
				}
				if err := os.Mkdir(at, 0o700); err != nil {
					return err
				}
				if err := unix.Mount(file, at, "erofs", unix.MS_RDONLY, ""); err != nil {
					return err
				}
				lower = append(lower, at)
			}
			root := lower[0]
			if len(lower) > 1 {
				slices.Reverse(lower)
				root = filepath.Join(dir, "root")
				if err := os.Mkdir(root, 0o700); err != nil {
					return err
				}
				if err := unix.Mount("overlay", root, "overlay", unix.MS_RDONLY, "lowerdir="+strings.Join(lower, ":")); err != nil {
					return err
				}
			}
			files, err = statAll(root)
			return err
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return files
}

// statAll tells of each path what stat(2) and reads do, and of which file it is a name.
func statAll(root string) (map[string]string, error) {
	files, first := map[string]string{}, map[string]string{}
	return files, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at, _ := filepath.Rel(root, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		what := fmt.Sprintf("%o %d:%d %d.%d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		value := make([]byte, 64)
		if n, err := unix.Lgetxattr(path, "user.n", value); err == nil {
			what += fmt.Sprintf(" user.n=%q", value[:n])
		}
		if !d.IsDir() {
			inode := fmt.Sprintf("%d %d", st.Dev, st.Ino)
			if first[inode] == "" {
				first[inode] = at
			}
			what += " is " + first[inode]
		}
		switch d.Type() {
		case fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			what += " -> " + target
		case 0:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			what += fmt.Sprintf(" %x", sha256.Sum256(content))
		}
		files[at] = what
		return nil
	})
}
