package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
)

func (s *sandbox) pauser() backend.Pauser { return s.i.(backend.Pauser) }

// cycle is a command that answers a line for each that it is given.
type cycle struct {
	s       *sandbox
	process uint64
	events  *chronusapi.Events
	rest    string
}

func (s *sandbox) cycle(argv ...string) *cycle {
	s.Helper()
	events := s.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: argv}, OpenStdin: true})
	ev, err := events.Next()
	check(s, err)
	s.Cleanup(func() { _ = events.Close() })
	return &cycle{s: s, process: ev.Process, events: events}
}

// ask gives it a line.
func (c *cycle) ask(line string) {
	c.s.Helper()
	_, err := c.s.client.WriteStdin(context.Background(), c.process, []byte(line+"\n"), false)
	check(c.s, err)
}

// want waits for its next line.
func (c *cycle) want(line string) {
	c.s.Helper()
	for !strings.Contains(c.rest, "\n") {
		ev, err := c.events.Next()
		check(c.s, err)
		c.rest += string(ev.Data)
	}
	var got string
	if got, c.rest, _ = strings.Cut(c.rest, "\n"); got != line {
		c.s.Fatalf("it said %q, want %q", got, line)
	}
}

// What a sandbox has in memory goes into swap while it is paused, whether its
// processes share it or not, and files in memory do; it all is there again after that.
func TestPageOutOfASandbox(t *testing.T) {
	testutil.Require(t, testutil.Root)
	testutil.Swap(t, 512<<20)
	h := newHost(t, nil)
	s := h.create()
	holds := s.cycle("/bin/inside", "hold", "24", "1")
	holds.want("true")
	sum := s.sh("head -c 16000000 /dev/urandom > /dev/shm/file; md5sum /dev/shm/file").out
	p := s.pauser()
	for round := range 3 {
		check(t, p.Pause(t.Context()))
		out, err := p.PageOut(t.Context())
		if err != nil || out.Reason != "" || out.Before < 40e6 || out.After > out.Before/5 {
			t.Errorf("round %d: %+v, %v", round, out, err)
		}
		// As an edge does that died meanwhile: it finds little to move, and tells what there is.
		again, err := p.PageOut(t.Context())
		if err != nil || again.Before < out.Before*3/4 || again.Before > out.Before*5/4 {
			t.Errorf("round %d: once more %+v, after %+v, and %v", round, again, out, err)
		}
		check(t, p.Resume(t.Context()))
		<-p.CameBack()
		if o := s.sh("md5sum /dev/shm/file"); o.out != sum || o.OOM {
			t.Errorf("round %d: %q, want %q: %+v", round, o.out, sum, o.Outcome)
		}
		holds.ask("")
		holds.want("true")
	}
	if u, err := s.i.Usage(t.Context()); err != nil || u.OOMKills != 0 {
		t.Errorf("%+v, %v", u, err)
	}
	// One that is under way is over when the sandbox is to go on, or to end.
	for what, end := range map[string]func(context.Context) error{"resume": p.Resume, "destroy": s.i.Destroy} {
		check(t, p.Pause(t.Context()))
		over := make(chan error, 1)
		go func() {
			_, err := p.PageOut(t.Context())
			over <- err
		}()
		check(t, end(t.Context()))
		if err := <-over; err != nil && dsec.CodeOf(err) != dsec.CodeConflict && dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("%s: %v", what, err)
		}
		if what == "destroy" {
			return
		}
	}
}

func TestPageOutWithoutSwap(t *testing.T) {
	testutil.Require(t, testutil.Root)
	if swaps, err := os.ReadFile("/proc/swaps"); err != nil || strings.Count(string(swaps), "\n") > 1 {
		t.Skipf("the host has swap of its own: %s, %v", swaps, err)
	}
	s := newHost(t, nil).create()
	check(t, s.pauser().Pause(t.Context()))
	if out, err := s.pauser().PageOut(t.Context()); err != nil || !strings.Contains(out.Reason, "no swap") || out.After < out.Before {
		t.Errorf("%+v, %v", out, err)
	}
	check(t, s.pauser().Resume(t.Context()))
	if o := s.sh("echo alive"); o.out != "alive\n" {
		t.Errorf("have %q", o.out)
	}
}

