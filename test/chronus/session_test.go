package chronus_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
	"golang.org/x/sys/unix"
)

func (f *fixture) session(t testing.TB, env ...string) string {
	t.Helper()
	s, err := f.OpenSession(t.Context(), chronusapi.SessionRequest{Env: env})
	if err != nil {
		t.Fatal(err)
	}
	return s.ID
}

func (f *fixture) command(t testing.TB, session, text string) result {
	t.Helper()
	s, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: session, Command: text})
	return collect(t, s, err)
}

// shells runs a test with every build, and the shells that a sandbox may have.
func shells(t *testing.T, run func(t *testing.T, f *fixture, session string)) {
	for _, b := range builds {
		t.Run(b.name+"/bash", func(t *testing.T) {
			f := newFixture(t, b)
			run(t, f, f.session(t))
		})
		for _, sh := range []string{"dash", "busybox"} {
			t.Run(b.name+"/"+sh, func(t *testing.T) {
				testutil.Require(t, testutil.Root, testutil.Program(sh))
				f := newShellFixture(t, b, sh)
				run(t, f, f.session(t))
			})
		}
	}
}

// newShellFixture starts chronus where there is no bash and /bin/sh is sh.
func newShellFixture(t *testing.T, b build, sh string) *fixture {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sh, err = exec.LookPath(sh)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "--ready", "--listen", "3")
	cmd.Env = append(os.Environ(), stageEnv+"="+b.path(t), shellEnv+"="+sh)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Setsid: true}
	f := startFixture(t, cmd)
	t.Cleanup(func() { f.killAll(t) })
	return f
}

func TestSessionKeepsItsState(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		dir := t.TempDir()
		for _, tt := range []struct {
			text, stdout, stderr string
			code                 int
		}{
			{"cd " + dir + "; A=1; export B=2; f() { echo f$1; }", "", "", 0},
			{"pwd; echo $A; sh -c 'echo $B'; f x", dir + "\n1\n2\nfx\n", "", 0},
			{"false", "", "", 1},
			{"echo $?", "1\n", "", 0},
			{"(exit 7)", "", "", 7},
			{"return 5", "", "", 5},
			{"printf 'no newline'", "no newline", "", 0},
			{"printf err >&2; echo out", "out\n", "err", 0},
			{"cat <<EOF\nA is $A\nEOF", "A is 1\n", "", 0},
			{"cat", "", "", 0},
			{"", "", "", 0},
			{"# nothing", "", "", 0},
			{"if true\nthen\n  echo multi\nfi\n\n", "multi\n", "", 0},
			{"echo 1 7; echo '99 0'; echo exit code: 0; sh -c 'exit 3'", "1 7\n99 0\nexit code: 0\n", "", 3},
			{"sleep 1000 &", "", "", 0},
			{"kill $!; wait; echo waited", "waited\n", "", 0},
			{"set -- a b; echo $#", "2\n", "", 0},
			{"kill -9 $(sh -c 'echo $$') 2>/dev/null; echo alive", "alive\n", "", 0},
		} {
			r := f.command(t, s, tt.text)
			if r.stdout != tt.stdout || r.stderr != tt.stderr || r.outcome.Code != tt.code || !r.outcome.Claimed || r.gaps != 0 {
				t.Errorf("%q: %+v", tt.text, r)
			}
		}
	})
}

func TestSessionSurvivesSyntaxErrors(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		for _, text := range []string{"echo 'unbalanced", "if true", "echo )", "cat <<EOF\nno end"} {
			r := f.command(t, s, text)
			if strings.HasPrefix(text, "cat") {
				continue // a here-document that ends with the text is a warning
			}
			if r.outcome.Code == 0 || r.stderr == "" {
				t.Errorf("%q: %+v", text, r)
			}
		}
		if r := f.command(t, s, "echo alive"); r.stdout != "alive\n" || r.outcome.Code != 0 {
			t.Errorf("after the errors: %+v", r)
		}
	})
}

