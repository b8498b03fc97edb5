package convert

import (
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/opendsec/dsec/internal/layer/tardir"
)

// BenchmarkConvert is the conversion alone: no helper, no digest, no sync.
func BenchmarkConvert(b *testing.B) {
	dir := os.Getenv("DSEC_BENCH_DIR")
	if dir == "" {
		dir = filepath.Join(runtime.GOROOT(), "src") //nolint:staticcheck // a large tree that is there where this is run
	}
	tmp := b.TempDir()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(tmp, name))
		if err != nil {
			b.Fatal(err)
		}
		return f
	}
	archive := open("tar")
	defer archive.Close()
	if _, err := tardir.Write(archive, dir); err != nil {
		b.Fatal(err)
	}
	size, _ := archive.Seek(0, io.SeekEnd)
	for b.Loop() {
		b.StopTimer()
		image, scratch := open("image"), open("scratch")
		_, _ = archive.Seek(0, io.SeekStart)
		b.StartTimer()
		if _, err := Convert(archive, image, scratch, Options{}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		_, _ = image.Close(), scratch.Close()
		_, _ = os.Remove(image.Name()), os.Remove(scratch.Name())
		b.StartTimer()
	}
	b.SetBytes(size)
}
