package hostos

import (
	"errors"
	"io/fs"
	"path/filepath"
	"regexp"
	"testing"
)

func TestAFileIsHeldUntilItIsClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path); !errors.Is(err, ErrLocked) {
		t.Errorf("held twice: %v, want ErrLocked", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if f, err = Lock(path); err != nil {
		t.Fatalf("after it was closed: %v", err)
	}
	_ = f.Close()
	if _, err := Lock(filepath.Join(path, "below")); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("a path that cannot be: %v", err)
	}
}

func TestSyncDirNeedsTheDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := SyncDir(dir); err != nil {
		t.Error(err)
	}
	if err := SyncDir(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a directory that is not there: %v", err)
	}
}

func TestBootIDIsAUUIDAndStays(t *testing.T) {
	id, err := BootID()
	if err != nil || !regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(id) {
		t.Fatalf("%q, %v", id, err)
	}
	if again, err := BootID(); err != nil || again != id {
		t.Errorf("%q, then %q, %v", id, again, err)
	}
}
