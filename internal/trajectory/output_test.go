package trajectory

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// endOf is the entry with which an action ended.
func endOf(t testing.TB, l *Log, id dsec.SandboxID, a *Action) *dsecv1.TrajectoryEntry {
	t.Helper()
	for _, e := range entries(t, l, id, a.Seq) {
		if e.BegunSeq == a.Seq {
			return e
		}
	}
	t.Fatalf("action %d has no end", a.Seq)
	return nil
}

type written struct {
	stream  dsecv1.Stream
	data    []byte
	missing int64 // in place of data
}

// merged are pieces of output with neighbours of one stream as one.
func merged(pieces []written) string {
	var b strings.Builder
	last, missing := dsecv1.Stream(-1), int64(0)
	for i, p := range pieces {
		if missing += p.missing; missing > 0 && (i+1 == len(pieces) || len(pieces[i+1].data) > 0) {
			fmt.Fprintf(&b, "<%d missing>", missing)
			last, missing = -1, 0
		}
		if len(p.data) == 0 {
			continue
		}
		if p.stream != last {
			fmt.Fprintf(&b, "<%d>", p.stream)
			last = p.stream
		}
		b.Write(p.data)
	}
	return b.String()
}

func asWritten(p *dsecv1.TrajectoryOutputPiece) written {
	return written{p.Stream, p.Data, p.MissingBytes}
}

func mergedPieces(pieces []*dsecv1.TrajectoryOutputPiece) string {
	var all []written
	for _, p := range pieces {
		all = append(all, asWritten(p))
	}
	return merged(all)
}

