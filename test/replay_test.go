package test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// replayable are the two kinds of sandbox that a replay is shown on.
func replayable(t *testing.T, f func(t *testing.T, s *server, o client.SandboxOptions)) {
	t.Run("fake", func(t *testing.T) { f(t, up(t), client.SandboxOptions{Backend: dsec.KindFake}) })
	t.Run("container", func(t *testing.T) {
		s, _ := containersWith(t)
		f(t, s, client.SandboxOptions{Layers: []string{"base"}})
	})
}

func create(t *testing.T, c *client.Client, o client.SandboxOptions) *client.Sandbox {
	t.Helper()
	sb, err := c.CreateSandbox(t.Context(), o)
	check(t, err)
	t.Cleanup(func() { _ = sb.Kill(context.WithoutCancel(t.Context())) })
	return sb
}

// actAll does each kind of action.
func actAll(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	ctx := t.Context()
	big := strings.Repeat("0123456789abcdef", 20_000)
	check(t, sb.WriteFile(ctx, "/tmp/in/small", []byte("7\n"), 0o640))
	check(t, sb.WriteFile(ctx, "/tmp/in/big", []byte(big), 0))
	check(t, sb.Mkdir(ctx, "/tmp/dir", 0o755, true))
	check(t, sb.Rename(ctx, "/tmp/in/small", "/tmp/dir/seven"))
	_, _, err := sb.Shell(`cat /tmp/dir/seven /tmp/in/big; echo "$GREETING" >&2; exit 3`).Output(ctx)
	check(t, err)
	_, err = sb.Upload(ctx, "/tmp/up", bytes.NewReader(tarOfHeaders(t, &tar.Header{Name: "file", Typeflag: tar.TypeReg, Mode: 0o644})), "")
	check(t, err)
	_, err = sb.Stat(ctx, "/tmp/up/file")
	check(t, err)
	for _, err := range sb.ReadDir(ctx, "/tmp") {
		check(t, err)
	}
	_, err = sb.ReadFile(ctx, "/tmp/in/big")
	check(t, err)
	_, err = sb.ReadFile(ctx, "/tmp/nothing")
	if dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Fatal(err)
	}
	_, err = sb.Download(ctx, "/tmp/up", io.Discard)
	check(t, err)
	check(t, sb.Remove(ctx, "/tmp/in", true))
	cat := sb.Command("cat")
	cat.Stdin = strings.NewReader(big)
	_, err = cat.Run(ctx)
	check(t, err)
	session, err := sb.OpenSession(ctx, client.SessionOptions{Dir: "/tmp/dir"})
	check(t, err)
	for _, command := range []string{"cd /tmp/up; X=9", "pwd; echo $X", "false"} {
		_, err = session.Run(ctx, command, 0, nil, nil)
		check(t, err)
	}
	check(t, session.Close(ctx))
	late := sb.Command("sleep", "100")
	late.Timeout = 200 * time.Millisecond
	_, err = late.Run(ctx)
	check(t, err)
	p, err := sb.Command("sleep", "100").Detach(ctx)
	check(t, err)
	_, _, err = sb.Command("echo", "beside").Output(ctx)
	check(t, err)
	check(t, p.Kill(ctx))
	_, err = p.Attach(ctx, 0, nil, nil, nil)
	check(t, err)
	_, err = sb.Command("sleep", "1000").Detach(ctx) // it does not end
	check(t, err)
}

// TestReplayIsEqual replays each kind of action: of a sandbox that runs, and of one that has ended.
func TestReplayIsEqual(t *testing.T) {
	replayable(t, func(t *testing.T, s *server, o client.SandboxOptions) {
		c := s.client(t)
		o.Env = map[string]string{"GREETING": "hello"}
		sb := create(t, c, o)
		actAll(t, sb)
		for _, ended := range []bool{false, true} {
			if ended {
				check(t, sb.Kill(t.Context()))
			}
			kinds := make(map[dsecv1.TrajectoryKind]bool)
			r, err := sb.Replay(t.Context(), client.ReplayOptions{Step: func(s client.ReplayStep) { kinds[s.Kind] = true }})
			if err != nil || !r.Equal() {
				t.Fatalf("ended %v: %+v, %v, %+v", ended, r, err, difference(r))
			}
			if len(kinds) < 16 || r.Steps < 24 || r.Unended != 1 {
				t.Errorf("ended %v: %d steps of %d kinds, %d without an end", ended, r.Steps, len(kinds), r.Unended)
			}
			info, err := r.Sandbox.Info(t.Context())
			if err != nil || !info.State.Terminal() {
				t.Errorf("the fresh sandbox is left: %v, %v", info, err)
			}
		}
	})
}

