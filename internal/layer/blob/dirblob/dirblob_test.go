package dirblob

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/layer/blob"
)

func TestRoundTrip(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	want := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	for _, key := range []string{"data/b", "data-1", "data.x", "a"} {
		if err := s.Put(ctx, key, bytes.NewReader(want), int64(len(want))); err != nil {
			t.Fatal(err)
		}
	}
	f, err := s.Temp()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(f, "linked"); err != nil {
		t.Fatal(err)
	}
	if err := s.Link(ctx, "data/linked", f); err != nil {
		t.Fatal(err)
	}
	f.Close()
	got := make([]byte, len(want)+1)
	if n, err := s.ReadAt(ctx, "data/b", got, 0); n != len(want) || err != io.EOF || !bytes.Equal(got[:n], want) {
		t.Errorf("read %d bytes, %v", n, err)
	}
	var keys []string
	if err := s.List(ctx, "data", func(i blob.Info) error { keys = append(keys, i.Key); return nil }); err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(keys, " "), "data-1 data.x data/b data/linked"; got != want {
		t.Errorf("listed %s, want %s", got, want)
	}
	if err := s.Delete(ctx, "data/b"); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Join(dir, tempDir))
	if err != nil || len(left) != 0 {
		t.Errorf("unfinished files: %v, %v", left, err)
	}
}
