package backendtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// pausable makes an instance that can be paused.
func pausable(t *testing.T, h Harness, be backend.Backend) (*box, backend.Pauser) {
	t.Helper()
	b := create(t, h, be)
	return b, b.pauser()
}

func (b *box) pauser() backend.Pauser {
	b.t.Helper()
	p, ok := b.inst.(backend.Pauser)
	if !ok {
		b.t.Skip("its instances cannot be paused")
	}
	return p
}

func (b *box) pause(p backend.Pauser) {
	b.t.Helper()
	if err := p.Pause(b.ctx()); err != nil {
		b.t.Fatalf("pause: %v", err)
	}
	if !p.Paused() {
		b.t.Fatal("it is paused, and does not say so")
	}
}

func (b *box) resume(p backend.Pauser) {
	b.t.Helper()
	if err := p.Resume(b.ctx()); err != nil {
		b.t.Fatalf("resume: %v", err)
	}
	if p.Paused() {
		b.t.Fatal("it goes on, and says that it is paused")
	}
}

// pageOut checks that what it tells can be.
func (b *box) pageOut(p backend.Pauser) {
	b.t.Helper()
	out, err := p.PageOut(b.ctx())
	if err != nil || out.After > out.Before+1<<20 || out.Before < 0 || out.After < 0 {
		b.t.Fatalf("page out: %+v, %v", out, err)
	}
}

// content is what a file holds, whichever goroutine asks.
func (b *box) content(path string) (string, error) {
	r, err := b.Read(b.ctx(), path, 0, -1)
	if err != nil {
		return "", err
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	return string(text), err
}

// standsStill checks that nothing inside answers.
func (b *box) standsStill() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx(), 100*time.Millisecond)
	defer cancel()
	if _, err := b.Info(ctx); !errors.Is(err, context.DeadlineExceeded) {
		b.t.Errorf("a paused instance answers: %v", err)
	}
}

// What runs stands still and goes on as if nothing had been; calls that are made
// meanwhile wait. Each step may be done again.
func testPause(t *testing.T, h Harness) {
	b, p := pausable(t, h, h.New(t))
	if p.Paused() {
		t.Error("a new instance is paused")
	}
	if _, err := p.PageOut(b.ctx()); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("page out of one that runs: %v, want conflict", err)
	}
	b.resume(p)
	b.write("/root/kept", "kept")
	session := b.openSession(chronusapi.SessionRequest{Cwd: "/tmp"})
	b.in(session, "export KEPT=yes")
	echo := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, OpenStdin: true})
	const size = 3_000_000
	s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Shell: fmt.Sprintf("yes 0123456789abcde | head -c %d", size)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(); err != nil { // it has started
		t.Fatal(err)
	}
	b.pause(p)
	b.pause(p)
	b.standsStill()
	b.pageOut(p)
	b.pageOut(p)
	b.standsStill()
	var calls sync.WaitGroup
	calls.Go(func() {
		if _, err := b.WriteStdin(b.ctx(), echo, []byte("said meanwhile"), true); err != nil {
			t.Errorf("input: %v", err)
		}
	})
	calls.Go(func() {
		if kept, err := b.content("/root/kept"); err != nil || kept != "kept" {
			t.Errorf("file: %q, %v", kept, err)
		}
	})
	calls.Go(func() {
		if r, err := gather(s, 0); err != nil || r.stdout != strings.Repeat("0123456789abcde\n", size/16) || !r.outcome.OK() {
			t.Errorf("output that a pause was in: %d bytes, %+v, %v", len(r.stdout), r.outcome, err)
		}
	})
	if u, err := b.inst.Usage(b.ctx()); err != nil || u.Pids < 1 {
		t.Errorf("usage of a paused instance: %+v, %v", u, err)
	}
	b.resume(p)
	b.resume(p)
	calls.Wait()
	if r := b.attach(echo, 0); r.stdout != "said meanwhile" || !r.outcome.OK() {
		t.Errorf("what waited for input: %q, %+v", r.stdout, r.outcome)
	}
	if r := b.in(session, "pwd; echo $KEPT"); r.stdout != "/tmp\nyes\n" {
		t.Errorf("the session: %q, %+v", r.stdout, r.outcome)
	}
	// A pause that was given up before it began is none.
	ctx, cancel := context.WithCancel(b.ctx())
	cancel()
	if err := p.Pause(ctx); err == nil || p.Paused() {
		t.Errorf("a pause that was given up: %v, paused %v", err, p.Paused())
	}
	if r := b.shell("echo alive"); r.stdout != "alive\n" {
		t.Errorf("after that: %q", r.stdout)
	}
}

