package trajectory

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// What is noted is synced by itself, and who waits for it is not made to wait
// for the next time.
func TestSync(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), SyncEvery: time.Millisecond})
	id := newSandbox(t, l)
	run(t, l, id, "x", "", "")
	testutil.WaitFor(t, 10*time.Second, "a sync", func() error {
		l.group.mu.Lock()
		defer l.group.mu.Unlock()
		if len(l.group.files) > 0 || l.group.under {
			return os.ErrDeadlineExceeded
		}
		return nil
	})
	l = open(t, Options{Dir: t.TempDir(), SyncEvery: time.Hour})
	id = newSandbox(t, l)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			for range 5 {
				run(t, l, id, "x", "", "")
				if err := l.Sync(context.Background()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if err := l.Sync(context.Background()); err != nil {
		t.Errorf("with nothing to sync: %v", err)
	}
	run(t, l, id, "x", "", "")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	l.group.syncing.Lock()
	err := l.Sync(ctx)
	l.group.syncing.Unlock()
	if err != context.Canceled {
		t.Errorf("with a caller that is gone: %v", err)
	}
}

// After a sync that failed nobody is told again that what is noted is on disk.
func TestAFailedSyncIsNotForgotten(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), Store: newStore(t)})
	id := newSandbox(t, l)
	run(t, l, id, "x", "", "")
	r, w, err := os.Pipe() // of which fsync says EINVAL
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	l.group.written(w)
	wantCode(t, l.Sync(t.Context()), dsec.CodeUnavailable)
	run(t, l, id, "x", "", "")
	wantCode(t, l.Sync(t.Context()), dsec.CodeUnavailable)
	// An entry that may be lost is not given to the store: its number may come again.
	wantCode(t, l.Seal(t.Context(), id), dsec.CodeUnavailable)
}

func TestACallAfterCloseFails(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	a := begin(t, l, id, "x", "")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	_, _, err := l.Begin(t.Context(), id, execOf("x", ""))
	wantCode(t, err, dsec.CodeUnavailable)
	_, err = l.Append(id, execOf("x", ""))
	wantCode(t, err, dsec.CodeUnavailable)
	wantCode(t, a.End(exited(0)), dsec.CodeUnavailable)
	wantCode(t, l.Entries(t.Context(), id, 1, nil, func(*dsecv1.TrajectoryEntry) error { return nil }), dsec.CodeUnavailable)
	wantCode(t, l.Follow(t.Context(), id, 1, nil, func(*dsecv1.TrajectoryEntry) error { return nil }), dsec.CodeUnavailable)
	wantCode(t, l.Seal(t.Context(), id), dsec.CodeUnsupported)
	select {
	case <-a.Done():
	default:
		t.Error("who waits for the action goes on waiting")
	}
	names, err := filepath.Glob(filepath.Join(l.opts.Dir, "outputs", "new", "*"))
	if err != nil || len(names) > 0 {
		t.Errorf("left: %v, %v", names, err)
	}
}
