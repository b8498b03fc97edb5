package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/testutil"
)

// S19: a sandbox that fills its disk stops at its limit, takes no more of the
// host, and gives all of it back.
func TestFillDisk(t *testing.T) {
	h := newHost(t, nil)
	limit := h.request().Spec.Limits.DiskBytes
	neighbour := h.create()
	s := h.create()
	free, allocated := h.diskFree(), h.diskAllocated()
	o := s.sh("i=0; while dd if=/dev/zero of=/fill$i bs=64k count=160 2>/dev/shm/error; do i=$((i+1)); done; cat /dev/shm/error; " +
		"stat -c %s /fill* | awk '{n += $1} END {print n}'")
	lines := strings.Split(strings.TrimSpace(o.out), "\n")
	wrote, err := strconv.ParseInt(lines[len(lines)-1], 10, 64)
	check(t, err)
	most := limit * 105 / 100
	if wrote < limit*95/100 || wrote > most {
		t.Errorf("wrote %d bytes of %d, want that ± 5 %%\n%s", wrote, limit, o.out)
	}
	// Subvolumes and projects have quotas, images an end.
	if !strings.Contains(o.out, "No space left on device") && !strings.Contains(o.out, "Disk quota exceeded") {
		t.Errorf("the write that failed says %q", o.out)
	}
	u, err := s.i.Usage(t.Context())
	check(t, err)
	if u.DiskBytes < wrote*95/100 || u.DiskBytes > most {
		t.Errorf("used are %d bytes, written were %d of %d", u.DiskBytes, wrote, limit)
	}
	if n := h.diskAllocated() - allocated; n > most {
		t.Errorf("the host's files have grown by %d bytes, the limit is %d", n, limit)
	}
	const metadata = 8 << 20 // of the whole store
	if n := free - h.diskFree(); n > most+metadata {
		t.Errorf("the store has %d bytes less, the limit is %d", n, limit)
	}
	if o := neighbour.sh("dd if=/dev/zero of=/mine bs=1M count=4 2>&1 && rm /mine"); o.Code != 0 {
		t.Errorf("the neighbour cannot write: %s", o.out)
	}
	_ = s.client.Close()
	check(t, s.i.Destroy(t.Context()))
	testutil.WaitFor(t, 60*time.Second, "the space comes back", func() error {
		if n := free - h.diskFree(); n > metadata {
			return fmt.Errorf("%d bytes are missing", n)
		}
		return nil
	})
}

// A sandbox whose limit is more than the disk of all has is stopped while there is
// room for others. What it ran then has no outcome; what they ran does, and new ones
// are made.
func TestDiskHog(t *testing.T) {
	h := newHost(t, nil)
	if h.b.disk.Driver() != "btrfs" {
		t.Skipf("the driver %s holds nobody", h.b.disk.Driver())
	}
	begun := time.Now()
	neighbour := h.create()
	// It has little CPU time, so that on a small disk and a busy machine too it
	// writes no faster than it is looked at.
	hog := h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.DiskBytes, r.Spec.Limits.MilliCPU = 1<<40, 100 })
	if o := hog.sh("dd if=/dev/zero of=/all bs=1M count=1000 2>&1"); o.Code == 0 || !strings.Contains(o.out, "Disk quota exceeded") {
		t.Fatalf("%q, want it stopped", o.out)
	}
	next := h.create()
	for name, s := range map[string]*sandbox{"the neighbour": neighbour, "a new one": next} {
		if o := s.sh("dd if=/dev/zero of=/mine bs=1M count=4 2>&1"); o.Code != 0 {
			t.Errorf("%s cannot write: %s", name, o.out)
		}
		if s.i.(backend.DiskUser).DiskStarved(begun, time.Now()) {
			t.Errorf("%s has no outcome", name)
		}
	}
	starved := hog.i.(backend.DiskUser).DiskStarved
	if !starved(begun, time.Now()) {
		t.Error("what was stopped has an outcome")
	}
	if o := hog.sh("rm /all && echo gone"); o.out != "gone\n" {
		t.Errorf("it cannot remove its file: %q", o.out)
	}
	ended := time.Now()
	_ = hog.client.Close()
	check(t, hog.i.Destroy(t.Context()))
	if !starved(begun, ended) {
		t.Error("what was stopped has an outcome once its sandbox is gone")
	}
}

