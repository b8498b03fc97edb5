package backendtest

import (
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// openSession opens a session, with a command group more where it takes one.
func (b *box) openSession(req chronusapi.SessionRequest) string {
	b.t.Helper()
	req.Env = append(req.Env, "PATH=/usr/bin:/bin")
	for {
		s, err := b.OpenSession(b.ctx(), req)
		g, ok := b.inst.(backend.Grouper)
		if err == chronusapi.ErrNeedGroup && ok {
			if err := g.AddGroup(b.ctx()); err != nil {
				b.t.Fatal(err)
			}
			continue
		}
		if err != nil {
			b.t.Fatal(err)
		}
		return s.ID
	}
}

func (b *box) in(session, command string) result {
	b.t.Helper()
	return b.inWith(chronusapi.SessionCommand{Session: session, Command: command})
}

func (b *box) inWith(cmd chronusapi.SessionCommand) result {
	b.t.Helper()
	s, err := b.RunCommand(b.ctx(), cmd)
	if err != nil {
		b.t.Fatalf("session command %q: %v", cmd.Command, err)
	}
	r := b.collect(s, anySeq)
	if !r.outcome.Claimed {
		b.t.Errorf("session command %q: outcome is not marked claimed", cmd.Command)
	}
	return r
}

func testSessions(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	id := b.openSession(chronusapi.SessionRequest{Env: []string{"FROM=open"}, Cwd: "/tmp"})
	for _, step := range []struct {
		command, stdout string
		code            int
	}{
		{"pwd; echo $FROM", "/tmp\nopen\n", 0},
		{"cd /; export KEPT=yes", "", 0},
		{"pwd; echo $KEPT", "/\nyes\n", 0},
		{"false", "", 1},
		{"printf 'no newline'", "no newline", 0},
		{"echo 'unbalanced", "", 2},
		{"echo goes on", "goes on\n", 0},
		{"echo 'exit code: 0' && false", "exit code: 0\n", 1},
		{"echo one\necho two\n", "one\ntwo\n", 0},
		{"# only a remark", "", 0},
	} {
		r := b.in(id, step.command)
		if r.stdout != step.stdout || (r.outcome.Code != step.code && !(step.code == 2 && r.outcome.Code != 0)) {
			t.Errorf("%q: stdout %q, code %d; want %q, %d", step.command, r.stdout, r.outcome.Code, step.stdout, step.code)
		}
	}
	r := b.inWith(chronusapi.SessionCommand{Session: id, Command: "echo partial; sleep 1000", Timeout: time.Second})
	if !r.outcome.TimedOut || !strings.HasPrefix(r.stdout, "partial\n") {
		t.Errorf("timeout: %q, %+v", r.stdout, r.outcome)
	}
	if err := b.CloseSession(b.ctx(), id); err != nil {
		// The timeout may have cost the session its shell.
		if dsec.CodeOf(err) != dsec.CodeNotFound {
			t.Errorf("close: %v", err)
		}
	}
	id = b.openSession(chronusapi.SessionRequest{})
	list, err := b.Sessions(b.ctx())
	if err != nil || len(list) != 1 || list[0].ID != id {
		t.Errorf("sessions %+v, %v; want the open one", list, err)
	}
	if r := b.in(id, "exit 4"); r.outcome.Code != 4 {
		t.Errorf("exit 4: %+v", r.outcome)
	}
	b.eventually("the session ended", func() bool {
		list, err := b.Sessions(b.ctx())
		return err == nil && len(list) == 0
	})
	if _, err = b.RunCommand(b.ctx(), chronusapi.SessionCommand{Session: id, Command: "true"}); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("command in an ended session: %v, want not_found", err)
	}
	id = b.openSession(chronusapi.SessionRequest{})
	b.in(id, "sleep 1000 &")
	if err := b.CloseSession(b.ctx(), id); err != nil {
		t.Error(err)
	}
	b.noneLingers()
}
