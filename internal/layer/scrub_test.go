package layer

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/scrub"
	"github.com/opendsec/dsec/internal/testutil"
)

// noise is text that no two chunks have the same of.
func noise(seed byte, n int) string {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return string(b)
}

// scrubbing is a Scrub under way in a test. Its clock is the test's: what it waits
// for has passed at once, but for the pause of one that has nothing to do, which is
// told over idle and ends by a receive from more.
type scrubbing struct {
	opt   ScrubOptions
	reg   *prometheus.Registry
	clock atomic.Int64
	idle  chan struct{}
	more  chan struct{}
	end   context.CancelFunc
	done  chan struct{}
}

func startScrub(t *testing.T, s *Store, change func(*ScrubOptions)) *scrubbing {
	t.Helper()
	sc := &scrubbing{reg: prometheus.NewRegistry(), idle: make(chan struct{}), more: make(chan struct{}), done: make(chan struct{})}
	sc.clock.Store(time.Now().UnixNano())
	sc.opt = ScrubOptions{
		Metrics: sc.reg, Command: []string{"/proc/self/exe", scrub.Verb},
		now: func() time.Time { return time.Unix(0, sc.clock.Load()) },
	}
	sc.opt.wait = func(ctx context.Context, d time.Duration) {
		sc.clock.Add(int64(d))
		if d != scrubIdle {
			return
		}
		for _, ch := range []chan struct{}{sc.idle, sc.more} {
			select {
			case ch <- struct{}{}:
			case <-ctx.Done():
				return
			}
		}
	}
	if change != nil {
		change(&sc.opt)
	}
	ctx, end := context.WithCancel(t.Context())
	sc.end = end
	go func() {
		defer close(sc.done)
		if err := s.Scrub(ctx, sc.opt); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { end(); <-sc.done })
	testutil.WaitFor(t, 20*time.Second, "its metrics", func() error {
		if f, err := sc.reg.Gather(); err != nil || len(f) == 0 {
			return errors.Join(errors.New("none"), err)
		}
		return nil
	})
	return sc
}

func (sc *scrubbing) stop() { sc.end(); <-sc.done }

// value is that of a metric, with its label where it has one.
func (sc *scrubbing) value(t *testing.T, name, label string) float64 {
	t.Helper()
	families, err := sc.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == name && (label == "" || m.Label[0].GetValue() == label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s %s", name, label)
	return 0
}

func (sc *scrubbing) want(t *testing.T, bytes int64, once, twice float64) {
	t.Helper()
	if n := sc.value(t, "dsec_scrub_bytes_total", ""); n != float64(bytes) {
		t.Errorf("%v bytes were read, want %d", n, bytes)
	}
	sc.wantMismatches(t, once, twice)
}

func (sc *scrubbing) wantMismatches(t *testing.T, once, twice float64) {
	t.Helper()
	if n := sc.value(t, "dsec_scrub_mismatches_total", "once"); n != once {
		t.Errorf("%v chunks were wrong once, want %v", n, once)
	}
	if n := sc.value(t, "dsec_scrub_mismatches_total", "twice"); n != twice {
		t.Errorf("%v chunks were wrong twice, want %v", n, twice)
	}
}

// flip changes one byte of a layer's data in a store's directory.
func flip(t *testing.T, blobs string, m Meta, off int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(blobs, blobKey(m.Digest, partData)), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b[:], off); err != nil {
		t.Fatal(err)
	}
}

func hold(t *testing.T, s *Store, m Meta) (release func()) {
	t.Helper()
	release, err := s.Hold(t.Context(), m.Digest)
	if err != nil {
		t.Fatal(err)
	}
	return release
}

// A layer is read once a day while it is held, and not without.
func TestScrubReadsWhatIsUsed(t *testing.T) {
	s := openStore(t, Options{})
	used, other := build(t, s, noise(1, 5<<20)), build(t, s, noise(2, 1<<20))
	hold(t, s, used)
	sc := startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, used.DataSize, 0, 0)
	if sc.value(t, "dsec_scrub_last_full_pass_timestamp_seconds", "") == 0 {
		t.Error("there is no time of a full pass")
	}
	took := time.Duration(sc.clock.Load())
	release := hold(t, s, other)
	<-sc.more
	<-sc.idle
	sc.want(t, used.DataSize+other.DataSize, 0, 0)
	// At a mebibyte a second, by its clock: waiting takes as long as there are bytes.
	if d, want := time.Duration(sc.clock.Load())-took, time.Duration(other.DataSize)*time.Second>>20; d < want || d > scrubIdle+2*want {
		t.Errorf("%v for %d bytes", d, other.DataSize)
	}
	release()
	sc.clock.Add(int64(24 * time.Hour))
	<-sc.more
	<-sc.idle
	sc.want(t, 2*used.DataSize+other.DataSize, 0, 0)
	<-sc.more
	<-sc.idle
	sc.want(t, 2*used.DataSize+other.DataSize, 0, 0)
}

