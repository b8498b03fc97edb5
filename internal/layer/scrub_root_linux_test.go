package layer

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// A byte that changes below a layer that is mounted is read by who has it mounted,
// for the kernel believes the store; the scrub finds it.
func TestScrubBelowAMountedLayer(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS)
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	text := noise(1, 3<<20)
	m := build(t, s, text)
	hold(t, s, m)
	mounted(t, devices(t, s, m.Digest), func(at string) {
		flip(t, filepath.Join(dir, "blobs"), m, 1<<20+17)
		got, err := os.ReadFile(filepath.Join(at, "file"))
		if err != nil {
			t.Error(err)
			return
		}
		if bytes.Equal(got, []byte(text)) {
			t.Error("the byte is not of the file, or not read")
		}
		sc := startScrub(t, s, nil)
		<-sc.idle
		sc.want(t, m.DataSize, 0, 1)
		if lost := s.Lost(); !slices.Equal(lost, []string{m.Digest}) {
			t.Errorf("lost: %v", lost)
		}
	})
}

// The scrub leaves the page cache as it is: what sandboxes have read stays, and what
// it has read does not come.
func TestScrubLeavesThePageCache(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 5))
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	m := build(t, s, noise(1, 8<<20))
	hold(t, s, m)
	f, err := os.Open(filepath.Join(dir, "blobs", blobKey(m.Digest, partData)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cached := func() uint64 {
		var st unix.Cachestat_t
		if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Len: uint64(m.DataSize)}, &st, 0); err != nil {
			t.Fatal(err)
		}
		return st.Cache
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	if cached() != 0 {
		t.Skip("this file system keeps files in memory")
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil { // nothing is read ahead
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, 300<<10), 2<<20+100); err != nil {
		t.Fatal(err)
	}
	before := cached()
	if before == 0 {
		t.Fatal("what was read is not in the page cache")
	}
	sc := startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, m.DataSize, 0, 0)
	if after := cached(); after != before {
		t.Errorf("%d pages were in the page cache before, %d are after", before, after)
	}
}
