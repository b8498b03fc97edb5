package layer

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/faultfs"
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

// faultyStore is a store on a file system that can be made to fail.
func faultyStore(t *testing.T) (*Store, *faultfs.FS) {
	t.Helper()
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	backing, at := filepath.Join(dir, "backing"), filepath.Join(dir, "at")
	if err := errors.Join(os.Mkdir(backing, 0o700), os.Mkdir(at, 0o700)); err != nil {
		t.Fatal(err)
	}
	fs, err := faultfs.Mount(at, backing)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	blobs, err := dirblob.Open(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { fs.Set(nil); _ = blobs.Close() })
	return openStore(t, Options{Blobs: blob.Wrap(blobs, blob.Options{}), Own: true}), fs
}

// A store that does not answer holds neither the scrub's end up nor anything else.
func TestScrubOfAHungStore(t *testing.T) {
	s, fs := faultyStore(t)
	m := build(t, s, noise(1, 3<<20))
	hold(t, s, m)
	var reads atomic.Int64
	hang := func(op faultfs.Op) faultfs.Fault {
		return faultfs.Fault{Hang: op == faultfs.Read && reads.Add(1) == 2}
	}
	fs.Set(hang)
	sc := startScrub(t, s, func(o *ScrubOptions) { o.Timeout = 3 * time.Second }) // more than a start takes
	testutil.WaitFor(t, 20*time.Second, "a read that is not answered", func() error {
		if reads.Load() < 2 || sc.value(t, "dsec_scrub_errors_total", "") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	stuck := readers(t)
	if len(stuck) != 1 {
		t.Fatalf("%d reading processes, want the one that is stuck", len(stuck))
	}
	if _, err := s.Get(t.Context(), m.Digest); err != nil {
		t.Error(err)
	}
	sc.stop() // returns, though the process cannot end
	if left := readers(t); !slices.Equal(left, stuck) {
		t.Errorf("reading processes %v, want %v: it was not stuck", left, stuck)
	}
	fs.Set(nil)
	testutil.WaitFor(t, 20*time.Second, "the end of what was stuck", func() error {
		if left := readers(t); len(left) > 0 {
			return errors.New("it is there")
		}
		return nil
	})
	sc = startScrub(t, s, nil)
	<-sc.idle
	sc.wantMismatches(t, 0, 0)
	if n := sc.value(t, "dsec_scrub_bytes_total", ""); n == 0 || n > float64(m.DataSize) {
		t.Errorf("%v bytes", n)
	}
}

// readers are the reading processes that this process has started.
func readers(t *testing.T) (pids []string) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range tasks {
		b, _ := os.ReadFile(f) // a thread that ended has none
		for pid := range strings.FieldsSeq(string(b)) {
			if lives(pid) {
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids)
	return pids
}

// lives reports whether a process has a thread that has not ended: the first may
// have, while another is stuck.
func lives(pid string) bool {
	stats, _ := filepath.Glob("/proc/" + pid + "/task/*/stat")
	for _, f := range stats {
		if stat, err := os.ReadFile(f); err == nil && !bytes.Contains(stat, []byte(") Z ")) && !bytes.Contains(stat, []byte(") X ")) {
			return true
		}
	}
	return false
}

// A late store is waited for; one that lies once is told of, one that goes on lying
// is damaged; one that fails is none of these.
func TestScrubOfABadStore(t *testing.T) {
	s, fs := faultyStore(t)
	m := build(t, s, noise(1, 3<<20))
	hold(t, s, m)
	sc := startScrub(t, s, nil)
	<-sc.idle
	day := func() {
		sc.clock.Add(int64(24 * time.Hour))
		<-sc.more
		<-sc.idle
	}
	fs.Set(func(faultfs.Op) faultfs.Fault { return faultfs.Fault{Delay: 3 * time.Millisecond} })
	day()
	sc.want(t, 2*m.DataSize, 0, 0)
	var reads atomic.Int64
	fs.Set(func(op faultfs.Op) faultfs.Fault {
		return faultfs.Fault{Lie: op == faultfs.Read && reads.Add(1) == 1}
	})
	day()
	sc.want(t, 3*m.DataSize, 1, 0)
	fs.Set(func(op faultfs.Op) faultfs.Fault {
		if op == faultfs.Read {
			return faultfs.Fault{Errno: unix.EIO}
		}
		return faultfs.Fault{}
	})
	day()
	sc.want(t, 3*m.DataSize, 1, 0)
	if len(s.Lost()) > 0 || sc.value(t, "dsec_scrub_errors_total", "") == 0 {
		t.Errorf("lost %v", s.Lost())
	}
	fs.Set(func(op faultfs.Op) faultfs.Fault { return faultfs.Fault{Lie: op == faultfs.Read} })
	day()
	if sc.value(t, "dsec_scrub_mismatches_total", "twice") == 0 || !slices.Equal(s.Lost(), []string{m.Digest}) {
		t.Errorf("lost %v", s.Lost())
	}
}
