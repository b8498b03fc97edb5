package backendtest

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func testProbe(t *testing.T, h Harness) {
	info, err := h.New(t).Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !info.Available {
		t.Fatalf("not available here: %v", info.Notes)
	}
	if info.Kind != h.Spec.Kind {
		t.Errorf("kind %q, want %q", info.Kind, h.Spec.Kind)
	}
}

func testOutcomes(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	for _, c := range []struct {
		argv         []string
		shell        string
		code, signal int
	}{
		{argv: []string{"true"}},
		{argv: []string{"false"}, code: 1},
		{shell: "exit 7", code: 7},
		{shell: "exit 255", code: 255},
		{shell: "no-such-program", code: 127},
		{shell: "kill -9 $$; sleep 100", signal: 9},
		{shell: "kill -TERM $$; sleep 100", signal: 15},
		{argv: []string{"sh", "-c", "exit 3"}, code: 3},
		{shell: "echo 'exit code: 0'; echo complete; exit 7", code: 7},
	} {
		r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{Argv: c.argv, Shell: c.shell}})
		if r.outcome.Code != c.code || r.outcome.Signal != c.signal {
			t.Errorf("%v%s: code %d, signal %d; want %d, %d", c.argv, c.shell, r.outcome.Code, r.outcome.Signal, c.code, c.signal)
		}
		if o := r.outcome; o.OOM || o.TimedOut || o.OutputLimit || o.Claimed || o.Duration < 0 || time.Since(o.Started) > hang {
			t.Errorf("%v%s: outcome %+v", c.argv, c.shell, o)
		}
	}
}

func testStartErrors(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	for what, c := range map[string]struct {
		cmd   chronusapi.Command
		field string
	}{
		"unknown program":  {chronusapi.Command{Argv: []string{"no-such-program"}}, "command.argv"},
		"missing file":     {chronusapi.Command{Argv: []string{"/no/such/program"}}, "command.argv"},
		"missing cwd":      {chronusapi.Command{Argv: []string{"true"}, Cwd: "/no/such/dir"}, "command.cwd"},
		"unknown user":     {chronusapi.Command{Argv: []string{"true"}, User: "no-such-user"}, "command.user"},
		"no command":       {chronusapi.Command{}, "command.argv"},
		"NUL in argv":      {chronusapi.Command{Argv: []string{"echo", "a\x00b"}}, "command.argv"},
		"env without =":    {chronusapi.Command{Argv: []string{"true"}, Env: []string{"A"}}, "command.env"},
		"env without name": {chronusapi.Command{Argv: []string{"true"}, Env: []string{"=A"}}, "command.env"},
		"huge argv":        {chronusapi.Command{Argv: []string{"echo", strings.Repeat("x", 3<<20)}}, "command.argv"},
		"relative cwd":     {chronusapi.Command{Argv: []string{"true"}, Cwd: "tmp"}, "command.cwd"},
		"negative timeout": {chronusapi.Command{Argv: []string{"true"}, Timeout: -1}, "command.timeout"},
	} {
		_, err := b.start(chronusapi.StartRequest{Command: c.cmd})
		want(t, what, err, c.field, dsec.CodeInvalid, dsec.CodeNotFound)
	}
	info, err := b.Info(b.ctx())
	if err != nil || info.Processes != 0 {
		t.Errorf("after refused starts: %d processes, %v; want none", info.Processes, err)
	}
	want(t, "signal 999", b.Signal(b.ctx(), 1, 999, false), "signal", dsec.CodeInvalid)
	// The process is not a field of a request here; the edge names it.
	if err := b.Signal(b.ctx(), 4242, 9, true); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("signal of no process: %v, want not_found", err)
	}
	if _, err = b.Attach(b.ctx(), 4242, 0); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("attach to no process: %v, want not_found", err)
	}
}

