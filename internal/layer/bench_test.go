package layer

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/opendsec/dsec/internal/layer/tardir"
)

// BenchmarkBuild imports the Go tree, or DSEC_BENCH_DIR, from a tar file.
func BenchmarkBuild(b *testing.B) {
	dir := os.Getenv("DSEC_BENCH_DIR")
	if dir == "" {
		dir = filepath.Join(runtime.GOROOT(), "src") //nolint:staticcheck // a large tree that is there where this is run
	}
	f, err := os.Create(filepath.Join(b.TempDir(), "tar"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if _, err := tardir.Write(f, dir); err != nil {
		b.Fatal(err)
	}
	s := openStore(b, Options{})
	var meta Meta
	for b.Loop() {
		b.StopTimer()
		if meta.Digest != "" {
			if err := s.Remove(b.Context(), meta.Digest); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if meta, _, err = s.Build(context.Background(), BuildOptions{}, f); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(meta.SourceSize)
	b.ReportMetric(float64(meta.Size)/(1<<20), "MiB/image")
}
