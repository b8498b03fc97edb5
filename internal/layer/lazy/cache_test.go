package lazy

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestEveryChunkIsFetchedOnceHoweverManyReadersAsk(t *testing.T) {
	f := newFixture(t, 8<<20+12345, MinChunk)
	f.store.set(t, faults{Delay: 2 * time.Millisecond})
	c, _ := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	var readers sync.WaitGroup
	for range 16 {
		readers.Go(func() {
			p := make([]byte, 100_000)
			for range 60 {
				off := rand.Int64N(im.Size - int64(len(p)))
				if err := c.readAt(t.Context(), im, p, off); err != nil {
					t.Error(err)
				} else if !bytes.Equal(p, f.truth[off:off+int64(len(p))]) {
					t.Errorf("wrong bytes at %d", off)
				}
			}
		})
	}
	readers.Wait()
	check(t, c, im, f.truth, 0, im.Size)
	c.filling.Wait()
	for i, n := range f.store.fetched(t, &f.image) {
		if n != 1 {
			t.Errorf("chunk %d was fetched %d times", i, n)
		}
	}
	if !im.complete() {
		t.Error("not complete")
	}
}

func TestASequentialReaderIsReadAhead(t *testing.T) {
	f := newFixture(t, 32<<20, MinChunk)
	c, _ := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	check(t, c, im, f.truth, 0, 4096)
	c.filling.Wait()
	if n := im.snapshot().Present; n != 1 {
		t.Fatalf("one read brought %d chunks", n)
	}
	for i := range int64(100) {
		check(t, c, im, f.truth, i*MinChunk, MinChunk)
	}
	c.filling.Wait()
	s := im.snapshot()
	if ahead := s.Present - 100; ahead < 16 || ahead > 64 {
		t.Errorf("%d chunks ahead of the reader, want 16 to 64 (4 MiB)", ahead)
	}
	if s.Waits > 50 {
		t.Errorf("%d of %d reads waited", s.Waits, s.Reads)
	}
	for i, n := range f.store.fetched(t, &f.image) {
		if n != 1 {
			t.Errorf("chunk %d was fetched %d times", i, n)
		}
	}
}

func TestCorruptChunks(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, events := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	f.store.set(t, faults{Corrupt: 1})
	check(t, c, im, f.truth, 10, 100) // the second try is right
	if e := <-events; e.Kind != EventCorrupt || e.Key != im.Key || e.Chunk != 0 {
		t.Errorf("event %+v", e)
	}
	f.store.set(t, faults{Corrupt: 2})
	p := make([]byte, 10)
	if err := c.readAt(t.Context(), im, p, 5*MinChunk); !errors.Is(err, errCorrupt) || !bytes.Equal(p, make([]byte, 10)) {
		t.Errorf("%v, %x", err, p)
	}
	for _, want := range []EventKind{EventCorrupt, EventCorrupt, EventDegraded} {
		if e := <-events; e.Kind != want || e.Chunk != 5 {
			t.Errorf("event %+v, want %s of chunk 5", e, want)
		}
	}
	if s := im.snapshot(); s.Present != 1 || s.Corrupt != 3 || s.Degraded == "" || s.Errors != 1 {
		t.Errorf("%+v", s)
	}
	check(t, c, im, f.truth, 5*MinChunk, 10)
	if e := <-events; e.Kind != EventRecovered {
		t.Errorf("event %+v, want recovered", e)
	}
}

func TestAStoreThatIsAway(t *testing.T) {
	for what, fault := range map[string]faults{
		"refuses": {Unavailable: true}, "hangs": {Hang: true}, "hangs, deaf": {Deaf: true},
	} {
		t.Run(what, func(t *testing.T) {
			f := newFixture(t, 1<<20, MinChunk)
			c, events := f.cache(t, Limits{RetryFor: 300 * time.Millisecond, CallFor: 100 * time.Millisecond})
			im := f.open(t, c, &f.image)
			f.store.set(t, fault)
			p := make([]byte, 10)
			err := c.readAt(t.Context(), im, p, 0)
			f.store.set(t, faults{})
			if err == nil {
				t.Fatal("read without a store")
			}
			if e := <-events; e.Kind != EventDegraded || e.Reason == "" {
				t.Errorf("event %+v", e)
			}
			check(t, c, im, f.truth, 0, 10)
			if e := <-events; e.Kind != EventRecovered {
				t.Errorf("event %+v", e)
			}
		})
	}
}