// Damage is found, told, and refused until it is mended.
func TestScrubFindsDamage(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	m, sound := build(t, s, noise(1, 3<<20)), build(t, s, noise(2, 1<<20))
	release := hold(t, s, m)
	hold(t, s, sound)
	flip(t, filepath.Join(dir, "blobs"), m, 2<<20+5)
	var told atomic.Int64
	sc := startScrub(t, s, func(o *ScrubOptions) {
		o.Lost = func(ctx context.Context) error {
			told.Add(1)
			if lost := s.Lost(); !slices.Equal(lost, []string{m.Digest}) {
				t.Errorf("lost: %v", lost)
			}
			wantCode(t, s.Settle(ctx, m.Digest), dsec.CodeConflict)
			return errors.New("its sandbox is being made")
		}
	})
	<-sc.idle
	sc.want(t, m.DataSize+sound.DataSize, 0, 1)
	<-sc.more
	<-sc.idle
	if n := told.Load(); n != 1 {
		t.Errorf("told %d times", n)
	}
	_, err := s.Hold(t.Context(), m.Digest)
	wantCode(t, err, dsec.CodeUnavailable)
	release()
	if err := s.Settle(t.Context(), m.Digest); err != nil || len(s.Lost()) > 0 {
		t.Errorf("%v, lost %v", err, s.Lost())
	}
	_, err = s.Hold(t.Context(), m.Digest)
	wantCode(t, err, dsec.CodeInternal)
	hold(t, s, sound)()
	sc.stop()

	// The next process knows, and so does one that does not scrub.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	_, err = s.Hold(t.Context(), m.Digest)
	wantCode(t, err, dsec.CodeInternal)
	flip(t, filepath.Join(dir, "blobs"), m, 2<<20+5) // back
	hold(t, s, m)
	sc = startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, m.DataSize, 0, 0) // read anew
}

// What is imported again, or removed and imported again, is mended.
func TestImportMendsDamage(t *testing.T) {
	for _, remove := range []bool{false, true} {
		dir := t.TempDir()
		s := openStoreIn(t, dir, Options{})
		m := build(t, s, noise(1, 1<<20))
		release := hold(t, s, m)
		flip(t, filepath.Join(dir, "blobs"), m, 77)
		sc := startScrub(t, s, func(o *ScrubOptions) {
			o.Lost = func(ctx context.Context) error { release(); return s.Settle(ctx, m.Digest) }
		})
		<-sc.idle
		sc.want(t, m.DataSize, 0, 1)
		_, err := s.Hold(t.Context(), m.Digest)
		wantCode(t, err, dsec.CodeInternal)
		if remove {
			if err := s.Remove(t.Context(), m.Digest); err != nil {
				t.Fatal(err)
			}
		}
		build(t, s, noise(1, 1<<20))
		hold(t, s, m)
		<-sc.more
		<-sc.idle
		sc.want(t, 2*m.DataSize, 0, 1)
	}
}

// What is imported again in place of data that were cut short is not read by a mount
// of these, also where no scrub has found them.
func TestAnImportInPlaceOfDamage(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	m := build(t, s, noise(1, 1<<20))
	release := hold(t, s, m)
	build(t, s, noise(1, 1<<20))
	if lost := s.Lost(); len(lost) > 0 {
		t.Errorf("nothing was damaged: %v", lost)
	}
	if err := os.Truncate(filepath.Join(dir, "blobs", blobKey(m.Digest, partData)), m.DataSize-4096); err != nil {
		t.Fatal(err)
	}
	build(t, s, noise(1, 1<<20))
	_, err := s.Hold(t.Context(), m.Digest)
	wantCode(t, err, dsec.CodeUnavailable)
	release()
	if err := s.Settle(t.Context(), m.Digest); err != nil {
		t.Fatal(err)
	}
	hold(t, s, m)
}