func testStreams(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	r := b.shell(`echo out; echo err >&2; printf 'a\000b\377'; printf '\303' >&2; printf '\244' >&2`)
	if r.stdout != "out\na\x00b\xff" || r.stderr != "err\n\xc3\xa4" {
		t.Errorf("stdout %q, stderr %q", r.stdout, r.stderr)
	}
	if r.next != uint64(len(r.stdout)+len(r.stderr)) {
		t.Errorf("%d bytes counted, %d came", r.next, len(r.stdout)+len(r.stderr))
	}
	const size = 3_000_000
	r = b.shell(fmt.Sprintf("yes 0123456789abcde | head -c %d", size))
	if len(r.stdout) != size || r.lost != 0 {
		t.Fatalf("%d bytes and %d lost, want %d and none", len(r.stdout), r.lost, size)
	}
	if wantOut := strings.Repeat("0123456789abcde\n", size/16); r.stdout != wantOut {
		t.Error("bytes are not the ones that were written")
	}
}

func testEnvironment(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	long := strings.Repeat("v", 100_000)
	r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{
		Shell: `echo "$A"; echo "$B"; printf %s "$LONG" | wc -c; pwd`, Cwd: "/tmp",
		Env: []string{"PATH=/usr/bin:/bin", "A=two words", "B=line\nline", "LONG=" + long},
	}})
	fields := strings.Split(r.stdout, "\n")
	if wantOut := []string{"two words", "line", "line", "100000", "/tmp", ""}; strings.Join(fields, "|") != strings.Join(wantOut, "|") {
		t.Errorf("got %q, want %q", fields, wantOut)
	}
	args := make([]string, 2000)
	for i := range args {
		args[i] = fmt.Sprint("argument-", i)
	}
	r = b.run(chronusapi.StartRequest{Command: chronusapi.Command{Argv: append([]string{"echo"}, args...)}})
	if r.stdout != strings.Join(args, " ")+"\n" {
		t.Errorf("2,000 arguments came back as %d bytes", len(r.stdout))
	}
	if h.Users {
		r = b.run(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "id -u; id -g", User: "1000:1001"}})
		if r.stdout != "1000\n1001\n" {
			t.Errorf("ids %q, want 1000 and 1001", r.stdout)
		}
	}
}

func testStdin(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	if r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, Stdin: []byte("once")}); r.stdout != "once" {
		t.Errorf("stdout %q, want %q", r.stdout, "once")
	}
	if r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}}); r.stdout != "" || !r.outcome.OK() {
		t.Errorf("without input: %q, %+v", r.stdout, r.outcome)
	}
	s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, Stdin: []byte("first "), OpenStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	e, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	const size = 2 << 20
	written := make(chan error, 1)
	go func() {
		n, err := b.WriteStdin(b.ctx(), e.Process, []byte(strings.Repeat("x", size)), false)
		if err == nil && n != size {
			err = fmt.Errorf("%d bytes taken, want %d", n, size)
		}
		if err == nil {
			_, err = b.WriteStdin(b.ctx(), e.Process, nil, true)
		}
		written <- err
	}()
	r := b.collect(s, 0)
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	if len(r.stdout) != size+len("first ") || !strings.HasPrefix(r.stdout, "first x") || !r.outcome.OK() {
		t.Errorf("%d bytes, %+v", len(r.stdout), r.outcome)
	}
	_, err = b.WriteStdin(b.ctx(), e.Process, []byte("late"), false)
	want(t, "write to an ended command", err, "stdin", dsec.CodeConflict)
}

func testTimeout(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	const timeout = time.Second // the shell says its word in that, on a busy machine too
	begun := time.Now()
	r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "echo partial; sleep 1000 & sleep 1000", Timeout: timeout}})
	if !r.outcome.TimedOut || r.outcome.Signal != 9 || r.outcome.OK() {
		t.Errorf("outcome %+v, want timed out by signal 9", r.outcome)
	}
	if r.stdout != "partial\n" {
		t.Errorf("output before the timeout: %q", r.stdout)
	}
	if d := time.Since(begun); d < timeout || d > hang/2 {
		t.Errorf("took %v with a timeout of %v", d, timeout)
	}
	b.noneLingers()
	if r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"true"}, Timeout: time.Hour}}); !r.outcome.OK() {
		t.Errorf("within its timeout: %+v", r.outcome)
	}
}

