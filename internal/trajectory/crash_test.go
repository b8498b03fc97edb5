package trajectory

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// noted is an entry that a history wrote, and where its record is.
type noted struct {
	text       string
	segment    uint32
	start, end int64
}

// history drives a log and knows what must be in it.
type history struct {
	rt    *rapid.T
	opts  Options
	log   *Log
	ids   []dsec.SandboxID
	wrote map[dsec.SandboxID][]noted
	open  map[dsec.SandboxID][]*Action
	acts  map[dsec.SandboxID][]*act
	count int
}

// act is an action with an ID, and the numbers of its entries; 0 is none.
type act struct {
	id           string
	begun, ended uint64
}

func (h *history) reopen() Recovery {
	l, r, err := Open(h.opts)
	if err != nil {
		h.rt.Fatal(err)
	}
	h.log, h.open = l, make(map[dsec.SandboxID][]*Action)
	for _, id := range h.ids {
		if err := l.Add(id, "project"); err != nil {
			h.rt.Fatal(err)
		}
		seqs, err := l.Unfinished(id)
		if err != nil {
			h.rt.Fatal(err)
		}
		slices.Sort(seqs)
		for _, seq := range seqs {
			a, _, err := l.Resume(h.rt.Context(), id, seq)
			if err != nil {
				h.rt.Fatal(err)
			}
			h.open[id] = append(h.open[id], a)
		}
	}
	return r
}

// text is what an entry says, as short as is enough to know it again.
func text(e *dsecv1.TrajectoryEntry) string {
	return fmt.Sprint(e.State, e.Request.GetShell(), e.Outcome.GetExitCode(), " ", e.Output.GetTotalBytes(), " ", e.BegunSeq)
}

func (h *history) note(id dsec.SandboxID, e *dsecv1.TrajectoryEntry) {
	h.log.mu.Lock()
	defer h.log.mu.Unlock()
	at := h.log.sandboxes[id].head
	h.wrote[id] = append(h.wrote[id], noted{text(e), at.segment, int64(at.offset), h.log.cur.size})
	if seq := h.log.sandboxes[id].seq; seq != uint64(len(h.wrote[id])) {
		h.rt.Fatalf("entry %d has seq %d", len(h.wrote[id]), seq)
	}
}

func (h *history) step() {
	h.count++
	id := rapid.SampledFrom(h.ids).Draw(h.rt, "sandbox")
	switch rapid.IntRange(0, 3).Draw(h.rt, "step") {
	case 0:
		e := &dsecv1.TrajectoryEntry{State: fmt.Sprint("event", h.count)}
		if _, err := h.log.Append(id, e); err != nil {
			h.rt.Fatal(err)
		}
		h.note(id, e)
	case 1:
		e := execOf(fmt.Sprint("command", h.count), fmt.Sprint("id", h.count))
		a, _, err := h.log.Begin(h.rt.Context(), id, e)
		if err != nil {
			h.rt.Fatal(err)
		}
		h.open[id] = append(h.open[id], a)
		h.acts[id] = append(h.acts[id], &act{id: fmt.Sprint("id", h.count), begun: a.Seq})
		h.note(id, e)
	default:
		if len(h.open[id]) == 0 {
			return
		}
		a := h.open[id][0]
		h.open[id] = h.open[id][1:]
		a.Output(dsecv1.Stream_STREAM_STDOUT, bytes.Repeat([]byte{byte(h.count)}, rapid.SampledFrom([]int{0, 1, 900, 60 << 10, 70 << 10}).Draw(h.rt, "output")))
		e := exited(int32(h.count))
		if err := a.End(e); err != nil {
			h.rt.Fatal(err)
		}
		h.note(id, e)
		for _, x := range h.acts[id] {
			if x.begun == a.Seq {
				x.ended = uint64(len(h.wrote[id]))
			}
		}
	}
}

