package container

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/backend"
)

// Whatever bounds the disk, a snapshot has what overlayfs keeps of a sandbox's changes,
// owned by the sandbox's IDs, and processes stand still only as long as is said.
func TestSnapshotOfEachDriver(t *testing.T) {
	for _, driver := range diskDrivers(t) {
		t.Run(driver, func(t *testing.T) {
			h := newHost(t, func(c *Config) { c.Disk.Driver = driver })
			if h.b.disk.CanSnapshot() != (driver == "btrfs") {
				t.Errorf("copies: %v", h.b.disk.CanSnapshot())
			}
			s := h.create()
			s.sh("echo one > /root/file; rm /bin/inside; mkdir /root/dir; touch /root/dir/x; chown 7:8 /root/dir/x")
			snap, err := s.i.(backend.Snapshotter).Snapshot(t.Context())
			check(t, err)
			base := s.i.(*instance).sh.slot.base()
			if snap.Owner != base {
				t.Errorf("owner %d, want %d", snap.Owner, base)
			}
			for name, want := range map[string]unix.Stat_t{
				"root/file": {Mode: unix.S_IFREG | 0o644, Uid: base, Gid: base}, "root/dir/x": {Mode: unix.S_IFREG | 0o644, Uid: base + 7, Gid: base + 8},
				"bin/inside": {Mode: unix.S_IFCHR}, "": {Mode: unix.S_IFDIR | 0o755, Uid: base, Gid: base},
			} {
				var st unix.Stat_t
				if err := unix.Fstatat(int(snap.Upper.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH); err != nil {
					t.Errorf("%s: %v", name, err)
				} else if st.Mode != want.Mode && st.Mode&^0o7777 != want.Mode || st.Uid != want.Uid && want.Mode != unix.S_IFCHR || st.Gid != want.Gid && want.Mode != unix.S_IFCHR {
					t.Errorf("%s: mode %o owner %d:%d", name, st.Mode, st.Uid, st.Gid)
				}
			}
			if s.pauser().Paused() != (snap.GoOn != nil) {
				t.Errorf("it stands still: %v", snap.GoOn == nil)
			}
			if snap.GoOn != nil {
				check(t, snap.GoOn())
			}
			if s.pauser().Paused() {
				t.Error("it does not go on")
			}
			s.timesOut()
			check(t, snap.Close())
		})
	}
}

// BenchmarkSnapshot takes one of a sandbox that has just written 100 MB, or goes on to
// write as much as it can.
func BenchmarkSnapshot(b *testing.B) {
	for _, driver := range []string{"btrfs", "ext4"} {
		for _, writer := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/writer=%v", driver, writer), func(b *testing.B) { benchmarkSnapshot(b, driver, writer) })
		}
	}
}

func benchmarkSnapshot(b *testing.B, driver string, writer bool) {
	dir := b.TempDir() // on a disk
	h := newHost(b, func(c *Config) {
		c.Disk.Driver, c.Disk.Dir, c.Disk.ImageBytes, c.Disk.MaxImageBytes = driver, filepath.Join(dir, "disk"), 2<<30, 2<<30
	})
	req := h.request()
	req.Spec.Limits.DiskBytes, req.Spec.Limits.MemoryBytes = 1<<30, 512<<20
	i, err := h.b.Create(b.Context(), req)
	check(b, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	b.Cleanup(func() {
		_ = s.client.Close()
		check(b, i.Destroy(background))
	})
	if writer {
		c := s.cycle("/bin/sh", "-c", "echo begins; while :; do head -c 100000000 /dev/zero > /root/more; rm /root/more; done")
		c.want("begins")
	}
	var all, frozen []time.Duration
	for b.Loop() {
		b.StopTimer()
		// New files: what was truncated btrfs writes out when it is closed.
		s.sh("cd /root; rm -f [0-9]*; for i in 1 2 3 4 5 6 7 8 9 10; do head -c 10000000 /dev/urandom > $i; done")
		b.StartTimer()
		begun := time.Now()
		snap, err := i.(backend.Snapshotter).Snapshot(b.Context())
		check(b, err)
		b.StopTimer()
		took := time.Since(begun)
		var st unix.Stat_t
		check(b, unix.Fstatat(int(snap.Upper.Fd()), "root/10", &st, 0))
		if st.Size != 10_000_000 || st.Blocks*512 < st.Size {
			b.Fatalf("it has %d bytes, in %d blocks", st.Size, st.Blocks)
		}
		if snap.GoOn != nil {
			check(b, snap.GoOn())
		}
		all, frozen = append(all, took), append(frozen, snap.Frozen())
		check(b, snap.Close())
		b.StartTimer()
	}
	b.ReportMetric(median(all)/1e3, "whole-ms")
	b.ReportMetric(median(frozen)/1e3, "frozen-ms")
	b.ReportMetric(float64(slices.Max(frozen).Microseconds())/1e3, "frozen-most-ms")
}