// What cannot be read is well again when its store is, though nobody reads it, as long as
// it is in use.
func TestAStoreThatIsBack(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, events := f.cache(t, Limits{RetryFor: 10 * time.Millisecond})
	c.probeEvery = time.Millisecond
	im := f.open(t, c, &f.image)
	read := func() error { return c.readAt(t.Context(), im, make([]byte, 10), 3*MinChunk) }
	for _, used := range []bool{true, false} {
		im.mu.Lock()
		im.inUse = used
		im.mu.Unlock()
		f.store.set(t, faults{Unavailable: true})
		if err := read(); err == nil {
			t.Fatal("read without a store")
		}
		if e := <-events; e.Kind != EventDegraded {
			t.Errorf("event %+v", e)
		}
		if !used {
			break
		}
		f.store.set(t, faults{})
		if e := <-events; e.Kind != EventRecovered || e.Chunk != 3 {
			t.Errorf("event %+v, want recovered by chunk 3", e)
		}
		if s := im.snapshot(); s.Present != 1 || s.Degraded != "" {
			t.Errorf("%+v", s)
		}
		if err := im.setState(3, absent); err != nil {
			t.Fatal(err)
		}
	}
	c.probing.Wait() // of what nobody uses nothing is fetched
	f.store.set(t, faults{})
	if err := read(); err != nil {
		t.Fatal(err)
	}
}

func TestAReaderOutlastsAShortOutage(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, _ := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	f.store.set(t, faults{Unavailable: true})
	done := make(chan struct{})
	go func() {
		defer close(done)
		check(t, c, im, f.truth, 0, 10)
	}()
	for im.snapshot().Reads == 0 && len(im.flightsNow()) == 0 {
		wait(t.Context(), time.Millisecond)
	}
	f.store.set(t, faults{})
	<-done
}

func (im *image) flightsNow() []int64 {
	im.mu.Lock()
	defer im.mu.Unlock()
	var list []int64
	for i := range im.flights {
		list = append(list, i)
	}
	return list
}

func TestACacheIsTakenUpAgain(t *testing.T) {
	f := newFixture(t, 3<<20, MinChunk)
	c, _ := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	check(t, c, im, f.truth, 0, 10*MinChunk)
	c.filling.Wait()
	had := im.snapshot().Present
	_ = os.Remove(filepath.Join(f.store.dir, "reads"))

	again, _ := f.cache(t, Limits{})
	if err := again.load(nil, nil); err != nil {
		t.Fatal(err)
	}
	im = f.open(t, again, &f.image)
	if n := im.snapshot().Present; n != had {
		t.Errorf("%d chunks, want %d", n, had)
	}
	check(t, again, im, f.truth, 0, 10*MinChunk)
	if n := len(f.store.fetched(t, &f.image)); n > int(f.image.chunks()-had) {
		t.Errorf("%d chunks were fetched again", n)
	}

	other := f.image
	other.Hashes = bytes.Repeat([]byte{1}, len(other.Hashes))
	if _, err := again.open(&other); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("same key, other hashes: %v", err)
	}
}

func TestChunksOfAnEarlierBootAreVerifiedAgain(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, _ := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	check(t, c, im, f.truth, 0, im.Size)
	// The power went, and of chunk 3 not all had reached the disk.
	if _, err := im.data.WriteAt(make([]byte, 512), 3*MinChunk+1024); err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(filepath.Join(f.store.dir, "reads"))

	again, _ := f.cache(t, Limits{})
	again.boot = "another boot"
	if err := again.load(nil, nil); err != nil {
		t.Fatal(err)
	}
	im = f.open(t, again, &f.image)
	if s := im.snapshot(); s.Present != 0 {
		t.Errorf("%d chunks count as present unverified", s.Present)
	}
	check(t, again, im, f.truth, 0, im.Size)
	if got := f.store.fetched(t, &f.image); len(got) != 1 || got[3] != 1 {
		t.Errorf("fetched again: %v, want chunk 3 alone", got)
	}
	// What was verified in this boot stays so, what was not does not.
	third, _ := f.cache(t, Limits{})
	third.boot = "another boot"
	if err := third.load(nil, nil); err != nil {
		t.Fatal(err)
	}
	if im := f.open(t, third, &f.image); !im.complete() {
		t.Error("not complete")
	}
}