// A connection inside is there after a pause; who sleeps until a time that was in the
// pause wakes at its end.
func TestWhatIsThereAfterAPause(t *testing.T) {
	s := newHost(t, nil).create()
	server := s.cycle("/bin/nc", "-l", "-p", "7000")
	testutil.WaitFor(t, 20*time.Second, "it listens", func() error {
		if o := s.sh("netstat -ltn"); !strings.Contains(o.out, ":7000") {
			return errors.New(o.out)
		}
		return nil
	})
	client := s.cycle("/bin/nc", "127.0.0.1", "7000")
	client.ask("before")
	server.want("before")
	begun := time.Now()
	sleeper := s.cycle("/bin/sh", "-c", "echo sleeps; sleep 1; echo wakes")
	sleeper.want("sleeps")
	check(t, s.pauser().Pause(t.Context()))
	paused := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	if _, err := s.client.Info(ctx); !errors.Is(err, context.DeadlineExceeded) { // it takes that long
		t.Errorf("a paused sandbox answers: %v", err)
	}
	stood := time.Since(paused)
	check(t, s.pauser().Resume(t.Context()))
	sleeper.want("wakes")
	if o, err := outcomeOf(sleeper.events); err != nil || !o.OK() || o.Duration > time.Since(begun)-stood {
		t.Errorf("what slept through a pause of %v: %+v, %v", stood, o, err)
	}
	for _, end := range []struct{ from, to *cycle }{{client, server}, {server, client}} {
		end.from.ask("after")
		end.to.want("after")
	}
}

func outcomeOf(events *chronusapi.Events) (dsec.Outcome, error) {
	for {
		ev, err := events.Next()
		if err != nil || ev.Kind == chronusapi.EventExited {
			return ev.Outcome, err
		}
	}
}

// Nothing is started in a paused sandbox: it would stand still before its first
// instruction, and the launcher with it, which makes all other sandboxes.
func TestNothingIsStartedInAPausedSandbox(t *testing.T) {
	h := newHost(t, nil)
	read := make(chan error, forkers)
	var paused []*sandbox
	for range forkers { // as many as would keep the launcher
		s := h.create()
		paused = append(paused, s)
		check(t, s.pauser().Pause(t.Context()))
		go func() {
			r, err := s.client.Read(context.Background(), "/etc/passwd", 0, -1)
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				err = errors.Join(err, r.Close())
			}
			read <- err
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if _, err := s.i.(backend.FileServer).DialFiles(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a connection for files of a paused sandbox: %v", err)
		}
		cancel()
	}
	if o := h.create().sh("echo other"); o.out != "other\n" {
		t.Errorf("another sandbox: %q", o.out)
	}
	for _, s := range paused {
		check(t, s.pauser().Resume(t.Context()))
	}
	for range paused {
		check(t, <-read)
	}
}

// timesOut checks that time goes on in a sandbox.
func (s *sandbox) timesOut() {
	s.Helper()
	events := s.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"/bin/sh", "-c", "while :; do :; done"}, Timeout: time.Millisecond}})
	defer time.AfterFunc(20*time.Second, func() { _ = events.Close() }).Stop()
	if o, err := outcomeOf(events); err != nil || !o.TimedOut {
		s.Errorf("a command past its time: %+v, %v", o, err)
	}
	_ = events.Close()
}

