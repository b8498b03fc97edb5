package chronus

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func TestStartErrorsNameTheField(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := write("plain", "x", 0o644)
	noInterpreter := write("interpreter", "#!/nonexistent/sh\n", 0o755)
	noMagic := write("magic", "echo hi\n", 0o755)
	cmd := func(c chronusapi.Command) chronusapi.StartRequest { return chronusapi.StartRequest{Command: c} }
	for _, tt := range []struct {
		req   chronusapi.StartRequest
		code  dsec.Code
		field string
	}{
		{argv("no-such-program"), dsec.CodeNotFound, "command.argv"},
		{argv("/no/such/program"), dsec.CodeNotFound, "command.argv"},
		{argv(plain), dsec.CodeInvalid, "command.argv"},
		{argv(dir), dsec.CodeInvalid, "command.argv"},
		{argv(noInterpreter), dsec.CodeNotFound, "command.argv"},
		{argv(noMagic), dsec.CodeInvalid, "command.argv"},
		{argv("true", strings.Repeat("x", 200<<10)), dsec.CodeInvalid, "command.argv"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, Env: []string{"PATH=/nonexistent"}}), dsec.CodeNotFound, "command.argv"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, Cwd: "/nonexistent"}), dsec.CodeNotFound, "command.cwd"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, Cwd: plain}), dsec.CodeInvalid, "command.cwd"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, User: "no-such-user"}), dsec.CodeNotFound, "command.user"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, User: "0:no-such-group"}), dsec.CodeNotFound, "command.user"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, User: "-1"}), dsec.CodeInvalid, "command.user"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, User: "4294967295"}), dsec.CodeInvalid, "command.user"},
		{cmd(chronusapi.Command{Argv: []string{"true"}, User: "root:"}), dsec.CodeInvalid, "command.user"},
	} {
		_, err := f.Start(t.Context(), tt.req)
		wantError(t, err, tt.code, tt.field)
	}
	if list, err := f.Processes(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%d processes, %v: a refused start leaves none", len(list), err)
	}
	if r := f.run(t, argv("true")); !r.outcome.OK() {
		t.Errorf("after the refusals: %+v", r.outcome)
	}
}

func TestEnvironmentCwdAndShell(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	r := f.run(t, chronusapi.StartRequest{Command: chronusapi.Command{
		Shell: "pwd; echo $A; echo $HOME:$USER:$LOGNAME; umask; echo \"$BASH_VERSION\" | cut -c1; shopt -q login_shell || echo non-login",
		Env:   []string{"A=x y", "HOME=/h"}, Cwd: dir,
	}})
	if want := dir + "\nx y\n/h:root:root\n0022\n5\nnon-login\n"; r.stdout != want {
		t.Errorf("got %q, want %q; stderr %q", r.stdout, want, r.stderr)
	}
	// sh takes over where PATH has no bash, and the standard places neither:
	// here they have one, so a PATH without any shell still works.
	r = f.run(t, chronusapi.StartRequest{Command: chronusapi.Command{Shell: "echo ok", Env: []string{"PATH=/nonexistent"}}})
	if r.stdout != "ok\n" {
		t.Errorf("got %+v", r)
	}
}

func TestHereDocumentsAndBackgroundJobsDoNotHang(t *testing.T) {
	f := newFixture(t)
	r := f.run(t, shell("cat <<'EOF'\nline 1\n$not\nEOF\nsleep 1000 & echo started"))
	if r.stdout != "line 1\n$not\nstarted\n" || r.outcome.Code != 0 {
		t.Fatalf("got %+v", r)
	}
	list, err := f.Processes(t.Context())
	if err != nil || len(list) != 1 || !list[0].Lingering || list[0].Outcome == nil {
		t.Fatalf("got %+v, %v; want one that lingers", list, err)
	}
	if err := f.Signal(t.Context(), r.process, 9, true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the background job ends", func() bool {
		list, err := f.Processes(t.Context())
		return err == nil && !list[0].Lingering
	})
	wantError(t, f.Signal(t.Context(), r.process, 9, true), dsec.CodeConflict, "")
	wantError(t, f.Signal(t.Context(), r.process, 15, false), dsec.CodeConflict, "")
	wantError(t, f.Signal(t.Context(), 999, 15, false), dsec.CodeNotFound, "")
}