func TestTheCacheIsBounded(t *testing.T) {
	f := newFixture(t, 2<<20, MinChunk)
	c, _ := f.cache(t, Limits{CacheBytes: 3 << 20})
	first := f.open(t, c, &f.image)
	check(t, c, first, f.truth, 0, first.Size)
	image, truth := f.add(t, "second", 2<<20, MinChunk)
	second := f.open(t, c, &image)
	second.inUse = true
	check(t, c, second, truth, 0, second.Size)
	if n := c.bytes.Load(); n > 3<<20 {
		t.Errorf("%d bytes are kept, want at most %d", n, 3<<20)
	}
	if s := second.snapshot(); s.Present != s.Chunks {
		t.Errorf("of what is used %d of %d chunks are there", s.Present, s.Chunks)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(first.data.Fd()), &st); err != nil || st.Blocks*512 > 1<<20+65536 || st.Size != first.Size {
		t.Errorf("the file of what is not used: %d bytes, long %d, %v", st.Blocks*512, st.Size, err)
	}
	check(t, c, first, f.truth, 0, first.Size) // and comes again
	// Both in use, by FUSE: chunks go that were not read lately.
	first.mu.Lock()
	first.inUse = true
	first.mu.Unlock()
	for range 3 {
		check(t, c, second, truth, 0, second.Size)
		check(t, c, first, f.truth, 0, first.Size)
	}
	c.filling.Wait()
	if n := c.bytes.Load(); n > 3<<20 {
		t.Errorf("%d bytes are kept, want at most %d", n, 3<<20)
	}
}

func TestAnOpenFileKeepsItsChunks(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, _ := f.cache(t, Limits{CacheBytes: 1 << 20})
	im := f.open(t, c, &f.image)
	check(t, c, im, f.truth, 0, im.Size)
	reader, err := os.Open(filepath.Join(f.dir, "cache", im.name+".data"))
	if err != nil {
		t.Fatal(err)
	}
	if c.makeRoom(1<<20, false) {
		t.Error("chunks went of a file that is open")
	}
	got := make([]byte, im.Size)
	if _, err := reader.ReadAt(got, 0); err != nil || !bytes.Equal(got, f.truth) {
		t.Errorf("wrong bytes, %v", err)
	}
	_ = reader.Close()
	if !c.makeRoom(1<<20, false) {
		t.Error("none went of one that is not")
	}
}

// Chunks that come at the same time make room for each other, too.
func TestRoomIsMadeForAllThatComes(t *testing.T) {
	f := newFixture(t, 4*MinChunk, MinChunk)
	c, _ := f.cache(t, Limits{CacheBytes: 5 * MinChunk})
	im := f.open(t, c, &f.image)
	check(t, c, im, f.truth, 0, im.Size)
	image, truth := f.add(t, "second", 4*MinChunk, MinChunk)
	second := f.open(t, c, &image)
	var both, readers sync.WaitGroup
	both.Add(2)
	c.crash = func(step string) {
		if step == "fill.written" {
			both.Done()
			both.Wait()
		}
	}
	for _, off := range []int64{0, 2 * MinChunk} {
		readers.Go(func() { check(t, c, second, truth, off, 100) })
	}
	readers.Wait()
	if n := c.bytes.Load(); n > 5*MinChunk {
		t.Errorf("%d bytes are kept, want %d at most", n, 5*MinChunk)
	}
}

// A chunk that is wanted again while it goes is written after it has gone.
func TestAChunkThatIsWantedWhileItGoes(t *testing.T) {
	for _, doubt := range []bool{false, true} {
		f := newFixture(t, MinChunk, MinChunk)
		c, _ := f.cache(t, Limits{})
		im := f.open(t, c, &f.image)
		check(t, c, im, f.truth, 0, im.Size)
		step := "evict.forgotten"
		if doubt {
			im.states[0], im.missing = doubtful, 1
			step = "evict.begin"
		}
		var once sync.Once
		written, done := make(chan struct{}), make(chan struct{})
		c.crash = func(s string) {
			switch s {
			case "fill.written":
				close(written)
			case step:
				once.Do(func() {
					go func() {
						defer close(done)
						check(t, c, im, f.truth, 0, im.Size)
					}()
					select { // it cannot be, and so there is nothing to wait for
					case <-written:
						if !doubt {
							t.Error("it was written before it had gone")
						}
					case <-done:
					case <-time.After(50 * time.Millisecond):
					}
				})
			}
		}
		c.makeRoom(MinChunk, true)
		<-done
		check(t, c, im, f.truth, 0, im.Size)
	}
}

