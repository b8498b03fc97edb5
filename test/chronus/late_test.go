package chronus_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// gate is a fifo that nobody gets past before it is opened.
type gate struct {
	path string
	held *os.File
}

func newGate(t *testing.T, name string) *gate {
	t.Helper()
	g := &gate{path: filepath.Join(t.TempDir(), name)}
	if err := unix.Mkfifo(g.path, 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if g.held, err = os.OpenFile(g.path, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.open)
	return g
}

func (g *gate) open() { _ = g.held.Close() }

// reaches waits for the word that a command is at the gate.
func reaches(t *testing.T, s *chronusapi.Events, err error) (pid int) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	for {
		ev, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		switch ev.Kind {
		case chronusapi.EventStarted:
			pid = ev.PID
		case chronusapi.EventOutput:
			return pid
		}
	}
}

// drainRest reads a stream to its end and returns the outcome.
func drainRest(s *chronusapi.Events) (o dsec.Outcome, err error) {
	for {
		ev, err := s.Next()
		if err != nil {
			return o, err
		}
		if ev.Kind == chronusapi.EventExited {
			return ev.Outcome, nil
		}
	}
}

// state is that of a process, as /proc shows it.
func state(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return err.Error()
	}
	return string(bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])[0])
}

// TestLateTimeoutIsNoEnd: where chronus does not get to run for a while, a command
// that ended in time is not told as timed out, however much else there is to be
// told first.
func TestLateTimeoutIsNoEnd(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		// Where the host was too slow for it, with twice the time.
		for timeout := 2 * time.Second; !lateTimeout(t, f, timeout); timeout *= 2 {
			if timeout > time.Minute {
				t.Fatal("the host is too slow for this test")
			}
		}
	})
}

// lateTimeout reports whether all ended in time.
func lateTimeout(t *testing.T, f *fixture, timeout time.Duration) bool {
	crowd, end := newGate(t, "crowd"), newGate(t, "end")
	var pids []int
	for range 40 { // more than the kernel tells of at once
		s, err := f.Start(t.Context(), shell("exec 3<"+crowd.path+"; echo ready; cat <&3; echo out; exec sleep 1000"))
		pids = append(pids, reaches(t, s, err))
	}
	session, err := f.OpenSession(t.Context(), chronusapi.SessionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	wait := "exec 3<" + end.path + "; echo ready; cat <&3; "
	req := shell(wait + "exit 3")
	req.Command.Timeout = timeout
	command, err := f.Start(t.Context(), req)
	pid := reaches(t, command, err)
	told := filepath.Join(t.TempDir(), "told")
	inSession, err := f.RunCommand(t.Context(), chronusapi.SessionCommand{Session: session.ID, Command: wait + ": > " + told + "; (exit 4)", Timeout: timeout})
	shellPID := reaches(t, inSession, err)
	if err := unix.Kill(f.pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := true
	goOn := func() {
		if stopped {
			_ = unix.Kill(f.pid, unix.SIGCONT)
		}
		stopped = false
	}
	t.Cleanup(goOn)
	crowd.open()
	for _, pid := range pids {
		eventually(t, "the others have written", func() bool {
			name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			return err == nil && string(name) == "sleep\n"
		})
	}
	end.open()
	eventually(t, "the command has ended", func() bool { return state(pid) == "Z" })
	eventually(t, "the session's command has ended", func() bool {
		_, err := os.Stat(told)
		return err == nil && state(shellPID) == "S"
	})
	inTime := time.Since(begun) < timeout
	eventually(t, "the time is over", func() bool { return time.Since(begun) > timeout+100*time.Millisecond })
	goOn()
	if !inTime {
		return false
	}
	if r, err := drainRest(command); err != nil || r.TimedOut || r.Code != 3 || r.Signal != 0 {
		t.Errorf("command: %+v, %v", r, err)
	}
	if r, err := drainRest(inSession); err != nil || r.TimedOut || r.Code != 4 || r.Signal != 0 {
		t.Errorf("session: %+v, %v", r, err)
	}
	return true
}
