package lazy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

var bothFrontEnds = []FrontEnd{Fanotify, FUSE}

func (f *fixture) config(t testing.TB, front FrontEnd, command ...string) Config {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		RunDir: filepath.Join(f.dir, "run"), CacheDir: filepath.Join(f.dir, "cache"), FrontEnd: front,
		Store:   Store{URL: "test:" + f.store.dir, Secrets: map[string]string{"token": "of the test"}},
		Command: append([]string{exe, Verb}, command...), Log: testutil.Logger(t),
	}
}

// connect connects a client whose layerd ends with the test.
func connect(t testing.TB, cfg Config) *Client {
	t.Helper()
	c, err := Connect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stopLayerd(t, c)
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(cfg.RunDir, "layerd.log"))
			t.Logf("layerd's log:\n%s", b[max(0, len(b)-8000):])
		}
	})
	return c
}

// stopLayerd ends a client and its layerd, whatever that serves.
func stopLayerd(t testing.TB, c *Client) {
	if c.stopping.Load() {
		return
	}
	c.stopping.Store(true)
	pidfd := layerdOf(t, c)
	if err := unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0); err != nil {
		t.Error(err)
	}
	ended(t, pidfd)
	c.Close()
}

// layerdOf returns a pidfd of the layerd that c is connected to.
func layerdOf(t testing.TB, c *Client) int {
	t.Helper()
	for {
		c.mu.Lock()
		conn, up := c.conn, c.up
		c.mu.Unlock()
		if conn == nil {
			<-up
			continue
		}
		raw, err := conn.c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		pidfd := -1
		_ = raw.Control(func(fd uintptr) {
			cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
			if err == nil {
				pidfd, _ = unix.PidfdOpen(int(cred.Pid), 0)
			}
		})
		if pidfd >= 0 {
			return pidfd
		}
	}
}

// ended waits for the end of a process, and closes its pidfd.
func ended(t testing.TB, pidfd int) {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 20_000)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			t.Errorf("the process does not end: %v", err)
		}
		_ = unix.Close(pidfd)
		return
	}
}

func openImageFile(t testing.TB, c *Client, im Image) *os.File {
	t.Helper()
	file, err := c.Open(t.Context(), im)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return file
}

func statsOf(t testing.TB, c *Client, key string) Stats {
	t.Helper()
	all, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.Key == key {
			return s
		}
	}
	t.Fatalf("no stats of %q", key)
	return Stats{}
}

// release gives an image back and waits until nobody has it open.
func release(t testing.TB, c *Client, key string) {
	t.Helper()
	if err := c.Release(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, 10*time.Second, "release", func() error {
		if s := statsOf(t, c, key); s.Open || s.InUse {
			return errors.New("still open")
		}
		return nil
	})
}

func checkFile(t testing.TB, file *os.File, truth []byte, off, n int64) {
	t.Helper()
	p := make([]byte, n)
	if _, err := file.ReadAt(p, off); err != nil {
		t.Fatalf("read %d at %d: %v", n, off, err)
	}
	if !bytes.Equal(p, truth[off:off+n]) {
		t.Fatalf("read %d at %d: wrong bytes", n, off)
	}
}