// Time in which an instance is paused counts for no timeout and no duration.
func testPauseDeadlines(t *testing.T, h Harness) {
	b, p := pausable(t, h, h.New(t))
	session := b.openSession(chronusapi.SessionRequest{})
	// Where the host was too slow for it, with twice the time.
	for timeout := 400 * time.Millisecond; ; timeout *= 2 {
		if timeout > time.Minute {
			t.Fatal("the host is too slow for this test")
		}
		begun := time.Now()
		s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "echo begun; sleep 1000", Timeout: timeout}})
		if err != nil {
			t.Fatal(err)
		}
		in, err := b.RunCommand(b.ctx(), chronusapi.SessionCommand{Session: session, Command: "echo begun; sleep 1000", Timeout: timeout})
		if err != nil {
			t.Fatal(err)
		}
		b.pause(p)
		inTime := time.Since(begun) < timeout
		paused := time.Now()
		ctx, cancel := context.WithTimeout(b.ctx(), 2*timeout)
		_, err = b.Info(ctx)
		cancel()
		held := time.Since(paused)
		b.resume(p)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a paused instance answers: %v", err)
		}
		ends := map[string]result{}
		for what, s := range map[string]*chronusapi.Events{"command": s, "session": in} {
			if ends[what], err = gather(s, anySeq); err != nil {
				t.Fatal(err)
			}
		}
		took := time.Since(begun)
		if !inTime {
			continue
		}
		for what, r := range ends {
			if o := r.outcome; !o.TimedOut || took < timeout+held || o.Duration < timeout || o.Duration > took-held || r.stdout != "begun\n" {
				t.Errorf("%s: %+v, all after %v, paused for %v", what, r, took, held)
			}
		}
		return
	}
}

// The next edge finds a paused instance paused, and has it go on.
func testPauseRecover(t *testing.T, h Harness) {
	b, p := pausable(t, h, h.New(t))
	process := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, OpenStdin: true})
	if _, err := b.WriteStdin(b.ctx(), process, []byte("before "), false); err != nil {
		t.Fatal(err)
	}
	b.pause(p)
	next := h.New(t)
	inst, err := next.Recover(b.ctx(), b.id, b.inst.Handle())
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Sweep(b.ctx(), map[dsec.SandboxID]bool{b.id: true}); err != nil {
		t.Fatal(err)
	}
	r := newBox(t, b.id, inst)
	p = r.pauser()
	if !p.Paused() {
		t.Error("it is not paused any more")
	}
	r.pause(p)
	r.standsStill()
	r.pageOut(p)
	r.resume(p)
	if _, err := r.WriteStdin(r.ctx(), process, []byte("after"), true); err != nil {
		t.Fatal(err)
	}
	if got := r.attach(process, 0); got.stdout != "before after" || !got.outcome.OK() {
		t.Errorf("the process said %q, %+v", got.stdout, got.outcome)
	}
	r.write("/root/new", "new")
	if got := r.shell("cat /root/new"); got.stdout != "new" {
		t.Errorf("a new command said %q", got.stdout)
	}
	// One whose edge died before it went on ends, too.
	r.pause(p)
	last, err := h.New(t).Recover(b.ctx(), b.id, inst.Handle())
	if err != nil {
		t.Fatal(err)
	}
	destroy(t, last)
}

// One that is paused and not to be kept is swept.
func testPauseSweep(t *testing.T, h Harness) {
	b, p := pausable(t, h, h.New(t))
	b.pause(p)
	if err := h.New(t).Sweep(b.ctx(), nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.inst.Done():
	case <-time.After(hang):
		t.Error("swept, and not done")
	}
}

// A paused instance can be destroyed, at any moment of a pause too.
func testPauseDestroy(t *testing.T, h Harness) {
	be := h.New(t)
	b, p := pausable(t, h, be)
	process := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "while :; do :; done"}})
	b.pause(p)
	b.pageOut(p)
	waits := make(chan error, 1)
	go func() {
		s, err := b.Attach(b.ctx(), process, 0)
		if err == nil {
			_, err = gather(s, 0)
		}
		waits <- err
	}()
	destroy(t, b.inst)
	if err := <-waits; err == nil {
		t.Error("a call of a paused instance that was destroyed has ended well")
	}
	for what, f := range map[string]func(context.Context) error{
		"pause": p.Pause, "resume": p.Resume, "page out": func(ctx context.Context) error { _, err := p.PageOut(ctx); return err },
	} {
		if err := f(b.ctx()); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("%s of one that is gone: %v, want lost", what, err)
		}
	}
	for n := range 20 {
		b, p := pausable(t, h, be)
		b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "while :; do :; done"}})
		var all sync.WaitGroup
		begun := make(chan struct{}, 3)
		for _, f := range []func(context.Context) error{p.Pause, func(ctx context.Context) error { _, err := p.PageOut(ctx); return err }, p.Resume} {
			all.Go(func() {
				for i := range 10 {
					if err := f(b.ctx()); err != nil && dsec.CodeOf(err) == dsec.CodeInternal {
						t.Errorf("beside a destroy: %v", err)
					}
					if i == n%4 {
						begun <- struct{}{}
					}
				}
			})
		}
		<-begun
		destroy(t, b.inst)
		all.Wait()
	}
}

