package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/layer/tardir"
	"github.com/opendsec/dsec/internal/testutil"
)

// devices opens what a layer is mounted from, as paths.
func devices(t *testing.T, s *Store, digest string) []string {
	t.Helper()
	files, _, err := s.Open(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, f := range files {
		t.Cleanup(func() { _ = f.Close() })
		paths = append(paths, fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	}
	return paths
}

// mounted calls f with a place where the kernel has mounted the image, in a
// mount namespace that only f's thread is in.
func mounted(t *testing.T, devices []string, f func(dir string)) {
	t.Helper()
	options := ""
	if len(devices) > 1 {
		options = "device=" + devices[1]
	}
	dir := t.TempDir()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Not unlocked: the thread, and with it the namespace and the mount,
		// ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Mount(devices[0], dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID, options); err != nil {
			t.Errorf("mount: %v", err)
			return
		}
		f(dir)
	}()
	<-done
}

// snapshot is what a program can see of a tree: a line for each name. alone
// says that no file of the tree has a name outside of it.
func snapshot(dir string, alone bool) (map[string]string, error) {
	lines := map[string]string{}
	first := map[uint64]string{} // inode to its first name
	count := map[string]uint64{} // first name to the inode's link count
	found := map[string]uint64{} // first name to its names in this tree
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
			return nil
		}
		line := fmt.Sprintf("mode=%o owner=%d:%d mtime=%d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		if !d.IsDir() {
			f, ok := first[st.Ino]
			if !ok {
				f, first[st.Ino] = rel, rel
			}
			line += " same=" + f
			count[f] = uint64(st.Nlink) //nolint:unconvert // 32 bits on arm64
			found[f]++
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " target=" + target
		case unix.S_IFREG:
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			h := sha256.New()
			if _, err := io.Copy(h, f); err != nil {
				return err
			}
			line += fmt.Sprintf(" size=%d sum=%x", st.Size, h.Sum(nil)[:8])
		}
		names := make([]byte, 64<<10)
		n, err := unix.Llistxattr(path, names)
		if err != nil {
			return err
		}
		for name := range strings.SplitSeq(string(names[:n]), "\x00") {
			if strings.HasPrefix(name, "user.") {
				value := make([]byte, 64<<10)
				n, err := unix.Lgetxattr(path, name, value)
				if err != nil {
					return err
				}
				line += fmt.Sprintf(" %s=%q", name, value[:n])
			}
		}
		lines[rel] = line
		return nil
	})
	for f, n := range found {
		if alone && count[f] != n {
			lines[f] += fmt.Sprintf(" nlink=%d names=%d", count[f], n)
		}
	}
	return lines, err
}

// oddTree makes what archives of real machines seldom hold all of.
func oddTree(t *testing.T) string {
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(name string, size int) {
		must(os.WriteFile(filepath.Join(dir, name), bytes.Repeat([]byte(name[:1]), size), 0o644))
	}
	for _, size := range []int{0, 1, 4031, 4032, 4033, 4095, 4096, 4097, 8192, 1 << 20, 1<<20 + 1} {
		write(fmt.Sprintf("size-%d", size), size)
	}
	must(os.Truncate(filepath.Join(dir, "size-1"), 3<<20)) // a hole
	must(os.Mkdir(filepath.Join(dir, "many"), 0o755))
	for i := range 2500 {
		write(fmt.Sprintf("many/a-rather-long-name-for-a-file-%d", i), i%7)
	}
	deep := "deep"
	for range 60 {
		deep += "/directory"
	}
	must(os.MkdirAll(filepath.Join(dir, deep), 0o755))
	write(deep+"/bottom", 10)
	write("bin\xff\xfe\n\t name", 5)
	write(strings.Repeat("n", 255), 5)
	must(os.Symlink(strings.Repeat("t", 4000), filepath.Join(dir, "long-link")))
	must(os.Symlink("../../etc/passwd", filepath.Join(dir, "out")))
	must(os.Link(filepath.Join(dir, "size-4096"), filepath.Join(dir, "many/zz-hard")))
	must(os.Link(filepath.Join(dir, "size-4096"), filepath.Join(dir, "a-hard")))
	must(unix.Linkat(unix.AT_FDCWD, filepath.Join(dir, "out"), unix.AT_FDCWD, filepath.Join(dir, deep, "hard-link-to-link"), 0))
	must(unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	must(unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0))
	write("setuid", 3)
	must(os.Chown(filepath.Join(dir, "setuid"), 1000, 70000))
	must(os.Chmod(filepath.Join(dir, "setuid"), 0o755|fs.ModeSetuid|fs.ModeSetgid))
	must(os.Mkdir(filepath.Join(dir, "sticky"), 0o700))
	must(os.Chmod(filepath.Join(dir, "sticky"), 0o777|fs.ModeSticky))
	must(unix.Setxattr(filepath.Join(dir, "setuid"), "user.note", []byte("a\x00b\nc"), 0))
	must(unix.Setxattr(filepath.Join(dir, "sticky"), "user.big", bytes.Repeat([]byte("v"), 1500), 0))
	must(unix.Setxattr(filepath.Join(dir, "size-4096"), "user.empty", nil, 0))
	old := time.Date(1999, 12, 31, 23, 59, 59, 123456789, time.UTC)
	must(os.Chtimes(filepath.Join(dir, "size-0"), old, old))
	return dir
}

