package lazy

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// readers read random ranges of a file over and over, drop it from the page cache
// now and then, and compare every byte.
type readers struct {
	stop  chan struct{}
	wg    sync.WaitGroup
	reads atomic.Int64
}

func startReaders(t *testing.T, n int, file *os.File, truth []byte, mayFail bool) *readers {
	r := &readers{stop: make(chan struct{})}
	for range n {
		r.wg.Go(func() {
			p := make([]byte, 200_000)
			for {
				select {
				case <-r.stop:
					return
				default:
				}
				n := rand.Int64N(min(int64(len(p)), int64(len(truth)))) + 1
				off := rand.Int64N(int64(len(truth)) - n + 1)
				got, err := file.ReadAt(p[:n], off)
				if !bytes.Equal(p[:got], truth[off:][:got]) {
					t.Errorf("wrong bytes in %d at %d", got, off)
					return
				}
				if err != nil && !mayFail {
					t.Errorf("read: %v", err)
					return
				}
				if err != nil {
					wait(t.Context(), time.Millisecond)
				}
				if r.reads.Add(1)%16 == 0 {
					_ = unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
				}
			}
		})
	}
	return r
}

func (r *readers) end() {
	close(r.stop)
	r.wg.Wait()
}

// layerd is killed at each step of its work, once, while readers read.
func TestCrashOfLayerdAtEachStep(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		for _, step := range CrashSteps {
			if front == Fanotify && strings.HasPrefix(step, "fuse.") ||
				front == FUSE && (strings.HasPrefix(step, "event.") || step == "open.armed" || step == "image.unmarked") {
				continue
			}
			t.Run(string(front)+"/"+step, func(t *testing.T) { crashAt(t, front, step) })
		}
	}
}

func crashAt(t *testing.T, front FrontEnd, step string) {
	f := newFixture(t, 6<<20, MinChunk)
	f.store.set(t, faults{Delay: time.Millisecond})
	marker := filepath.Join(f.dir, "run", "kill") // where layerd may remove it
	n := "1"
	if strings.HasPrefix(step, "event.") || strings.HasPrefix(step, "fuse.") {
		n = "4"
	}
	cfg := f.config(t, front, step, n, marker)
	cfg.Limits.CacheBytes = 5 << 20
	c := connect(t, cfg)
	if err := os.WriteFile(marker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before := layerdOf(t, c)
	file := openImageFile(t, c, f.image)
	r := startReaders(t, 4, file, f.truth, false)
	checkFile(t, file, f.truth, 0, f.image.Size)
	if strings.HasPrefix(step, "evict.") && front == Fanotify { // nothing goes while it is in use
		r.end()
		_ = file.Close()
		release(t, c, f.image.Key)
		other, truth := f.add(t, "other", 4<<20, MinChunk)
		otherFile := openImageFile(t, c, other)
		checkFile(t, otherFile, truth, 0, other.Size)
		file = openImageFile(t, c, f.image)
		r = startReaders(t, 4, file, f.truth, false)
	}
	checkFile(t, file, f.truth, 0, f.image.Size)
	ended(t, before)
	if _, err := os.Stat(marker); !errors.Is(err, os.ErrNotExist) {
		t.Error("it did not kill itself")
	}
	r.end()
	checkFile(t, file, f.truth, 0, f.image.Size)
	if lost := c.Lost(); len(lost) > 0 {
		t.Errorf("lost: %v", lost)
	}
	if s := statsOf(t, c, f.image.Key); s.Corrupt > 0 || s.Errors > 0 {
		t.Errorf("%+v", s)
	}
}

// layerd is killed again and again at any moment.
func TestCrashOfLayerdAtAnyMoment(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 24<<20, MinChunk)
			f.store.set(t, faults{Delay: 3 * time.Millisecond})
			cfg := f.config(t, front)
			cfg.Limits.ReadAhead = MinChunk
			c := connect(t, cfg)
			file := openImageFile(t, c, f.image)
			r := startReaders(t, 6, file, f.truth, false)
			for range 12 {
				pidfd := layerdOf(t, c)
				wait(t.Context(), time.Duration(rand.IntN(20_000))*time.Microsecond)
				_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
				ended(t, pidfd)
			}
			r.end()
			checkFile(t, file, f.truth, 0, f.image.Size)
			if r.reads.Load() == 0 {
				t.Error("nothing was read")
			}
			if lost := c.Lost(); len(lost) > 0 {
				t.Errorf("lost: %v", lost)
			}
		})
	}
}