// Pauses at any moment of commands and of calls for files change nothing of what
// these say.
func testPauseBesideCalls(t *testing.T, h Harness) {
	b, p := pausable(t, h, h.New(t))
	session := b.openSession(chronusapi.SessionRequest{})
	stop := make(chan struct{})
	var pauses, calls sync.WaitGroup
	pauses.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			b.pause(p)
			b.resume(p)
		}
	})
	const rounds = 20
	calls.Go(func() {
		for n := range rounds {
			want := fmt.Sprintf("ok %d\n", n)
			if r := b.shell(fmt.Sprintf("echo ok %d; exit %d", n, n)); r.stdout != want || r.outcome.Code != n {
				t.Errorf("command %d: %q, %+v", n, r.stdout, r.outcome)
			}
		}
	})
	calls.Go(func() {
		for n := range rounds {
			if r := b.in(session, fmt.Sprintf("echo in %d", n)); r.stdout != fmt.Sprintf("in %d\n", n) {
				t.Errorf("session, command %d: %q, %+v", n, r.stdout, r.outcome)
			}
		}
	})
	calls.Go(func() {
		for n := range rounds {
			path, text := fmt.Sprintf("/root/file%d", n), strings.Repeat("x", n*1000)
			if _, err := b.Write(b.ctx(), chronusapi.WriteRequest{Path: path}, strings.NewReader(text)); err != nil {
				t.Errorf("write: %v", err)
			}
			if got, err := b.content(path); err != nil || got != text {
				t.Errorf("%s holds %d bytes, %v", path, len(got), err)
			}
		}
	})
	calls.Wait()
	close(stop)
	pauses.Wait()
}

// randomPauses are the steps of testPauseRandom, in whatever order.
type randomPauses struct {
	*box
	h      Harness
	p      backend.Pauser
	paused bool
	n      int
	waits  []func() // what is checked once the instance goes on
}

func testPauseRandom(t *testing.T, h Harness) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	b, p := pausable(t, h, h.New(t))
	s := &randomPauses{box: b, h: h, p: p}
	steps := []func(){s.stepPause, s.stepPause, s.stepResume, s.stepResume, s.stepPageOut, s.stepCommand, s.stepCommand, s.stepFile, s.stepUsage}
	for n := range 1000 {
		s.n = n
		if random.IntN(100) == 0 {
			s.stepRecover()
		}
		steps[random.IntN(len(steps))]()
	}
	s.stepResume()
	if r := s.shell("echo alive"); r.stdout != "alive\n" {
		t.Errorf("at the end: %q", r.stdout)
	}
}

func (s *randomPauses) stepPause() {
	s.pause(s.p)
	s.paused = true
}

func (s *randomPauses) stepResume() {
	s.resume(s.p)
	s.paused = false
	for _, wait := range s.waits {
		wait()
	}
	s.waits = nil
}

func (s *randomPauses) stepPageOut() {
	if s.paused {
		s.pageOut(s.p)
	} else if _, err := s.p.PageOut(s.ctx()); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		s.t.Errorf("page out of one that runs: %v", err)
	}
}

// later runs f, and checks it at once or when the instance goes on.
func (s *randomPauses) later(f func() error) {
	if len(s.waits) == 8 {
		return
	}
	done := make(chan error, 1)
	go func() { done <- f() }()
	wait := func() {
		if err := <-done; err != nil {
			s.t.Error(err)
		}
	}
	if !s.paused {
		wait()
		return
	}
	s.waits = append(s.waits, wait)
}

func (s *randomPauses) stepCommand() {
	n, b := s.n, s.box
	s.later(func() error {
		stream, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Shell: fmt.Sprintf("echo %d", n), Timeout: hang}})
		if err != nil {
			return fmt.Errorf("command %d: %w", n, err)
		}
		if r, err := gather(stream, 0); err != nil || r.stdout != fmt.Sprintf("%d\n", n) || !r.outcome.OK() {
			return fmt.Errorf("command %d: %q, %+v, %w", n, r.stdout, r.outcome, err)
		}
		return nil
	})
}

func (s *randomPauses) stepFile() {
	n, b := s.n, s.box
	s.later(func() error {
		if _, err := b.Write(b.ctx(), chronusapi.WriteRequest{Path: "/root/file"}, strings.NewReader("text")); err != nil {
			return fmt.Errorf("file %d: %w", n, err)
		}
		if text, err := b.content("/root/file"); err != nil || text != "text" {
			return fmt.Errorf("file %d: %q, %w", n, text, err)
		}
		return nil
	})
}

func (s *randomPauses) stepUsage() {
	if _, err := s.inst.Usage(s.ctx()); err != nil {
		s.t.Error(err)
	}
}

func (s *randomPauses) stepRecover() {
	if len(s.waits) > 0 {
		return // these are the last edge's
	}
	inst, err := s.h.New(s.t).Recover(s.ctx(), s.id, s.inst.Handle())
	if err != nil {
		s.t.Fatal(err)
	}
	s.box = newBox(s.t, s.id, inst)
	s.p = s.pauser()
	if s.p.Paused() != s.paused {
		s.t.Errorf("recovered: paused %v, want %v", !s.paused, s.paused)
	}
}