func TestTimeoutKillsTheTreeAndKeepsOutput(t *testing.T) {
	f := newFixture(t)
	pids := filepath.Join(t.TempDir(), "pids")
	// One child in the shell's session, one in a session of its own.
	req := shell("echo partial; sleep 1000 & echo $! >> " + pids + "; setsid sh -c 'echo $$ >> " + pids + "; exec sleep 1000' & sleep 1000")
	req.Command.Timeout = 300 * time.Millisecond
	r := f.run(t, req)
	if r.stdout != "partial\n" || !r.outcome.TimedOut || r.outcome.Signal != 9 || r.outcome.OK() {
		t.Fatalf("got %+v", r)
	}
	text, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text))
	if len(fields) != 2 {
		t.Fatalf("pids %q", text)
	}
	for _, s := range fields {
		pid, _ := strconv.Atoi(s)
		eventually(t, "descendants are gone", func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH })
	}
	// A command that ends in time is not marked.
	req = shell("exit 3")
	req.Command.Timeout = time.Hour
	if r := f.run(t, req); r.outcome.TimedOut || r.outcome.Code != 3 {
		t.Errorf("got %+v", r.outcome)
	}
}

func TestOutputLimitKeepsExactlyThatMuch(t *testing.T) {
	f := newFixture(t)
	for _, limit := range []int64{1, 1000, 300_000} {
		req := shell("while :; do echo 0123456789 || exit; done")
		req.Command.OutputLimit = limit
		r := f.run(t, req)
		if int64(len(r.stdout)) != limit || !r.outcome.OutputLimit || r.outcome.Signal != 9 {
			t.Errorf("limit %d: %d bytes, %+v", limit, len(r.stdout), r.outcome)
		}
	}
	req := shell("printf 0123456789")
	req.Command.OutputLimit = 10
	if r := f.run(t, req); r.outcome.OutputLimit || !r.outcome.OK() || r.stdout != "0123456789" {
		t.Errorf("exactly the limit: %+v", r)
	}
}

func TestStdin(t *testing.T) {
	f := newFixture(t)
	if r := f.run(t, argv("cat")); r.stdout != "" || !r.outcome.OK() {
		t.Errorf("without input: %+v", r)
	}
	// First input of more than a pipe holds, while output flows.
	req := argv("cat")
	req.Stdin = bytes.Repeat([]byte("0123456789abcdef"), 60_000)
	if r := f.run(t, req); r.stdout != string(req.Stdin) {
		t.Errorf("got %d bytes back of %d", len(r.stdout), len(req.Stdin))
	}
}

func TestStdinInChunksWithBackPressure(t *testing.T) {
	f := newFixture(t)
	req := argv("sha256sum")
	req.OpenStdin = true
	s, err := f.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	ev, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	chunk := make([]byte, 1<<20)
	for range 50 {
		if n, err := f.WriteStdin(t.Context(), ev.Process, chunk, false); err != nil || n != len(chunk) {
			t.Fatal(n, err)
		}
	}
	if _, err := f.WriteStdin(t.Context(), ev.Process, nil, true); err != nil {
		t.Fatal(err)
	}
	r, err := drainEvents(s)
	if err != io.EOF || !r.outcome.OK() { // started was read above
		t.Fatal(r, err)
	}
	want := f.run(t, shell("head -c 52428800 /dev/zero | sha256sum"))
	if r.stdout != want.stdout {
		t.Errorf("got %q, want %q", r.stdout, want.stdout)
	}
	_, err = f.WriteStdin(t.Context(), ev.Process, []byte("x"), false)
	wantError(t, err, dsec.CodeConflict, "stdin")
}

func TestStdinThatIsClosedIsAConflict(t *testing.T) {
	f := newFixture(t)
	req := shell("exec 0<&-; echo ready; sleep 1000")
	req.OpenStdin = true
	s, err := f.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ev, _ := s.Next()
	if out, err := s.Next(); err != nil || string(out.Data) != "ready\n" {
		t.Fatal(out, err)
	}
	_, err = f.WriteStdin(t.Context(), ev.Process, []byte("x"), false)
	wantError(t, err, dsec.CodeConflict, "stdin")
	_, err = f.WriteStdin(t.Context(), 12345, []byte("x"), false)
	wantError(t, err, dsec.CodeNotFound, "")
}

