package trajectory

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Many sandboxes at once, each of which is followed, read, sealed and, every
// second one, forgotten, in a log that is over its bound all the time.
func TestManySandboxesAtOnce(t *testing.T) {
	const steps = 60
	store := newStore(t)
	opts := Options{Dir: t.TempDir(), Store: store, SegmentBytes: 2 * maxPayload, MaxBytes: 8 * maxPayload, SyncEvery: time.Millisecond}
	l := open(t, opts)
	var all sync.WaitGroup
	var kept []dsec.SandboxID
	for i := range 12 {
		id := newSandbox(t, l)
		if i%2 == 0 {
			kept = append(kept, id)
		}
		all.Go(func() { live(t, l, id, steps, i%2 == 1) })
	}
	all.Wait()
	check := func() {
		t.Helper()
		for _, id := range kept {
			got := entries(t, l, id, 1)
			if len(got) != 2*steps {
				t.Errorf("%s has %d entries, want %d", id, len(got), 2*steps)
				continue
			}
			for i, e := range got {
				if want := fmt.Sprint("step ", i/2); e.Gap != nil || e.Seq != uint64(i+1) || i%2 == 0 && e.Request.Shell != want || i%2 == 1 && e.BegunSeq != uint64(i) {
					t.Errorf("%s: entry %d is %v", id, i+1, e)
				}
			}
		}
	}
	check()
	l.Close()
	l = open(t, opts)
	check()
	for _, id := range kept {
		if err := l.Forget(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if s := l.Stats(); s.Sandboxes != 0 || s.Actions != 0 || l.outputs.bytes.Load() != 0 {
		t.Errorf("left: %+v, %d bytes of output", s, l.outputs.bytes.Load())
	}
	if got := keys(t, store, "trajectories/"); len(got) != 0 {
		t.Errorf("left in the store: %v", got)
	}
}

// live is one sandbox's life.
func live(t *testing.T, l *Log, id dsec.SandboxID, steps int, forget bool) {
	ctx, cancel := context.WithCancel(context.Background())
	followed := make(chan uint64)
	go func() {
		last := uint64(0)
		err := l.Follow(ctx, id, 1, nil, func(e *dsecv1.TrajectoryEntry) error {
			if e.Seq != last+1 {
				t.Errorf("%s: followed from entry %d to %d", id, last, e.Seq)
			}
			if last = e.Seq; last == uint64(2*steps) {
				return errEnough
			}
			return nil
		})
		if err != errEnough {
			t.Errorf("%s: follow ended after entry %d: %v", id, last, err)
		}
		followed <- last
	}()
	for i := range steps {
		name, actionID := fmt.Sprint("step ", i), fmt.Sprint("id ", i)
		var a *Action
		testutil.WaitFor(t, 30*time.Second, "room", func() (err error) {
			a, _, err = l.Begin(ctx, id, execOf(name, actionID))
			return err
		})
		a.Output(dsecv1.Stream_STREAM_STDOUT, []byte(strings.Repeat(string(id), []int{0, 10, 2000, 4000}[i%4])))
		if err := a.End(exited(0)); err != nil {
			t.Errorf("%s: end: %v", id, err)
		}
		_, earlier, err := l.Begin(ctx, id, execOf(fmt.Sprint("step ", i/2), fmt.Sprint("id ", i/2)))
		if err != nil || earlier == nil || earlier.Ended == nil {
			t.Errorf("%s: step %d again: %+v, %v", id, i/2, earlier, err)
			continue
		}
		if out := earlier.Ended.Output; out != nil && out.KeptBytes == out.TotalBytes {
			n := int64(0)
			err := l.Output(ctx, id, earlier.Ended.Seq, func(p *dsecv1.TrajectoryOutputPiece) error {
				n += int64(len(p.Data))
				return nil
			})
			if err != nil || n != out.TotalBytes {
				t.Errorf("%s: output of entry %d: %d bytes of %d, %v", id, earlier.Ended.Seq, n, out.TotalBytes, err)
			}
		}
		if i%20 == 19 {
			if err := l.Seal(ctx, id); err != nil {
				t.Errorf("%s: seal: %v", id, err)
			}
		}
	}
	<-followed
	cancel()
	if forget {
		if err := l.Forget(context.Background(), id); err != nil {
			t.Errorf("%s: forget: %v", id, err)
		}
	}
}