// check holds the log against what was written, of which only what is lost may
// be missing, and is told as a gap unless the log ends there.
func (h *history) check(lost func(noted) bool) (missing int) {
	for _, id := range h.ids {
		next := uint64(1)
		wrote := h.wrote[id]
		err := h.log.Entries(h.rt.Context(), id, 1, nil, func(e *dsecv1.TrajectoryEntry) error {
			if e.Seq != next {
				h.rt.Fatalf("%s: entry %d after %d", id, e.Seq, next-1)
			}
			if e.Gap == nil {
				if e.Seq > uint64(len(wrote)) || text(e) != wrote[e.Seq-1].text {
					h.rt.Fatalf("%s: entry %d is %s, wrote %v", id, e.Seq, text(e), wrote[min(int(e.Seq), len(wrote))-1:])
				}
				next++
				return nil
			}
			if e.Gap.Reason != reasonDamaged {
				h.rt.Fatalf("%s: gap from %d: %s", id, e.Seq, e.Gap.Reason)
			}
			for ; next <= e.Gap.LastSeq; next++ {
				if next <= uint64(len(wrote)) && !lost(wrote[next-1]) {
					h.rt.Fatalf("%s: entry %d is in a gap (%s): %+v", id, next, e.Gap.Reason, wrote[next-1])
				}
			}
			return nil
		})
		if err != nil {
			h.rt.Fatal(err)
		}
		for ; next <= uint64(len(wrote)); next++ {
			if !lost(wrote[next-1]) {
				h.rt.Fatalf("%s: entry %d of %d is missing: %+v", id, next, len(wrote), wrote[next-1])
			}
			missing++
		}
		h.checkActs(id, lost)
	}
	return missing
}

// checkActs looks for what may be done again though it was done.
func (h *history) checkActs(id dsec.SandboxID, lost func(noted) bool) {
	wrote := h.wrote[id]
	for _, want := range h.acts[id] {
		x, err := h.log.Lookup(h.rt.Context(), id, want.id)
		switch {
		case err != nil:
			if dsec.CodeOf(err) != dsec.CodeOutcomeUnknown || !slices.ContainsFunc(wrote, lost) {
				h.rt.Fatalf("%s: look up %s: %v", id, want.id, err)
			}
		case x == nil:
			if !lost(wrote[want.begun-1]) || slices.ContainsFunc(wrote[want.begun:], func(n noted) bool { return !lost(n) }) {
				h.rt.Fatalf("%s: %s is not known, though a later entry is", id, want.id)
			}
		case text(x.Begun) != wrote[want.begun-1].text:
			h.rt.Fatalf("%s: %s begun as %s", id, want.id, text(x.Begun))
		case x.Ended == nil:
			if want.ended != 0 && !lost(wrote[want.ended-1]) {
				h.rt.Fatalf("%s: %s has not ended", id, want.id)
			}
		case want.ended == 0 || text(x.Ended) != wrote[want.ended-1].text:
			h.rt.Fatalf("%s: %s ended as %s", id, want.id, text(x.Ended))
		}
	}
}

// forgetLost has the history go on from what the log has.
func (h *history) forgetLost() {
	for _, id := range h.ids {
		n := h.log.sandboxes[id].seq
		for uint64(len(h.wrote[id])) < n {
			h.wrote[id] = append(h.wrote[id], noted{})
		}
		h.wrote[id] = h.wrote[id][:n]
		h.acts[id] = slices.DeleteFunc(h.acts[id], func(x *act) bool { return x.begun > n })
		for _, x := range h.acts[id] {
			if x.ended > n {
				x.ended = 0
			}
		}
	}
}

// loud has a test fail by what is logged.
type loud struct{ rt *rapid.T }

func (l *loud) Write(b []byte) (int, error) {
	l.rt.Errorf("logged: %s", b)
	return len(b), nil
}

// newHistory of a log whose directories are gone with rt, of which there are many.
func newHistory(rt *rapid.T) *history {
	h := &history{rt: rt, opts: Options{Dir: tempDir(rt), SegmentBytes: 2 * maxPayload, MaxBytes: 1 << 30, Logger: slog.New(slog.NewTextHandler(&loud{rt}, &slog.HandlerOptions{Level: slog.LevelError}))}, wrote: make(map[dsec.SandboxID][]noted), acts: make(map[dsec.SandboxID][]*act)}
	for i := range 4 { // the same in each run
		h.ids = append(h.ids, dsec.SandboxID("edge2"+strings.Repeat(string(rune('a'+i)), sandboxIDLen-len("edge2"))))
	}
	h.reopen()
	return h
}

