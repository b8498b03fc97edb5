package lazy

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// sendSignal sends a signal to a process.
func sendSignal(t *testing.T, pidfd int, sig unix.Signal) {
	t.Helper()
	if err := unix.PidfdSendSignal(pidfd, sig, nil, 0); err != nil {
		t.Fatal(err)
	}
}

// stop stops a process that this one has started, and returns once it has stopped.
func stop(t *testing.T, pidfd int) {
	t.Helper()
	sendSignal(t, pidfd, unix.SIGSTOP)
	for {
		err := unix.Waitid(unix.P_PIDFD, pidfd, nil, unix.WSTOPPED|unix.WNOWAIT, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
}

// until lets the client's time pass until an event comes, which it returns.
func until(t *testing.T, c *Client, ticks chan time.Time, kind EventKind) Event {
	t.Helper()
	for {
		select {
		case e := <-c.Events():
			if e.Kind == kind {
				return e
			}
			t.Logf("event %+v", e)
		case ticks <- time.Time{}:
		}
	}
}

// answered waits until nothing is asked of layerd.
func answered(t *testing.T, c *Client) {
	t.Helper()
	testutil.WaitFor(t, 20*time.Second, "an answer", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.pending) > 0 {
			return errors.New("not yet")
		}
		return nil
	})
}

// A layerd that is stopped makes what it serves degraded; once it goes on, so does
// all else.
func TestAStoppedLayerdThatGoesOn(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 8<<20, MinChunk)
			cfg, ticks := f.config(t, front), make(chan time.Time)
			cfg.ticks = ticks
			c := connect(t, cfg)
			file := openImageFile(t, c, f.image)
			other, _ := f.add(t, "released", 1<<20, MinChunk)
			_ = openImageFile(t, c, other).Close()
			release(t, c, other.Key)
			checkFile(t, file, f.truth, 0, 1000)
			for range 3 * killAfter { // as long as it answers, time does nothing
				answered(t, c)
				ticks <- time.Time{}
			}
			pidfd := layerdOf(t, c)
			defer unix.Close(pidfd)
			for range 2 {
				answered(t, c)
				stop(t, pidfd)
				r := startReaders(t, 2, file, f.truth, false)
				if e := until(t, c, ticks, EventDegraded); e.Key != f.image.Key || !strings.Contains(e.Reason, "layerd") {
					t.Errorf("event %+v", e)
				}
				sendSignal(t, pidfd, unix.SIGCONT)
				if e := <-c.Events(); e.Kind != EventRecovered || e.Key != f.image.Key {
					t.Errorf("event %+v", e)
				}
				checkFile(t, file, f.truth, 0, f.image.Size)
				r.end()
			}
			select {
			case e := <-c.Events():
				t.Errorf("event %+v", e)
			default:
			}
			now := layerdOf(t, c)
			defer unix.Close(now)
			if err := unix.PidfdSendSignal(pidfd, 0, nil, 0); err != nil {
				t.Errorf("it was killed: %v", err)
			}
		})
	}
}

// One that stays so is killed, and another takes over: readers that waited get the
// bytes, all of them right.
func TestAStoppedLayerdIsReplaced(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 8<<20, MinChunk)
			f.store.set(t, faults{Delay: time.Millisecond})
			cfg, ticks := f.config(t, front), make(chan time.Time)
			cfg.ticks = ticks
			cfg.Limits.ReadAhead = MinChunk
			c := connect(t, cfg)
			file := openImageFile(t, c, f.image)
			checkFile(t, file, f.truth, 0, 1000)
			for range 2 {
				pidfd := layerdOf(t, c)
				r := startReaders(t, 4, file, f.truth, false)
				checkFile(t, file, f.truth, 4<<20, 1000)
				stop(t, pidfd)
				until(t, c, ticks, EventDegraded)
				if e := until(t, c, ticks, EventRecovered); e.Key != f.image.Key {
					t.Errorf("event %+v", e)
				}
				until(t, c, ticks, EventRestarted)
				ended(t, pidfd)
				checkFile(t, file, f.truth, 0, f.image.Size)
				r.end()
				if r.reads.Load() == 0 {
					t.Error("nothing was read")
				}
				if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
					t.Error(err)
				}
			}
			checkFile(t, file, f.truth, 0, f.image.Size)
			if lost := c.Lost(); len(lost) > 0 {
				t.Errorf("lost: %v", lost)
			}
		})
	}
}

