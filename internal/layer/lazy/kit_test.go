package lazy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/testutil"
)

// The test binary is layerd too, so that it dies as a process of its own.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Verb {
		os.Exit(layerdMain(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "client" {
		os.Exit(clientMain(os.Args[2:]))
	}
	os.Exit(m.Run())
}

func signalContext() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), unix.SIGTERM)
}

// layerdMain is layerd. The arguments are the step at which it kills itself, at
// the how manieth time, and a file: it does only if that is there, and removes it.
func layerdMain(args []string) int {
	ctx, stop := signalContext()
	defer stop()
	cfg := ServerConfig{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), OpenStore: openDirStore}
	if len(args) == 3 {
		var mu sync.Mutex
		left, _ := strconv.Atoi(args[1])
		cfg.Crash = func(step string) {
			if step != args[0] {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if _, err := os.Stat(args[2]); err != nil {
				return
			}
			if left--; left == 0 && os.Remove(args[2]) == nil {
				_ = unix.Kill(os.Getpid(), unix.SIGKILL)
				select {}
			}
		}
	}
	if err := Serve(ctx, cfg); err != nil {
		cfg.Log.Error("layerd", "error", err)
		return 1
	}
	return 0
}

// dirStore is a store over a directory, whose faults a file in it tells, so that
// the test and layerd may be two processes.
type dirStore struct{ dir string }

// faults is what a dirStore does wrong.
type faults struct {
	Delay       time.Duration
	Unavailable bool
	Hang        bool  // until the context ends
	Deaf        bool  // hang without regard to the context, until Hang is gone
	Corrupt     int64 // the next so many reads
}

func openDirStore(_ context.Context, s Store) (blob.Store, error) {
	if s.Secrets["token"] != "of the test" {
		return nil, &dsec.Error{Code: dsec.CodeDenied, Message: "wrong token"}
	}
	return &dirStore{strings.TrimPrefix(s.URL, "test:")}, nil
}

func (s *dirStore) faults() (f faults) {
	b, err := os.ReadFile(filepath.Join(s.dir, "faults"))
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		panic(err)
	}
	return f
}

func (s *dirStore) set(t testing.TB, f faults) {
	t.Helper()
	if err := s.put(f); err != nil {
		t.Fatal(err)
	}
}

func (s *dirStore) put(f faults) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	next, err := os.CreateTemp(s.dir, "faults-")
	if err != nil {
		return err
	}
	_, err = next.Write(b)
	return errors.Join(err, next.Close(), os.Rename(next.Name(), filepath.Join(s.dir, "faults")))
}

func (s *dirStore) ReadAt(ctx context.Context, key string, p []byte, off int64) (int, error) {
	for {
		f := s.faults()
		if f.Deaf || f.Hang && ctx.Err() == nil {
			wait(context.Background(), 5*time.Millisecond)
			continue
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		wait(ctx, f.Delay)
		if f.Unavailable {
			return 0, &dsec.Error{Code: dsec.CodeUnavailable, Message: "the test says so"}
		}
		n, err := s.read(key, p, off)
		if f.Corrupt > 0 && n > 0 {
			p[n/2] ^= 1
			f.Corrupt--
			_ = s.put(f) // layerd may not
		}
		return n, err
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func (s *dirStore) read(key string, p []byte, off int64) (int, error) {
	f, err := os.Open(filepath.Join(s.dir, name(key)))
	if err != nil {
		return 0, &dsec.Error{Code: dsec.CodeNotFound, Message: "no such blob"}
	}
	defer f.Close()
	log, err := os.OpenFile(filepath.Join(s.dir, "reads"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		_, _ = log.WriteString(strconv.FormatInt(off, 10) + " " + strconv.Itoa(len(p)) + "\n")
		_ = log.Close()
	}
	n, err := f.ReadAt(p, off)
	if n == len(p) {
		err = nil
	}
	return n, err
}

// fetched returns how many bytes were read of each chunk.
func (s *dirStore) fetched(t testing.TB, im *Image) map[int64]int64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.dir, "reads"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	got := map[int64]int64{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		off, _ := strconv.ParseInt(f[0], 10, 64)
		n, _ := strconv.ParseInt(f[1], 10, 64)
		for at := off; at < off+n; at += im.ChunkSize {
			got[at/im.ChunkSize]++
		}
	}
	return got
}

func (s *dirStore) Put(context.Context, string, io.Reader, int64) error { return errors.ErrUnsupported }
func (s *dirStore) Stat(context.Context, string) (blob.Info, error) {
	return blob.Info{}, errors.ErrUnsupported
}
func (s *dirStore) List(context.Context, string, func(blob.Info) error) error {
	return errors.ErrUnsupported
}
func (s *dirStore) Delete(context.Context, string) error { return errors.ErrUnsupported }

// fixture is one image in a store.
type fixture struct {
	dir   string
	store *dirStore
	image Image
	truth []byte
}

// newFixture makes an image of so many bytes. Its directory is on the disk of the
// temporary files, which must be one that fanotify can watch where root tests run.
func newFixture(t testing.TB, size, chunk int64) *fixture {
	t.Helper()
	f := &fixture{dir: testutil.Dir(t)}
	f.store = &dirStore{filepath.Join(f.dir, "store")}
	for _, d := range []string{"store", "cache", "run"} {
		if err := os.Mkdir(filepath.Join(f.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	f.image, f.truth = f.add(t, "sha256:of the test", size, chunk)
	return f
}

// add puts one more image into the store. No 8 bytes of it are zero.
func (f *fixture) add(t testing.TB, key string, size, chunk int64) (Image, []byte) {
	t.Helper()
	truth := make([]byte, size)
	r := rand.NewChaCha8(sha256.Sum256([]byte(key)))
	_, _ = r.Read(truth)
	for i := range truth {
		truth[i] |= 1
	}
	return f.addBytes(t, key, truth, chunk), truth
}

func (f *fixture) addBytes(t testing.TB, key string, truth []byte, chunk int64) Image {
	t.Helper()
	if err := os.WriteFile(filepath.Join(f.store.dir, name(key)), truth, 0o600); err != nil {
		t.Fatal(err)
	}
	im := Image{Key: key, Size: int64(len(truth)), ChunkSize: chunk}
	for i := range im.chunks() {
		r := im.chunk(i)
		sum := sha256.Sum256(truth[r.Offset : r.Offset+r.Length])
		im.Hashes = append(im.Hashes, sum[:]...)
	}
	return im
}

// cache opens a cache in this process.
func (f *fixture) cache(t testing.TB, limits Limits) (*cache, chan Event) {
	t.Helper()
	events := make(chan Event, 1000)
	dir, err := os.Open(filepath.Join(f.dir, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := newCache(dir, testutil.Logger(t), func(string) {}, func(e Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	c.configure(f.store, limits)
	t.Cleanup(func() {
		c.close()
		_ = dir.Close()
	})
	return c, events
}

func (f *fixture) open(t testing.TB, c *cache, im *Image) *image {
	t.Helper()
	i, err := c.open(im)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// check reads a range of an image and compares it.
func check(t testing.TB, c *cache, im *image, truth []byte, off, n int64) {
	t.Helper()
	p := make([]byte, n)
	if err := c.readAt(t.Context(), im, p, off); err != nil {
		t.Fatalf("read %d at %d: %v", n, off, err)
	}
	if !bytes.Equal(p, truth[off:off+n]) {
		t.Fatalf("read %d at %d: wrong bytes", n, off)
	}
}
