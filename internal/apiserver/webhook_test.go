package apiserver

import (
	"testing"

	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/testutil"
)

// TestLeaderThatWakesUp is S67 for webhooks: a server that led, slept while another took its place,
// and wakes up, writes nothing over what that one has written.
func TestLeaderThatWakesUp(t *testing.T) {
	ctx, log := t.Context(), testutil.Logger(t)
	st, err := store.Open(ctx, store.Config{Dir: t.TempDir(), Log: log})
	check(t, err)
	defer func() { _ = st.Close() }()
	all, err := openHooks(ctx, Config{Store: st})
	check(t, err)
	defer all.docs.Close()
	const key = "a/wh-1"
	_, err = store.Put(ctx, st, hookStatePrefix+key, hookState{})
	check(t, err)
	_, err = store.Put(ctx, st, hookPrefix+key, hook{URL: "https://example.com"})
	check(t, err)
	leader := func() *delivery {
		t.Helper()
		d := &delivery{s: &Server{hooks: all, log: log}, key: key}
		now, ok, err := d.take(ctx)
		if err != nil || !ok {
			t.Fatalf("taken: %v, %v", ok, err)
		}
		d.change(func(st *hookState) { *st = now })
		return d
	}
	write := func(d *delivery, delivered int64) {
		d.change(func(st *hookState) { st.Delivered = delivered })
		d.save(ctx)
	}
	want := func(what string, delivered int64, disabled bool) {
		t.Helper()
		got, _, ok, err := store.Get[hookState](ctx, st, hookStatePrefix+key)
		if err != nil || !ok || got.Delivered != delivered || got.Disabled != disabled {
			t.Errorf("%s: %+v, %v, %v; want %d delivered, disabled %v", what, got, ok, err, delivered, disabled)
		}
	}
	first := leader()
	write(first, 1)
	write(first, 2)
	want("one that leads", 2, false)
	second := leader()
	write(first, 3)
	want("one that woke up before another wrote", 2, false)
	second.change(func(st *hookState) { st.Disabled = true })
	write(second, 5)
	want("the one in its place", 5, true)
	write(first, 4)
	want("one that woke up after that", 5, true)
	if !first.outdated.Load() || second.outdated.Load() {
		t.Errorf("outdated: %v and %v", first.outdated.Load(), second.outdated.Load())
	}
	third := leader()
	if third.state.Delivered != 5 || !third.state.Disabled {
		t.Errorf("the next goes on with %+v", third.state)
	}
	_, err = st.Delete(ctx, hookPrefix+key)
	check(t, err)
	_, err = st.Delete(ctx, hookStatePrefix+key)
	check(t, err)
	third.save(ctx)
	if _, _, ok, err := store.Get[hookState](ctx, st, hookStatePrefix+key); ok || err != nil {
		t.Errorf("one that was deleted is back: %v, %v", ok, err)
	}
}