// clientMain is a node agent that opens an image and waits to be killed. Over
// descriptor 3 it tells what is lost, with the file.
func clientMain(args []string) int {
	var cfg Config
	var im Image
	if err := errors.Join(json.Unmarshal([]byte(args[0]), &cfg), json.Unmarshal([]byte(args[1]), &im)); err != nil {
		panic(err)
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	conn, err := net.FileConn(os.NewFile(3, "test"))
	if err != nil {
		panic(err)
	}
	ctx, cancel := signalContext()
	defer cancel()
	c, err := Connect(ctx, cfg)
	if err != nil {
		panic(err)
	}
	lost := c.Lost()
	var files []*os.File
	if len(lost) == 0 {
		file, err := c.Open(ctx, im)
		if err != nil {
			panic(err)
		}
		files = append(files, file)
	}
	m := &message{Hello: &hello{Lost: lost}}
	if err := newConnection(conn.(*net.UnixConn)).send(m, files...); err != nil {
		panic(err)
	}
	<-ctx.Done()
	return 0
}

// agent is a clientMain.
type agent struct {
	p    *os.Process
	lost []string
	file *os.File
}

func startAgent(t *testing.T, cfg Config, im Image) *agent {
	t.Helper()
	cfg.Log = nil
	cfgJSON, err1 := json.Marshal(cfg)
	imJSON, err2 := json.Marshal(im)
	fds, err3 := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	theirs, ours := os.NewFile(uintptr(fds[0]), "theirs"), os.NewFile(uintptr(fds[1]), "ours")
	defer ours.Close()
	cmd := exec.Command(cfg.Command[0], "client", string(cfgJSON), string(imJSON))
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	m, files, err := newConnection(conn.(*net.UnixConn)).receive()
	if err != nil {
		t.Fatalf("the agent died: %v, %v", err, cmd.Wait())
	}
	a := &agent{p: cmd.Process, lost: m.Hello.Lost}
	if len(files) == 1 {
		a.file = files[0]
		t.Cleanup(func() { a.file.Close() })
	}
	return a
}

func (a *agent) kill(t *testing.T) {
	t.Helper()
	_ = a.p.Kill()
	if _, err := a.p.Wait(); err != nil {
		t.Error(err)
	}
}

// layerdIn returns a pidfd of the layerd that listens in the run directory.
func layerdIn(t *testing.T, runDir string) int {
	t.Helper()
	conn, err := net.Dial("unixpacket", filepath.Join(runDir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	pidfd := -1
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pidfd, _ = unix.PidfdOpen(int(cred.Pid), 0)
		}
	})
	if pidfd < 0 {
		t.Fatal("no layerd")
	}
	return pidfd
}

func TestCrashOfTheClient(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 24<<20, MinChunk)
			f.store.set(t, faults{Delay: 3 * time.Millisecond})
			cfg := f.config(t, front)
			cfg.Limits.ReadAhead = MinChunk
			a := startAgent(t, cfg, f.image)
			r := startReaders(t, 4, a.file, f.truth, false)
			a.kill(t)
			b := startAgent(t, cfg, f.image) // finds the same layerd
			if len(b.lost) > 0 {
				t.Errorf("lost: %v", b.lost)
			}
			// And the other way round: what b has from layerd is enough for a new one.
			pidfd := layerdIn(t, cfg.RunDir)
			_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
			ended(t, pidfd)
			checkFile(t, a.file, f.truth, 0, f.image.Size)
			b.kill(t)
			c := connect(t, cfg)
			if lost := c.Lost(); len(lost) > 0 {
				t.Errorf("lost: %v", lost)
			}
			r.end()
			checkFile(t, a.file, f.truth, 0, f.image.Size)
		})
	}
}