func TestBlockedStdinEndsWithItsContext(t *testing.T) {
	f := newFixture(t)
	req := argv("sleep", "1000")
	req.OpenStdin = true
	s, err := f.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ev, _ := s.Next()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := f.WriteStdin(ctx, ev.Process, make([]byte, 1<<20), false)
		done <- err
	}()
	cancel()
	if err := <-done; err == nil {
		t.Error("a write of 1 MiB to a process that does not read worked")
	}
}

func TestBackPressureLosesNothing(t *testing.T) {
	f := newFixture(t)
	marker := filepath.Join(t.TempDir(), "done")
	s, err := f.Start(t.Context(), shell("head -c 5000000 /dev/zero; touch "+marker))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// The writer stops once spool, pipe and sockets are full.
	p := f.only(t)
	eventually(t, "the spool is full", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.spool.size > spoolLimit-maxBlock
	})
	if _, err := os.Stat(marker); err == nil {
		t.Fatal("the writer ended although nobody reads")
	}
	r := collect(t, s, nil)
	if len(r.stdout) != 5000000 || r.gaps != 0 {
		t.Errorf("%d bytes, %d gaps", len(r.stdout), r.gaps)
	}
}

// only returns the one process of the fixture.
func (f *fixture) only(t testing.TB) *process {
	t.Helper()
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	if len(f.c.processes) != 1 {
		t.Fatalf("%d processes", len(f.c.processes))
	}
	for _, p := range f.c.processes {
		return p
	}
	return nil
}

func TestDetachedOutputOverwritesAndMarksTheGap(t *testing.T) {
	f := newFixture(t)
	req := shell("head -c 2000000 /dev/zero; echo end; read x")
	req.Detach, req.OpenStdin = true, true
	s, err := f.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	ev, err := s.Next()
	if err != nil || ev.Kind != chronusapi.EventStarted {
		t.Fatal(ev, err)
	}
	if _, err := s.Next(); err != io.EOF {
		t.Fatalf("a detached start goes on: %v", err)
	}
	p := f.only(t)
	eventually(t, "all is written", func() bool {
		list, err := f.Processes(t.Context())
		return err == nil && list[0].NextSeq == 2000004
	})
	p.mu.Lock()
	size := p.spool.size
	p.mu.Unlock()
	if size > spoolLimit {
		t.Errorf("the spool has %d bytes, at most %d", size, spoolLimit)
	}
	if _, err := f.WriteStdin(t.Context(), ev.Process, []byte("x\n"), true); err != nil {
		t.Fatal(err)
	}
	for range 2 { // detached output may be read again
		s, err := f.Attach(t.Context(), ev.Process, 0)
		r := collect(t, s, err)
		if r.gaps != 1 || !strings.HasSuffix(r.stdout, "\x00end\n") || r.next != 2000004 || !r.outcome.OK() {
			t.Errorf("%d gaps, %d bytes, %+v", r.gaps, len(r.stdout), r.outcome)
		}
	}
	s, err = f.Attach(t.Context(), ev.Process, 2000001)
	if r := collect(t, s, err); r.stdout != "nd\n" || r.gaps != 0 {
		t.Errorf("from the middle: %+v", r)
	}
}

func TestDisconnectKillsUnlessOrphan(t *testing.T) {
	f := newFixture(t)
	for _, orphan := range []bool{false, true} {
		req := shell("echo one; read x; echo two")
		req.Orphan, req.OpenStdin = orphan, true
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		ev, _ := s.Next()
		if out, err := s.Next(); err != nil || string(out.Data) != "one\n" {
			t.Fatal(out, err)
		}
		s.Close()
		if !orphan {
			s, err := f.Attach(t.Context(), ev.Process, 0)
			if r := collect(t, s, err); r.outcome.Signal != 9 || r.stdout != "one\n" {
				t.Errorf("got %+v", r)
			}
			continue
		}
		if _, err := f.WriteStdin(t.Context(), ev.Process, []byte("\n"), true); err != nil {
			t.Fatal(err)
		}
		s, err = f.Attach(t.Context(), ev.Process, 4)
		if r := collect(t, s, err); !r.outcome.OK() || r.stdout != "two\n" {
			t.Errorf("orphan: %+v", r)
		}
	}
}