// Whatever is read, evicted, broken and killed in whatever order: no wrong byte.
func TestNoWrongByte(t *testing.T) {
	f := newFixture(t, 600_000, MinChunk)
	image2, truth2 := f.add(t, "second", 500_000, MinChunk)
	images, truths := []*Image{&f.image, &image2}, [][]byte{f.truth, truth2}
	rapid.Check(t, func(r *rapid.T) {
		limits := Limits{CacheBytes: rapid.Int64Range(1, 1_200_000).Draw(r, "cache"),
			RetryFor: 20 * time.Millisecond, CallFor: 10 * time.Millisecond}
		c, _ := f.cache(t, limits)
		defer func() { c.close() }()
		if err := c.load(nil, nil); err != nil {
			t.Fatal(err)
		}
		f.store.set(t, faults{})
		failing := false
		var readers sync.WaitGroup
		for range rapid.IntRange(1, 12).Draw(r, "steps") {
			n := rapid.IntRange(0, 1).Draw(r, "image")
			switch rapid.SampledFrom([]string{"read", "read", "read", "evict", "fault", "power", "restart"}).Draw(r, "step") {
			case "read":
				im := f.open(t, c, images[n])
				off := rapid.Int64Range(0, im.Size-1).Draw(r, "offset")
				p := make([]byte, rapid.Int64Range(1, im.Size-off).Draw(r, "length"))
				mayFail := failing
				readers.Go(func() {
					err := c.readAt(t.Context(), im, p, off)
					if err == nil && !bytes.Equal(p, truths[n][off:off+int64(len(p))]) {
						t.Errorf("wrong bytes of image %d in %d at %d", n, len(p), off)
					}
					if err != nil && !mayFail {
						t.Logf("read: %v", err) // a fault that came during the read
					}
				})
			case "evict":
				c.makeRoom(rapid.Int64Range(0, 2_000_000).Draw(r, "room"), true)
			case "fault":
				fault := rapid.SampledFrom([]faults{{}, {Unavailable: true}, {Hang: true}, {Corrupt: 1}, {Corrupt: 3}}).Draw(r, "fault")
				f.store.set(t, fault)
				failing = true
			case "power", "restart":
				readers.Wait()
				c.close()
				c, _ = f.cache(t, limits)
				if rapid.Bool().Draw(r, "boot") {
					c.boot = rapid.StringMatching(`[0-9a-f]{36}`).Draw(r, "boot id")
				}
				if err := c.load(nil, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		readers.Wait()
	})
}

// A full disk: what FUSE serves comes from memory, what fanotify serves cannot.
func TestAFullDisk(t *testing.T) {
	testutil.Require(t, testutil.Root)
	f := newFixture(t, 4<<20, 256<<10)
	disk := testutil.SmallDisk(t, "size=2m")
	if err := errors.Join(os.Remove(filepath.Join(f.dir, "cache")), os.Symlink(disk, filepath.Join(f.dir, "cache"))); err != nil {
		t.Fatal(err)
	}
	c, events := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	im.armed = true // nothing may go
	check(t, c, im, f.truth, 0, im.Size)
	if e := <-events; e.Kind != EventDegraded || e.Reason != errNoRoom.Error() {
		t.Errorf("event %+v", e)
	}
	s := im.snapshot()
	if s.Present == 0 || s.Present > 7 {
		t.Errorf("%+v", s)
	}
	_ = os.Remove(filepath.Join(f.store.dir, "reads"))
	for off := int64(3 << 20); off < im.Size; off += 64 << 10 {
		check(t, c, im, f.truth, off, 64<<10)
	}
	for i, n := range f.store.fetched(t, &f.image) {
		if n > 1 {
			t.Errorf("chunk %d was fetched %d times for one reader", i, n)
		}
	}
	if err := c.wait(t.Context(), im, Range{0, im.Size}); !errors.Is(err, errNoRoom) {
		t.Errorf("%v, want %v", err, errNoRoom)
	}
	// What nobody uses makes room.
	im.mu.Lock()
	im.armed = false
	im.mu.Unlock()
	image, truth := f.add(t, "second", 1<<20, 256<<10)
	second := f.open(t, c, &image)
	second.armed = true
	if err := c.wait(t.Context(), second, Range{0, second.Size}); err != nil {
		t.Error(err)
	}
	check(t, c, second, truth, 0, second.Size)
	c.filling.Wait()
}

// A release that was given up before it began does nothing.
func TestAReleaseThatWasGivenUp(t *testing.T) {
	f := newFixture(t, 1<<20, MinChunk)
	c, _ := f.cache(t, Limits{})
	im := f.open(t, c, &f.image)
	im.inUse = true
	ctx, giveUp := context.WithCancel(t.Context())
	giveUp()
	s := &server{cache: c, served: &served{dir: directory{c.dir.f}}}
	if idle, err := s.release(ctx, &releaseCall{Key: im.Key}); idle || !errors.Is(err, context.Canceled) || !im.inUse {
		t.Errorf("idle %v, in use %v, %v", idle, im.inUse, err)
	}
}