func TestAnImageIsServedOnDemand(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 8<<20+777, 128<<10)
			cfg := f.config(t, front)
			cfg.Limits.Trace = true
			c := connect(t, cfg)
			file := openImageFile(t, c, f.image)
			st, err := file.Stat()
			if err != nil || st.Size() != f.image.Size {
				t.Fatalf("size %d, %v", st.Size(), err)
			}
			checkFile(t, file, f.truth, 5<<20+100, 200)
			if s := statsOf(t, c, f.image.Key); s.Present < 1 || s.Present > 12 || !s.InUse || s.Reads == 0 {
				t.Errorf("after one read: %+v", s)
			}
			ranges, err := c.Trace(t.Context(), f.image.Key)
			if err != nil || len(ranges) == 0 || ranges[0].Offset != 5<<20 {
				t.Errorf("trace %v, %v", ranges, err)
			}
			for range 200 {
				n := rand.Int64N(100_000) + 1
				checkFile(t, file, f.truth, rand.Int64N(f.image.Size-n), n)
			}
			checkFile(t, file, f.truth, 0, f.image.Size)
			again := openImageFile(t, c, f.image)
			checkFile(t, again, f.truth, 0, f.image.Size)
			if s := statsOf(t, c, f.image.Key); s.Present != s.Chunks || s.Fetched != s.Chunks || s.Errors != 0 || s.Corrupt != 0 {
				t.Errorf("complete: %+v", s)
			}
			if err := c.Stop(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
				t.Errorf("stopped while it is in use: %v", err)
			}
			_ = file.Close()
			_ = again.Close()
			if err := c.Release(t.Context(), f.image.Key); err != nil {
				t.Fatal(err)
			}
			testutil.WaitFor(t, 10*time.Second, "stop", func() error { return c.Stop(t.Context()) })
			if left, _ := os.ReadDir(filepath.Join(cfg.RunDir, "served")); len(left) > 0 {
				t.Errorf("records are left: %v", left)
			}
		})
	}
}

func TestPrefetch(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 20<<20, 256<<10)
	c := connect(t, f.config(t, ""))
	var last Progress
	part := []Range{{10 << 20, 1 << 20}, {0, 1}}
	if err := c.Prefetch(t.Context(), f.image, part, func(p Progress) { last = p }); err != nil {
		t.Fatal(err)
	}
	if want := int64(1<<20 + 256<<10); last.Done != want || last.Total != want {
		t.Errorf("progress %+v, want %d", last, want)
	}
	if s := statsOf(t, c, f.image.Key); s.Present != 5 || s.InUse {
		t.Errorf("%+v", s)
	}
	if err := c.Prefetch(t.Context(), f.image, nil, nil); err != nil {
		t.Fatal(err)
	}
	if s := statsOf(t, c, f.image.Key); s.Present != s.Chunks || s.Fetched != s.Chunks {
		t.Errorf("%+v", s)
	}
	f.store.set(t, faults{Hang: true})
	file := openImageFile(t, c, f.image)
	checkFile(t, file, f.truth, 0, f.image.Size)

	other, _ := f.add(t, "other", 4<<20, 64<<10)
	ctx, cancel := context.WithCancel(t.Context())
	began := make(chan struct{})
	go func() {
		<-began
		cancel()
	}()
	var once sync.Once
	if err := c.Prefetch(ctx, other, nil, func(Progress) { once.Do(func() { close(began) }) }); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	f.store.set(t, faults{})
}

func TestUnusableOpens(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 1<<20, MinChunk)
	c := connect(t, f.config(t, ""))
	openImageFile(t, c, f.image)
	short, odd, other := f.image, f.image, f.image
	short.Hashes = short.Hashes[1:]
	odd.ChunkSize--
	other.Hashes = slices.Clone(other.Hashes)
	other.Hashes[0]++
	for want, im := range map[dsec.Code][]Image{dsec.CodeInvalid: {short, odd, {}}, dsec.CodeConflict: {other}} {
		for _, im := range im {
			if _, err := c.Open(t.Context(), im); err == nil || dsec.CodeOf(err) != want {
				t.Errorf("%v, want %s", err, want)
			}
		}
	}
	if err := c.Release(t.Context(), "none"); dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Error(err)
	}
	if err := c.Settle(t.Context(), f.image.Key); dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Error(err)
	}
	cfg := f.config(t, "none")
	if _, err := Connect(t.Context(), cfg); dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Error(err)
	}
}

