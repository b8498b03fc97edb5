package disk

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkLife is what a volume costs a sandbox that writes one small file: to
// make it, to have an overlay on it, which leaves directories of its own in work,
// to remove it, and to make it ready for the next. cpu-us is the CPU time of this
// process; what the kernel's own threads do is not in it.
func BenchmarkLife(b *testing.B) {
	for _, d := range drivers {
		b.Run(d.name, func(b *testing.B) {
			s := openStore(b, d.name)
			lower := openFD(b, b.TempDir())
			var create, remove time.Duration
			cpu := cpuTime(b)
			for b.Loop() {
				start := time.Now()
				v, err := s.Create(context.Background(), Request{Bytes: 64 << 20, Inodes: 10000, UID: owner, GID: owner})
				if err != nil {
					b.Fatal(err)
				}
				create += time.Since(start)
				overlayOnce(b, v, lower)
				start = time.Now()
				if err := v.Remove(context.Background()); err != nil {
					b.Fatal(err)
				}
				remove += time.Since(start)
				if free, ok := s.driver.(*btrfs); ok {
					free.awaitFree(b)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/float64(b.N), "cpu-us")
			b.ReportMetric(float64(create.Microseconds())/float64(b.N), "us/create")
			b.ReportMetric(float64(remove.Microseconds())/float64(b.N), "us/remove")
		})
	}
}

// awaitFree waits until what was removed is ready to be used again.
func (b *btrfs) awaitFree(t testing.TB) {
	t.Helper()
	for len(b.free.dirty) > 0 || b.free.count() == 0 {
		if err := unix.Nanosleep(&unix.Timespec{Nsec: 300_000}, nil); err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
	}
}

func (r *recycler) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.free)
}

func cpuTime(t testing.TB) time.Duration {
	t.Helper()
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// overlayOnce mounts an overlay on a volume as a sandbox's root is, writes a file
// and takes it down.
func overlayOnce(t testing.TB, v *Volume, lower int) {
	t.Helper()
	top, err := v.Open()
	check(t, err)
	defer unix.Close(top)
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	check(t, err)
	defer unix.Close(fs)
	check(t, unix.FsconfigSetFd(fs, "lowerdir+", lower))
	for _, name := range []string{"upper", "work"} {
		fd, err := openDirAt(top, name)
		check(t, err)
		check(t, unix.FsconfigSetFd(fs, name+"dir", fd))
		check(t, unix.Close(fd))
	}
	check(t, unix.FsconfigSetFlag(fs, "volatile"))
	check(t, unix.FsconfigCreate(fs))
	root, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	check(t, err)
	file, err := unix.Openat(root, "file", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	check(t, err)
	_, err = unix.Write(file, []byte("something"))
	check(t, err)
	check(t, unix.Close(file))
	check(t, unix.Close(root))
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
