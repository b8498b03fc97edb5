package testutil

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// recorder stands in for a test that Require ends.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()                   {}
func (r *recorder) Skipf(f string, a ...any)  { r.skipped = fmt.Sprintf(f, a...) }
func (r *recorder) Fatalf(f string, a ...any) { r.failed = fmt.Sprintf(f, a...) }

func TestRequireSkipsWithTheReasonUnlessItMust(t *testing.T) {
	here := newNeed("here", func() error { return nil })
	missing := newNeed("moon", func() error { return errors.New("it is day") })
	for _, tc := range []struct{ must, skipped, failed string }{
		{must: "", skipped: "needs moon: it is day"},
		{must: "here,moonlight", skipped: "needs moon: it is day"},
		{must: "here,moon", failed: "needs moon, which DSEC_MUST says is here: it is day"},
		{must: "all", failed: "needs moon, which DSEC_MUST says is here: it is day"},
	} {
		t.Run(tc.must, func(t *testing.T) {
			t.Setenv("DSEC_MUST", tc.must)
			r := &recorder{TB: t}
			Require(r, here)
			if r.skipped+r.failed != "" {
				t.Fatalf("a need that is here ended the test: %q %q", r.skipped, r.failed)
			}
			if tc.failed == "" {
				Require(r, here, missing)
			} else {
				// The real Fatalf does not return; neither may this one.
				done := make(chan struct{})
				go func() {
					defer close(done)
					Require(&fatal{r}, here, missing)
				}()
				<-done
			}
			if r.skipped != tc.skipped || r.failed != tc.failed {
				t.Errorf("skipped %q, failed %q; want %q, %q", r.skipped, r.failed, tc.skipped, tc.failed)
			}
		})
	}
}

type fatal struct{ *recorder }

func (f *fatal) Fatalf(format string, a ...any) {
	f.recorder.Fatalf(format, a...)
	runtime.Goexit()
}

func TestRequireCanBeToldThatAThingIsMissing(t *testing.T) {
	here := newNeed("here", func() error { return nil })
	t.Setenv("DSEC_WITHOUT", "here")
	r := &recorder{TB: t}
	if Require(r, here); r.skipped != "needs here: held back by DSEC_WITHOUT" {
		t.Errorf("skipped %q", r.skipped)
	}
	t.Setenv("DSEC_MUST", "here")
	r = &recorder{TB: t}
	if Require(r, here); r.skipped+r.failed != "" {
		t.Errorf("skipped %q, failed %q", r.skipped, r.failed)
	}
}

func TestKernelComparesVersions(t *testing.T) {
	if !Kernel(2, 6).Has() {
		t.Error("this kernel is older than 2.6")
	}
	if Kernel(999, 0).Has() {
		t.Error("this kernel is at least 999.0")
	}
}

func TestWaitForReturnsAtOnceAndAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		calls := 0
		err := poll(time.Second, func() error {
			if calls++; calls < 4 {
				return errors.New("not yet")
			}
			return nil
		})
		if want := 7 * time.Millisecond; err != nil || time.Since(start) != want {
			t.Errorf("fourth try: %v after %v, want none after %v", err, time.Since(start), want)
		}
		start = time.Now()
		err = poll(time.Second, func() error { return errors.New("never") })
		if err == nil || err.Error() != "never" || time.Since(start) != time.Second {
			t.Errorf("never: %v after %v, want the last error after 1s", err, time.Since(start))
		}
	})
}

func TestLoggerIsSilentAfterItsTest(t *testing.T) {
	var log = func() *testWriter {
		var w *testWriter
		t.Run("short", func(t *testing.T) {
			w = &testWriter{t: t}
			t.Cleanup(w.close)
			if _, err := io.WriteString(w, "while it runs\n"); err != nil {
				t.Error(err)
			}
		})
		return w
	}()
	if n, err := io.WriteString(log, "too late"); n != 8 || err != nil {
		t.Errorf("write after the end: %d, %v", n, err)
	}
}

func TestDirIsShortAndCarriesItsName(t *testing.T) {
	t.Run("with_a_name_so_long_that_no_socket_would_fit_below_a_directory_named_after_it_as_the_usual_ones_are", func(t *testing.T) {
		dir := Dir(t)
		if len(dir) > 60 {
			t.Errorf("%s has %d characters", dir, len(dir))
		}
		if !strings.Contains(dir, fmt.Sprintf("dsec-t-%d-", os.Getpid())) {
			t.Errorf("%s does not carry a test's name", dir)
		}
	})
}

// seen runs leak and reports what a ledger finds, then runs the function that
// leak returned and checks that the ledger is even again.
func seen(t *testing.T, names []string, leak func() (undo func())) string {
	t.Helper()
	s := scope{names: names}
	before, err := s.take()
	if err != nil {
		t.Fatal(err)
	}
	undo := leak()
	found := s.check(before)
	undo()
	if err := poll(ledgerWait, func() error { return s.check(before) }); err != nil {
		t.Errorf("after it was undone: %v", err)
	}
	if found == nil {
		return ""
	}
	return found.Error()
}

func TestLedgerSeesDescriptorsAndChildren(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kept-open")
	got := seen(t, nil, func() func() {
		f, err := os.Create(file)
		if err != nil {
			t.Fatal(err)
		}
		return func() { _ = f.Close() }
	})
	if !strings.Contains(got, "+1 descriptor "+file) {
		t.Errorf("an open file: %s", got)
	}
	got = seen(t, nil, func() func() {
		cmd := exec.Command("cat")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return func() { _, _ = in.Close(), cmd.Wait() }
	})
	if !strings.Contains(got, "+1 process ") || !strings.Contains(got, "+1 descriptor pipe") {
		t.Errorf("a child with a pipe: %s", got)
	}
	if got := seen(t, nil, func() func() { return func() {} }); got != "" {
		t.Errorf("nothing leaked, but: %s", got)
	}
}
