package trajectory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var quiet = slog.New(slog.DiscardHandler)

func open(t testing.TB, opts Options) *Log {
	t.Helper()
	l, _ := openAgain(t, opts)
	return l
}

func openAgain(t testing.TB, opts Options) (*Log, Recovery) {
	t.Helper()
	if opts.Logger == nil {
		opts.Logger = quiet
	}
	l, r, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, r
}

// newSandbox adds a sandbox to a log.
func newSandbox(t testing.TB, l *Log) dsec.SandboxID {
	t.Helper()
	id := dsec.NewSandboxID("edge2")
	if err := l.Add(id, "project"); err != nil {
		t.Fatal(err)
	}
	return id
}

func execOf(command, actionID string) *dsecv1.TrajectoryEntry {
	e := &dsecv1.TrajectoryEntry{
		Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC, Caller: "key", ActionId: actionID,
		Request: &dsecv1.TrajectoryRequest{Shell: command},
	}
	_ = Describe(e, &dsecv1.ExecRequest{Command: &dsecv1.Command{Shell: command}})
	return e
}

func begin(t testing.TB, l *Log, id dsec.SandboxID, command, actionID string) *Action {
	t.Helper()
	a, earlier, err := l.Begin(t.Context(), id, execOf(command, actionID))
	if err != nil || earlier != nil {
		t.Fatalf("begin %s: %v, %v", command, earlier, err)
	}
	return a
}

func exited(code int32) *dsecv1.TrajectoryEntry {
	return &dsecv1.TrajectoryEntry{Outcome: &dsecv1.Outcome{End: &dsecv1.Outcome_ExitCode{ExitCode: code}}, ProcessId: 7}
}

// run notes a whole command.
func run(t testing.TB, l *Log, id dsec.SandboxID, command, actionID, output string) *Action {
	t.Helper()
	a := begin(t, l, id, command, actionID)
	a.Output(dsecv1.Stream_STREAM_STDOUT, []byte(output))
	end(t, a, 0)
	return a
}

func end(t testing.TB, a *Action, code int32) {
	t.Helper()
	if err := a.End(exited(code)); err != nil {
		t.Fatal(err)
	}
}

