package dirblob

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
	"github.com/opendsec/dsec/internal/testutil"
)

// ext4 is the directory of a small ext4 of its own.
func ext4(t *testing.T) string {
	t.Helper()
	testutil.Require(t, testutil.Program("mkfs.ext4"), testutil.Program("mount"))
	dir := testutil.Dir(t)
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "at")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, argv := range [][]string{
		{"truncate", "-s", "64M", image}, {"mkfs.ext4", "-q", "-m", "0", image}, {"mount", "-o", "loop", image, at},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil { // the loop device goes with it
			t.Error(err)
		}
	})
	return at
}

// TestFullDisk fills file systems to their last byte: a put is exhausted, changes
// nothing, and works again once there is room.
func TestFullDisk(t *testing.T) {
	testutil.Require(t, testutil.Root)
	for name, disk := range map[string]func(*testing.T) string{
		"tmpfs": func(t *testing.T) string { return testutil.SmallDisk(t, "size=16m") }, "ext4": ext4,
	} {
		t.Run(name, func(t *testing.T) {
			dir := disk(t)
			s := mustOpen(t, dir)
			b := blobtest.Bytes(4 << 20)
			blobtest.MustPut(t, s, "there", b)
			if err := os.WriteFile(filepath.Join(dir, tempDir, "of-another-host"), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			fill := testutil.Fill(t, dir)
			blobtest.WantBlob(t, mustOpen(t, dir), "there", b) // without the room to ask what time it is
			if err := os.Remove(filepath.Join(dir, tempDir, "of-another-host")); err != nil {
				t.Fatal(err)
			}
			testutil.Fill(t, dir)
			if err := s.Sweep(t.Context()); err != nil {
				t.Errorf("sweep: %v", err)
			}
			blobtest.WantCode(t, "put", s.Put(t.Context(), "new/key", bytes.NewReader(b), int64(len(b))), dsec.CodeExhausted, "")
			blobtest.WantNone(t, s, "new/key")
			wantNoTemps(t, dir)
			blobtest.WantBlob(t, s, "there", b)
			f, err := s.Temp()
			if err != nil {
				t.Fatal(err)
			}
			_, err = f.Write(b)
			if err == nil {
				err = f.Sync()
			}
			_ = f.Close()
			if err == nil {
				t.Error("a file without a name found room on a full disk")
			}
			if err := os.Remove(fill); err != nil {
				t.Fatal(err)
			}
			blobtest.MustPut(t, s, "new/key", b)
			blobtest.WantBlob(t, s, "new/key", b)
		})
	}
}

func TestSuiteOnDisks(t *testing.T) {
	testutil.Require(t, testutil.Root)
	for name, disk := range map[string]func(*testing.T) string{
		"tmpfs": func(t *testing.T) string { return testutil.SmallDisk(t, "size=64m") }, "ext4": ext4,
	} {
		t.Run(name, func(t *testing.T) {
			blobtest.Run(t, func(t *testing.T) blob.Store {
				dir := disk(t)
				t.Cleanup(func() { wantNoTemps(t, dir) })
				return mustOpen(t, dir)
			})
		})
	}
}

// TestReadOnly reads a store that cannot be written to.
func TestReadOnly(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	rw, ro := filepath.Join(dir, "rw"), filepath.Join(dir, "ro")
	if err := os.Mkdir(ro, 0o700); err != nil {
		t.Fatal(err)
	}
	b := blobtest.Bytes(10_000)
	blobtest.MustPut(t, mustOpen(t, rw), "there/key", b)
	if err := unix.Mount(rw, ro, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(ro, 0); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount("", ro, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	s := mustOpen(t, ro)
	blobtest.WantBlob(t, s, "there/key", b)
	if keys := blobtest.Keys(t, s, ""); keys != "there/key" {
		t.Errorf("listed %s", keys)
	}
	if err := s.Put(t.Context(), "there/key", bytes.NewReader(b), int64(len(b))); err != nil {
		t.Errorf("put of what is there: %v", err)
	}
	blobtest.WantCode(t, "put", s.Put(t.Context(), "new", bytes.NewReader(b), int64(len(b))), dsec.CodeUnsupported, "")
	blobtest.WantCode(t, "delete", s.Delete(t.Context(), "there/key"), dsec.CodeUnsupported, "")
	_, err := s.Temp()
	blobtest.WantCode(t, "temp", err, dsec.CodeUnsupported, "")
	blobtest.WantBlob(t, s, "there/key", b)
}
