package chronus_test

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func TestTerminal(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := shell("test -t 0 && test -t 1 && test -t 2 && echo tty; stty size; echo $TERM; echo é; exit 3")
		req.PTY = &chronusapi.WindowSize{Rows: 33, Cols: 101}
		r := f.run(t, req)
		if r.pty != "tty\r\n33 101\r\nxterm\r\né\r\n" || r.stdout != "" || r.outcome.Code != 3 {
			t.Fatalf("got %+v", r)
		}
	})
}

func TestTerminalInputResizeAndEnd(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := shell("stty -echo; trap 'stty size' WINCH; echo ready; while read line; do echo got $line; done; echo end")
		req.PTY = &chronusapi.WindowSize{Rows: 24, Cols: 80}
		s, err := f.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		text := ""
		until := func(want string) {
			t.Helper()
			for !strings.Contains(text, want) {
				ev, err := s.Next()
				if err != nil {
					t.Fatalf("%v after %q, before %q", err, text, want)
				}
				text += string(ev.Data)
			}
		}
		until("ready\r\n")
		p := f.only(t)
		if err := f.Resize(t.Context(), p.ID, chronusapi.WindowSize{Rows: 50, Cols: 132}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteStdin(t.Context(), p.ID, []byte("line\n"), false); err != nil {
			t.Fatal(err)
		}
		until("50 132\r\n")
		until("got line\r\n")
		if _, err := f.WriteStdin(t.Context(), p.ID, nil, true); err != nil {
			t.Fatal(err)
		}
		until("end\r\n")
	})
}

func TestAllOutputOfATerminalIsDrained(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		req := shell("stty -opost; head -c 300000 /dev/zero; echo end")
		req.PTY = &chronusapi.WindowSize{Rows: 24, Cols: 80}
		for range 5 {
			if r := f.run(t, req); len(r.pty) != 300004 || !strings.HasSuffix(r.pty, "end\n") {
				t.Fatalf("%d bytes", len(r.pty))
			}
		}
	})
}

func TestResizeWithoutATerminalIsAConflict(t *testing.T) {
	each(t, func(t *testing.T, f *fixture) {
		r := f.run(t, argv("true"))
		wantError(t, f.Resize(t.Context(), r.process, chronusapi.WindowSize{Rows: 1, Cols: 1}), dsec.CodeConflict, "pty")
	})
}
