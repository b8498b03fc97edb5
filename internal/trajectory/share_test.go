package trajectory

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// TestOneSandboxDropsNoOther: the cheap calls of one do not fill the log of a node that
// has no store, so that the others' actions are known for as long as they were.
func TestOneSandboxDropsNoOther(t *testing.T) {
	opts := Options{Dir: t.TempDir(), SegmentBytes: 1 << 20, MaxBytes: 4 << 20}
	l := open(t, opts)
	hog, other := newSandbox(t, l), newSandbox(t, l)
	known := func(id dsec.SandboxID, action string) {
		t.Helper()
		_, earlier, err := l.Begin(t.Context(), id, execOf("true", action))
		if err != nil || earlier == nil || earlier.Ended == nil {
			t.Errorf("an action that was done: %v, %v", earlier, err)
		}
	}
	run(t, l, other, "true", "one", "")
	run(t, l, hog, "true", "one", "")
	small := "true " + strings.Repeat("x", 1000)
	var refused error
	did := 0
	for ; refused == nil && did < 10_000; did++ { // twice what the log holds
		a, _, err := l.Begin(t.Context(), hog, execOf(small, fmt.Sprint(did)))
		if refused = err; err == nil {
			end(t, a, 0)
		}
	}
	if refused == nil || dsec.CodeOf(refused) != dsec.CodeExhausted || did < 50 {
		t.Fatalf("after %d small calls: %v", did, refused)
	}
	for range 2 {
		known(hog, "one")
		known(other, "one")
		if _, _, err := l.Begin(t.Context(), hog, execOf(small, "")); err == nil || dsec.CodeOf(err) != dsec.CodeExhausted {
			t.Errorf("one more: %v", err)
		}
		run(t, l, other, small, "", "")
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = open(t, opts)
	}
}

// TestWhatIsKeptIsNoEntry: output and input have a bound of their own, and are counted by
// that alone, also when the log is opened again, from its end or from a footer.
func TestWhatIsKeptIsNoEntry(t *testing.T) {
	opts := Options{Dir: t.TempDir(), SegmentBytes: 1 << 20, MaxBytes: 4 << 20}
	l := open(t, opts)
	id := newSandbox(t, l)
	const n, size = 32, 60_000 // more than a segment
	for range n {
		run(t, l, id, "true", "", strings.Repeat("o", size))
	}
	a := begin(t, l, id, "true", "")
	a.Input([]byte(strings.Repeat("i", size)))
	end(t, a, 0)
	got := l.sandboxes[id].state
	if got.kept != [flows]int64{n * size, size} || got.entries < n*headerLen || got.entries > n*1000 {
		t.Errorf("kept %d, entries %d", got.kept, got.entries)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if again := open(t, opts).sandboxes[id].state; again.kept != got.kept || again.entries != got.entries {
		t.Errorf("opened again: kept %d, entries %d; want %d, %d", again.kept, again.entries, got.kept, got.entries)
	}
}
