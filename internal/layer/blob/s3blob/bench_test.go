package s3blob

import (
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
	s := mustOpen(b, config(b))
	const size = 8 << 20
	blobtest.MustPut(b, s, "a", blobtest.Bytes(size))
	p := make([]byte, 128<<10)
	start := cpu()
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.ReadAt(b.Context(), "a", p, int64(n%63)*int64(len(p))); err != nil {
			b.Fatal(err)
		}
		n++
	}
	b.ReportMetric(float64((cpu()-start).Microseconds())/float64(n), "cpu-µs/op")
}
