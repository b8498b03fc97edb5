package lazy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// bench is an image that a benchmark reads, with names enough to read it cold
// again and again.
type bench struct {
	f    *fixture
	c    *Client
	n    int
	im   Image
	file *os.File
}

func newBench(b *testing.B, front FrontEnd, size int64) *bench {
	testutil.Require(b, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(b, size, 128<<10)
	k := &bench{f: f, c: connect(b, f.config(b, front)), im: f.image}
	return k
}

// cold opens the image under a name of which nothing is local.
func (k *bench) cold(b *testing.B) {
	b.Helper()
	if k.file != nil {
		_ = k.file.Close()
		release(b, k.c, k.im.Key)
		for _, kind := range []string{".meta", ".map", ".data"} {
			_ = os.Remove(filepath.Join(k.f.dir, "cache", name(k.im.Key)+kind))
		}
	}
	k.n++
	k.im.Key = fmt.Sprintf("%s %d", k.f.image.Key, k.n)
	if err := os.Link(filepath.Join(k.f.store.dir, name(k.f.image.Key)), filepath.Join(k.f.store.dir, name(k.im.Key))); err != nil {
		b.Fatal(err)
	}
	k.file = openImageFile(b, k.c, k.im)
}

// cpu returns the nanoseconds of CPU that layerd has used.
func (k *bench) cpu(b *testing.B) (ns int64) {
	b.Helper()
	raw, err := k.c.conn.c.SyscallConn()
	if err != nil {
		b.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			b.Fatal(err)
		}
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", cred.Pid))
		for _, t := range tasks {
			var one int64
			s, _ := os.ReadFile(t)
			_, _ = fmt.Sscan(string(s), &one)
			ns += one
		}
	})
	return ns
}

func (k *bench) measure(b *testing.B, read func(i int)) {
	before := k.cpu(b)
	i := 0
	for b.Loop() {
		read(i)
		i++
	}
	b.ReportMetric(float64(k.cpu(b)-before)/float64(i)/1000, "layerd-µs/op")
}

func BenchmarkColdRandom4K(b *testing.B) {
	for _, front := range bothFrontEnds {
		b.Run(string(front), func(b *testing.B) {
			k := newBench(b, front, 128<<20)
			p := make([]byte, 4096)
			var order []int
			k.measure(b, func(i int) {
				if i%1024 == 0 {
					b.StopTimer()
					k.cold(b)
					order = rand.Perm(1024)
					b.StartTimer()
				}
				if _, err := k.file.ReadAt(p, int64(order[i%1024])*(128<<10)+8192); err != nil {
					b.Fatal(err)
				}
			})
		})
	}
}

func BenchmarkColdSequential(b *testing.B) {
	for _, front := range bothFrontEnds {
		b.Run(string(front), func(b *testing.B) {
			k := newBench(b, front, 64<<20)
			p := make([]byte, 128<<10)
			b.SetBytes(64 << 20)
			k.measure(b, func(int) {
				b.StopTimer()
				k.cold(b)
				b.StartTimer()
				for off := int64(0); off < 64<<20; off += int64(len(p)) {
					if _, err := k.file.ReadAt(p, off); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}

func BenchmarkLocalRandom4K(b *testing.B) {
	for _, front := range bothFrontEnds {
		for _, whole := range []bool{true, false} {
			what := map[bool]string{true: "complete", false: "but-one-chunk"}[whole]
			b.Run(string(front)+"/"+what, func(b *testing.B) {
				k := newBench(b, front, 128<<20)
				k.cold(b)
				ranges := []Range{{0, 128 << 20}}
				if !whole {
					ranges[0].Length -= 128 << 10
				}
				if err := k.c.Prefetch(b.Context(), k.im, ranges, nil); err != nil {
					b.Fatal(err)
				}
				data, err := os.Open(filepath.Join(k.f.dir, "cache", name(k.im.Key)+".data"))
				if err != nil {
					b.Fatal(err)
				}
				defer data.Close()
				p := make([]byte, 4096)
				_, _ = k.file.ReadAt(p, 0) // a complete file loses its mark at its next read
				_ = data.Sync()
				k.measure(b, func(i int) {
					if i%256 == 0 {
						b.StopTimer()
						for _, f := range []*os.File{k.file, data} {
							_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
						}
						b.StartTimer()
					}
					off := rand.Int64N(1023*32) * 4096
					if _, err := k.file.ReadAt(p, off); err != nil {
						b.Fatal(err)
					}
				})
			})
		}
	}
}

// memoryStore is a store that costs nothing.
type memoryStore struct {
	dirStore
	b []byte
}

func (s *memoryStore) ReadAt(_ context.Context, _ string, p []byte, off int64) (int, error) {
	return copy(p, s.b[off:]), nil
}

// BenchmarkFill is what one chunk costs without a front end and a store.
func BenchmarkFill(b *testing.B) {
	f := newFixture(b, 64<<20, 128<<10)
	c, _ := f.cache(b, Limits{})
	c.configure(&memoryStore{b: f.truth}, Limits{})
	im := f.open(b, c, &f.image)
	n := int(im.chunks())
	i := 0
	b.SetBytes(128 << 10)
	for b.Loop() {
		if i%n == 0 {
			b.StopTimer()
			c.filling.Wait()
			im.exclusive(func() { c.drop(im, 1<<40, false) })
			b.StartTimer()
		}
		// From the back to the front: nothing is read ahead.
		if err := c.wait(b.Context(), im, Range{int64(n-1-i%n) * im.ChunkSize, 4096}); err != nil {
			b.Fatal(err)
		}
		i++
	}
}
