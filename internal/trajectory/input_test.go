package trajectory

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"testing"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// given is an action whose request holds data, and to which streamed is streamed.
func given(t testing.TB, l *Log, id dsec.SandboxID, data, streamed []byte) *Action {
	t.Helper()
	e := &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC}
	if err := Describe(e, &dsecv1.ExecRequest{SandboxId: string(id), Tag: "tag", Stdin: data}); err != nil {
		t.Fatal(err)
	}
	a, _, err := l.Begin(t.Context(), id, e)
	if err != nil {
		t.Fatal(err)
	}
	for len(streamed) > 0 {
		n := min(30_000, len(streamed))
		a.Input(streamed[:n])
		streamed = streamed[n:]
	}
	return a
}

// inputOf is what there is of the input of an entry, and what the entry says of it.
func inputOf(t testing.TB, l *Log, id dsec.SandboxID, seq uint64) ([]byte, *dsecv1.TrajectoryOutput) {
	t.Helper()
	var all []byte
	err := l.Input(t.Context(), id, seq, func(p *dsecv1.TrajectoryOutputPiece) error {
		all = append(all, p.Data...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all, entries(t, l, id, seq)[0].Input
}

func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

// TestInputIsKept reads what actions were given: after a restart and a seal, too.
func TestInputIsKept(t *testing.T) {
	for _, size := range []int{1, freeInput - 100, freeInput + 1, 63 << 10, 65 << 10, 1 << 20} {
		dir, store := t.TempDir(), newStore(t)
		l := open(t, Options{Dir: dir, Store: store})
		id := newSandbox(t, l)
		data, streamed := noise(size), noise(size)
		a := given(t, l, id, data, streamed)
		end(t, a, 0)
		check := func(when string) {
			t.Helper()
			message, in := inputOf(t, l, id, a.Seq)
			want, err := Nameless(&dsecv1.ExecRequest{Stdin: data})
			if err != nil || !bytes.Equal(message, want) || in.KeptBytes != int64(len(want)) || in.TotalBytes != in.KeptBytes {
				t.Errorf("%s, %d bytes: the request is %d bytes, %v, want %d; %v", when, size, len(message), in, len(want), err)
			}
			if got, in := inputOf(t, l, id, a.Seq+1); !bytes.Equal(got, streamed) || in.KeptBytes != int64(size) {
				t.Errorf("%s: %d bytes of what was streamed, %v, want %d", when, len(got), in, size)
			}
		}
		check("at once")
		l.mu.Lock()
		kept := l.sandboxes[id].kept
		l.mu.Unlock()
		if counted := size > freeInput; kept[flowOut] != 0 || kept[flowIn] < int64(size) || kept[flowIn] >= 2*int64(size) != counted {
			t.Errorf("%d bytes given twice count as %v", size, kept)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = open(t, Options{Dir: dir, Store: store})
		check("after a restart")
		l.mu.Lock()
		if again := l.sandboxes[id].kept; again != kept {
			t.Errorf("after a restart %v count, before %v", again, kept)
		}
		l.mu.Unlock()
		if err := l.Seal(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		check("sealed")
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSealLeavesWhatIsUnderWay seals the begin of an action whose output comes later.
func TestSealLeavesWhatIsUnderWay(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), Store: newStore(t)})
	id := newSandbox(t, l)
	a := given(t, l, id, noise(100<<10), nil)
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	a.Output(dsecv1.Stream_STREAM_STDOUT, noise(100<<10))
	end(t, a, 0)
	if n := len(output(t, l, id, a.Seq+1)); n < 100<<10 {
		t.Errorf("%d bytes of output", n)
	}
	if err := l.Seal(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if n := len(output(t, l, id, a.Seq+1)); n < 100<<10 {
		t.Errorf("%d bytes of output once sealed", n)
	}
	if message, _ := inputOf(t, l, id, a.Seq); len(message) < 100<<10 {
		t.Errorf("%d bytes of request", len(message))
	}
}

// TestInputHasBounds keeps of too much what comes first, and tells the rest.
func TestInputHasBounds(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), MaxInput: 200 << 10, MaxSandboxInput: 500 << 10})
	id := newSandbox(t, l)
	for i, want := range []int64{200 << 10, 200 << 10, 100 << 10, 0} {
		data := noise(300 << 10)
		a := given(t, l, id, nil, data)
		a.Output(dsecv1.Stream_STREAM_STDOUT, noise(100<<10))
		end(t, a, 0)
		e := endOf(t, l, id, a)
		if in := e.Input; in.TotalBytes != 300<<10 || in.KeptBytes != want || in.GapReason == "" {
			t.Errorf("action %d: %d of %d bytes kept (%q), want %d", i, in.KeptBytes, in.TotalBytes, in.GapReason, want)
		}
		if got, _ := inputOf(t, l, id, e.Seq); !bytes.Equal(got[:want], data[:want]) {
			t.Errorf("action %d: what is kept is not what came first", i)
		}
		if out := e.Output; out.KeptBytes != 100<<10 {
			t.Errorf("action %d: %d bytes of output kept: input is not to count as output", i, out.KeptBytes)
		}
	}
	// A small request is always kept.
	a := given(t, l, id, []byte("small"), nil)
	if message, in := inputOf(t, l, id, a.Seq); len(message) < 5 || in.GapReason != "" {
		t.Errorf("of a small request: %q, %v", message, in)
	}
	// A large one is not, where nothing more is.
	b := given(t, l, id, noise(10<<10), nil)
	if in := entries(t, l, id, b.Seq)[0].Input; in.KeptBytes != 0 || in.TotalBytes < 10<<10 || in.GapReason == "" {
		t.Errorf("of a large request: %d of %d bytes (%q)", in.KeptBytes, in.TotalBytes, in.GapReason)
	}
	end(t, a, 0)
	end(t, b, 0)
}

// TestInputIsNamedByItsBytes: of what was streamed there is one digest, of all of it and of
// what is kept.
func TestInputIsNamedByItsBytes(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), MaxInput: 200 << 10})
	id := newSandbox(t, l)
	for _, size := range []int{0, 10, 200 << 10, 300<<10 + 7} {
		data := noise(size)
		a := given(t, l, id, nil, data)
		all, kept := sha256.Sum256(data), sha256.Sum256(data[:min(size, 200<<10)])
		if got := a.InputDigest(); !bytes.Equal(got, all[:]) {
			t.Errorf("%d bytes have the digest %x, want %x", size, got, all)
		}
		end(t, a, 0)
		in := endOf(t, l, id, a).Input
		if in.GetKeptBytes() > inlineOutput && !bytes.Equal(in.Digest, kept[:]) {
			t.Errorf("of %d bytes those that are kept have the digest %x, want %x", size, in.Digest, kept)
		}
	}
	// Two actions that were given the same share it.
	data := noise(100 << 10)
	for range 2 {
		end(t, given(t, l, id, nil, data), 0)
	}
	if objects := files(t, l, "objects"); len(objects) != 3 {
		t.Errorf("three contents are %d objects", len(objects))
	}
}
