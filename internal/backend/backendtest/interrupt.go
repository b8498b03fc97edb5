package backendtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// begin starts a command in a session and reads up to its first output.
func (b *box) begin(session, command string) (s *chronusapi.Events, cancel context.CancelCauseFunc) {
	b.t.Helper()
	ctx, cancel := context.WithCancelCause(b.ctx())
	s, err := b.RunCommand(ctx, chronusapi.SessionCommand{Session: session, Command: command})
	for kind := chronusapi.EventStarted; err == nil && kind != chronusapi.EventOutput; {
		var e chronusapi.Event
		e, err = s.Next()
		kind = e.Kind
	}
	if err != nil {
		b.t.Fatalf("%q: %v", command, err)
	}
	return s, cancel
}

// What interrupts a command reaches that one and nothing else of its session.
func testInterrupt(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	id := b.openSession(chronusapi.SessionRequest{Cwd: "/"})
	b.in(id, "cd /tmp; export KEPT=yes")
	kept := func(after string) {
		t.Helper()
		if r := b.in(id, "pwd; echo $KEPT; echo $BAD"); r.stdout != "/tmp\nyes\n\n" {
			t.Fatalf("after %s: %q, %+v", after, r.stdout, r.outcome)
		}
	}
	want(t, "an idle session", b.Interrupt(b.ctx(), id), "session_id", dsec.CodeConflict)
	want(t, "no session", b.Interrupt(b.ctx(), "s4242"), "session_id", dsec.CodeNotFound)

	s, _ := b.begin(id, "echo begun; sleep 1000")
	if err := b.Interrupt(b.ctx(), id); err != nil {
		t.Fatal(err)
	}
	r, err := gather(s, anySeq)
	if o := r.outcome; err != nil || o.TimedOut || !o.Claimed || o.ShellStatus() != 128+9 {
		t.Errorf("an interrupted command: %+v, %v", o, err)
	}
	kept("Interrupt")

	_, cancel := b.begin(id, "echo begun; sleep 1000")
	cancel(chronusapi.ErrInterrupt)
	kept("a cancel in its turn")

	s, _ = b.begin(id, "echo begun; sleep 1000")
	b.waitInVain(id)
	if list, err := b.Sessions(b.ctx()); err != nil || len(list) != 1 || !list[0].Busy {
		t.Errorf("a cancel of what waits has reached what runs: %+v, %v", list, err)
	}
	if err := b.Interrupt(b.ctx(), id); err != nil {
		t.Fatal(err)
	}
	if r, err := gather(s, anySeq); err != nil || r.outcome.ShellStatus() != 128+9 {
		t.Errorf("what ran meanwhile: %+v, %v", r.outcome, err)
	}
	kept("cancels before their turn")

	// A client that goes away without a word, as an edge does that is restarted.
	s, cancel = b.begin(id, "echo begun; sleep 0.3; export LATE=yes; yes | head -c 1000000")
	cancel(nil)
	_ = s.Close()
	if r := b.in(id, "echo $LATE"); r.stdout != "yes\n" {
		t.Errorf("a command whose client is gone has not run on: %q", r.stdout)
	}
}

// waitInVain has a command wait for its turn, and gives it up.
func (b *box) waitInVain(id string) {
	b.t.Helper()
	ctx, cancel := context.WithCancelCause(b.ctx())
	done := make(chan error)
	go func() {
		_, err := b.RunCommand(ctx, chronusapi.SessionCommand{Session: id, Command: "sleep 1000 && export BAD=yes"})
		done <- err
	}()
	cancel(chronusapi.ErrInterrupt)
	if err := <-done; !errors.Is(err, chronusapi.ErrInterrupt) {
		b.t.Errorf("a command that was given up: %v, want %v", err, chronusapi.ErrInterrupt)
	}
}

// Several clients of one session, of which some give their commands up at any
// moment: the others' are not touched.
func testInterruptStress(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	id := b.openSession(chronusapi.SessionRequest{Cwd: "/tmp"})
	ctx := b.ctx()
	var all sync.WaitGroup
	for worker := range 2 {
		all.Go(func() {
			for i := range 20 {
				text := fmt.Sprintf("ok %d %d", worker, i)
				s, err := b.RunCommand(ctx, chronusapi.SessionCommand{Session: id, Command: "sleep 0.001 && echo " + text})
				if err != nil {
					t.Errorf("%s: %v", text, err)
					return
				}
				if r, err := gather(s, anySeq); err != nil || r.stdout != text+"\n" || r.outcome.Code != 0 {
					t.Errorf("%s: %q, %+v, %v", text, r.stdout, r.outcome, err)
				}
			}
		})
	}
	for fickle := range 2 {
		all.Go(func() {
			for i := range 20 {
				ctx, cancel := context.WithCancelCause(ctx)
				command := []string{"true", "sleep 1000", strings.Repeat("#", 100_000) + "\nsleep 1000", "echo; sleep 0.001"}[(i+fickle)%4]
				if i%3 == 0 {
					cancel(chronusapi.ErrInterrupt) // before it is sent
				}
				s, err := b.RunCommand(ctx, chronusapi.SessionCommand{Session: id, Command: command})
				if err == nil {
					if i%3 == 1 {
						_, _ = s.Next() // it has its turn
					}
					cancel(chronusapi.ErrInterrupt)
					_ = s.Close()
				}
				cancel(nil)
			}
		})
	}
	all.Wait()
	if r := b.in(id, "pwd"); r.stdout != "/tmp\n" {
		t.Errorf("at the end: %q, %+v", r.stdout, r.outcome)
	}
}
