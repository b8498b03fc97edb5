package disk

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// The Store knows when the disk of all was full, before, after and in another
// life, and nothing of a volume that reached its own limit.
func TestStarved(t *testing.T) {
	s := openNode(t, Options{Driver: "btrfs", ImageBytes: minImage, MaxImageBytes: minImage, Share: noShare})
	small := volume(t, s.Store, 16<<20)
	begin := time.Now()
	fillVolume(t, small, unix.EDQUOT)
	if s.Starved(begin, time.Now()) {
		t.Fatal("starved, where a volume reached its own limit")
	}
	before := time.Now()
	large := volume(t, s.Store, 1<<40)
	fillVolume(t, large, unix.ENOSPC)
	if !s.Starved(before, time.Now()) {
		t.Fatal("not starved, where the image was full")
	}
	if err := large.Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, time.Minute, "room", func() error {
		if now := time.Now(); s.Starved(now, now) {
			return errors.New("still starved")
		}
		return nil
	})
	after := time.Now()
	for range 2 {
		if s.Starved(begin.Add(-time.Hour), begin) || s.Starved(after, time.Now()) {
			t.Error("starved, when there was room")
		}
		if !s.Starved(before, after) {
			t.Error("forgot when the image was full")
		}
		s.restart(nil)
	}
}

// A Store that finds the disk full does not know since when.
func TestStarvedBeforeItWasOpen(t *testing.T) {
	s := openNode(t, Options{Driver: "btrfs", ImageBytes: minImage, MaxImageBytes: minImage, Share: noShare})
	v := volume(t, s.Store, 1<<40)
	fillVolume(t, v, unix.ENOSPC)
	s.restart(func(dir string) error { return os.Remove(filepath.Join(dir, starvedName)) })
	if hour := time.Now().Add(-time.Hour); !s.Starved(hour, hour) {
		t.Error("not starved")
	}
}

// Small files fill the image by their metadata; room for data does not help.
func TestStarvedOfMetadata(t *testing.T) {
	s := openStore(t, "btrfs")
	v := create(t, s, 1<<40, 0)
	before := time.Now()
	dir, done := use(t, v)
	var err error
	for n := 0; err == nil; n++ {
		err = os.WriteFile(fmt.Sprintf("%s/%d", dir, n), make([]byte, 1800), 0o600)
	}
	done()
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	if !s.Starved(before, time.Now()) {
		space, _, err := s.Space()
		t.Errorf("not starved: %+v, %v", space, err)
	}
}

func TestCreatesAreRefusedBeforeTheDiskIsFull(t *testing.T) {
	s := openStore(t, "btrfs")
	v := create(t, s, 1<<40, 0)
	dir, done := use(t, v)
	defer done()
	for n := 0; ; n++ {
		space, _, err := s.Space()
		if err != nil {
			t.Fatal(err)
		}
		if space.Free < minRoom {
			break
		}
		if err := os.WriteFile(fmt.Sprintf("%s/%d", dir, n), make([]byte, 4<<20), 0o600); err != nil {
			t.Fatalf("the disk is full with %d free: %v", space.Free, err)
		}
	}
	if _, err := s.Create(context.Background(), Request{Bytes: 1 << 20}); dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Errorf("create: %v, want exhausted", err)
	}
	if err := s.Admit(); err == nil || dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Errorf("use of a volume made ahead: %v, want exhausted", err)
	}
	if err := os.WriteFile(dir+"/last", make([]byte, 4<<20), 0o600); err != nil {
		t.Errorf("nothing is left for who is there: %v", err)
	}
}