// noneLingers waits until no command, and no descendant of one, runs.
func (b *box) noneLingers() {
	b.t.Helper()
	b.eventually("no process runs", func() bool {
		list, err := b.Processes(b.ctx())
		if err != nil {
			b.t.Fatal(err)
		}
		for _, p := range list {
			if p.Outcome == nil || p.Lingering {
				return false
			}
		}
		return true
	})
}

// eventually polls for what no event tells of.
func (b *box) eventually(what string, f func() bool) {
	b.t.Helper()
	for deadline := time.Now().Add(hang); !f(); time.Sleep(2 * time.Millisecond) { //nolint:forbidigo // no event tells of it
		if time.Now().After(deadline) {
			b.t.Fatalf("it never came to be that %s", what)
		}
	}
}

func testOutputLimit(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	r := b.run(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "yes", OutputLimit: 10_000}})
	if !r.outcome.OutputLimit || r.outcome.OK() || len(r.stdout) != 10_000 {
		t.Errorf("%d bytes, outcome %+v; want 10000 and output limit", len(r.stdout), r.outcome)
	}
	r = b.run(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "printf 12345; printf 67890 >&2", OutputLimit: 10}})
	if !r.outcome.OK() || r.stdout+r.stderr != "1234567890" {
		t.Errorf("exactly the limit: %q, %q, %+v", r.stdout, r.stderr, r.outcome)
	}
	b.noneLingers()
}

func testBackPressure(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	const size = 4_000_000
	s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Shell: fmt.Sprintf("yes | head -c %d", size)}})
	if err != nil {
		t.Fatal(err)
	}
	// The reader waits until the command can write no more.
	var held uint64
	b.eventually("the command waits for its reader", func() bool {
		list, err := b.Processes(b.ctx())
		if err != nil || len(list) != 1 {
			t.Fatalf("%d processes, %v", len(list), err)
		}
		still := list[0].NextSeq == held && held > 0
		held = list[0].NextSeq
		return still
	})
	if held >= size {
		t.Errorf("%d bytes were taken in without a reader", held)
	}
	if r := b.collect(s, 0); len(r.stdout) != size || r.lost != 0 {
		t.Errorf("%d bytes and %d lost, want %d and none", len(r.stdout), r.lost, size)
	}
}

func testDetach(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	p := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "echo one; echo two >&2; exit 5"}})
	r := b.attach(p, 0)
	if r.stdout != "one\n" || r.stderr != "two\n" || r.outcome.Code != 5 {
		t.Errorf("%q, %q, code %d", r.stdout, r.stderr, r.outcome.Code)
	}
	if again := b.attach(p, 0); again.stdout != r.stdout || again.outcome.Code != 5 {
		t.Errorf("attached again: %q, code %d", again.stdout, again.outcome.Code)
	}
	// Which of two streams is read first is open, so this is for one.
	p = b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "echo one; echo two"}})
	if rest := b.attach(p, 4); rest.stdout != "two\n" {
		t.Errorf("from byte 4: %q", rest.stdout)
	}
	// Two who watch see the same, while it runs.
	p = b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, OpenStdin: true})
	var watchers sync.WaitGroup
	for range 2 {
		// Attach waits for the first event.
		watchers.Go(func() {
			s, err := b.Attach(b.ctx(), p, 0)
			if err != nil {
				t.Error(err)
				return
			}
			if r, err := gather(s, 0); err != nil || r.stdout != "seen by both" {
				t.Errorf("watcher saw %q, %v", r.stdout, err)
			}
		})
	}
	if _, err := b.WriteStdin(b.ctx(), p, []byte("seen by both"), true); err != nil {
		t.Error(err)
	}
	watchers.Wait()
}

func testGap(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	const size = 2_000_000
	p := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: fmt.Sprintf("yes 0123456789abcde | head -c %d", size)}})
	b.noneLingers()
	r := b.attach(p, 0)
	if r.next != size || r.lost == 0 || uint64(len(r.stdout)) != size-r.lost {
		t.Errorf("%d bytes in all, %d came, %d lost; want %d, fewer, the rest", r.next, len(r.stdout), r.lost, size)
	}
	if !strings.HasSuffix(strings.Repeat("0123456789abcde\n", size/16), r.stdout) {
		t.Error("what came is not the end of what was written")
	}
}