func difference(r *client.Replay) any {
	if r == nil || r.Difference == nil {
		return nil
	}
	return *r.Difference
}

// TestReplayFindsTheFirstDifference tells the step, and what was expected and got.
func TestReplayFindsTheFirstDifference(t *testing.T) {
	s, c := containersWith(t)
	sb := create(t, c, client.SandboxOptions{Layers: []string{"base"}})
	ctx := t.Context()
	run := func(script string) {
		t.Helper()
		_, _, err := sb.Shell(script).Output(ctx)
		check(t, err)
	}
	const chance = "$(od -An -N8 -tx1 /dev/urandom | tr -d ' ')"
	run("echo same")
	run("echo one; echo at " + chance + "; exit 4") // entries 4 and 5
	run("exit 5")
	replay := func(o client.ReplayOptions) *client.Replay {
		t.Helper()
		r, err := sb.Replay(ctx, o)
		check(t, err)
		return r
	}
	r := replay(client.ReplayOptions{})
	if d := r.Difference; d == nil || d.Seq != 4 || d.What != "stdout" || !strings.HasPrefix(d.Expected, `line 2: "at `) || !strings.HasPrefix(d.Got, `line 2: "at `) || d.Expected == d.Got {
		t.Errorf("%+v", difference(r))
	}
	if r := replay(client.ReplayOptions{Mask: []*regexp.Regexp{regexp.MustCompile(`at [0-9a-f]+`)}}); !r.Equal() || r.Steps != 3 {
		t.Errorf("masked: %+v", difference(r))
	}
	if r := replay(client.ReplayOptions{IgnoreOutput: true}); !r.Equal() || r.Steps != 3 {
		t.Errorf("without output: %+v", difference(r))
	}
	if r := replay(client.ReplayOptions{Until: 3}); !r.Equal() || r.Steps != 1 {
		t.Errorf("until 3: %+v", r)
	}
	// By the CLI, which leaves the sandbox where it is told to.
	stdout, stderr, code := s.cli("", "replay", "-q", "-o", "json", string(sb.ID()))
	if code != 1 || !strings.Contains(stdout, `"equal": false`) || !strings.Contains(stdout, `"seq": 4`) || stderr != "" {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	stdout, stderr, code = s.cli("", "replay", "--mask", "at [0-9a-f]+", "--keep", string(sb.ID()))
	if code != 0 || !regexp.MustCompile(`equal +yes`).MatchString(stdout) || strings.Count(stderr, "\n") != 3 {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	kept := regexp.MustCompile(`sandbox +([a-z2-7]{25})`).FindStringSubmatch(stdout)
	if kept == nil {
		t.Fatalf("no sandbox is kept: %s", stdout)
	}
	check(t, c.Sandbox(kept[1]).Kill(ctx))
	// What ends by chance differs without output, too.
	for range 3 {
		run("exit $(od -An -N1 -tu1 /dev/urandom)")
	}
	r = replay(client.ReplayOptions{IgnoreOutput: true})
	if d := r.Difference; d == nil || d.Seq < 8 || d.What != "outcome" || !strings.HasPrefix(d.Expected, "exit code ") {
		t.Errorf("%+v", difference(r))
	}
}

// withBounds is a server on the fake backend that keeps little of what actions are given and write.
func withBounds(t *testing.T) *server {
	t.Helper()
	dir := testutil.Dir(t)
	p := startEnv(t, []string{"DSEC_EDGE_TRAJECTORY_MAX_INPUT_BYTES=200000", "DSEC_EDGE_TRAJECTORY_MAX_OUTPUT_BYTES=200000"},
		"up", "--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, "data"), "--run-dir", filepath.Join(dir, "run"))
	return &server{p, p.ready, filepath.Join(dir, "data", "admin.key"), dir}
}

// TestReplayTellsWhatWasNotKept: what is not in the log is never called the same.
func TestReplayTellsWhatWasNotKept(t *testing.T) {
	c := withBounds(t).client(t)
	ctx := t.Context()
	hole := func(sb *client.Sandbox, o client.ReplayOptions, want string) {
		t.Helper()
		r, err := sb.Replay(ctx, o)
		if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || !strings.Contains(err.Error(), want) || r == nil || r.Steps != 1 {
			t.Errorf("%+v, %v; want one step, and then %q", r, err, want)
		}
	}
	given := create(t, c, client.SandboxOptions{Backend: dsec.KindFake})
	check(t, given.WriteFile(ctx, "/tmp/a", make([]byte, 100_000), 0))
	check(t, given.WriteFile(ctx, "/tmp/b", make([]byte, 300_000), 0)) // entries 4 and 5
	hole(given, client.ReplayOptions{}, "of what entry 5 was given 100000 bytes were not kept")
	if r, err := given.Replay(ctx, client.ReplayOptions{Until: 3}); err != nil || !r.Equal() || r.Steps != 1 {
		t.Errorf("up to the hole: %+v, %v", r, err)
	}
	written := create(t, c, client.SandboxOptions{Backend: dsec.KindFake})
	for _, n := range []int{100_000, 300_000} {
		_, _, err := written.Shell(fmt.Sprintf("yes | head -c %d", n)).Output(ctx)
		check(t, err)
	}
	r, err := written.Replay(ctx, client.ReplayOptions{})
	if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || !strings.Contains(err.Error(), "100000 bytes of the output of entry 4 were not kept") {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := written.Replay(ctx, client.ReplayOptions{IgnoreOutput: true}); err != nil || !r.Equal() || r.Steps != 2 {
		t.Errorf("without output: %+v, %v", r, err)
	}
}

// TestReplayOfADamagedLog: a log with a damaged record, or without its end, is replayed
// up to there.
func TestReplayOfADamagedLog(t *testing.T) {
	overwrite := func(f *os.File, at int64) error { _, err := f.WriteAt([]byte{0}, at); return err }
	for name, damage := range map[string]struct {
		of   func(s, sep []byte) int
		do   func(f *os.File, at int64) error
		want string
	}{
		"a damaged begin": {bytes.Index, overwrite, "entries 12 to 12 are gone (the log was damaged)"},
		"a damaged end":   {bytes.LastIndex, overwrite, "what came of entry 12 the platform does not know"},
		"a cut log":       {bytes.LastIndex, (*os.File).Truncate, "what came of entry 12 the platform does not know"},
	} {
		t.Run(name, func(t *testing.T) {
			s := up(t)
			sb, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake})
			check(t, err)
			for i := range 10 {
				_, _, err := sb.Command("echo", fmt.Sprint("step-", i)).Output(t.Context())
				check(t, err)
			}
			s.stop()
			segments, err := filepath.Glob(filepath.Join(s.dir, "data", "*", "trajectories", "*.seg"))
			check(t, err)
			for _, path := range segments {
				b, err := os.ReadFile(path)
				check(t, err)
				at := damage.of(b, []byte("step-5"))
				if at < 0 {
					continue
				}
				f, err := os.OpenFile(path, os.O_RDWR, 0)
				check(t, err)
				check(t, damage.do(f, int64(at)))
				check(t, f.Close())
			}
			again := upIn(t, s.dir)
			r, err := again.client(t).Sandbox(string(sb.ID())).Replay(t.Context(), client.ReplayOptions{})
			if err == nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || !strings.Contains(err.Error(), damage.want) || r == nil || r.Steps != 5 {
				t.Errorf("%+v, %v; want five steps, and then %q", r, err, damage.want)
			}
		})
	}
}

// TestContentOfTheLog: what was given and written can be read, however much it is.
func TestContentOfTheLog(t *testing.T) {
	sb := create(t, up(t).client(t), client.SandboxOptions{Backend: dsec.KindFake})
	big := strings.Repeat("0123456789abcdef", 20_000)
	check(t, sb.WriteFile(t.Context(), "/tmp/big", []byte(big), 0))
	_, _, err := sb.Shell("cat /tmp/big").Output(t.Context())
	check(t, err)
	seen := 0
	for e, err := range sb.Trajectory(t.Context(), client.TrajectoryOptions{}) {
		check(t, err)
		if e.Phase != dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED {
			continue
		}
		var got strings.Builder
		if e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_FILE_WRITE {
			check(t, sb.TrajectoryInput(t.Context(), e.Seq, &got))
		} else {
			check(t, sb.TrajectoryOutput(t.Context(), e.Seq, &got))
		}
		if seen++; got.String() != big {
			t.Errorf("entry %d has %d bytes, want %d", e.Seq, got.Len(), len(big))
		}
	}
	if seen != 2 {
		t.Errorf("%d actions ended, want 2", seen)
	}
}