// Calls that a stopped layerd does not take are done by its successor.
func TestCallsOfAStoppedLayerd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 1<<20, MinChunk)
	cfg, ticks := f.config(t, ""), make(chan time.Time)
	cfg.ticks = ticks
	c := connect(t, cfg)
	pidfd := layerdOf(t, c)
	stop(t, pidfd)
	opened := make(chan *os.File, 1)
	go func() {
		file, err := c.Open(t.Context(), f.image)
		if err != nil {
			t.Error(err)
		}
		opened <- file
	}()
	until(t, c, ticks, EventRestarted)
	ended(t, pidfd)
	file := <-opened
	defer file.Close()
	checkFile(t, file, f.truth, 0, f.image.Size)
}

// What reads failed for before is told again once layerd answers.
func TestWhatFailedBeforeFailsAfter(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	f := newFixture(t, 1<<20, MinChunk)
	cfg, ticks := f.config(t, ""), make(chan time.Time)
	cfg.ticks = ticks
	cfg.Limits = Limits{RetryFor: 300 * time.Millisecond}
	c := connect(t, cfg)
	file := openImageFile(t, c, f.image)
	f.store.set(t, faults{Unavailable: true})
	if _, err := file.ReadAt(make([]byte, 100), 0); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	failed := <-c.Events()
	answered(t, c)
	pidfd := layerdOf(t, c)
	stop(t, pidfd)
	if e := until(t, c, ticks, EventDegraded); e.Reason == failed.Reason {
		t.Errorf("event %+v", e)
	}
	sendSignal(t, pidfd, unix.SIGCONT)
	if e := <-c.Events(); e.Kind != EventDegraded || e.Reason != failed.Reason {
		t.Errorf("event %+v, want %q", e, failed.Reason)
	}
	// Its successor has not failed yet.
	answered(t, c)
	stop(t, pidfd)
	until(t, c, ticks, EventRecovered)
	until(t, c, ticks, EventRestarted)
	ended(t, pidfd)
	f.store.set(t, faults{})
	testutil.WaitFor(t, 20*time.Second, "a read", func() error { _, err := file.ReadAt(make([]byte, 100), 0); return err })
	checkFile(t, file, f.truth, 0, f.image.Size)
}

// A new client does not wait for ever for the greeting of one that is stopped. What
// that served is lost then, for its descriptors are.
func TestAClientOfAStoppedLayerd(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.Kernel(6, 14))
	for _, front := range bothFrontEnds {
		t.Run(string(front), func(t *testing.T) {
			f := newFixture(t, 4<<20, MinChunk)
			cfg := f.config(t, front)
			c, err := Connect(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			file := openImageFile(t, c, f.image)
			checkFile(t, file, f.truth, 0, 1000)
			pidfd := layerdOf(t, c)
			stop(t, pidfd)
			c.Close()
			cfg.greetFor = 50 * time.Millisecond
			began := make(chan *Client)
			go func() {
				c, err := Connect(t.Context(), cfg)
				if err != nil {
					t.Error(err)
				}
				began <- c
			}()
			ended(t, pidfd)
			c = <-began
			t.Cleanup(func() { stopLayerd(t, c) })
			if lost := c.Lost(); !slices.Equal(lost, []string{f.image.Key}) {
				t.Errorf("lost: %v", lost)
			}
			_ = file.Close()
			testutil.WaitFor(t, 10*time.Second, "settle", func() error { return c.Settle(t.Context(), f.image.Key) })
			checkFile(t, openImageFile(t, c, f.image), f.truth, 0, f.image.Size)
			if left, err := os.ReadDir(filepath.Join(cfg.RunDir, "served")); err != nil || len(left) > 1 {
				t.Errorf("records: %v, %v", left, err)
			}
		})
	}
}