func output(t testing.TB, l *Log, id dsec.SandboxID, seq uint64) string {
	t.Helper()
	var pieces []written
	err := l.Output(t.Context(), id, seq, func(p *dsecv1.TrajectoryOutputPiece) error {
		pieces = append(pieces, asWritten(p))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return merged(pieces)
}

func files(t testing.TB, l *Log, name string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(l.opts.Dir, "outputs", name), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, filepath.Base(path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// Output comes back in order and whole but for what was told to be missing, however
// it was cut, and the same output is kept once.
func TestOutputComesBackAsItWasWritten(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		l, _, err := Open(Options{Dir: dir, Logger: quiet})
		if err != nil {
			rt.Fatal(err)
		}
		defer l.Close()
		id := dsec.NewSandboxID("edge2")
		if err := l.Add(id, "project"); err != nil {
			rt.Fatal(err)
		}
		var pieces []written
		total, missing := int64(0), int64(0)
		random := rand.NewChaCha8([32]byte{1})
		for range rapid.IntRange(0, 6).Draw(rt, "pieces") {
			if n := rapid.SampledFrom([]int64{0, 0, 0, 1, 1 << 40}).Draw(rt, "missing"); n > 0 {
				pieces = append(pieces, written{missing: n})
				total, missing = total+n, missing+n
			}
			data := make([]byte, rapid.SampledFrom([]int{0, 1, 100, 3000, 64 << 10, 64<<10 + 1, 200 << 10}).Draw(rt, "bytes"))
			random.Read(data)
			pieces = append(pieces, written{rapid.SampledFrom([]dsecv1.Stream{dsecv1.Stream_STREAM_STDOUT, dsecv1.Stream_STREAM_STDERR}).Draw(rt, "stream"), data, 0})
			total += int64(len(data))
		}
		want := merged(pieces)
		var digests []string
		for range 2 { // written as pieces of different sizes
			a := begin(t, l, id, "x", "")
			for _, p := range pieces {
				if p.missing > 0 {
					half := rapid.Int64Range(0, p.missing).Draw(rt, "gap")
					a.Gap(half, "why")
					a.Gap(p.missing-half, "another reason")
				}
				for rest := p.data; len(rest) > 0; {
					n := rapid.IntRange(max(1, len(rest)/3), len(rest)).Draw(rt, "write")
					a.Output(p.stream, rest[:n])
					rest = rest[n:]
				}
			}
			end(t, a, 0)
			e := endOf(t, l, id, a)
			if total == 0 {
				if e.Output != nil {
					rt.Fatalf("no output reads as %v", e.Output)
				}
				return
			}
			if e.Output.TotalBytes != total || e.Output.KeptBytes != total-missing || (e.Output.GapReason != "") != (missing > 0) || (e.Output.Digest == nil) != (total-missing <= inlineOutput) {
				rt.Fatalf("%d bytes: total %d, kept %d, digest %x, gap %q", total, e.Output.TotalBytes, e.Output.KeptBytes, e.Output.Digest, e.Output.GapReason)
			}
			if got := output(t, l, id, e.Seq); got != want {
				rt.Fatalf("%d bytes of output came back as %d", len(want), len(got))
			}
			if e.Output.Digest != nil {
				head, tail := e.Output.Head, e.Output.Tail
				if length(head) != endOutput || length(tail) != endOutput || !strings.HasPrefix(want, mergedPieces(head)) || !strings.HasSuffix(want, mergedPieces(tail)[len("<1>"):]) {
					rt.Fatalf("ends of %d and %d bytes", length(head), length(tail))
				}
			}
			digests = append(digests, string(e.Output.Digest))
		}
		if digests[0] != digests[1] {
			rt.Fatal("the same output has two digests")
		}
	})
}

func TestTheSameOutputIsKeptOnce(t *testing.T) {
	dir := t.TempDir()
	l := open(t, Options{Dir: dir})
	one, two := newSandbox(t, l), newSandbox(t, l)
	data := strings.Repeat("0123456789", 10<<10)
	first := run(t, l, one, "x", "", data)
	run(t, l, one, "x", "", data)
	second := run(t, l, two, "x", "", data)
	if names := files(t, l, "objects"); len(names) != 1 {
		t.Errorf("objects %v, want one", names)
	}
	if used := l.outputs.bytes.Load(); used == 0 || used > int64(len(data))/4 {
		t.Errorf("%d bytes of digits take %d", len(data), used)
	}
	if err := l.Forget(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	if got := output(t, l, two, endOf(t, l, two, second).Seq); len(got) != len(data)+3 {
		t.Errorf("the output of who is left has %d bytes", len(got))
	}
	wantCode(t, l.Output(t.Context(), one, first.Seq+1, nil), dsec.CodeNotFound)
	// Nothing of an object that a crash left without an entry outlives the next start.
	if err := os.WriteFile(filepath.Join(dir, "outputs", "objects", "stray"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	stray := filepath.Join(dir, "outputs", "of", string(dsec.NewSandboxID("edge2")))
	if err := os.Mkdir(stray, 0o700); err != nil {
		t.Fatal(err)
	}
	l.Close()
	l = open(t, Options{Dir: dir})
	if names := files(t, l, "objects"); len(names) != 1 {
		t.Errorf("objects %v, want one", names)
	}
	if _, err := os.Stat(stray); err == nil {
		t.Error("outputs of a sandbox that the log does not know are kept")
	}
	if err := l.Forget(t.Context(), two); err != nil {
		t.Fatal(err)
	}
	if names := append(files(t, l, "objects"), files(t, l, "of")...); len(names) != 0 || l.outputs.bytes.Load() != 0 {
		t.Errorf("left when all is forgotten: %v, %d bytes", names, l.outputs.bytes.Load())
	}
}

// A command that writes for ever costs what one output may, and says what is missing.
func TestEndlessOutputCostsABoundedAmount(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), MaxOutput: 1 << 20, MaxSandboxOutput: 1<<20 + 100<<10})
	id := newSandbox(t, l)
	yes := bytes.Repeat([]byte("y\n"), 32<<10)
	writes := func() *dsecv1.TrajectoryOutput {
		a := begin(t, l, id, "yes", "")
		for range 100 {
			a.Output(dsecv1.Stream_STREAM_STDOUT, yes)
		}
		a.Output(dsecv1.Stream_STREAM_STDERR, []byte("the end"))
		end(t, a, 0)
		return endOf(t, l, id, a).Output
	}
	total := int64(100*len(yes) + len("the end"))
	for i, want := range []int64{1 << 20, 100 << 10, 0} {
		out := writes()
		if out.TotalBytes != total || out.KeptBytes != want || out.GapReason == "" {
			t.Errorf("output %d: total %d, kept %d (%s), want %d and %d", i, out.TotalBytes, out.KeptBytes, out.GapReason, total, want)
		}
		if tail := out.Tail[len(out.Tail)-1]; string(tail.Data) != "the end" {
			t.Errorf("output %d ends with %q", i, tail.Data)
		}
		if (len(out.Digest) > 0) != (want > 0) {
			t.Errorf("output %d: digest %x with %d bytes kept", i, out.Digest, want)
		}
	}
	if got := output(t, l, id, 2); len(got) != 1<<20+len("<1>") {
		t.Errorf("kept output has %d bytes", len(got))
	}
	if used := l.outputs.bytes.Load(); used > 128<<10 {
		t.Errorf("two kept outputs take %d bytes", used)
	}
}

// Holes by turns with single bytes cost a bounded amount, too, and of those after a
// bound was met the end tells.
func TestManyHoles(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), MaxOutput: 1500})
	id := newSandbox(t, l)
	a := begin(t, l, id, "x", "")
	var want []written
	for i := range 2000 {
		a.Output(dsecv1.Stream_STREAM_STDOUT, []byte{byte(i)})
		a.Gap(2, "lost on the way")
		if i < 1500 {
			want = append(want, written{stream: dsecv1.Stream_STREAM_STDOUT, data: []byte{byte(i)}}, written{missing: 2})
		}
	}
	end(t, a, 0)
	out := endOf(t, l, id, a).Output
	if out.TotalBytes != 6000 || out.KeptBytes != 1500 || out.GapReason != "lost on the way; it is more than is kept of one action" {
		t.Errorf("total %d, kept %d, %q", out.TotalBytes, out.KeptBytes, out.GapReason)
	}
	if got := output(t, l, id, 2); got != merged(want) {
		t.Error("output with holes came back otherwise")
	}
	if tail := out.Tail; len(tail) != endPieces || tail[len(tail)-1].MissingBytes != 2 || len(out.Head) != endPieces || out.Head[1].MissingBytes != 2 {
		t.Errorf("ends of %d and %d pieces", len(out.Head), len(tail))
	}
}

