package test

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// seen are the events that somebody watches, as lines by sandbox or job.
type seen struct {
	mu     sync.Mutex
	lines  map[string][]string
	last   string // cursor
	cancel context.CancelFunc
	done   chan error
}

// watchAll begins to watch, and returns once that is so.
func watchAll(t *testing.T, c *client.Client, o client.EventOptions) *seen {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s := &seen{lines: map[string][]string{}, cancel: cancel, done: make(chan error, 1)}
	t.Cleanup(cancel)
	go func() {
		for e, err := range c.Events(ctx, o) {
			if err != nil {
				s.done <- err
				return
			}
			line := e.State
			if e.Kind != client.EventSandbox && e.Kind != client.EventJob {
				line = e.Kind
			}
			if e.Repeated {
				line += " repeated"
			}
			name := string(e.SandboxID)
			if name == "" {
				name = e.Job
			}
			s.mu.Lock()
			s.lines[name], s.last = append(s.lines[name], line), e.Cursor
			s.mu.Unlock()
		}
		s.done <- nil
	}()
	return s
}

func (s *seen) of(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.lines[name], ", ")
}

func (s *seen) want(t *testing.T, name, lines string) {
	t.Helper()
	testutil.WaitFor(t, 30*time.Second, "events", func() error {
		if got := s.of(name); got != lines {
			return fmt.Errorf("of %s there are %q, want %q", name, got, lines)
		}
		return nil
	})
}

// TestEventsOverAKilledServer: who watches misses nothing while servers are killed and started, and
// sees nothing twice that is not marked; who comes later with a cursor, as well.
func TestEventsOverAKilledServer(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	w := watchAll(t, cl, client.EventOptions{FromStart: true})
	job, err := cl.CreateJob(t.Context(), "train", client.JobOptions{})
	check(t, err)
	testutil.WaitFor(t, 30*time.Second, "the job", func() error {
		if got := strings.TrimSuffix(w.of("train"), " repeated"); got != "active" { // it may have been there first
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
	first := w.of("train")
	var all []*client.Sandbox
	for range 5 {
		sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Job: "train"})
		check(t, err)
		all = append(all, sb)
	}
	for i, sb := range all {
		_, err := sb.Pause(t.Context(), client.PauseOptions{})
		check(t, err)
		if i%2 == 0 {
			restart(t, c)
		}
		says(t, sb, "true")
		check(t, sb.Kill(t.Context()))
	}
	_, err = job.End(t.Context())
	check(t, err)
	const life = "running, paused, running, stopping, stopped"
	for _, sb := range all {
		w.want(t, string(sb.ID()), life)
	}
	w.want(t, "train", first+", ended")
	w.cancel()
	<-w.done
	w.mu.Lock()
	cursor := w.last
	w.mu.Unlock()
	restart(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	later := watchAll(t, cl, client.EventOptions{Cursor: cursor})
	later.want(t, string(sb.ID()), "running")
	check(t, sb.Kill(t.Context()))
	later.want(t, string(sb.ID()), "running, stopping, stopped")
	for _, sb := range all {
		if got := later.of(string(sb.ID())); got != "" {
			t.Errorf("with a cursor: %s again", got)
		}
	}
}

// TestEventsAreOfOneProject, and what is asked for.
func TestEventsAreOfOneProject(t *testing.T) {
	s := up(t)
	a, _ := s.project(t, "a")
	b, _ := s.project(t, "b")
	wa, wb := watchAll(t, a, client.EventOptions{FromStart: true}), watchAll(t, b, client.EventOptions{FromStart: true})
	failed := watchAll(t, a, client.EventOptions{FromStart: true, EventFilter: client.EventFilter{States: []string{"stopped"}, Kinds: []string{"sandbox"}, Job: "one"}})
	for _, job := range []string{"one", "two"} {
		_, err := a.CreateJob(t.Context(), job, client.JobOptions{Labels: map[string]string{"k": job}})
		check(t, err)
	}
	one, err := a.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Job: "one"})
	check(t, err)
	two, err := a.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Job: "two"})
	check(t, err)
	check(t, one.Kill(t.Context()))
	check(t, two.Kill(t.Context()))
	other, err := b.CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	wa.want(t, string(two.ID()), "running, stopping, stopped")
	wb.want(t, string(other.ID()), "running")
	failed.want(t, string(one.ID()), "stopped")
	for name, got := range map[string]string{
		"another project's": wb.of(string(one.ID())) + wb.of("one") + wa.of(string(other.ID())), "another job's": failed.of(string(two.ID())) + failed.of("one"),
	} {
		if got != "" {
			t.Errorf("%s events are seen: %s", name, got)
		}
	}
	for field, o := range map[string]client.EventOptions{
		"cursor":                {Cursor: "nonsense"},
		"filter.kinds[0]":       {EventFilter: client.EventFilter{Kinds: []string{"gap"}}},
		"filter.sandbox_ids[1]": {EventFilter: client.EventFilter{SandboxIDs: []dsec.SandboxID{one.ID(), "x"}}},
	} {
		for _, err := range a.Events(t.Context(), o) {
			if e := typed(t, err); e.Code != dsec.CodeInvalid || e.Field != field {
				t.Errorf("%s: %v", field, e)
			}
		}
	}
}

// TestEventsByTheCommandLine
func TestEventsByTheCommandLine(t *testing.T) {
	s := up(t)
	sb, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake", Labels: map[string]string{"a": "b"}})
	check(t, err)
	check(t, sb.Kill(t.Context()))
	cmd := exec.CommandContext(t.Context(), dsecBinary, "events", "--from-start", "--label", "a=b", "-n", "3")
	cmd.Env = append(environ(), "DSEC_URL="+s.url, "DSEC_API_KEY="+readKey(t, s.keyFile))
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), string(sb.ID())) != 3 || !strings.Contains(string(out), "stopped") {
		t.Errorf("%v: %s", err, out)
	}
}