func entries(t testing.TB, l *Log, id dsec.SandboxID, from uint64, kinds ...dsecv1.TrajectoryKind) (all []*dsecv1.TrajectoryEntry) {
	t.Helper()
	err := l.Entries(t.Context(), id, from, kinds, func(e *dsecv1.TrajectoryEntry) error {
		all = append(all, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// story is entries as short text.
func story(all []*dsecv1.TrajectoryEntry) string {
	var b bytes.Buffer
	for _, e := range all {
		switch e.Phase {
		case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN:
			fmt.Fprintf(&b, "%d:%s ", e.Seq, e.Request.GetShell())
		case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED:
			fmt.Fprintf(&b, "%d:end-of-%d=%d ", e.Seq, e.BegunSeq, e.Outcome.GetExitCode())
		case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP:
			fmt.Fprintf(&b, "%d-%d:gap ", e.Seq, e.Gap.LastSeq)
		default:
			fmt.Fprintf(&b, "%d:%s ", e.Seq, e.State)
		}
	}
	return b.String()
}

func wantStory(t testing.TB, l *Log, id dsec.SandboxID, want string) {
	t.Helper()
	if got := story(entries(t, l, id, 1)); got != want {
		t.Errorf("log of %s:\n%s\nwant\n%s", id, got, want)
	}
}

func wantCode(t testing.TB, err error, code dsec.Code) {
	t.Helper()
	if err == nil || dsec.CodeOf(err) != code {
		t.Errorf("error %v, want one of code %s", err, code)
	}
}

func TestEntriesComeBackAsTheyWereNoted(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Options{Dir: dir})
	one, two := newSandbox(t, l), newSandbox(t, l)
	if _, err := l.Append(one, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE, State: "running"}); err != nil {
		t.Fatal(err)
	}
	a := begin(t, l, one, "make", "step-1")
	run(t, l, two, "true", "", "")
	a.Output(dsecv1.Stream_STREAM_STDOUT, []byte("o"))
	a.Output(dsecv1.Stream_STREAM_STDERR, []byte("e"))
	a.Output(dsecv1.Stream_STREAM_STDERR, []byte("E"))
	end(t, a, 2)
	check := func(l *Log) {
		t.Helper()
		wantStory(t, l, one, "1:running 2:make 3:end-of-2=2 ")
		wantStory(t, l, two, "1:true 2:end-of-1=0 ")
		got := entries(t, l, one, 3)[0]
		if got.Time == nil || got.Duration.AsDuration() <= 0 {
			t.Errorf("time %v, duration %v; want both", got.Time, got.Duration)
		}
		got.Time, got.Duration = nil, nil
		want := exited(2)
		want.Seq, want.SandboxId, want.BegunSeq, want.ProcessId = 3, string(one), 2, 7
		want.Phase, want.Kind = dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED, dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC
		want.Output = &dsecv1.TrajectoryOutput{TotalBytes: 3, KeptBytes: 3, Head: []*dsecv1.TrajectoryOutputPiece{
			{Stream: dsecv1.Stream_STREAM_STDOUT, Data: []byte("o")}, {Stream: dsecv1.Stream_STREAM_STDERR, Data: []byte("eE")},
		}}
		if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
			t.Errorf("the end of make (-want +got):\n%s", d)
		}
	}
	check(l)
	l.Close()
	l, r := openAgain(t, Options{Dir: dir})
	if r != (Recovery{}) {
		t.Errorf("after a clean end: %+v", r)
	}
	check(l)
	run(t, l, one, "again", "", "")
	wantStory(t, l, one, "1:running 2:make 3:end-of-2=2 4:again 5:end-of-4=0 ")
}

func TestOnlyOneProcessHasTheLog(t *testing.T) {
	dir := t.TempDir()
	open(t, Options{Dir: dir})
	if _, _, err := Open(Options{Dir: dir}); !errors.Is(err, ErrInUse) {
		t.Errorf("second open: %v, want ErrInUse", err)
	}
}

func TestBadArguments(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	wantCode(t, l.Add("short", "project"), dsec.CodeInvalid)
	wantCode(t, l.Add(dsec.NewSandboxID("edge2"), "../project"), dsec.CodeInvalid)
	_, err := l.Append(dsec.NewSandboxID("edge2"), execOf("x", ""))
	wantCode(t, err, dsec.CodeNotFound)
	_, err = l.Append(id, &dsecv1.TrajectoryEntry{Response: make([]byte, maxResponse+1)}) // what it cannot hold it does not take
	wantCode(t, err, dsec.CodeInternal)
	_, _, err = l.Begin(t.Context(), id, execOf("x", string(make([]byte, MaxActionID+1))))
	wantCode(t, err, dsec.CodeInvalid)
	_, err = l.List(t.Context(), &dsecv1.ListTrajectoryRequest{SandboxId: string(id), PageSize: 1001})
	wantCode(t, err, dsec.CodeInvalid)
	wantCode(t, l.Seal(t.Context(), id), dsec.CodeUnsupported)
	for _, bad := range []Options{{SegmentBytes: 1}, {MaxBytes: 1 << 20}, {MaxOutput: -1}} {
		bad.Dir = t.TempDir()
		if l, _, err := Open(bad); err == nil {
			l.Close()
			t.Errorf("open with %+v: no error", bad)
		}
	}
	wantStory(t, l, id, "")
}

// An action ID is good for one request, and tells what became of it.
func TestActionIDs(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Options{Dir: dir})
	id := newSandbox(t, l)
	done := run(t, l, id, "make", "one", "built")
	under := begin(t, l, id, "sleep", "two")
	refused := begin(t, l, id, "retry", "three")
	if err := refused.End(&dsecv1.TrajectoryEntry{Error: &dsecv1.TrajectoryError{Detail: &dsecv1.ErrorDetail{Code: string(dsec.CodeUnavailable)}}}); err != nil {
		t.Fatal(err)
	}
	check := func(l *Log, sure bool) {
		t.Helper()
		_, earlier, err := l.Begin(t.Context(), id, execOf("make", "one"))
		if err != nil || earlier == nil || earlier.Ended.GetBegunSeq() != done.Seq || string(earlier.Ended.Output.Head[0].Data) != "built" || earlier.Begun.ActionId != "one" {
			t.Errorf("an ended action again: %+v, %v", earlier, err)
		}
		_, _, err = l.Begin(t.Context(), id, execOf("rm", "one"))
		wantCode(t, err, dsec.CodeDiverged)
		_, earlier, err = l.Begin(t.Context(), id, execOf("sleep", "two"))
		if sure {
			if err != nil || earlier == nil || earlier.Ended != nil || earlier.Action != under {
				t.Errorf("an action under way again: %+v, %v", earlier, err)
			}
		} else {
			wantCode(t, err, dsec.CodeOutcomeUnknown)
		}
		if earlier, err := l.Lookup(t.Context(), id, "four"); earlier != nil || err != nil {
			t.Errorf("an ID that was never used: %+v, %v", earlier, err)
		}
		other := newSandbox(t, l)
		run(t, l, other, "rm", "one", "")
	}
	check(l, true)
	l.Close()
	l = open(t, Options{Dir: dir})
	check(l, false)
	seqs, err := l.Unfinished(id)
	if err != nil || len(seqs) != 1 || seqs[0] != under.Seq {
		t.Fatalf("unfinished: %v, %v; want %d", seqs, err, under.Seq)
	}
	again, begun, err := l.Resume(t.Context(), id, under.Seq)
	if err != nil || begun.ActionId != "two" {
		t.Fatalf("resume: %v, %v", begun, err)
	}
	_, _, err = l.Resume(t.Context(), id, under.Seq)
	wantCode(t, err, dsec.CodeConflict)
	_, _, err = l.Resume(t.Context(), id, done.Seq)
	wantCode(t, err, dsec.CodeNotFound)
	end(t, again, 9)
	wantCode(t, again.End(exited(0)), dsec.CodeConflict)
	if earlier, err := l.Lookup(t.Context(), id, "two"); err != nil || earlier.Ended.GetOutcome().GetExitCode() != 9 {
		t.Errorf("a resumed action: %+v, %v", earlier, err)
	}
	// What provably had no effect is done when it is asked for again.
	run(t, l, id, "other", "three", "")
	wantStory(t, l, id, "1:make 2:end-of-1=0 3:sleep 4:retry 5:end-of-4=0 6:end-of-3=9 7:other 8:end-of-7=0 ")
}

