package dirblob

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
)

func mustOpen(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantNoTemps fails the test where an unfinished file stays.
func wantNoTemps(t testing.TB, dir string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(dir, tempDir))
	if err != nil || len(left) != 0 {
		t.Errorf("unfinished files: %v, %v", left, err)
	}
}

func TestSuite(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store {
		dir := filepath.Join(t.TempDir(), "new", "store")
		t.Cleanup(func() { wantNoTemps(t, dir) })
		return mustOpen(t, dir)
	})
}