func TestSessionTakesLargeCommandsAndOutput(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		text := "x='" + strings.Repeat("0123456789abcdef", 64<<10) + "'; echo ${#x}; printf %s \"$x\" | wc -c"
		if r := f.command(t, s, text); r.stdout != "1048576\n1048576\n" {
			t.Errorf("got %.200q %.200q", r.stdout, r.stderr)
		}
		if r := f.command(t, s, "head -c 3000000 /dev/zero"); len(r.stdout) != 3000000 || r.gaps != 0 {
			t.Errorf("%d bytes, %d gaps", len(r.stdout), r.gaps)
		}
	})
}

func TestSessionEndsWithItsShell(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		r := f.command(t, s, "echo bye; exit 4")
		if r.stdout != "bye\n" || r.outcome.Code != 4 || !r.outcome.Claimed {
			t.Errorf("got %+v", r)
		}
		eventually(t, "the session is gone", func() bool {
			list, err := f.Sessions(t.Context())
			return err == nil && len(list) == 0
		})
		_, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: s, Command: "true"})
		wantError(t, err, dsec.CodeNotFound, "session_id")
		wantError(t, f.CloseSession(t.Context(), s), dsec.CodeNotFound, "session_id")
	})
}

func TestSessionTimeoutKillsTheCommandOnly(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		f.command(t, s, "A=kept; sleep 1000 & job=$!")
		st, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: s, Command: "echo partial; sleep 1000; echo next", Timeout: time.Second})
		r := collect(t, st, err)
		if !r.outcome.TimedOut || !strings.HasPrefix(r.stdout, "partial\n") {
			t.Errorf("got %+v", r)
		}
		if r := f.command(t, s, "echo $A; kill -0 $job && echo job"); r.stdout != "kept\njob\n" {
			t.Errorf("after the timeout: %+v", r)
		}
		// A shell that does not come back ends with its session.
		st, err = f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: s, Command: "echo spin; while :; do :; done", Timeout: time.Second})
		r = collect(t, st, err)
		if !r.outcome.TimedOut || r.outcome.Signal != 9 || r.stdout != "spin\n" {
			t.Errorf("spinning: %+v", r)
		}
	})
}

// Whoever else follows a session's shell has all that a command wrote once the
// command has ended, and not at the next sign of life.
func TestSessionIsFollowed(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		list, err := f.Sessions(t.Context())
		if err != nil || len(list) != 1 {
			t.Fatalf("got %+v, %v", list, err)
		}
		other, err := f.Attach(t.Context(), list[0].Process, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		const size = 60_000 // what a pipe holds, and more than is read at once
		for seen := 0; seen < 10*size; {
			if r := f.command(t, s, "head -c 60000 /dev/zero"); len(r.stdout) != size {
				t.Fatalf("%d bytes, %+v", len(r.stdout), r.outcome)
			}
			for want := seen + size; seen < want; {
				ev, err := other.Next()
				if err != nil {
					t.Fatal(err)
				}
				seen += len(ev.Data)
			}
		}
	})
}

func TestInterruptKillsTheCommandOnly(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		f.command(t, s, "A=kept; sleep 1000 & job=$!")
		wantError(t, f.Interrupt(t.Context(), s), dsec.CodeConflict, "session_id")
		wantError(t, f.Interrupt(t.Context(), "s99"), dsec.CodeNotFound, "session_id")
		st, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: s, Command: "echo partial; sleep 1000"})
		if err != nil {
			t.Fatal(err)
		}
		var text string
		for text != "partial\n" {
			ev, err := st.Next()
			if err != nil {
				t.Fatal(err)
			}
			text += string(ev.Data)
		}
		if err := f.Interrupt(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		r, _ := drainEvents(st)
		if r.outcome.Code != 128+9 || r.outcome.TimedOut || !r.outcome.Claimed {
			t.Errorf("got %+v", r.outcome)
		}
		if r := f.command(t, s, "echo $A; kill -0 $job && echo job"); r.stdout != "kept\njob\n" {
			t.Errorf("after the interrupt: %+v", r)
		}
	})
}

