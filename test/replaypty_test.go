package test

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// echoes answers each line once it has thought about it for a while: a line that is typed
// ahead is shown before the answer to the one before, by the terminal.
const echoes = `while read -r line; do j=0; while [ $j -lt 20000 ]; do j=$((j+1)); done; stty size; echo "got $line"; done; exit 7`

// typist is somebody at a terminal, who types a line once the one before is answered.
type typist struct {
	t      *testing.T
	screen *bufio.Reader
	keys   func([]byte) error
	resize func(client.WindowSize) error
}

// sees waits for an answer.
func (w *typist) sees(answer string) {
	w.t.Helper()
	for {
		line, err := w.screen.ReadString('\n')
		check(w.t, err)
		if strings.TrimRight(line, "\r\n") == answer {
			return
		}
	}
}

// types has a conversation.
func (w *typist) types() {
	w.t.Helper()
	for i, line := range []string{"one", "two", "three"} {
		check(w.t, w.keys([]byte(line+"\n")))
		w.sees("got " + line)
		check(w.t, w.resize(client.WindowSize{Rows: 30 + i, Cols: 100 + i}))
	}
	check(w.t, w.keys([]byte{4})) // the end
	go func() { _, _ = io.Copy(io.Discard, w.screen) }()
}

// late is a writer that is known once it is written to.
type late struct{ io.Writer }

// TestReplayOfATerminal types when the command had asked for it, and changes the size when
// it was changed: of keys that were written one by one, that were streamed, and that were
// written to a command that nobody owned.
func TestReplayOfATerminal(t *testing.T) {
	s, c := containersWith(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	// at has somebody at a command's terminal, and wait follow it to its end.
	at := func(resize func(client.WindowSize) error, keys func([]byte) error, wait func(screen io.Writer) (dsec.Outcome, error)) {
		screen, out := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			o, err := wait(out)
			if err == nil && o.Code != 7 {
				err = fmt.Errorf("it ended with %+v", o)
			}
			_ = out.CloseWithError(cmp.Or(err, io.EOF))
			ended <- err
		}()
		who := &typist{t: t, screen: bufio.NewReader(screen), resize: resize, keys: keys}
		who.types()
		check(t, <-ended)
	}
	terminal := func(sb *client.Sandbox) *client.Cmd {
		cmd := sb.Shell(echoes)
		cmd.PTY = &client.WindowSize{Rows: 24, Cols: 80}
		return cmd
	}
	owned := func(cmd *client.Cmd, keys func([]byte) error) {
		out := new(late)
		cmd.Stdout = out
		check(t, cmd.Start(ctx))
		resize := func(size client.WindowSize) error { return cmd.Process().Resize(ctx, size) }
		at(resize, keys, func(screen io.Writer) (dsec.Outcome, error) {
			out.Writer = screen
			return cmd.Wait()
		})
	}
	for name, talk := range map[string]func(sb *client.Sandbox){
		"written": func(sb *client.Sandbox) {
			cmd := terminal(sb)
			owned(cmd, func(b []byte) error { _, err := cmd.Process().WriteStdin(ctx, b); return err })
		},
		"streamed": func(sb *client.Sandbox) {
			cmd := terminal(sb)
			keys, typed := io.Pipe()
			cmd.Stdin = keys
			owned(cmd, func(b []byte) error {
				_, err := typed.Write(b)
				if b[0] == 4 {
					_ = typed.Close()
				}
				return err
			})
		},
		"detached": func(sb *client.Sandbox) {
			cmd := terminal(sb)
			p, err := cmd.Detach(ctx)
			check(t, err)
			resize := func(size client.WindowSize) error { return p.Resize(ctx, size) }
			at(resize, func(b []byte) error { _, err := p.WriteStdin(ctx, b); return err }, func(screen io.Writer) (dsec.Outcome, error) {
				return p.Attach(ctx, 0, screen, nil, nil)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			sb := create(t, c, client.SandboxOptions{Layers: []string{"base"}})
			talk(sb)
			for range 2 {
				kinds := make(map[dsecv1.TrajectoryKind]int)
				r, err := sb.Replay(ctx, client.ReplayOptions{Step: func(s client.ReplayStep) { kinds[s.Kind]++ }})
				if err != nil || !r.Equal() {
					t.Fatalf("%+v, %v, %+v", r, err, difference(r))
				}
				if kinds[dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESIZE] != 3 || kinds[dsecv1.TrajectoryKind_TRAJECTORY_KIND_START] != 1 || kinds[dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN] == 0 {
					t.Errorf("replayed were %v", kinds)
				}
			}
			stdout, stderr, code := s.cli("", "log", "--kind", "resize", string(sb.ID()))
			if code != 0 || strings.Count(stdout, "31 rows, 101 columns") != 1 {
				t.Errorf("dsec log: exit code %d, %s%s", code, stdout, stderr)
			}
		})
	}
}