func testBackground(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	r := b.shell("sleep 1000 & echo done")
	if r.stdout != "done\n" || !r.outcome.OK() {
		t.Errorf("%q, %+v", r.stdout, r.outcome)
	}
	list, err := b.Processes(b.ctx())
	if err != nil || len(list) != 1 || !list[0].Lingering {
		t.Fatalf("processes %+v, %v; want one that lingers", list, err)
	}
	if err := b.Signal(b.ctx(), r.process, 9, true); err != nil {
		t.Fatal(err)
	}
	b.noneLingers()
}

func testClientGone(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	open := func(orphan bool) uint64 {
		s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"sleep", "1000"}}, Orphan: orphan})
		if err != nil {
			t.Fatal(err)
		}
		e, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		return e.Process
	}
	p := open(false)
	if r := b.attach(p, 0); r.outcome.Signal != 9 {
		t.Errorf("command of a client that went away: %+v, want signal 9", r.outcome)
	}
	p = open(true)
	if err := b.Signal(b.ctx(), p, 15, false); err != nil {
		t.Errorf("orphan: %v, want it to live", err)
	}
	if r := b.attach(p, 0); r.outcome.Signal != 15 {
		t.Errorf("orphan: %+v, want signal 15", r.outcome)
	}
}

func testSignal(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	p := b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"sleep", "1000"}}})
	if err := b.Signal(b.ctx(), p, 2, false); err != nil {
		t.Fatal(err)
	}
	if r := b.attach(p, 0); r.outcome.Signal != 2 || r.outcome.Code != 0 {
		t.Errorf("outcome %+v, want signal 2", r.outcome)
	}
	p = b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "sleep 1000 & sleep 1000 & sleep 1000"}})
	if err := b.Signal(b.ctx(), p, 9, true); err != nil {
		t.Fatal(err)
	}
	if r := b.attach(p, 0); r.outcome.Signal != 9 {
		t.Errorf("outcome %+v, want signal 9", r.outcome)
	}
	b.noneLingers()
}

func testPTY(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"cat"}}, PTY: &chronusapi.WindowSize{Rows: 24, Cols: 80}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Resize(b.ctx(), e.Process, chronusapi.WindowSize{Rows: 50, Cols: 132}); err != nil {
		t.Error(err)
	}
	if _, err := b.WriteStdin(b.ctx(), e.Process, []byte("typed\n\x04"), false); err != nil {
		t.Fatal(err)
	}
	r := b.collect(s, 0)
	if r.stdout != "" || r.stderr != "" || !strings.HasPrefix(r.pty, "typed\r\n") || strings.Count(r.pty, "typed") != 2 {
		t.Errorf("stdout %q, stderr %q, pty %q; want the echo and the copy, on the pty", r.stdout, r.stderr, r.pty)
	}
	if !h.Terminal {
		return
	}
	r = b.run(chronusapi.StartRequest{Command: chronusapi.Command{Shell: "test -t 0 && test -t 1 && stty size"}, PTY: &chronusapi.WindowSize{Rows: 33, Cols: 99}})
	if r.pty != "33 99\r\n" {
		t.Errorf("terminal says %q, want 33 99", r.pty)
	}
}

func testConcurrentExecs(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	const workers, each = 8, 8
	errs := make(chan error, workers)
	for w := range workers {
		go func() {
			errs <- func() error {
				for i := range each {
					text := fmt.Sprintf("worker %d run %d", w, i)
					s, err := b.start(chronusapi.StartRequest{Command: chronusapi.Command{Shell: fmt.Sprintf("echo '%s'; exit %d", text, w)}})
					if err != nil {
						return err
					}
					r, err := gather(s, 0)
					if err != nil && !errors.Is(err, io.EOF) {
						return err
					}
					if r.stdout != text+"\n" || r.outcome.Code != w {
						return fmt.Errorf("got %q and code %d, want %q and %d", r.stdout, r.outcome.Code, text, w)
					}
				}
				return nil
			}()
		}()
	}
	for range workers {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	b.noneLingers()
}