func TestSessionOutputLimit(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		s := f.session(t)
		f.command(t, s, "echo before")
		st, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: s, Command: "yes", OutputLimit: 1000})
		r := collect(t, st, err)
		if len(r.stdout) != 1000 || !r.outcome.OutputLimit || r.outcome.TimedOut {
			t.Errorf("%d bytes, %+v", len(r.stdout), r.outcome)
		}
		if r := f.command(t, s, "echo after"); r.stdout != "after\n" || r.outcome.OutputLimit {
			t.Errorf("after: %+v", r)
		}
	})
}

func TestClosingASessionKillsAllItStarted(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		s := f.session(t)
		r := f.command(t, s, "sleep 1000 & echo $!")
		if err := f.CloseSession(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		list, err := f.Processes(t.Context())
		if err != nil || len(list) != 1 || list[0].Session != s || list[0].Outcome == nil {
			t.Fatalf("got %+v, %v", list, err)
		}
		eventually(t, "the job is gone", func() bool {
			_, err := os.Stat("/proc/" + strings.TrimSpace(r.stdout))
			return err != nil
		})
	})
}

func TestSessionRefusals(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		_, err := f.OpenSession(t.Context(), chronusapi.SessionRequest{Cwd: "/nonexistent"})
		wantError(t, err, dsec.CodeNotFound, "cwd")
		_, err = f.OpenSession(t.Context(), chronusapi.SessionRequest{User: "no-such-user"})
		wantError(t, err, dsec.CodeNotFound, "user")
		_, err = f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: "s99", Command: "true"})
		wantError(t, err, dsec.CodeNotFound, "session_id")
		if list, err := f.Sessions(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("got %+v, %v", list, err)
		}
	})
}

// What a command writes to the descriptor of its shell's status is no status
// unless it is one in every byte.
func TestStatusLinesAreParsedStrictly(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		s := f.session(t)
		for _, line := range []string{"", "%s", "x 1", "0 1", "%s 256", "%s -1", "-%s 1", "%s 1 1", " %s 1", "%s  1", "%s 1 ", "%s +1", "%s 0x1", "99999999999999999999 1", "%s 1\\r", "%s 1\\0"} {
			if r := f.command(t, s, "printf -- '"+line+"\\n' $__dsec_n >&251; echo after; (exit 7)"); r.stdout != "after\n" || r.outcome.Code != 7 {
				t.Errorf("%q: %+v", line, r)
			}
		}
		// The positive control, and why a session's status is only claimed.
		if r := f.command(t, s, "printf '%s 9\\n' $__dsec_n >&251; (exit 7)"); r.outcome.Code != 9 || !r.outcome.Claimed {
			t.Errorf("got %+v", r)
		}
	})
}

func BenchmarkSessionBuiltin(b *testing.B) {
	f := newFixture(b, shipped)
	s := f.session(b)
	for b.Loop() {
		f.command(b, s, ":")
	}
}

func BenchmarkExecTrue(b *testing.B) {
	f := newFixture(b, shipped)
	req := argv("/bin/true")
	for b.Loop() {
		f.run(b, req)
	}
}

// A second command waits for the first, also where nobody reads that any more.
func TestSessionCommandsWaitForEachOther(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		s := f.session(t)
		dir := t.TempDir()
		if err := syscall.Mkfifo(dir+"/go", 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, leave := context.WithCancel(t.Context())
		first, err := f.RunCommand(ctx, chronusapi.SessionCommand{Session: s, Command: "cd " + dir + "; read x <go; A=$x"})
		if err != nil {
			t.Fatal(err)
		}
		if ev, err := first.Next(); err != nil || ev.Kind != chronusapi.EventStarted {
			t.Fatal(ev, err)
		}
		if list, err := f.Sessions(t.Context()); err != nil || len(list) != 1 || !list[0].Busy {
			t.Errorf("got %+v, %v", list, err)
		}
		leave()
		_ = first.Close()
		got := make(chan result, 1)
		go func() { got <- f.command(t, s, "echo $A") }()
		if err := os.WriteFile(dir+"/go", []byte("first\n"), 0); err != nil {
			t.Fatal(err)
		}
		if r := <-got; r.stdout != "first\n" || r.outcome.Code != 0 {
			t.Errorf("%+v, want the state that the first command left", r)
		}
	})
}

