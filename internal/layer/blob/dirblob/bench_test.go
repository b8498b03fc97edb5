package dirblob

import (
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
)

func cpu() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func BenchmarkReadAt(b *testing.B) {
	dir := b.TempDir()
	s := mustOpen(b, dir)
	blobtest.MustPut(b, s, "sha256/a", blobtest.Bytes(8<<20))
	f, _ := os.Open(dir + "/sha256/a")
	defer f.Close()
	p := make([]byte, 128<<10)
	for name, read := range map[string]func(off int64) error{
		"store": func(off int64) error { _, err := s.ReadAt(b.Context(), "sha256/a", p, off); return err },
		"file":  func(off int64) error { _, err := f.ReadAt(p, off); return err },
	} {
		b.Run(name, func(b *testing.B) {
			start := cpu()
			n := 0
			b.ReportAllocs()
			for b.Loop() {
				if err := read(int64(n%63) * int64(len(p))); err != nil {
					b.Fatal(err)
				}
				n++
			}
			b.ReportMetric(float64((cpu()-start).Nanoseconds())/float64(n)/1000, "cpu-µs/op")
		})
	}
}