func tempDir(rt *rapid.T) string {
	dir, err := os.MkdirTemp("", "trajectory")
	if err != nil {
		rt.Fatal(err)
	}
	rt.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// crashed is a copy of the log as a crash now would leave it, all of it in the
// page cache.
func (h *history) crashed() string {
	dir := tempDir(h.rt)
	h.log.mu.Lock() // the copy is of one moment
	defer h.log.mu.Unlock()
	err := filepath.WalkDir(h.opts.Dir, func(path string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(h.opts.Dir, path)
		if err == nil && d.IsDir() {
			return os.MkdirAll(filepath.Join(dir, rel), 0o700)
		}
		var b []byte
		if err == nil {
			b, err = os.ReadFile(path)
		}
		if errors.Is(err, fs.ErrNotExist) { // what has no number yet, or any more
			return nil
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, rel), b, 0o600)
		}
		return err
	})
	if err != nil {
		h.rt.Fatal(err)
	}
	return dir
}

func (h *history) last() string {
	names, _ := filepath.Glob(filepath.Join(h.opts.Dir, "*.seg"))
	for _, name := range slices.Backward(names) {
		if info, err := os.Stat(name); err == nil && info.Size() > segmentHeaderLen {
			return name
		}
	}
	return ""
}

// What was noted outlives the process, and a loss of the end of the last
// segment takes what was there and no more.
func TestNothingWrittenIsLostByACrash(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHistory(rt)
		for range rapid.IntRange(1, 3).Draw(rt, "lives") {
			for range rapid.IntRange(1, 40).Draw(rt, "steps") {
				h.step()
			}
			none := func(noted) bool { return false }
			h.check(none)
			dir, old := h.crashed(), h.log
			defer old.Close()
			h.opts.Dir = dir
			if rapid.Bool().Draw(rt, "cut") {
				last := h.last()
				info, err := os.Stat(last)
				if err != nil {
					rt.Fatal(err)
				}
				number, _ := segmentNumber(filepath.Base(last))
				size := rapid.Int64Range(0, info.Size()).Draw(rt, "size")
				if rapid.Bool().Draw(rt, "near the end") {
					size = info.Size() - min(info.Size(), size%500)
				}
				if err := os.Truncate(last, size); err != nil {
					rt.Fatal(err)
				}
				if r := h.reopen(); r.Damaged+r.Unclaimed > 0 {
					rt.Fatalf("a cut reads as damage: %+v", r)
				}
				h.check(func(n noted) bool { return n.segment == number && n.end > size })
				h.forgetLost()
			} else {
				if r := h.reopen(); r != (Recovery{}) {
					rt.Fatalf("after a crash: %+v", r)
				}
				h.check(none)
			}
		}
		h.log.Close()
	})
}