// diskFree is what is free where the volumes are.
func (h *host) diskFree() int64 {
	h.Helper()
	var st unix.Statfs_t
	check(h, unix.Statfs(h.volumes(), &st))
	return int64(st.Bfree) * st.Bsize
}

// volumes is a directory of the file system of the volumes.
func (h *host) volumes() string {
	dir := filepath.Join(h.config.Disk.Dir, "btrfs")
	if _, err := os.Stat(dir); err != nil {
		return h.config.Disk.Dir
	}
	return dir
}

// flush has that file system write out, and so count, what it would within 30
// seconds; no program of a sandbox can ask for it.
func (h *host) flush() {
	h.Helper()
	dir, err := os.Open(h.volumes())
	check(h, err)
	defer dir.Close()
	check(h, unix.Syncfs(int(dir.Fd())))
}

// diskAllocated is what the store's own files take of the host's disk.
func (h *host) diskAllocated() (sum int64) {
	h.Helper()
	entries, err := os.ReadDir(h.config.Disk.Dir)
	check(h, err)
	for _, e := range entries {
		var st unix.Stat_t
		check(h, unix.Lstat(filepath.Join(h.config.Disk.Dir, e.Name()), &st))
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			sum += st.Blocks * 512
		}
	}
	return sum
}

// S23: on a busy CPU sandboxes share as their limits are to each other, and a
// frozen one gets nothing.
func TestCPUWeight(t *testing.T) {
	h := newHost(t, nil)
	limited := func(milli int64) *sandbox {
		return h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.MilliCPU = milli })
	}
	large, small := limited(1000), limited(500)
	// Both on one CPU, where their limits together are more than there is. The
	// programs choose it: a mask is theirs to set.
	const spin = "echo ready; exec taskset 1 /bin/sh -c 'while :; do :; done'"
	large.hold(nil, "/bin/sh", "-c", spin)
	small.hold(nil, "/bin/sh", "-c", spin)
	large.burn(200 * time.Millisecond)
	small.burn(100 * time.Millisecond)
	l, s := large.cpu(), small.cpu()
	large.burn(3 * time.Second)
	ratio := float64(large.cpu()-l) / float64(small.cpu()-s)
	if ratio < 1.7 || ratio > 2.3 {
		t.Errorf("the larger one gets %.2f times as much, want 2 ± 0.3", ratio)
	}

	small.freeze(true)
	s = small.cpu()
	large.burn(3 * time.Second)
	// A process counts as frozen a moment before it leaves the CPU.
	if n := small.cpu() - s; n > time.Millisecond {
		t.Errorf("frozen, it has used %v", n)
	}
	t.Logf("%.2f times as much", ratio)
	small.freeze(false)
	small.burn(100 * time.Millisecond) // it goes on
}

func (s *sandbox) cpu() time.Duration {
	s.Helper()
	u, err := s.i.Usage(s.Context())
	check(s, err)
	return u.CPU
}

// burn waits until the sandbox has used so much more CPU time, and tells how
// long that took.
func (s *sandbox) burn(d time.Duration) time.Duration {
	s.Helper()
	start, before := time.Now(), s.cpu()
	testutil.WaitFor(s, time.Minute, "CPU time is used", func() error {
		if now := s.cpu(); now-before < d {
			return fmt.Errorf("%v of %v", now-before, d)
		}
		return nil
	})
	return time.Since(start)
}

// freeze stops all processes of the sandbox, or lets them go on.
func (s *sandbox) freeze(frozen bool) {
	s.Helper()
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/unified/cgroup.procs"); err == nil {
		root += "/unified"
	}
	dir := filepath.Join(root, s.config.Cgroup, s.groupOf(s))
	value := "0"
	if frozen {
		value = "1"
	}
	check(s, os.WriteFile(dir+"/cgroup.freeze", []byte(value), 0))
	testutil.WaitFor(s, 10*time.Second, "the group freezes", func() error {
		text, err := os.ReadFile(dir + "/cgroup.events")
		if err == nil && !strings.Contains(string(text), "frozen "+value) {
			err = errors.New(string(text))
		}
		return err
	})
}