// blockedReader is a process that reads one byte of a file.
func blockedReader(t *testing.T, file *os.File, off int64) *os.Process {
	t.Helper()
	dd, err := filepath.EvalSymlinks("/usr/bin/dd")
	if err != nil {
		dd = "/bin/dd"
	}
	p, err := os.StartProcess(dd, []string{"dd", "if=/dev/stdin", "of=/dev/null", "bs=1", "count=1", "skip=" + fmt.Sprint(off), "iflag=skip_bytes"},
		&os.ProcAttr{Files: []*os.File{file, nil, nil}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAReaderOfAHungStoreCanBeKilled(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			f.store.set(t, faults{Deaf: true})
			c := connect(t, f.config(t, front))
			file := openImageFile(t, c, f.image)
			reader := blockedReader(t, file, 1<<20)
			testutil.WaitFor(t, 20*time.Second, "a read that waits", func() error {
				stack, err := os.ReadFile(fmt.Sprintf("/proc/%d/stack", reader.Pid))
				if err == nil && !strings.Contains(string(stack), "fanotify") && !strings.Contains(string(stack), "fuse") && !strings.Contains(string(stack), "folio") {
					err = fmt.Errorf("it does not wait: %s", stack)
				}
				return err
			})
			// All else answers.
			if _, err := c.Stats(t.Context()); err != nil {
				t.Error(err)
			}
			other, _ := f.add(t, "other", 1<<20, MinChunk)
			openImageFile(t, c, other)
			if err := c.Release(t.Context(), other.Key); err != nil {
				t.Error(err)
			}
			if err := reader.Kill(); err != nil {
				t.Fatal(err)
			}
			if st, err := reader.Wait(); err != nil || st.Success() {
				t.Errorf("%v, %v", st, err)
			}
			f.store.set(t, faults{})
			checkFile(t, file, f.truth, 0, f.image.Size)
		})
	}
}

func TestReadersGetAnErrorAndThenTheTruth(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			cfg := f.config(t, front)
			cfg.Limits = Limits{RetryFor: 200 * time.Millisecond, CallFor: 100 * time.Millisecond}
			c := connect(t, cfg)
			file := openImageFile(t, c, f.image)
			f.store.set(t, faults{Unavailable: true})
			if n, err := file.ReadAt(make([]byte, 100), 1<<20); !errors.Is(err, unix.EIO) {
				t.Errorf("%d, %v, want EIO", n, err)
			}
			if e := <-c.Events(); e.Kind != EventDegraded || e.Key != f.image.Key {
				t.Errorf("event %+v", e)
			}
			if s := statsOf(t, c, f.image.Key); s.Degraded == "" || s.Errors == 0 {
				t.Errorf("%+v", s)
			}
			f.store.set(t, faults{Corrupt: 1000})
			if n, err := file.ReadAt(make([]byte, 100), 1<<20); !errors.Is(err, unix.EIO) {
				t.Errorf("%d, %v, want EIO", n, err)
			}
			f.store.set(t, faults{})
			checkFile(t, file, f.truth, 0, f.image.Size)
			if s := statsOf(t, c, f.image.Key); s.Degraded != "" {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestReleasedImagesAreEvictedAndComeAgain(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			cfg := f.config(t, front)
			cfg.Limits.CacheBytes = 6 << 20
			c := connect(t, cfg)
			image, truth := f.add(t, "second", 4<<20, MinChunk)
			for range 3 {
				for _, one := range []struct {
					im    Image
					truth []byte
				}{{f.image, f.truth}, {image, truth}} {
					file := openImageFile(t, c, one.im)
					checkFile(t, file, one.truth, 0, one.im.Size)
					_ = file.Close()
					release(t, c, one.im.Key)
				}
			}
			var present int64
			stats, err := c.Stats(t.Context())
			for _, s := range stats {
				present += s.Present * MinChunk
			}
			if err != nil || present > 6<<20 || present < 4<<20 {
				t.Errorf("%d bytes are kept, want 4 to 6 MiB; %v", present, err)
			}
		})
	}
}