// A layer that is shorter in the store than it was is damaged.
func TestScrubOfACutLayer(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	m := build(t, s, noise(1, 1<<20))
	hold(t, s, m)
	if err := os.Truncate(filepath.Join(dir, "blobs", blobKey(m.Digest, partData)), m.DataSize-4096); err != nil {
		t.Fatal(err)
	}
	sc := startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, m.DataSize, 0, 1)
	if !slices.Equal(s.Lost(), []string{m.Digest}) {
		t.Errorf("lost: %v", s.Lost())
	}
}

// Hashes on this node that are not the layer's prove nothing.
func TestScrubByDamagedHashes(t *testing.T) {
	s := openStore(t, Options{})
	m := build(t, s, noise(1, 1<<20))
	hold(t, s, m)
	path := s.file(m.Digest, chunksExt)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[3] ^= 1
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, b, 0o600)); err != nil {
		t.Fatal(err)
	}
	sc := startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, 0, 0, 0)
	if sc.value(t, "dsec_scrub_last_full_pass_timestamp_seconds", "") != 0 || len(s.Lost()) > 0 {
		t.Errorf("lost %v, or passed", s.Lost())
	}
}

// A process that goes on reads what the one before did not get to.
func TestScrubGoesOnAfterARestart(t *testing.T) {
	dir := t.TempDir()
	s := openStoreIn(t, dir, Options{})
	m := build(t, s, noise(1, 8<<20))
	hold(t, s, m)
	read := int64(3 << 20)
	var turns atomic.Int64
	sc := startScrub(t, s, nil)
	sc.stop()
	sc = startScrub(t, s, func(o *ScrubOptions) {
		o.wait = func(ctx context.Context, _ time.Duration) {
			if turns.Add(1) == 3 {
				<-ctx.Done()
			}
		}
	})
	testutil.WaitFor(t, 20*time.Second, "three reads", func() error {
		if turns.Load() < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	sc.stop()
	sc.want(t, read, 0, 0)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	hold(t, s, m)
	sc = startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, m.DataSize-read, 0, 0)
	sc.stop()
	// A file that is not whole is begun anew.
	if err := errors.Join(s.Close(), os.WriteFile(scrubPath(dir), []byte(`{"version":1,"layers":{"x`), 0o600)); err != nil {
		t.Fatal(err)
	}
	s = openStoreIn(t, dir, Options{})
	hold(t, s, m)
	sc = startScrub(t, s, nil)
	<-sc.idle
	sc.want(t, m.DataSize, 0, 0)
}

// Layers that come, go and come again while they are read are no damage.
func TestScrubWhileLayersComeAndGo(t *testing.T) {
	s := openStore(t, Options{})
	stays := build(t, s, noise(1, 1<<20))
	hold(t, s, stays)
	sc := startScrub(t, s, func(o *ScrubOptions) {
		o.Every, o.retry = time.Nanosecond, time.Nanosecond
		wait := o.wait
		o.wait = func(ctx context.Context, d time.Duration) {
			if d != scrubIdle {
				wait(ctx, d+time.Millisecond)
			}
		}
		o.Lost = func(context.Context) error { t.Errorf("lost: %v", s.Lost()); return nil }
	})
	for round := range 12 {
		m := build(t, s, noise(byte(round%3+2), 2<<20))
		release := hold(t, s, m)
		if round%2 == 0 { // it is being read when it goes
			n := sc.value(t, "dsec_scrub_bytes_total", "")
			testutil.WaitFor(t, 20*time.Second, "a read", func() error {
				if sc.value(t, "dsec_scrub_bytes_total", "") == n {
					return errors.New("not yet")
				}
				return nil
			})
		}
		release()
		if err := s.Remove(t.Context(), m.Digest); err != nil {
			t.Fatal(err)
		}
	}
	sc.stop()
	sc.wantMismatches(t, 0, 0)
	if lost := s.Lost(); len(lost) > 0 {
		t.Errorf("lost: %v", lost)
	}
}

// A store whose data are checked when they are read is not scrubbed.
func TestScrubOfOtherStores(t *testing.T) {
	s := openStore(t, Options{Verify: true})
	wantCode(t, s.Scrub(t.Context(), ScrubOptions{}), dsec.CodeUnsupported)
}
