package trajectory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/dirblob"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// flakyStore fails where refuse says so.
type flakyStore struct {
	blob.Store
	mu   sync.Mutex
	rule func(op string) error
}

func (s *flakyStore) set(rule func(op string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rule = rule
}

func (s *flakyStore) refuse(op string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rule(op)
}

func (s *flakyStore) Put(ctx context.Context, key string, r io.Reader, size int64) error {
	if err := s.refuse("put"); err != nil {
		return err
	}
	return s.Store.Put(ctx, key, r, size)
}

func (s *flakyStore) List(ctx context.Context, prefix string, f func(blob.Info) error) error {
	if err := s.refuse("list"); err != nil {
		return err
	}
	return s.Store.List(ctx, prefix, f)
}

func newStore(t testing.TB) *flakyStore {
	t.Helper()
	s, err := dirblob.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return &flakyStore{Store: s, rule: func(string) error { return nil }}
}

func keys(t testing.TB, s blob.Store, prefix string) (all []string) {
	t.Helper()
	err := s.List(t.Context(), prefix, func(i blob.Info) error {
		all = append(all, i.Key)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// fill has a log go on to its next segment, and one more.
func fill(t testing.TB, l *Log, segments int) {
	t.Helper()
	id := newSandbox(t, l)
	for before := l.Stats().Segments; l.Stats().Segments < before+segments; {
		run(t, l, id, "fill", "", strings.Repeat("x", 60<<10))
	}
	if err := l.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

func settled(t testing.TB, l *Log, segments int) {
	t.Helper()
	testutil.WaitFor(t, 10*time.Second, "segments to go", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if n := len(l.segments) + 1; n > segments {
			return fmt.Errorf("%d segments, want %d", n, segments)
		}
		return nil
	})
}

// What is sealed reads as before once its segments are gone.
func TestASealedTrajectoryReadsAsBefore(t *testing.T) {
	store := newStore(t)
	opts := Options{Dir: t.TempDir(), Store: store, SegmentBytes: 2 * maxPayload}
	l := open(t, opts)
	id := newSandbox(t, l)
	long := strings.Repeat("long ", 50<<10)
	run(t, l, id, "one", "id-1", "short")
	run(t, l, id, "two", "id-2", long)
	under := begin(t, l, id, "three", "id-3")
	fill(t, l, 2)
	before := entries(t, l, id, 1)
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	settled(t, l, 1)
	prefix := "trajectories/project/" + string(id) + "/"
	if got := keys(t, store, prefix); len(got) != 2 || !strings.HasPrefix(got[0], prefix+"000000000001-000000000005-") || !strings.HasPrefix(got[1], prefix+"outputs/") {
		t.Errorf("the store has %v", got)
	}
	if got := files(t, l, "objects"); len(got) != 0 {
		t.Errorf("outputs that are in the store are here, too: %v", got)
	}
	check := func() {
		t.Helper()
		after := entries(t, l, id, 1)
		if len(after) < len(before) || story(after[:len(before)]) != story(before) {
			t.Errorf("after sealing %s, before %s", story(after), story(before))
		}
		if got := output(t, l, id, 4); got != "<1>"+long {
			t.Errorf("output of %d bytes came back with %d", len(long), len(got)-3)
		}
		_, earlier, err := l.Begin(t.Context(), id, execOf("one", "id-1"))
		if err != nil || string(earlier.Ended.Output.Head[0].Data) != "short" {
			t.Errorf("a sealed action again: %+v, %v", earlier, err)
		}
		_, _, err = l.Begin(t.Context(), id, execOf("other", "id-2"))
		wantCode(t, err, dsec.CodeDiverged)
	}
	check()
	l.Close()
	l = open(t, opts)
	check()
	a, begun, err := l.Resume(t.Context(), id, under.Seq)
	if err != nil || begun.GetActionId() != "id-3" {
		t.Fatalf("resume of an action whose begin is sealed: %v, %v", begun, err)
	}
	end(t, a, 3)
	run(t, l, id, "four", "id-4", long+"!")
	check()
	if got := entries(t, l, id, 6)[0]; got.BegunSeq != 5 || got.Outcome.GetExitCode() != 3 || got.Kind != dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC {
		t.Errorf("the end of what begun before sealing: %v", got)
	}
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if got := keys(t, store, prefix); len(got) != 4 || !strings.HasPrefix(got[1], prefix+"000000000006-000000000008-") {
		t.Errorf("the store has %v", got)
	}
	check()
	if err := l.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if got := keys(t, store, "trajectories/"); len(got) != 0 {
		t.Errorf("forgotten, and the store has %v", got)
	}
}

func TestSealingThatFailsIsRepeated(t *testing.T) {
	store := newStore(t)
	l := open(t, Options{Dir: t.TempDir(), Store: store})
	id := newSandbox(t, l)
	run(t, l, id, "one", "", strings.Repeat("x", inlineOutput+1))
	for _, allowed := range []int{0, 1} {
		store.set(func(op string) error {
			if allowed--; op == "put" && allowed < 0 {
				return dsec.Errorf(dsec.CodeUnavailable, "the store is away")
			}
			return nil
		})
		wantCode(t, l.Seal(t.Context(), id), dsec.CodeUnavailable)
		if len(files(t, l, "objects")) != 1 {
			t.Error("an output is gone that is not sealed")
		}
	}
	store.set(func(string) error { return nil })
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantStory(t, l, id, "1:one 2:end-of-1=0 ")
	if got := output(t, l, id, 2); len(got) != inlineOutput+1+len("<1>") {
		t.Errorf("output with %d bytes", len(got))
	}
	// A store that is away is no reason to think that an ID is new.
	fill(t, l, 1)
	settled(t, l, 1)
	l.mu.Lock()
	l.indexes.drop(l.sandboxes[id])
	l.pieces.of = nil
	l.mu.Unlock()
	store.set(func(string) error { return dsec.Errorf(dsec.CodeUnavailable, "the store is away") })
	_, _, err := l.Begin(t.Context(), id, execOf("x", "new"))
	wantCode(t, err, dsec.CodeUnavailable)
	wantCode(t, l.Forget(t.Context(), id), dsec.CodeUnavailable)
	run(t, l, id, "without an ID", "", "")
}

func TestDamageInTheStoreIsTold(t *testing.T) {
	dir := t.TempDir()
	s, err := dirblob.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := open(t, Options{Dir: t.TempDir(), Store: s, SegmentBytes: 2 * maxPayload})
	id := newSandbox(t, l)
	run(t, l, id, "one", "", "")
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	run(t, l, id, "two", "", "")
	fill(t, l, 1)
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	settled(t, l, 1)
	path := filepath.Join(dir, keys(t, s, "trajectories/")[0])
	other, err := os.ReadFile(filepath.Join(dir, keys(t, s, "trajectories/")[1]))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	// Whole, and not what the key says.
	if err := os.WriteFile(path, other, 0o600); err != nil {
		t.Fatal(err)
	}
	if r, ok := any(s).(blob.Reopener); ok {
		r.Reopen(keys(t, s, "trajectories/")[0])
	}
	wantCode(t, l.Entries(t.Context(), id, 1, nil, func(*dsecv1.TrajectoryEntry) error { return nil }), dsec.CodeInternal)
}

// Over its bound a log seals and removes what is oldest, and without a store
// says that it dropped it.
func TestALogStaysWithinItsBound(t *testing.T) {
	for _, stored := range []bool{true, false} {
		t.Run(fmt.Sprint("store=", stored), func(t *testing.T) {
			opts := Options{Dir: t.TempDir(), SegmentBytes: 2 * maxPayload, MaxBytes: 8 * maxPayload, Logger: quiet}
			if stored {
				opts.Store = newStore(t)
			}
			l := open(t, opts)
			id := newSandbox(t, l)
			silent := newSandbox(t, l)
			run(t, l, silent, "once", "id", strings.Repeat("y", inlineOutput+1))
			for range 200 { // 12 MiB
				var a *Action
				testutil.WaitFor(t, 10*time.Second, "room", func() (err error) {
					a, _, err = l.Begin(t.Context(), id, execOf("x", ""))
					return err
				})
				a.Output(dsecv1.Stream_STREAM_STDOUT, bytes.Repeat([]byte("x"), 60<<10))
				end(t, a, 0)
			}
			within := func() error {
				if n := l.Stats().Bytes; n > opts.MaxBytes {
					return fmt.Errorf("%d bytes", n)
				}
				return nil
			}
			testutil.WaitFor(t, 10*time.Second, "the log to shrink", within)
			l.Close()
			l = open(t, opts)
			testutil.WaitFor(t, 10*time.Second, "the log to shrink again", within)
			all := entries(t, l, id, 1)
			if stored {
				if len(all) != 400 || slices.ContainsFunc(all, func(e *dsecv1.TrajectoryEntry) bool { return e.Gap != nil }) {
					t.Errorf("%d entries of 400, or gaps", len(all))
				}
				wantStory(t, l, silent, "1:once 2:end-of-1=0 ")
				if got := output(t, l, silent, 2); len(got) != inlineOutput+1+len("<1>") {
					t.Errorf("output of %d bytes", len(got))
				}
				run(t, l, silent, "again", "other", "")
				return
			}
			next := uint64(1)
			for _, e := range all {
				if e.Seq != next || e.Gap != nil && e.Gap.Reason != reasonDropped {
					t.Fatalf("after entry %d: %v", next-1, e)
				}
				next = max(e.Seq, e.Gap.GetLastSeq()) + 1
			}
			if next != 401 || all[0].Gap == nil {
				t.Errorf("entries up to %d, the first %v", next-1, all[0])
			}
			wantStory(t, l, silent, "1-2:gap ")
			// What may have been done before is not done again.
			_, _, err := l.Begin(t.Context(), silent, execOf("once", "id"))
			wantCode(t, err, dsec.CodeOutcomeUnknown)
			run(t, l, silent, "again", "", "")
			wantStory(t, l, silent, "1-2:gap 3:again 4:end-of-3=0 ")
			if len(files(t, l, "objects")) != 0 {
				t.Error("the output of a dropped entry is kept")
			}
		})
	}
}

// A store that takes nothing makes the log refuse actions, not forget them.
func TestAStoreThatIsAwayStopsTheLogInTheEnd(t *testing.T) {
	store := newStore(t)
	store.set(func(op string) error { return dsec.Errorf(dsec.CodeUnavailable, "the store is away") })
	opts := Options{Dir: t.TempDir(), Store: store, SegmentBytes: 2 * maxPayload, MaxBytes: 8 * maxPayload}
	l := open(t, opts)
	id := newSandbox(t, l)
	n := 0
	var err error
	for a := (*Action)(nil); n < 1000; n++ {
		if a, _, err = l.Begin(t.Context(), id, execOf("x", "")); err != nil {
			break
		}
		a.Output(dsecv1.Stream_STREAM_STDOUT, bytes.Repeat([]byte("x"), 60<<10))
		end(t, a, 0)
	}
	wantCode(t, err, dsec.CodeExhausted)
	if used := l.Stats().Bytes; used > 2*opts.MaxBytes {
		t.Errorf("%d bytes, the bound is %d", used, opts.MaxBytes)
	}
	if all := entries(t, l, id, 1); len(all) != 2*n {
		t.Errorf("%d entries of %d", len(all), 2*n)
	}
	store.set(func(string) error { return nil })
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	settled(t, l, 2)
	run(t, l, id, "again", "", "")
}

// Segments go in any order, and what is known of sandboxes stays.
func TestSealAndForgetInAnyOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store := newStore(t)
		h := newHistory(rt)
		h.log.Close()
		h.opts.Store = store
		h.reopen()
		prefixes := make(map[dsec.SandboxID]string)
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			h.step()
			id := rapid.SampledFrom(h.ids).Draw(rt, "sandbox")
			switch rapid.IntRange(0, 20).Draw(rt, "then") {
			case 0, 1:
				if err := h.log.Seal(t.Context(), id); err != nil {
					rt.Fatal(err)
				}
			case 2:
				if err := h.log.Forget(t.Context(), id); err != nil {
					rt.Fatal(err)
				}
				prefixes[id] = "trajectories/project/" + string(id) + "/"
				h.ids[slices.Index(h.ids, id)] = dsec.NewSandboxID("edge2")
				delete(h.open, id)
				for _, id := range h.ids {
					if err := h.log.Add(id, "project"); err != nil {
						rt.Fatal(err)
					}
				}
			case 3:
				dir := h.crashed()
				h.log.Close()
				h.opts.Dir = dir
				h.reopen()
			default:
				continue
			}
			h.check(func(noted) bool { return false })
		}
		h.log.Close()
		h.reopen()
		defer h.log.Close()
		h.check(func(noted) bool { return false })
		for id, prefix := range prefixes {
			err := h.log.Entries(t.Context(), id, 1, nil, func(*dsecv1.TrajectoryEntry) error { return errors.New("an entry") })
			if dsec.CodeOf(err) != dsec.CodeNotFound {
				rt.Fatalf("a forgotten sandbox: %v", err)
			}
			if got := keys(t, store, prefix); len(got) > 0 {
				rt.Fatalf("forgotten, and the store has %v", got)
			}
		}
		for _, id := range h.ids {
			if err := h.log.Forget(t.Context(), id); err != nil {
				rt.Fatal(err)
			}
		}
		h.log.mu.Lock()
		left, reserved := len(h.log.sandboxes), h.log.reserved
		h.log.mu.Unlock()
		if reserved != 0 {
			rt.Fatalf("%d bytes are reserved for nobody, %d sandboxes", reserved, left)
		}
	})
}

// Who is forgotten stays so while an older segment has records of them, though
// that in which this was noted goes.
func TestAForgottenSandboxDoesNotComeBack(t *testing.T) {
	opts := Options{Dir: t.TempDir(), SegmentBytes: 2 * maxPayload}
	l := open(t, opts)
	id, living := newSandbox(t, l), newSandbox(t, l)
	run(t, l, id, "one", "", "")
	run(t, l, living, "one", "", "")
	fill(t, l, 1)
	if err := l.Forget(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	fill(t, l, 1)
	settled(t, l, 2)
	if l.segments[0].number != 1 {
		t.Fatalf("segment %d is left, want that of who lives", l.segments[0].number)
	}
	l.Close()
	l = open(t, opts)
	wantCode(t, l.Add(id, "project"), dsec.CodeNotFound)
	wantStory(t, l, living, "1:one 2:end-of-1=0 ")
	if err := l.Forget(t.Context(), living); err != nil {
		t.Fatal(err)
	}
	settled(t, l, 1)
	fill(t, l, 1)
	settled(t, l, 1)
	if err := l.Add(id, "project"); err != nil {
		t.Errorf("something is known of who was forgotten: %v", err)
	}
}