func TestCrashOfBoth(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 8<<20, MinChunk)
			cfg := f.config(t, front)
			a := startAgent(t, cfg, f.image)
			checkFile(t, a.file, f.truth, 0, 100_000)
			pidfd := layerdIn(t, cfg.RunDir)
			// The client first: it would start another layerd.
			r := startReaders(t, 2, a.file, f.truth, front == FUSE)
			a.kill(t)
			r.end() // what is read after both died is not asserted: holes are zeros
			_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
			ended(t, pidfd)

			b := startAgent(t, cfg, f.image) // it asks what is lost, and opens nothing then
			if !slices.Equal(b.lost, []string{f.image.Key}) {
				t.Fatalf("lost: %v, want %q", b.lost, f.image.Key)
			}
			pidfd = layerdIn(t, cfg.RunDir)
			b.kill(t) // it did not settle it: the next one is told too
			_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
			ended(t, pidfd)

			c := connect(t, cfg)
			if !slices.Equal(c.Lost(), []string{f.image.Key}) {
				t.Fatalf("lost: %v, want %q", c.Lost(), f.image.Key)
			}
			if _, err := c.Open(t.Context(), f.image); err == nil {
				t.Error("opened though it is lost")
			}
			// Who still reads gets errors, or what the kernel has of it: by FUSE that is
			// true, by fanotify it may be zeros and so is not to be had.
			b4k := make([]byte, 4096)
			if n, err := a.file.ReadAt(b4k, 7<<20); err == nil && (front == Fanotify || !bytes.Equal(b4k, f.truth[7<<20:][:n])) {
				t.Errorf("read %d bytes of a lost image", n)
			}
			if front == Fanotify {
				if err := c.Settle(t.Context(), f.image.Key); err == nil {
					t.Error("settled while it is open")
				}
			}
			_ = a.file.Close()
			testutil.WaitFor(t, 10*time.Second, "settle", func() error { return c.Settle(t.Context(), f.image.Key) })
			if len(c.Lost()) > 0 {
				t.Errorf("lost: %v", c.Lost())
			}
			file := openImageFile(t, c, f.image)
			checkFile(t, file, f.truth, 0, f.image.Size)
		})
	}
}

// A FUSE connection that the kernel ends loses what it served, and another takes
// its place.
func TestCrashOfTheConnection(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 4<<20, MinChunk)
	c := connect(t, f.config(t, FUSE))
	file := openImageFile(t, c, f.image)
	checkFile(t, file, f.truth, 0, 1000)
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	ctl := testutil.Dir(t)
	if err := unix.Mount("none", ctl, "fusectl", 0, ""); err != nil {
		t.Skipf("fusectl: %v", err)
	}
	defer func() {
		if err := unix.Unmount(ctl, 0); err != nil {
			t.Error(err)
		}
	}()
	abort := filepath.Join(ctl, strconv.Itoa(int(unix.Minor(st.Dev))), "abort")
	if err := os.WriteFile(abort, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	for e := range c.Events() {
		if e.Kind == EventLost {
			break
		}
	}
	if n, err := file.ReadAt(make([]byte, 100), 3<<20); err == nil {
		t.Errorf("read %d bytes of what is lost", n)
	}
	if lost := c.Lost(); !slices.Equal(lost, []string{f.image.Key}) {
		t.Errorf("lost: %v", lost)
	}
	if err := c.Settle(t.Context(), f.image.Key); err != nil {
		t.Fatal(err)
	}
	checkFile(t, openImageFile(t, c, f.image), f.truth, 0, f.image.Size)
}
