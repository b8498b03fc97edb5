package disk

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// Whoever wants all of the disk, one or some, is stopped while there is room for
// others: new ones are admitted, and write what they may. Only who was stopped is
// told of, in that time, and over a restart.
func TestHogsLeaveRoom(t *testing.T) {
	for name, c := range map[string]struct {
		share int
		hogs  int
		fill  func(t *testing.T, v *Volume) error
	}{
		"one":   {0, 1, fillWithOne},
		"two":   {50, 2, fillWithOne},
		"files": {0, 1, fillWithMany},
	} {
		t.Run(name, func(t *testing.T) {
			s := openNode(t, Options{Driver: "btrfs", ImageBytes: 4 * minImage, MaxImageBytes: 1, Share: c.share})
			begin := time.Now()
			small := volume(t, s.Store, 4<<20)
			var hogs []*Volume
			for range c.hogs {
				hogs = append(hogs, volume(t, s.Store, 1<<40))
			}
			for i, v := range hogs {
				if err := c.fill(t, v); !errors.Is(err, unix.EDQUOT) {
					t.Fatalf("hog %d ends with %v, want %v", i, err, unix.EDQUOT)
				}
				if !v.Starved(begin, time.Now()) {
					t.Errorf("it is not on record that hog %d was stopped below its limit", i)
				}
			}
			fillVolume(t, small, unix.EDQUOT)
			late := volume(t, s.Store, 4<<20)
			fillVolume(t, late, unix.EDQUOT)
			now := time.Now()
			if s.Starved(begin, now) || small.Starved(begin, now) || late.Starved(begin, now) {
				t.Error("the disk was full for others")
			}
			ended := time.Now()
			if last := hogs[len(hogs)-1]; len(hogs) > 1 {
				check(t, last.Remove(context.Background()))
				if !last.Starved(begin, ended) || last.Starved(begin.Add(-time.Hour), begin.Add(-time.Minute)) {
					t.Error("it is not on record when one that is removed was stopped")
				}
			}
			s.restart(nil)
			hog, err := s.Recover(hogs[0].Name(), 1<<40)
			check(t, err)
			other, err := s.Recover(late.Name(), 4<<20)
			check(t, err)
			if !hog.Starved(begin, begin.Add(time.Hour)) || other.Starved(begin, time.Now()) {
				t.Error("after a restart it is not on record who was stopped")
			}
		})
	}
}

func fillWithOne(t *testing.T, v *Volume) error {
	t.Helper()
	dir, done := use(t, v)
	defer done()
	_, err := fill(t, dir+"/all")
	return err
}

func fillWithMany(t *testing.T, v *Volume) error {
	t.Helper()
	dir, done := use(t, v)
	defer done()
	for n := 0; ; n++ {
		if err := os.WriteFile(fmt.Sprintf("%s/%d", dir, n), make([]byte, 64<<10), 0o600); err != nil {
			return err
		}
	}
}

// A volume that was held grows again up to its own limit once there is room.
func TestHeldVolumeIsLetGo(t *testing.T) {
	s := openNode(t, Options{Driver: "btrfs", ImageBytes: 4 * minImage, MaxImageBytes: 1})
	const limit, written = 600 << 20, 450 << 20
	first, second := volume(t, s.Store, limit), volume(t, s.Store, 1<<40) // the first may have 760 alone, and 400 beside the second
	dir, done := use(t, first)
	check(t, os.WriteFile(dir+"/file", make([]byte, written), 0o600))
	done()
	fillVolume(t, second, unix.EDQUOT)
	testutil.WaitFor(t, time.Minute, "the first is held, too", func() error {
		if now := time.Now(); !first.Starved(now, now) {
			return errors.New("it is not")
		}
		return nil
	})
	check(t, second.Remove(context.Background()))
	testutil.WaitFor(t, time.Minute, "it is let go", func() error {
		if now := time.Now(); first.Starved(now, now) {
			return errors.New("it is held")
		}
		return nil
	})
	dir, done = use(t, first)
	defer done()
	if n, err := fill(t, dir+"/more"); !errors.Is(err, unix.EDQUOT) || n < limit-written-8<<20 {
		t.Errorf("%d MiB more, then %v", n>>20, err)
	}
}

func TestPart(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for _, c := range []struct {
		name                 string
		size, free, growable int64
		share                int64
		want                 int64
	}{
		{"an empty disk", 64 * gib, 64 * gib, 0, 80, 252 * gib},
		{"half is taken", 64 * gib, 32 * gib, 0, 80, 124 * gib},
		{"little is left", 64 * gib, 2 * gib, 0, 80, 4 * gib},
		{"what creates want is left", 64 * gib, gib, 0, 80, (gib - 64*mib) / 4},
		{"a half of that", 64 * gib, gib / 2, 0, 80, (gib/2 - 64*mib) / 4},
		{"nothing is left", 64 * gib, 20 * mib, 0, 80, 0},
		{"it can grow", 32 * gib, 0, 32 * gib, 80, 124 * gib},
		{"a half for one", 64 * gib, 33 * gib, 0, 50, 32 * gib},
		{"all for one", 64 * gib, 0, 0, 100, math.MaxInt64},
	} {
		now := sample{Space: Space{Size: c.size, Free: c.free}, growable: c.growable}
		if got := part(now, c.share); got != c.want {
			t.Errorf("%s: %d MiB, want %d", c.name, got>>20, c.want>>20)
		}
	}
	for capacity, want := range map[int64]int64{
		64 * gib: 48 * gib, // of 50.4
		65 * gib: 48 * gib,
		gib:      768 * mib,
		mib:      0,
	} {
		if got := most(capacity, 80); got != want {
			t.Errorf("the most of %d MiB: %d, want %d", capacity>>20, got>>20, want>>20)
		}
	}
}