// The image grows as it is filled, up to its most, and is as large after a restart.
func TestImageGrows(t *testing.T) {
	const most = 640 << 20
	s := openNode(t, Options{Driver: "btrfs", ImageBytes: minImage, MaxImageBytes: most, Share: noShare})
	dir := s.opts.Dir
	v := volume(t, s.Store, 1<<40)
	begin := time.Now()
	path, done := use(t, v)
	for n := range 30 { // 480 MiB
		testutil.WaitFor(t, 30*time.Second, "room", func() error {
			if space, _, err := s.Space(); err != nil || space.Free < 60<<20 { // a write of 16 leaves more than starveBelow
				return errors.Join(fmt.Errorf("%+v", space), err)
			}
			return nil
		})
		if err := os.WriteFile(fmt.Sprintf("%s/%d", path, n), make([]byte, 16<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	done()
	if s.Starved(begin, time.Now()) {
		t.Error("starved")
	}
	space, ok, err := s.Space()
	if err != nil || !ok || space.Size != most || space.Used < 480<<20 || space.Allocated < space.Used || space.Free > most-space.Used {
		t.Errorf("space %+v, %v, %v", space, ok, err)
	}
	driver, seen, largest, err := Inspect(Options{Dir: dir, MaxImageBytes: most, Share: 50})
	if driver != "btrfs" || err != nil || seen.Size != most || seen.Used < 480<<20 || largest != 288<<20 {
		t.Errorf("inspected: %s %+v, %d, %v", driver, seen, largest, err)
	}
	// A growth that was cut short after the file became longer is done at the next start.
	s.restart(func(dir string) error { return os.Truncate(filepath.Join(dir, imageName), most+64<<20) })
	if space, _, err = s.Space(); err != nil || space.Size != most+64<<20 {
		t.Errorf("after a restart %+v, %v", space, err)
	}
}

func TestGrowth(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	for _, c := range []struct {
		name                    string
		image, most, disk, free int64
		want                    int64
	}{
		{"half", 4 * gib, math.MaxInt64, 100 * gib, 50 * gib, 2 * gib},
		{"at most a step", 32 * gib, math.MaxInt64, 1000 * gib, 500 * gib, 8 * gib},
		{"16 GiB stay", 32 * gib, math.MaxInt64, 1000 * gib, 18 * gib, 2 * gib},
		{"to its most", 4 * gib, 5 * gib, 100 * gib, 50 * gib, gib},
		{"no most", 4 * gib, 0, 100 * gib, 50 * gib, 2 * gib},
		{"a tenth stays", 4 * gib, math.MaxInt64, 100 * gib, 11 * gib, gib},
		{"1 GiB stays", 4 * gib, math.MaxInt64, 4 * gib, 1100 * mib, 76 * mib},
		{"too little to matter", 4 * gib, math.MaxInt64, 100 * gib, 10*gib + 63*mib, 0},
		{"is at its most", 4 * gib, 4 * gib, 100 * gib, 50 * gib, 0},
		{"is past its most", 4 * gib, 1, 100 * gib, 50 * gib, 0},
		{"the disk is full", 4 * gib, math.MaxInt64, 100 * gib, 5 * gib, 0},
	} {
		if got := growth(c.image, spare(c.image, c.most, c.disk, c.free)); got != c.want {
			t.Errorf("%s: %d MiB, want %d", c.name, got>>20, c.want>>20)
		}
	}
}

// fillVolume writes until it fails, which must be for that reason.
func fillVolume(t *testing.T, v *Volume, want error) {
	t.Helper()
	dir, done := use(t, v)
	defer done()
	if _, err := fill(t, dir+"/all"); !errors.Is(err, want) {
		t.Fatalf("ends in %v, want %v", err, want)
	}
}

// volume makes one that goes with its Store.
func volume(t *testing.T, s *Store, bytes int64) *Volume {
	t.Helper()
	v, err := s.Create(context.Background(), Request{Bytes: bytes, UID: owner, GID: owner})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// scarce is a disk with as much room as it is told to have.
type scarce struct {
	driver
	free int64
}

func (d scarce) look() (sample, error) {
	return sample{Space: Space{Size: 1 << 40, Free: d.free}}, nil
}

// What filled and ended while no Store was open is unknown from the last time on
// of which something is known.
func TestStarvationIsKnownOverARestart(t *testing.T) {
	dir := t.TempDir()
	during := func(free int64, do func(s *Store)) {
		t.Helper()
		s := &Store{opts: Options{Dir: dir}, driver: scarce{free: free}, log: testutil.Logger(t), stop: make(chan struct{})}
		var err error
		if s.starved, err = openStarvation(s); err != nil {
			t.Fatal(err)
		}
		do(s)
		close(s.stop)
		s.wg.Wait()
	}
	old := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	if err := os.WriteFile(filepath.Join(dir, starvedName), []byte(`[{"from":"2020-01-01T00:00:00Z","until":"2020-01-02T00:00:00Z"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	last := time.Now().Add(-time.Hour)
	during(1<<30, func(s *Store) {
		if s.Starved(last, time.Now()) || !s.Starved(old, old) {
			t.Errorf("with room: %+v", s.starved.spans)
		}
	})
	during(0, func(s *Store) {
		if !s.Starved(last, last) || s.Starved(old.Add(-time.Hour), old.Add(-time.Minute)) {
			t.Errorf("found full: %+v", s.starved.spans)
		}
	})
	during(1<<30, func(s *Store) {
		if now := time.Now(); !s.Starved(last, last) || s.Starved(now, now) {
			t.Errorf("with room again: %+v", s.starved.spans)
		}
	})
}

// eager is a disk that is full until it grew, and tells what was asked of it.
type eager struct {
	driver
	asked chan<- string
	grown atomic.Bool
}

func (d *eager) look() (sample, error) {
	if d.grown.Load() {
		return sample{Space: Space{Size: 1 << 40, Free: 1 << 39}}, nil
	}
	return sample{Space: Space{Size: 1 << 40}, nearlyFull: true}, nil
}

func (d *eager) grow(int64) error { d.grown.Store(true); d.asked <- "grow"; return nil }
func (d *eager) commitSoon()      { d.asked <- "commit" }

// A disk that was full until it grew is on record as that, and a full one is
// asked to give back what was removed; one with room is not.
func TestFullDiskIsOnRecordBeforeItGrows(t *testing.T) {
	asked := make(chan string, 16)
	d := &eager{asked: asked}
	d.grown.Store(true)
	s := &Store{opts: Options{Dir: t.TempDir()}, driver: d, log: testutil.Logger(t), stop: make(chan struct{})}
	var err error
	if s.starved, err = openStarvation(s); err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	d.grown.Store(false)
	if what := []string{<-asked, <-asked}; !slices.Equal(what, []string{"grow", "commit"}) {
		t.Errorf("%v of a full disk", what)
	}
	close(s.stop)
	s.wg.Wait()
	if !s.Starved(before, time.Now()) {
		t.Errorf("not on record: %+v", s.starved.spans)
	}
}

// slow is a disk that takes its time to tell how full it is.
type slow struct {
	driver
	looks   atomic.Int64
	asked   chan struct{}
	release chan struct{}
}

func (d *slow) look() (sample, error) {
	d.looks.Add(1)
	d.asked <- struct{}{}
	<-d.release
	return sample{Space: Space{Size: 1 << 40, Free: 1 << 39}}, nil
}

// Whoever knows enough does not wait for another's look, and those who wait for one
// share it.
func TestLooksAreShared(t *testing.T) {
	const all = 8
	d := &slow{asked: make(chan struct{}, all+1), release: make(chan struct{})}
	s := &Store{opts: Options{Dir: t.TempDir()}, driver: d, log: testutil.Logger(t), stop: make(chan struct{})}
	v := &starvation{s: s, held: map[string]span{}, seen: time.Now(), last: sample{Space: Space{Size: 1 << 40, Free: 1 << 62}}}
	s.starved = v
	done := make(chan sample, all+1)
	go func() { done <- v.look(time.Now()) }()
	<-d.asked
	begun := time.Now()
	if err := s.Admit(); err != nil || s.Starved(begun, begun) {
		t.Errorf("with room for years: %v", err)
	}
	for range all {
		go func() { done <- v.look(begun) }()
	}
	close(d.release)
	for range all + 1 {
		<-done
	}
	if n := d.looks.Load(); n != 2 {
		t.Errorf("%d looks, want the one before they asked and one after", n)
	}
}

// The image counts as full without room for metadata, but not while the kernel only
// gives back a chunk for it that was not used. Figures as seen on images of 1 GiB.
func TestRoomForMetadata(t *testing.T) {
	const mib = 1 << 20
	data := spaceInfo{total: 899 * mib, used: 450 * mib}
	for _, c := range []struct {
		name        string
		unallocated int64
		meta        spaceInfo
		free        int64
		nearlyFull  bool
	}{
		{"none", mib, spaceInfo{total: 8 * mib}, 0, true},
		{"a chunk", mib, spaceInfo{total: 120 * mib}, 450 * mib, false},
		{"a chunk that is given back", mib, spaceInfo{total: 120 * mib, readonly: 112 * mib}, 450 * mib, false},
		{"unallocated", 112 * mib, spaceInfo{total: 8 * mib}, 561 * mib, false},
		{"a chunk that is in use", mib, spaceInfo{total: 120 * mib, used: 112 * mib, pinned: 3 * mib}, 0, true},
	} {
		s := btrfsSpace{size: 1024 * mib, unallocated: c.unallocated, data: data, meta: c.meta, reserve: 6 * mib}.sample()
		if s.Free != c.free || s.nearlyFull != c.nearlyFull {
			t.Errorf("%s: %d MiB free, nearly full %t", c.name, s.Free>>20, s.nearlyFull)
		}
	}
}