func TestOneOfManyBeginsOfAnActionIDWins(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	const n = 16
	won := make(chan *Action, n)
	for range n {
		go func() {
			a, earlier, err := l.Begin(context.Background(), id, execOf("make", "one"))
			if err != nil || (a == nil) == (earlier == nil) {
				t.Errorf("%v, %v, %v", a, earlier, err)
			}
			won <- a
		}()
	}
	var first *Action
	for range n {
		if a := <-won; a != nil {
			if first != nil {
				t.Error("two begins of one action ID")
			}
			first = a
		}
	}
	if first == nil {
		t.Fatal("no begin of an action ID")
	}
	end(t, first, 0)
	<-first.Done()
	wantStory(t, l, id, "1:make 2:end-of-1=0 ")
}

func TestListGivesPagesOfTheKindsAskedFor(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	for i := range 5 {
		run(t, l, id, fmt.Sprint("c", i), "", "")
		if _, err := l.Append(id, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE, State: fmt.Sprint("s", i)}); err != nil {
			t.Fatal(err)
		}
	}
	var pages []string
	for from := uint64(1); from > 0; {
		page, err := l.List(t.Context(), &dsecv1.ListTrajectoryRequest{SandboxId: string(id), FromSeq: from, PageSize: 2, Kinds: []dsecv1.TrajectoryKind{dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE}})
		if err != nil {
			t.Fatal(err)
		}
		pages, from = append(pages, story(page.Entries)), page.NextSeq
	}
	if d := cmp.Diff([]string{"3:s0 6:s1 ", "9:s2 12:s3 ", "15:s4 "}, pages); d != "" {
		t.Errorf("pages (-want +got):\n%s", d)
	}
	if got := story(entries(t, l, id, 16)); got != "" {
		t.Errorf("after the end: %s", got)
	}
}

