package lazy

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// frontOf is the front end that a file comes by.
func frontOf(t *testing.T, file *os.File) FrontEnd {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if st.Type == unix.FUSE_SUPER_MAGIC {
		return FUSE
	}
	return Fanotify
}

func otherFrontEnd(front FrontEnd) FrontEnd {
	if front == FUSE {
		return Fanotify
	}
	return FUSE
}

// A client that wants the other front end has what is served served on, and opened
// again, by the one that it has; once nobody has it, it comes by the other.
func TestAClientWithTheOtherFrontEnd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			first, err := Connect(t.Context(), f.config(t, front))
			if err != nil {
				t.Fatal(err)
			}
			file := openImageFile(t, first, f.image)
			checkFile(t, file, f.truth, 0, 1000)
			first.Close()
			c := connect(t, f.config(t, otherFrontEnd(front)))
			if lost := c.Lost(); len(lost) > 0 {
				t.Errorf("lost: %v", lost)
			}
			r := startReaders(t, 2, file, f.truth, false)
			again := openImageFile(t, c, f.image)
			if got := frontOf(t, again); got != front {
				t.Errorf("opened by %s while it is served by %s", got, front)
			}
			checkFile(t, again, f.truth, 2<<20, 1<<20)
			pidfd := layerdOf(t, c) // and the next layerd has both
			sendSignal(t, pidfd, unix.SIGKILL)
			ended(t, pidfd)
			checkFile(t, again, f.truth, 0, f.image.Size)
			r.end()
			if lost := c.Lost(); len(lost) > 0 {
				t.Errorf("lost: %v", lost)
			}
			_ = file.Close()
			_ = again.Close()
			release(t, c, f.image.Key)
			now := openImageFile(t, c, f.image)
			if got := frontOf(t, now); got == front {
				t.Errorf("opened by %s though nobody has it", got)
			}
			checkFile(t, now, f.truth, 0, f.image.Size)
		})
	}
}

// lose has an image be lost, which the file has open.
func (f *fixture) lose(t *testing.T, front FrontEnd) *os.File {
	t.Helper()
	cfg := f.config(t, front)
	a := startAgent(t, cfg, f.image)
	checkFile(t, a.file, f.truth, 0, 1000)
	pidfd := layerdIn(t, cfg.RunDir)
	a.kill(t) // first: it would start another layerd
	sendSignal(t, pidfd, unix.SIGKILL)
	ended(t, pidfd)
	return a.file
}

// What is lost can be settled by a client that wants the other front end.
func TestALostImageAndTheOtherFrontEnd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			old := f.lose(t, front)
			c := connect(t, f.config(t, otherFrontEnd(front)))
			if lost := c.Lost(); !slices.Equal(lost, []string{f.image.Key}) {
				t.Fatalf("lost: %v", lost)
			}
			if _, err := c.Open(t.Context(), f.image); err == nil {
				t.Error("opened though it is lost")
			}
			if err := c.Settle(t.Context(), f.image.Key); err != nil { // though old is open
				t.Fatal(err)
			}
			file := openImageFile(t, c, f.image)
			if got := frontOf(t, file); got == front {
				t.Errorf("opened by %s", got)
			}
			checkFile(t, file, f.truth, 0, f.image.Size)
			_ = old.Close()
			_ = file.Close()
			release(t, c, f.image.Key)
		})
	}
}

// What is lost and not settled is so too with a layerd that takes the place of the
// one that knew it.
func TestALostImageAndTheNextLayerd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			old := f.lose(t, front)
			c := connect(t, f.config(t, front))
			pidfd := layerdOf(t, c)
			sendSignal(t, pidfd, unix.SIGKILL)
			ended(t, pidfd)
			for e := range c.Events() {
				if e.Kind == EventRestarted {
					break
				}
			}
			if lost := c.Lost(); !slices.Equal(lost, []string{f.image.Key}) {
				t.Fatalf("lost: %v", lost)
			}
			if _, err := c.Open(t.Context(), f.image); err == nil {
				t.Error("opened though it is lost")
			}
			if n, err := old.ReadAt(make([]byte, 4096), 3<<20); err == nil && front == Fanotify {
				t.Errorf("read %d bytes of a lost image", n)
			}
			_ = old.Close()
			testutil.WaitFor(t, 10*time.Second, "settle", func() error { return c.Settle(t.Context(), f.image.Key) })
			file := openImageFile(t, c, f.image)
			checkFile(t, file, f.truth, 0, f.image.Size)
		})
	}
}

// layerd goes on without a client as long as somebody reads through it, and no longer.
func TestLayerdEndsOnceNobodyNeedsIt(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			cfg := f.config(t, front)
			client := func() *Client {
				t.Helper()
				c, err := Connect(t.Context(), cfg)
				if err != nil {
					t.Fatal(err)
				}
				return c
			}
			c := client()
			file := openImageFile(t, c, f.image)
			pidfd := layerdOf(t, c)
			end := layerdOf(t, c)
			t.Cleanup(func() { // of one that failed
				_ = unix.PidfdSendSignal(end, unix.SIGKILL, nil, 0)
				_ = unix.Close(end)
			})
			c.Close()
			checkFile(t, file, f.truth, 0, 1<<20)
			c = client()
			if err := c.Release(t.Context(), f.image.Key); err != nil {
				t.Fatal(err)
			}
			c.Close()
			checkFile(t, file, f.truth, 1<<20, 1<<20)
			if front == FUSE { // only a client can tell whether it is open
				c = client()
				checkFile(t, file, f.truth, 2<<20, 1<<20)
				_ = file.Close()
				c.Close()
			} else {
				_ = file.Close()
			}
			ended(t, pidfd)
		})
	}
}

// A release that failed is repeated, unless the image was opened again.
func TestAReleaseThatFailed(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 1<<20, MinChunk)
			cfg, ticks := f.config(t, front), make(chan time.Time)
			cfg.ticks = ticks
			c := connect(t, cfg)
			fails := func(key string) {
				t.Helper()
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				if err := c.Release(ctx, key); err == nil {
					t.Fatal("released without time")
				}
			}
			other, truth := f.add(t, "opened again", 1<<20, MinChunk)
			_ = openImageFile(t, c, f.image).Close()
			_ = openImageFile(t, c, other).Close()
			fails(f.image.Key)
			fails(other.Key)
			again := openImageFile(t, c, other)
			testutil.WaitFor(t, 10*time.Second, "a release", func() error {
				ticks <- time.Time{}
				if s := statsOf(t, c, f.image.Key); s.InUse || s.Open {
					return errors.New("in use")
				}
				return nil
			})
			if s := statsOf(t, c, other.Key); !s.InUse {
				t.Errorf("what was opened again was released: %+v", s)
			}
			checkFile(t, again, truth, 0, other.Size)
		})
	}
}
