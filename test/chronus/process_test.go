package chronus_test

import (
	"context"
	"errors"
	"fmt"
	"net"
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

// Limits of chronus.
const (
	spoolLimit   = 256 << 10 // bytes of output that are kept of one command
	maxBlock     = 64 << 10  // they are kept in blocks
	budgetLimit  = 8 << 20   // of all commands
	keepFinished = 64        // commands that are listed after their end
)

func TestExitCodesAreThoseOfWait(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		for _, tt := range []struct {
			text   string
			code   int
			signal int
		}{
			{"exit 0", 0, 0},
			{"exit 7", 7, 0},
			{"exit 255", 255, 0},
			{"kill -9 $$", 0, 9},
			{"kill -TERM $$", 0, 15},
			{"echo 'exit code: 0'; printf '\\200\\000\\000\\000\\000'; exit 7", 7, 0},
		} {
			r := f.run(t, shell(tt.text))
			if r.outcome.Code != tt.code || r.outcome.Signal != tt.signal || r.outcome.Claimed || r.outcome.Started.IsZero() {
				t.Errorf("%s: %+v", tt.text, r.outcome)
			}
		}
	})
}

func TestStartErrorsNameTheField(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
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
	})
}

func TestEnvironmentCwdAndShell(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
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
	})
}

func TestHereDocumentsAndBackgroundJobsDoNotHang(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
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
	})
}

func TestTimeoutKillsTheTreeAndKeepsOutput(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		pids := filepath.Join(t.TempDir(), "pids")
		// One child in the shell's session, one in a session of its own.
		req := shell("echo partial; sleep 1000 & echo $! >> " + pids + "; setsid sh -c 'echo $$ >> " + pids + "; exec sleep 1000' & sleep 1000")
		req.Command.Timeout = time.Second
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
	})
}

func TestDisconnectKillsUnlessOrphan(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
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
	})
}

func TestZombiesAreReaped(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		r := f.run(t, shell("for i in $(seq 500); do (sleep 0 &) ; done; for i in $(seq 50); do (true & exec true); done"))
		if !r.outcome.OK() {
			t.Fatal(r.outcome)
		}
		eventually(t, "no child is left", func() bool {
			return len(f.children(t)) == 0
		})
	})
}

func TestSignalTreeReachesEveryDescendant(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
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
	})
}

func TestTooManyProcessesAreRefused(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := argv("sleep", "1000")
		req.Detach = true
		for range chronusapi.MaxProcesses {
			s, err := f.Start(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			s.Close()
		}
		_, err := f.Start(t.Context(), argv("true"))
		wantError(t, err, dsec.CodeExhausted, "")
		list, err := f.Processes(t.Context())
		if err != nil || len(list) != chronusapi.MaxProcesses {
			t.Fatalf("%d processes, %v", len(list), err)
		}
		if err := f.Signal(t.Context(), list[0].ID, 9, false); err != nil {
			t.Fatal(err)
		}
		eventually(t, "one has ended", func() bool {
			info, err := f.Info(t.Context())
			return err == nil && info.Processes < chronusapi.MaxProcesses
		})
		if r := f.run(t, argv("true")); !r.outcome.OK() {
			t.Errorf("got %+v", r)
		}
	})
}

func TestFinishedProcessesAreBounded(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		t.Parallel() // it waits for about 15 s
		var last uint64
		for range keepFinished + 20 {
			last = f.run(t, shell("echo x")).process
		}
		list, err := f.Processes(t.Context())
		if err != nil || len(list) > keepFinished+1 || len(list) < keepFinished || list[len(list)-1].ID != last {
			t.Errorf("%d processes, last %d, %v", len(list), last, err)
		}
		if p := list[len(list)-1]; p.FirstSeq != 0 || p.NextSeq != 2 {
			t.Errorf("the output of the last is [%d, %d), want it to be kept for a while", p.FirstSeq, p.NextSeq)
		}
		// What is left of them goes when its time has come; the entries stay.
		eventually(t, "no output is kept", func() bool {
			list, err := f.Processes(t.Context())
			if err != nil || len(list) < keepFinished {
				t.Fatalf("%d processes, %v", len(list), err)
			}
			for _, p := range list {
				if p.FirstSeq != p.NextSeq {
					return false
				}
			}
			return true
		})
	})
}

func TestManyCommandsAtOnce(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
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
	})
}

// leave starts a command on a connection whose other side goes away at once. It
// returns once chronus has done what it does then.
func (f *fixture) leave(t testing.TB, req chronusapi.StartRequest) {
	t.Helper()
	c := chronusapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, "unix", f.socket)
		return leaver{nc}, err
	})
	defer c.Close()
	s, err := c.Start(t.Context(), req)
	if err != nil {
		return
	}
	defer s.Close()
	for {
		if ev, err := s.Next(); err != nil {
			return
		} else if ev.Kind == chronusapi.EventExited && ev.Outcome.Signal != 9 {
			t.Errorf("got %+v", ev.Outcome)
		}
	}
}

// leaver ends its side of a connection after the first request.
type leaver struct{ net.Conn }

func (l leaver) Write(p []byte) (int, error) {
	n, err := l.Conn.Write(p)
	return n, errors.Join(err, l.Conn.(*net.UnixConn).CloseWrite())
}

func TestStartWhoseReaderIsGoneLeavesNothing(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := argv("sleep", "1000")
		f.leave(t, req)
		// It may have been seen before anything was started.
		eventually(t, "it is not started, or killed and counted once", func() bool {
			list, err := f.Processes(t.Context())
			info, ierr := f.Info(t.Context())
			return err == nil && ierr == nil && info.Processes == 0 && (len(list) == 0 || len(list) == 1 && list[0].Outcome != nil)
		})
		req.Orphan = true
		f.leave(t, req)
		eventually(t, "the orphan runs", func() bool {
			list, err := f.Processes(t.Context())
			return err == nil && len(list) > 0 && list[len(list)-1].Outcome == nil
		})
		if info, err := f.Info(t.Context()); err != nil || info.Processes != 1 {
			t.Errorf("got %+v, %v; want an orphan that runs", info, err)
		}
	})
}

// The pid of a command is not known before it is cloned, and session 0 is that
// of everything outside: a kill that comes so early must find nobody.
func TestAnAbandonedStartKillsNobodyElse(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		bystander := argv("sleep", "1000")
		bystander.Detach = true
		s, err := f.Start(t.Context(), bystander)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		ev, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			f.leave(t, shell("sleep 1000 & sleep 1000"))
		}
		eventually(t, "only the bystander runs", func() bool {
			info, err := f.Info(t.Context())
			return err == nil && info.Processes == 1
		})
		if err := syscall.Kill(ev.PID, 0); err != nil {
			t.Errorf("the bystander: %v", err)
		}
		list, err := f.Processes(t.Context())
		if err != nil || len(list) == 0 || list[0].ID != ev.Process || list[0].Outcome != nil {
			t.Errorf("got %+v, %v", list, err)
		}
	})
}
