package lazy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
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
// also of an image that was evicted, and whichever process dies, until it is closed.
func TestAnOpenFileOfAReleasedImage(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 1<<20, MinChunk)
	cfg, ticks := f.config(t, FUSE), make(chan time.Time)
	cfg.Limits.CacheBytes, cfg.ticks = 1<<20, ticks
	c, err := Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stopLayerd(t, c) }) // of whichever there is
	file := openImageFile(t, c, f.image)
	checkFile(t, file, f.truth, 0, f.image.Size)
	left := func(what string, want bool) {
		t.Helper()
		if s := statsOf(t, c, f.image.Key); s.InUse || s.Open != want {
			t.Errorf("%s: %+v, want open %v", what, s, want)
		}
		records, err := os.ReadDir(filepath.Join(cfg.RunDir, "served"))
		if err != nil || (len(records) == 1) != want {
			t.Errorf("%s: records %v, %v", what, records, err)
		}
	}
	if err := c.Release(t.Context(), f.image.Key); err != nil {
		t.Fatal(err)
	}
	left("released", true)
	other, truth := f.add(t, "other", 2<<20, MinChunk)
	otherFile := openImageFile(t, c, other)
	checkFile(t, otherFile, truth, 0, other.Size)
	if s := statsOf(t, c, f.image.Key); s.Present > 0 {
		t.Errorf("%+v", s)
	}
	if n := imageFiles(t, pidOf(t, layerdOf(t, c)), cfg.CacheDir); n != 2 {
		t.Errorf("layerd has %d files of images open, want those of one", n)
	}
	reads := func() {
		t.Helper()
		for range 3 {
			if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			checkFile(t, file, f.truth, 0, f.image.Size)
		}
	}
	reads()
	_ = otherFile.Close()
	release(t, c, other.Key)
	for range 3 {
		ticks <- time.Time{}
	}
	left("looked at", true)
	if err := c.Stop(t.Context()); dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("stopped: %v", err)
	}

	pidfd := layerdOf(t, c)
	sendSignal(t, pidfd, unix.SIGKILL)
	ended(t, pidfd)
	reads()
	left("after layerd was killed", true)
	c.Close()
	if c, err = Connect(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if lost := c.Lost(); len(lost) > 0 {
		t.Errorf("lost: %v", lost)
	}
	reads()
	left("with the next client", true)

	_ = file.Close()
	testutil.WaitFor(t, 20*time.Second, "an image that nobody has open", func() error {
		ticks <- time.Time{}
		if s := statsOf(t, c, f.image.Key); s.Open {
			return errors.New("it is open")
		}
		return nil
	})
	left("closed", false)
	if n := imageFiles(t, os.Getpid(), cfg.CacheDir); n > 0 {
		t.Errorf("the client has %d files of images open", n)
	}
	again := openImageFile(t, c, f.image)
	checkFile(t, again, f.truth, 0, f.image.Size)
}