// What the kernel shows of a layer is what was in the directory.
func TestRoundTripThroughKernel(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	trees := map[string]string{"odd": oddTree(t), "etc": "/etc", "bin": "/usr/bin", "go": filepath.Join(runtime.GOROOT(), "src/net")} //nolint:staticcheck // a tree that is there where this is built
	if _, err := os.Stat("/usr/lib/python3"); err == nil {
		trees["python"] = "/usr/lib/python3"
	}
	s := openStore(t, Options{})
	for name, dir := range trees {
		t.Run(name, func(t *testing.T) {
			pr, pw := io.Pipe()
			go func() { _, err := tardir.Write(pw, dir); _ = pw.CloseWithError(err) }()
			meta, findings, err := s.Build(context.Background(), BuildOptions{}, pr)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d files, %d bytes, findings: %q", meta.Files, meta.Size, findings)
			want, err := snapshot(dir, false)
			if err != nil {
				t.Fatal(err)
			}
			release, err := s.Hold(t.Context(), meta.Digest)
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			from := devices(t, s, meta.Digest)
			mounted(t, from, func(at string) {
				got, err := snapshot(at, true)
				if err != nil {
					t.Error(err)
				}
				if int64(len(got)) != meta.Files+1 {
					t.Errorf("%d names, metadata say %d", len(got), meta.Files)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("directory and mounted layer differ (-want +got):\n%.4000s", diff)
				}
			})
			fsck(t, from)
			// Look-ups read the index alone.
			want, err = names(dir)
			if err != nil {
				t.Fatal(err)
			}
			if len(from) > 1 {
				hole, err := os.CreateTemp(t.TempDir(), "hole")
				if err != nil {
					t.Fatal(err)
				}
				defer hole.Close()
				if err := hole.Truncate(meta.DataSize); err != nil {
					t.Fatal(err)
				}
				from[1] = hole.Name()
			}
			mounted(t, from, func(at string) {
				got, err := names(at)
				if err != nil {
					t.Error(err)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("directory and layer without data differ (-want +got):\n%.4000s", diff)
				}
			})
		})
	}
}

// names are those of a tree, with the targets of symbolic links.
func names(dir string) (map[string]string, error) {
	found := map[string]string{}
	return found, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type() == fs.ModeSocket {
			return err
		}
		target := ""
		if d.Type() == fs.ModeSymlink {
			target, err = os.Readlink(path)
		}
		found[strings.TrimPrefix(path, dir)] = target
		return err
	})
}

func fsck(t *testing.T, devices []string) {
	t.Helper()
	prog, err := exec.LookPath("fsck.erofs")
	if err != nil {
		t.Log("fsck.erofs is not installed: not run")
		return
	}
	// fsck.erofs has descriptors of its own: it gets ours by our number.
	args := []string{strings.Replace(devices[0], "self", fmt.Sprint(os.Getpid()), 1)}
	for _, d := range devices[1:] {
		args = append(args, "--device="+strings.Replace(d, "self", fmt.Sprint(os.Getpid()), 1))
	}
	if out, err := exec.Command(prog, args...).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}