func TestFollowTellsWhatComes(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	run(t, l, id, "first", "", "")
	told := make(chan *dsecv1.TrajectoryEntry)
	gone := make(chan error)
	go func() {
		gone <- l.Follow(context.Background(), id, 2, nil, func(e *dsecv1.TrajectoryEntry) error {
			told <- e
			return nil
		})
	}()
	all := []*dsecv1.TrajectoryEntry{<-told}
	for range 3 {
		run(t, l, id, "next", "", "")
		all = append(all, <-told, <-told)
	}
	if got, want := story(all), "2:end-of-1=0 3:next 4:end-of-3=0 5:next 6:end-of-5=0 7:next 8:end-of-7=0 "; got != want {
		t.Errorf("followed %s, want %s", got, want)
	}
	if err := l.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-gone, dsec.CodeNotFound)
	wantCode(t, l.Add(id, "project"), dsec.CodeNotFound)
}

// Whoever has an action of a sandbox that is forgotten is told, and nothing of it stays.
func TestAnActionOfAForgottenSandbox(t *testing.T) {
	opts := Options{Dir: t.TempDir()}
	l := open(t, opts)
	id := newSandbox(t, l)
	a := begin(t, l, id, "x", "one")
	a.Output(dsecv1.Stream_STREAM_STDOUT, make([]byte, inlineOutput+1))
	if err := l.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantCode(t, a.End(exited(0)), dsec.CodeNotFound)
	if names := append(files(t, l, "objects"), files(t, l, "of")...); len(names) > 0 {
		t.Errorf("left: %v", names)
	}
	if s := l.Stats(); s.Actions != 0 || s.Sandboxes != 0 {
		t.Errorf("left: %+v", s)
	}
	_, _, err := l.Begin(t.Context(), id, execOf("x", "one"))
	wantCode(t, err, dsec.CodeNotFound)
	if err := l.Forget(t.Context(), id); err != nil {
		t.Errorf("forgotten again: %v", err)
	}
	l.Close()
	l = open(t, opts)
	wantCode(t, l.Add(id, "project"), dsec.CodeNotFound)
}

// What a caller gives as text has no bound of its own, and need not be text.
func TestLongAndBrokenTextIsCut(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	long := strings.Repeat("\xffé", 1<<20)
	e := execOf(long, "one")
	e.Caller, e.Request.Path, e.Request.Cwd = long, []byte(long), long
	for range 100_000 {
		e.Request.Argv = append(e.Request.Argv, []byte(long[:30]))
	}
	a, _, err := l.Begin(t.Context(), id, e)
	if err != nil {
		t.Fatal(err)
	}
	x := exited(0)
	x.Response, x.SessionId, x.Reason = []byte(long), long, long
	x.Error = &dsecv1.TrajectoryError{Message: long, Detail: &dsecv1.ErrorDetail{Code: long, Field: long}}
	end(t, a, 0)
	all := entries(t, l, id, 1)
	if r := all[0].Request; !r.Cut || len(r.Shell) > maxCommand || len(r.Shell) < maxCommand-4 || len(r.Argv) == 0 || len(all[0].Caller) > maxText {
		t.Errorf("cut %v, shell of %d bytes, %d arguments, caller of %d bytes", r.Cut, len(r.Shell), len(r.Argv), len(all[0].Caller))
	}
	b := begin(t, l, id, "y", "")
	if err := b.End(x); err != nil {
		t.Fatal(err)
	}
	if n := proto.Size(entries(t, l, id, 4)[0]); n > endRoom-headerLen {
		t.Errorf("an end without output of %d bytes: more than is reserved for it", n)
	}
	if r := (&dsecv1.TrajectoryRequest{Shell: "short", Argv: [][]byte{[]byte("a")}}); true {
		if boundRequest(r); r.Cut {
			t.Error("a short request is told to be cut")
		}
	}
}
