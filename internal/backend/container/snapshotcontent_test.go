package container

import (
	"bufio"
	"crypto/md5"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/testutil"
)

func init() { tries["mapped"] = mapped }

// mapped writes each byte that it is given to all of a file that it has mapped.
//
//	mapped PATH
func mapped(args []string) {
	f, err := os.OpenFile(args[0], os.O_RDWR|os.O_CREATE, 0o644)
	if err == nil {
		err = f.Truncate(mappedBytes)
	}
	var data []byte
	if err == nil {
		data, err = unix.Mmap(int(f.Fd()), 0, mappedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	say("mapped", err)
	for s := bufio.NewScanner(os.Stdin); err == nil && s.Scan(); {
		for i := range data {
			data[i] = s.Bytes()[0]
		}
		fmt.Println("wrote", s.Text())
	}
}

const mappedBytes = 1 << 20

// diskDrivers are those that a snapshot is tried of, of those that work here: with copies
// and without.
func diskDrivers(t *testing.T) (names []string) {
	testutil.Require(t, testutil.Root)
	if has := os.Getenv("DSEC_TEST_DISK"); has != "" { // the guest says what it has
		return []string{has}
	}
	for _, d := range disk.Probe(t.TempDir()) {
		if d.Name != "project" && d.Err == nil { // it depends on the directory
			names = append(names, d.Name)
		}
	}
	return names
}

func eachDriver(t *testing.T, test func(t *testing.T, s *sandbox)) {
	for _, driver := range diskDrivers(t) {
		t.Run(driver, func(t *testing.T) {
			test(t, newHost(t, func(c *Config) { c.Disk.Driver = driver }).create())
		})
	}
}

func (s *sandbox) snapshot() backend.Snapshot {
	s.Helper()
	snap, err := s.i.(backend.Snapshotter).Snapshot(s.Context())
	check(s, err)
	return snap
}

// below opens a file of a snapshot.
func below(t testing.TB, snap backend.Snapshot, name string) *os.File {
	t.Helper()
	fd, err := unix.Openat2(int(snap.Upper.Fd()), name, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return os.NewFile(uintptr(fd), name)
}

// What a program has written to memory that it maps is what is in a snapshot, whether it
// was on the disk yet or not, and nothing that it writes there later.
func TestSnapshotOfMappedFiles(t *testing.T) {
	eachDriver(t, func(t *testing.T, s *sandbox) {
		program := s.cycle("/bin/inside", "mapped", "/root/file")
		program.want("mapped ok")
		for _, text := range []string{"a", "b", "c"} {
			program.ask(text)
			program.want("wrote " + text)
			snap := s.snapshot()
			if snap.GoOn == nil { // the same pages, which are the copy's too
				program.ask("z")
				program.want("wrote z")
			}
			f := below(t, snap, "root/file")
			got, err := io.ReadAll(f)
			check(t, err)
			if len(got) != mappedBytes || slices.ContainsFunc(got, func(b byte) bool { return b != text[0] }) {
				t.Errorf("after %q it has %d bytes, the first %q", text, len(got), got[:min(len(got), 1)])
			}
			check(t, f.Close())
			check(t, snap.Close())
		}
	})
}

// What overlayfs says of a sandbox's changes is in a snapshot as it said it.
func TestSnapshotHasWhatOverlayfsSays(t *testing.T) {
	eachDriver(t, func(t *testing.T, s *sandbox) {
		o := s.sh("set -e; cd /root; rm /bin/inside; rm -r /etc; mkdir /etc; echo new > /etc/new; echo one > a; ln a b; mkfifo pipe; ln -s /nowhere link; truncate -s 10000000 holes; chmod 4711 a")
		if !o.OK() {
			t.Fatalf("%q: %+v", o.out, o.Outcome)
		}
		snap := s.snapshot()
		stat := func(name string) (st unix.Stat_t) {
			t.Helper()
			if err := unix.Fstatat(int(snap.Upper.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			return st
		}
		for name, mode := range map[string]uint32{
			"bin/inside": unix.S_IFCHR, "root/pipe": unix.S_IFIFO | 0o644, "root/link": unix.S_IFLNK | 0o777, "root/a": unix.S_IFREG | 0o4711,
		} {
			if st := stat(name); st.Mode != mode || st.Rdev != 0 {
				t.Errorf("%s: mode %o, device %d, want mode %o", name, st.Mode, st.Rdev, mode)
			}
		}
		if a, b := stat("root/a"), stat("root/b"); a.Ino != b.Ino || a.Nlink != 2 {
			t.Errorf("a and b are %d and %d, which has %d links", a.Ino, b.Ino, a.Nlink)
		}
		if st := stat("root/holes"); st.Size != 10_000_000 || st.Blocks > 16 {
			t.Errorf("of %d bytes %d blocks", st.Size, st.Blocks)
		}
		for name, want := range map[string]string{"etc": "y", "root": ""} {
			dir, value := below(t, snap, name), make([]byte, 8)
			n, err := unix.Fgetxattr(int(dir.Fd()), "trusted.overlay.opaque", value)
			if err != nil && err != unix.ENODATA || string(value[:max(n, 0)]) != want {
				t.Errorf("%s: opaque %q, %v, want %q", name, value[:max(n, 0)], err, want)
			}
			check(t, dir.Close())
		}
		check(t, snap.Close())
	})
}

// One that has filled its disk, and so may write no more, can be packed.
func TestSnapshotOfAFullDisk(t *testing.T) {
	eachDriver(t, func(t *testing.T, s *sandbox) {
		o := s.sh("cd /root; head -c 100000000 /dev/urandom > file 2>/dev/null && exit 1; wc -c < file; md5sum < file")
		var size int64
		var sum string
		if _, err := fmt.Sscan(o.out, &size, &sum); err != nil || size < 50e6 || !o.OK() {
			t.Fatalf("%q, %v, %+v", o.out, err, o.Outcome)
		}
		snap := s.snapshot()
		f, h := below(t, snap, "root/file"), md5.New()
		n, err := io.Copy(h, f)
		check(t, errors.Join(err, f.Close(), snap.Close()))
		if got := fmt.Sprintf("%x", h.Sum(nil)); n != size || got != sum {
			t.Errorf("%d bytes of sum %s, want %d of %s", n, got, size, sum)
		}
		if o := s.sh("cd /root; rm file; echo alive"); o.out != "alive\n" {
			t.Errorf("have %q", o.out)
		}
	})
}

// One that ends while its disk is read ends at once, though it stands still for that, and
// what was read is freed.
func TestSnapshotDestroyedMeanwhile(t *testing.T) {
	eachDriver(t, func(t *testing.T, s *sandbox) {
		s.sh("echo text > /root/file")
		snap := s.snapshot()
		f := below(t, snap, "root/file")
		check(t, s.i.Destroy(t.Context()))
		_ = f.Close()
		if err := snap.Close(); err != nil && dsec.CodeOf(err) != dsec.CodeLost {
			t.Error(err)
		}
		if _, err := s.i.(backend.Snapshotter).Snapshot(t.Context()); dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("of one that has ended: %v", err)
		}
	})
}

// What was read of one that is destroyed meanwhile is not taken for all that it had, also
// where it was paused and so has nothing to go on with.
func TestSnapshotGoesWithItsSandbox(t *testing.T) {
	eachDriver(t, func(t *testing.T, s *sandbox) {
		s.sh("echo text > /root/file")
		check(t, s.pauser().Pause(t.Context()))
		snap := s.snapshot()
		check(t, s.i.Destroy(t.Context()))
		if snap.GoOn == nil {
			check(t, below(t, snap, "root/file").Close()) // of a copy, which stays
		} else if err := snap.GoOn(); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("it goes on: %v", err)
		}
		check(t, snap.Close())
	})
}

// Who resumes or pauses a sandbox that stands still to be read waits until it is; then
// it is as they said.
func TestSnapshotPausedMeanwhile(t *testing.T) {
	eachDriver(t, func(t *testing.T, s *sandbox) {
		for what, call := range map[string]struct {
			do     func() error
			paused bool
		}{
			"pause": {func() error { return s.pauser().Pause(t.Context()) }, true}, "resume": {func() error { return s.pauser().Resume(t.Context()) }, false},
		} {
			snap := s.snapshot()
			over := make(chan error, 1)
			go func() { over <- call.do() }()
			if snap.GoOn != nil {
				s.waitsForItsTurn(over)
				check(t, snap.GoOn())
			}
			check(t, <-over)
			if got := s.pauser().Paused(); got != call.paused {
				t.Errorf("%s: paused %v", what, got)
			}
			check(t, snap.Close())
			check(t, s.pauser().Resume(t.Context()))
			if o := s.sh("echo alive"); o.out != "alive\n" {
				t.Errorf("%s: %q", what, o.out)
			}
		}
	})
}

// waitsForItsTurn returns once a call waits for what an instance does before.
func (s *sandbox) waitsForItsTurn(over <-chan error) {
	s.Helper()
	p := &s.i.(*instance).pauses
	testutil.WaitFor(s, 20*time.Second, "it waits", func() error {
		select {
		case err := <-over:
			s.Fatalf("it did not wait: %v", err)
		default:
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.hurried == 0 {
			return errors.New("it does not")
		}
		return nil
	})
}