// Two streams by turns, byte by byte, make a whole that is much longer as messages.
func TestOutputInManySmallPieces(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	a := begin(t, l, id, "x", "")
	var want []written
	for i := range 60_000 {
		p := written{stream: dsecv1.Stream(1 + i%2), data: []byte{byte(i)}}
		a.Output(p.stream, p.data)
		want = append(want, p)
	}
	end(t, a, 0)
	if got := output(t, l, id, 2); got != merged(want) {
		t.Error("output by turns came back otherwise")
	}
}

func TestDamagedOutputIsTold(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	random := make([]byte, 100<<10)
	rand.NewChaCha8([32]byte{2}).Read(random)
	run(t, l, id, "x", "", string(random))
	path := filepath.Join(l.opts.Dir, "outputs", "objects", files(t, l, "objects")[0])
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{0, len(b) / 2, len(b) - len(endFrame(0)) - 1} {
		bad := bytes.Clone(b)
		bad[at] ^= 1
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		wantCode(t, l.Output(t.Context(), id, 2, func(*dsecv1.TrajectoryOutputPiece) error { return nil }), dsec.CodeInternal)
	}
	if err := os.WriteFile(path, b[:len(b)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	wantCode(t, l.Output(t.Context(), id, 2, func(*dsecv1.TrajectoryOutputPiece) error { return nil }), dsec.CodeInternal)
	// The same output again is not taken for the one that is there.
	a := run(t, l, id, "x", "", string(random))
	if got := output(t, l, id, a.Seq+1); got != "<1>"+string(random) {
		t.Error("an output is kept as a damaged one of the same digest")
	}
}

// What one file may have of names is the file system's to say: 65,000 on ext4.
func TestMoreNamesThanAnObjectCanHave(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir()})
	id := newSandbox(t, l)
	data := strings.Repeat("x", inlineOutput+1)
	run(t, l, id, "x", "", data)
	dir := filepath.Join(l.opts.Dir, "outputs")
	object := filepath.Join(dir, "objects", files(t, l, "objects")[0])
	for i := range 66_000 {
		err := unix.Link(object, filepath.Join(dir, "new", fmt.Sprint(i)))
		if err == unix.EMLINK {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	a := run(t, l, id, "x", "", data)
	if got := output(t, l, id, a.Seq+1); len(got) != len(data)+3 {
		t.Errorf("output of %d bytes came back with %d", len(data), len(got)-3)
	}
}

// What is kept of an output is its beginning, without a hole.
func TestAnOutputIsNotGoneOnWithAfterAGap(t *testing.T) {
	l := open(t, Options{Dir: t.TempDir(), MaxSandboxOutput: 10})
	id := newSandbox(t, l)
	a := begin(t, l, id, "x", "")
	a.Output(dsecv1.Stream_STREAM_STDOUT, []byte("first and too long"))
	l.mu.Lock()
	l.opts.MaxSandboxOutput = 1000
	l.mu.Unlock()
	a.Output(dsecv1.Stream_STREAM_STDOUT, []byte(", last"))
	end(t, a, 0)
	out := endOf(t, l, id, a).Output
	if out.KeptBytes != 10 || string(out.Head[0].Data) != "first and " || string(out.Tail[0].Data) != "first and too long, last" || len(out.Tail) != 1 {
		t.Errorf("output %v", out)
	}
}