// Damaged bytes take the entries whose records they are in, which shows.
func TestDamageTakesWhatItHitsAndShows(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := newHistory(rt)
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			h.step()
		}
		dir := h.crashed()
		h.log.Close()
		h.opts.Dir = dir
		names, _ := filepath.Glob(filepath.Join(dir, "*.seg"))
		type hit struct {
			segment uint32
			at      int64
		}
		var hits []hit
		for range rapid.IntRange(1, 6).Draw(rt, "flips") {
			name := rapid.SampledFrom(names).Draw(rt, "segment")
			b, err := os.ReadFile(name)
			if err != nil {
				rt.Fatal(err)
			}
			number, _ := segmentNumber(filepath.Base(name))
			if len(b) <= segmentHeaderLen {
				continue
			}
			at := rapid.Int64Range(segmentHeaderLen, int64(len(b))-1).Draw(rt, "at")
			if rapid.Bool().Draw(rt, "in a header") { // where most of the bytes are output
				if id := rapid.SampledFrom(h.ids).Draw(rt, "of"); len(h.wrote[id]) > 0 {
					n := rapid.SampledFrom(h.wrote[id]).Draw(rt, "entry")
					if n.segment == number {
						at = n.start + rapid.Int64Range(0, headerLen-1).Draw(rt, "byte")
					}
				}
			}
			b[at] ^= byte(1 << rapid.IntRange(0, 7).Draw(rt, "bit"))
			if err := os.WriteFile(name, b, 0o600); err != nil {
				rt.Fatal(err)
			}
			hits = append(hits, hit{number, at})
		}
		lost := func(n noted) bool {
			return slices.ContainsFunc(hits, func(x hit) bool { return x.segment == n.segment && n.start <= x.at && x.at < n.end })
		}
		r := h.reopen()
		missing := h.check(lost)
		if missing > 0 && r.Unclaimed == 0 && r.Cut == 0 {
			rt.Fatalf("%d entries are missing, and nothing says so: %+v", missing, r)
		}
		// It goes on, and what was whole stays so.
		h.forgetLost()
		for range 10 {
			id := rapid.SampledFrom(h.ids).Draw(rt, "sandbox")
			e := &dsecv1.TrajectoryEntry{State: "after"}
			if _, err := h.log.Append(id, e); err != nil {
				rt.Fatal(err)
			}
			h.note(id, e)
		}
		h.check(func(n noted) bool { return n == noted{} || lost(n) })
		h.log.Close()
		h.reopen()
		h.check(func(n noted) bool { return n == noted{} || lost(n) })
		h.log.Close()
	})
}

// Two records may be damaged as one, of which the length of the first tells.
func TestTwoDamagedRecordsSideBySide(t *testing.T) {
	opts := Options{Dir: t.TempDir(), SegmentBytes: 2 * maxPayload}
	l := open(t, opts)
	ids := []dsec.SandboxID{newSandbox(t, l), newSandbox(t, l), newSandbox(t, l)}
	var at []int64
	for _, id := range ids {
		if _, err := l.Append(id, &dsecv1.TrajectoryEntry{State: "last"}); err != nil {
			t.Fatal(err)
		}
		at = append(at, int64(l.sandboxes[id].head.offset))
	}
	l.Close()
	path := filepath.Join(opts.Dir, segmentName(1))
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[at[0]+5] ^= 1 // 256 bytes more
	b[at[1]] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	l, r := openAgain(t, opts)
	if r.Damaged != 1 || r.Unclaimed != 1 {
		t.Errorf("recovery: %+v", r)
	}
	wantStory(t, l, ids[0], "1-1:gap ")
	wantStory(t, l, ids[2], "1:last ")
}

// No bit of a header makes the last entry of a sandbox go without a trace.
func TestEveryBitOfAHeader(t *testing.T) {
	opts := Options{Dir: t.TempDir(), SegmentBytes: 2 * maxPayload}
	l := open(t, opts)
	began, ended, other := newSandbox(t, l), newSandbox(t, l), newSandbox(t, l)
	run(t, l, began, "one", "id", "")
	begin(t, l, began, "last", "")
	run(t, l, ended, "one", "id", "")
	heads := map[dsec.SandboxID]int64{began: int64(l.sandboxes[began].head.offset), ended: int64(l.sandboxes[ended].head.offset)}
	run(t, l, other, "two", "", "")
	l.Close()
	path := filepath.Join(opts.Dir, segmentName(1))
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for id, at := range heads {
		for bit := range headerLen * 8 {
			b := bytes.Clone(whole)
			b[at+int64(bit/8)] ^= 1 << (bit % 8)
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			l, r, err := Open(opts)
			if err != nil {
				t.Fatal(err)
			}
			all := entries(t, l, id, 1)
			if r.Damaged != 1 || r.Cut != 0 || all[len(all)-1].Gap == nil && r.Unclaimed == 0 {
				t.Errorf("bit %d of the header: %s, %+v", bit, story(all), r)
			}
			wantStory(t, l, other, "1:two 2:end-of-1=0 ")
			l.Close()
		}
	}
}