// What is on record and cannot be read is taken for the worst.
func TestDamagedRecordOfWhoWasHeld(t *testing.T) {
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, heldName), []byte("{"), 0o600))
	s := &Store{opts: Options{Dir: dir}, driver: scarce{free: 1 << 39}, log: testutil.Logger(t), stop: make(chan struct{})}
	var err error
	s.starved, err = openStarvation(s)
	check(t, err)
	close(s.stop)
	s.wg.Wait()
	last := time.Now().Add(-time.Hour)
	v := &Volume{store: s, name: "A"}
	if now := time.Now(); !v.Starved(last, last) || v.Starved(now, now) {
		t.Errorf("%+v", s.starved.spans)
	}
}

// late is a driver that holds a volume, and asks before that takes effect what is
// on record.
type late struct {
	driver
	ask func()
}

func (d late) look() (sample, error) { return sample{Space: Space{Size: 1 << 40, Free: 1 << 39}}, nil }

func (d late) ration(_ int64, begin func(string)) ([]string, error) {
	begin("A")
	d.ask()
	return []string{"A"}, nil
}

func (d late) recovered(string, int64) (bool, error) { return false, nil }

func (d late) disown(string) {}

// A write that fails since its volume is held finds that on record already.
func TestHeldIsOnRecordBeforeAWriteFails(t *testing.T) {
	d := late{ask: func() {}}
	s := &Store{opts: Options{Dir: t.TempDir()}, driver: d, log: testutil.Logger(t), stop: make(chan struct{})}
	s.starved = &starvation{s: s, held: map[string]span{}, seen: time.Now(), last: sample{Space: Space{Size: 1 << 40, Free: 1 << 62}}}
	v := &Volume{store: s, name: "A"}
	asked := false
	d.ask = func() {
		asked = true
		if now := time.Now(); !v.Starved(now, now) {
			t.Error("not on record")
		}
	}
	s.starved.ration(d, sample{})
	if !asked {
		t.Error("nobody was held")
	}
	if data, err := os.ReadFile(s.path(heldName)); err != nil || len(data) < 10 {
		t.Errorf("the record: %q, %v", data, err)
	}
}

// The limit of a volume is not changed for what its last owner had, though the next
// has the same limits, nor is that told of it.
func TestVolumeOfAnotherIsNotHeld(t *testing.T) {
	s := openStore(t, "btrfs")
	const limit = 32 << 20
	r := s.driver.(*btrfs).free
	v := create(t, s, limit, 0)
	known := func() subvolume {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.known[v.Name()]
	}
	looked := known()
	check(t, v.Remove(context.Background()))
	kept(t, s)
	next := create(t, s, limit, 0)
	if next.Name() != v.Name() {
		t.Fatal("the volume is not used again")
	}
	n, err := r.limit(v.Name(), looked, limit/2, func(string) { t.Error("the next owner is told to be held") })
	if err != nil || n != limit || known().limit != limit {
		t.Errorf("limit %d, %v, known %+v; want %d", n, err, known(), limit)
	}
	// Removed in the middle of such a change, it is the next one's as that wants it.
	gone := make(chan error, 1)
	n, err = r.limit(v.Name(), known(), limit/2, func(string) {
		go func() { gone <- next.Remove(context.Background()) }()
	})
	if err != nil || n != limit/2 {
		t.Errorf("limit %d, %v; want %d", n, err, limit/2)
	}
	check(t, <-gone)
	if sub := known(); sub.own != 0 || sub.limit != limit/2 {
		t.Errorf("of nobody's is known %+v", sub)
	}
	kept(t, s)
	last := create(t, s, limit, 0)
	got, err := s.driver.(*btrfs).quota(known().id, "max_referenced")
	if err != nil || last.Name() != v.Name() || got != limit {
		t.Errorf("its limit is %d, %v; want %d", got, err, limit)
	}
}

// Creates do not wait for a change of a limit.
func TestLimitIsChangedWithoutTheLock(t *testing.T) {
	s := openStore(t, "btrfs")
	b := s.driver.(*btrfs)
	v := create(t, s, 32<<20, 0)
	b.free.mu.Lock()
	sub := b.free.known[v.Name()]
	b.free.mu.Unlock()
	const freeze, thaw = 0xc0045877, 0xc0045878 // FIFREEZE and FITHAW of linux/fs.h
	check(t, unix.IoctlSetInt(b.fd, freeze, 0))
	done := make(chan error, 1)
	go func() {
		_, err := b.free.limit(v.Name(), sub, 16<<20, func(string) {})
		done <- err
	}()
	defer func() {
		check(t, unix.IoctlSetInt(b.fd, thaw, 0))
		check(t, <-done)
	}()
	testutil.WaitFor(t, 20*time.Second, "the lock is free while the limit is changed", func() error {
		if !b.free.mu.TryLock() {
			return errors.New("it is taken")
		}
		defer b.free.mu.Unlock()
		if b.free.limiting != v.Name() {
			return errors.New("nothing changes")
		}
		return nil
	})
}
