package lazy

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// pidOf is the process of a pidfd, which is closed.
func pidOf(t *testing.T, pidfd int) int {
	t.Helper()
	defer unix.Close(pidfd)
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", pidfd))
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	for line := range strings.Lines(string(b)) {
		if n, _ := fmt.Sscanf(line, "Pid: %d", &pid); n == 1 {
			return pid
		}
	}
	t.Fatalf("no process in %s", b)
	return 0
}

// imageFiles are how many descriptors of files of dir a process has.
func imageFiles(t *testing.T, pid int, dir string) (n int) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil && strings.HasPrefix(to, dir+"/") {
			n++
		}
	}
	return n
}

// Of images that were evicted and that nobody uses no file is open, in any process,
// and they can be read again.
func TestEvictedImagesHoldNoFiles(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 1<<20, MinChunk)
			cfg := f.config(t, front)
			cfg.Limits.CacheBytes = 1 << 20
			c := connect(t, cfg)
			pid := pidOf(t, layerdOf(t, c))
			type one struct {
				im    Image
				truth []byte
			}
			var images []one
			for i := range 12 {
				im, truth := f.add(t, fmt.Sprint("image ", i), 1<<20, MinChunk)
				images = append(images, one{im, truth})
			}
			for range 2 {
				for _, o := range images {
					file := openImageFile(t, c, o.im)
					checkFile(t, file, o.truth, 0, o.im.Size)
					_ = file.Close()
					release(t, c, o.im.Key)
				}
				// Two for each image with chunks: the last, and the one before it in part.
				if n := imageFiles(t, pid, cfg.CacheDir); n > 4 {
					t.Errorf("layerd has %d files of images open", n)
				}
				if n := imageFiles(t, os.Getpid(), cfg.CacheDir); n > 0 {
					t.Errorf("its client has %d", n)
				}
			}
			// What was opened and not read has no chunk either.
			unread := openImageFile(t, c, images[0].im)
			if n := imageFiles(t, pid, cfg.CacheDir); n > 6 {
				t.Errorf("layerd has %d files of images open", n)
			}
			_ = unread.Close()
			release(t, c, images[0].im.Key)
			if n := imageFiles(t, pid, cfg.CacheDir); n > 4 {
				t.Errorf("layerd has %d files of images open", n)
			}
			// Prefetches of what is not used, too.
			for _, o := range images {
				if err := c.Prefetch(t.Context(), o.im, nil, nil); err != nil {
					t.Fatal(err)
				}
			}
			if n := imageFiles(t, pid, cfg.CacheDir); n > 4 {
				t.Errorf("layerd has %d files of images open after prefetches", n)
			}
			// Its successor opens none of what is not there.
			pidfd := layerdOf(t, c)
			sendSignal(t, pidfd, unix.SIGKILL)
			ended(t, pidfd)
			for e := range c.Events() {
				if e.Kind == EventRestarted {
					break
				}
			}
			pid = pidOf(t, layerdOf(t, c))
			if n := imageFiles(t, pid, cfg.CacheDir); n > 4 {
				t.Errorf("the next layerd has %d files of images open", n)
			}
			for _, o := range images {
				file := openImageFile(t, c, o.im)
				checkFile(t, file, o.truth, 0, o.im.Size)
				_ = file.Close()
				release(t, c, o.im.Key)
			}
		})
	}
}

// A file of the FUSE mount that is open though its image was released is served on,
// also of an image that was evicted.
func TestAnOpenFileOfAReleasedImage(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 1<<20, MinChunk)
	cfg := f.config(t, FUSE)
	cfg.Limits.CacheBytes = 1 << 20
	c := connect(t, cfg)
	pid := pidOf(t, layerdOf(t, c))
	file := openImageFile(t, c, f.image)
	checkFile(t, file, f.truth, 0, f.image.Size)
	release(t, c, f.image.Key)
	other, truth := f.add(t, "other", 1<<20, MinChunk)
	checkFile(t, openImageFile(t, c, other), truth, 0, other.Size)
	if s := statsOf(t, c, f.image.Key); s.Present > 0 {
		t.Errorf("%+v", s)
	}
	if n := imageFiles(t, pid, cfg.CacheDir); n != 2 {
		t.Errorf("layerd has %d files of images open, want those of one", n)
	}
	for range 3 {
		if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		checkFile(t, file, f.truth, 0, f.image.Size)
	}
}