// Who gives a command up has it interrupted by a word before it goes, in its
// turn and before, and whatever else comes in a command ends the connection only.
func TestACommandThatIsGivenUp(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		f.command(t, s, "A=kept")
		run := func(text string) string {
			return frame(callRunCommand, str(s), str(text), u32(0), u32(0), u32(0), u32(0))
		}
		started := func() {
			eventually(t, "the command has begun", func() bool {
				list, err := f.Sessions(t.Context())
				return err == nil && len(list) == 1 && list[0].Busy
			})
		}
		state := func(want string) {
			t.Helper()
			if r := f.command(t, s, "echo $A $B"); r.stdout != want+"\n" {
				t.Errorf("got %+v, want %s", r, want)
			}
		}
		sleep := run("sleep 1000")
		f.talk(t, 0, preface, sleep+frame(frameAbort))
		state("kept")
		f.talk(t, 0, preface, sleep, frame(frameAbort))
		state("kept")
		f.talk(t, 0, preface, sleep+frame(frameAbort)[:2], frame(frameAbort)[2:])
		state("kept")
		f.talk(t, 0, preface, run(strings.Repeat("#", 100_000)+"\nsleep 1000")+frame(frameAbort))
		state("kept")

		first, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: s, Command: "sleep 1000"})
		if err != nil {
			t.Fatal(err)
		}
		started()
		f.talk(t, 0, preface, run("B=bad")+frame(frameAbort))
		f.talk(t, 0, preface, run("B=bad"))
		f.talk(t, 1, preface, run("B=bad")+frame(callInfo))
		if list, err := f.Sessions(t.Context()); err != nil || !list[0].Busy {
			t.Errorf("the command before was interrupted: %+v, %v", list, err)
		}
		if err := f.Interrupt(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if r, err := drainEvents(first); err != nil || r.outcome.Code != 128+9 {
			t.Errorf("got %+v, %v", r, err)
		}
		state("kept")

		for _, last := range []string{"", frame(callInfo), frame(frameAbort, "x"), "\x85\x00"} {
			f.talk(t, 0, preface, run("sleep 0.2; A=on")+last)
			state("on")
			f.command(t, s, "A=kept")
		}
	})
}

// The word counts although the client went away before chronus could tell it that
// its command has begun.
func TestACommandThatIsGivenUpAtOnce(t *testing.T) {
	shells(t, func(t *testing.T, f *fixture, s string) {
		for _, text := range []string{"sleep 1000", strings.Repeat("#", 100_000) + "\nsleep 1000"} {
			if err := syscall.Kill(f.pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			nc, err := net.Dial("unix", f.socket)
			if err == nil {
				request := frame(callRunCommand, str(s), str(text), u32(0), u32(0), u32(0), u32(0))
				_, err = io.WriteString(nc, preface+request+frame(frameAbort))
				_ = nc.Close()
			}
			if err := errors.Join(err, syscall.Kill(f.pid, syscall.SIGCONT)); err != nil {
				t.Fatal(err)
			}
			for range 5 { // rounds in which chronus takes what has come
				if _, err := f.Info(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("the session is still busy"))
			defer cancel()
			run, err := f.RunCommand(ctx, chronusapi.SessionCommand{Session: s, Command: "echo on"})
			if r := collect(t, run, err); r.stdout != "on\n" {
				t.Errorf("a command of %d bytes is given up at once: the next says %+v", len(text), r)
			}
		}
	})
}