// At every step of a pause at which the backend's process can die, the next one finds
// the sandbox paused, or going on with its time, and both can be changed.
func TestKilledInAPause(t *testing.T) {
	for _, step := range append(slices.Clone(PauseCrashSteps), "paused/snapshot", "resumed/snapshot") {
		t.Run(step, func(t *testing.T) {
			h := newHost(t, nil)
			h.handOver(t)
			req := h.request()
			step, _, snapshot := strings.Cut(step, "/")
			snapshot = snapshot || step == "snapshot"
			cmd, stdin, handle := h.startVictim(errand{Request: req, Crash: step, Pause: !snapshot, Snapshot: snapshot})
			_, err := io.WriteString(stdin, "pause\n")
			check(t, err)
			killed(t, cmd)
			h.open()
			check(t, h.b.Sweep(t.Context(), map[dsec.SandboxID]bool{req.ID: true}))
			i, err := h.b.Recover(t.Context(), req.ID, backend.Handle(handle))
			check(t, err)
			s := &sandbox{host: h, id: req.ID}
			s.use(i)
			t.Cleanup(func() { check(t, i.Destroy(background)); _ = s.client.Close() })
			want := step == "paused" || step == "snapshot" || step == "resume-thaw"
			if s.pauser().Paused() != want {
				t.Errorf("paused: %v, want %v", !want, want)
			}
			if !want {
				s.timesOut()
			}
			check(t, s.pauser().Pause(t.Context()))
			check(t, s.pauser().Resume(t.Context()))
			s.timesOut()
			if o := s.sh("echo alive"); o.out != "alive\n" || i.(*instance).sh.group.MarkedPaused() {
				t.Errorf("have %q, marked %v", o.out, i.(*instance).sh.group.MarkedPaused())
			}
		})
	}
}

// BenchmarkPause pauses a sandbox with a process of 256 MiB, with and without its
// memory in swap.
func BenchmarkPause(b *testing.B) {
	for _, forks := range []int{0, 3} {
		for _, out := range []bool{false, true} {
			b.Run(fmt.Sprintf("forks=%d/pageout=%v", forks, out), func(b *testing.B) {
				testutil.Require(b, testutil.Root)
				testutil.Swap(b, 1<<30)
				benchmarkPause(b, fmt.Sprint(forks), out)
			})
		}
	}
}

func benchmarkPause(b *testing.B, forks string, pageOut bool) {
	h := newHost(b, nil)
	req := h.request()
	req.Spec.Limits.MemoryBytes, req.Spec.Limits.MilliCPU = 512<<20, 2000
	i, err := h.b.Create(b.Context(), req)
	check(b, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	b.Cleanup(func() {
		_ = s.client.Close()
		check(b, i.Destroy(background))
	})
	holds := s.cycle("/bin/inside", "hold", "256", forks)
	holds.want("true")
	s.sh("true")
	p, g := s.pauser(), i.(*instance).sh.group
	var floor, freeze, resume, first, touched, paging []time.Duration
	var given, had int64
	since := func(list *[]time.Duration, f func()) {
		begun := time.Now()
		f()
		*list = append(*list, time.Since(begun))
	}
	for b.Loop() {
		since(&floor, func() { check(b, g.Freeze(b.Context())) })
		check(b, g.Thaw())
		since(&freeze, func() { check(b, p.Pause(b.Context())) })
		if pageOut {
			since(&paging, func() {
				out, err := p.PageOut(b.Context())
				check(b, err)
				given, had = given+out.Before-out.After, had+out.Before
			})
		}
		begun := time.Now()
		since(&resume, func() { check(b, p.Resume(b.Context())) })
		since(&first, func() { s.sh("true") })
		holds.ask("")
		holds.want("true")
		touched = append(touched, time.Since(begun))
	}
	b.ReportMetric(median(floor), "freeze-alone-us")
	b.ReportMetric(median(freeze), "pause-us")
	b.ReportMetric(median(resume), "resume-us")
	b.ReportMetric(median(first), "first-command-us")
	b.ReportMetric(median(touched), "all-touched-us")
	if pageOut {
		b.ReportMetric(float64(given)/float64(b.N)/(1<<30)/(median(paging)/1e6), "pageout-GiB/s")
		b.ReportMetric(100*float64(given)/float64(had), "%given-back")
	}
}