func TestZombiesAreReaped(t *testing.T) {
	f := newFixture(t)
	r := f.run(t, shell("for i in $(seq 500); do (sleep 0 &) ; done; for i in $(seq 50); do (true & exec true); done"))
	if !r.outcome.OK() {
		t.Fatal(r.outcome)
	}
	eventually(t, "no child is left", func() bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
		if err != nil {
			t.Skip("no children file: ", err)
		}
		return len(strings.Fields(string(text))) == 0
	})
}

func TestSignalTreeReachesEveryDescendant(t *testing.T) {
	f := newFixture(t)
	req := shell("trap 'echo shell; exit 4' TERM; bash -c 'trap \"echo child; exit\" TERM; echo up; while :; do read -t 0.01 <> <(:); done' & while :; do wait; done")
	s, err := f.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ev, _ := s.Next()
	if out, err := s.Next(); err != nil || string(out.Data) != "up\n" {
		t.Fatal(out, err)
	}
	if err := f.Signal(t.Context(), ev.Process, int(syscall.SIGTERM), true); err != nil {
		t.Fatal(err)
	}
	var text string
	for {
		ev, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		text += string(ev.Data)
		if ev.Kind == chronusapi.EventExited {
			if ev.Outcome.Code != 4 || !strings.Contains(text, "shell") {
				t.Errorf("%q, %+v", text, ev.Outcome)
			}
			break
		}
	}
	eventually(t, "the child got it too", func() bool {
		list, err := f.Processes(t.Context())
		return err == nil && !list[0].Lingering
	})
}

func TestTooManyProcessesAreRefused(t *testing.T) {
	f := newFixture(t)
	f.c.mu.Lock()
	f.c.running = chronusapi.MaxProcesses
	f.c.mu.Unlock()
	_, err := f.Start(t.Context(), argv("true"))
	wantError(t, err, dsec.CodeExhausted, "")
	f.c.mu.Lock()
	f.c.running = 0
	f.c.mu.Unlock()
}

func TestFinishedProcessesAreBounded(t *testing.T) {
	f := newFixture(t)
	var last uint64
	for range keepFinished + 20 {
		last = f.run(t, shell("echo x")).process
	}
	list, err := f.Processes(t.Context())
	if err != nil || len(list) > keepFinished+1 || list[len(list)-1].ID != last {
		t.Errorf("%d processes, last %d, %v", len(list), last, err)
	}
	// What is left of them goes when its time has come.
	f.c.mu.Lock()
	for _, p := range f.c.processes {
		p.mu.Lock()
		p.told = p.told.Add(-keepTold)
		p.mu.Unlock()
	}
	f.c.mu.Unlock()
	f.c.sweep()
	f.c.budget.mu.Lock()
	used := f.c.budget.used
	f.c.budget.mu.Unlock()
	if used != 0 {
		t.Errorf("%d bytes of spools left", used)
	}
}

func TestManyCommandsAtOnce(t *testing.T) {
	f := newFixture(t)
	errs := make(chan error, 40)
	for i := range cap(errs) {
		go func() {
			s, err := f.Start(t.Context(), shell(fmt.Sprintf("echo out %d; echo err %d >&2; exit %d", i, i, i)))
			if err != nil {
				errs <- err
				return
			}
			r, err := drainEvents(s)
			if err == nil && (r.stdout != fmt.Sprintf("out %d\n", i) || r.stderr != fmt.Sprintf("err %d\n", i) || r.outcome.Code != i) {
				err = fmt.Errorf("%d: %+v", i, r)
			}
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestStartWhoseReaderIsGoneLeavesNothing(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	req := argv("sleep", "1000")
	err := f.c.Start(ctx, req, func(chronusapi.Event) error { return ctx.Err() })
	if err == nil {
		t.Fatal("no error")
	}
	eventually(t, "it was killed and counted once", func() bool {
		f.c.mu.Lock()
		defer f.c.mu.Unlock()
		return f.c.running == 0
	})
	req.Orphan = true
	if err := f.c.Start(ctx, req, func(chronusapi.Event) error { return ctx.Err() }); err == nil {
		t.Fatal("no error")
	}
	list, err := f.Processes(t.Context())
	if err != nil || len(list) != 2 || list[0].Outcome == nil || list[1].Outcome != nil {
		t.Errorf("got %+v, %v; want one killed and one running", list, err)
	}
	if info, err := f.Info(t.Context()); err != nil || info.Processes != 1 {
		t.Errorf("got %+v, %v", info, err)
	}
}
