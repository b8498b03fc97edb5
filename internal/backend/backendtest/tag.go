package backendtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func tagged(tag uint64, script string) chronusapi.StartRequest {
	return chronusapi.StartRequest{Command: chronusapi.Command{Shell: script}, Orphan: true, Tag: tag}
}

// find is FindTag where that knows.
func (b *box) find(tag uint64) uint64 {
	b.t.Helper()
	process, err := b.FindTag(b.ctx(), tag)
	if err != nil {
		b.t.Fatalf("tag %d: %v", tag, err)
	}
	return process
}

func testTags(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	r := b.run(tagged(7, "echo out; echo err >&2; exit 3"))
	if p := b.find(7); p != r.process {
		t.Fatalf("tag 7 is of process %d, want %d", p, r.process)
	}
	for range 2 { // after its reader had it all
		if again := b.attach(r.process, 0); again.stdout != "out\n" || again.stderr != "err\n" || again.outcome != r.outcome || again.lost != 0 {
			t.Errorf("from byte 0: %+v, want what there was: %+v", again, r)
		}
	}
	_, err := b.start(tagged(7, "true"))
	want(t, "the same tag, of a command that ended", err, "tag", dsec.CodeConflict)
	running := tagged(8, "sleep 1000")
	running.Detach = true
	p := b.detach(running)
	_, err = b.start(tagged(8, "true"))
	want(t, "the same tag, of a command that runs", err, "tag", dsec.CodeConflict)
	if found := b.find(8); found != p {
		t.Errorf("tag 8 is of process %d, want %d", found, p)
	}
	list, err := b.Processes(b.ctx())
	if err != nil || len(list) != 2 {
		t.Errorf("%d processes, %v; want those of tags 7 and 8 alone", len(list), err)
	}
	_, err = b.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"no-such-program"}}, Tag: 9})
	want(t, "what cannot start", err, "command.argv", dsec.CodeNotFound)
	if r := b.run(tagged(9, "true")); b.find(9) != r.process {
		t.Error("the tag of what could not start is not free")
	}
	if found := b.find(10); found != 0 {
		t.Errorf("tag 10 is of process %d, want none", found)
	}
	_, err = b.start(tagged(10, "true"))
	want(t, "a tag that nothing was said to have", err, "tag", dsec.CodeConflict)
	for tag, code := range map[uint64]dsec.Code{0: dsec.CodeInvalid, 7: "", 8: "", 11: ""} { // there is no 11
		if err := b.ForgetTag(b.ctx(), tag); (err != nil || code != "") && dsec.CodeOf(err) != code {
			t.Errorf("forgetting tag %d: %v, want code %q", tag, err, code)
		}
	}
	_, err = b.FindTag(b.ctx(), 0)
	want(t, "tag 0", err, "tag", dsec.CodeInvalid)
	if again := b.attach(r.process, 0); again.outcome != r.outcome {
		t.Errorf("just forgotten: %+v", again)
	}
}

// cutConn breaks when it has carried so many bytes to and fro; then nothing of what
// is on its way comes.
type cutConn struct {
	net.Conn
	out, in int
}

var errCut = errors.New("cut")

func (c *cutConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p[:min(len(p), c.out)])
	if c.out -= n; n < len(p) || c.out == 0 && c.in == 0 {
		c.Close()
		err = errCut
	}
	return n, err
}

func (c *cutConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p[:min(len(p), c.in)])
	if c.in -= n; c.in == 0 {
		c.Close()
	}
	return n, err
}

// testTagsBroken: whenever its connection breaks, a command with a tag is found and
// has run once, or has not run and never will.
func testTagsBroken(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	const most = 1 << 20
	tag, runs := uint64(0), 0
	try := func(out, in int) (cut cutConn, found bool) {
		tag++
		c := chronusapi.NewClient(func(ctx context.Context) (net.Conn, error) {
			nc, err := b.inst.Dial(ctx)
			cut.Conn, cut.out, cut.in = nc, out, in
			return &cut, err
		})
		defer c.Close()
		req := tagged(tag, "echo run >> /tmp/runs; echo out; echo err >&2; exit 3")
		req.Command.Env = []string{"PATH=/usr/bin:/bin"}
		if s, err := c.Start(b.ctx(), req); err == nil {
			_, _ = gather(s, 0)
		}
		if p := b.find(tag); p != 0 {
			found = true
			runs++
			if r := b.attach(p, 0); r.stdout != "out\n" || r.stderr != "err\n" || r.outcome.Code != 3 || r.lost != 0 {
				t.Errorf("cut after %d and %d bytes: %+v", out, in, r)
			}
		} else {
			_, err := b.start(tagged(tag, "echo run >> /tmp/runs"))
			want(t, "a tag that nothing was said to have", err, "tag", dsec.CodeConflict)
		}
		if err := b.ForgetTag(b.ctx(), tag); err != nil {
			t.Fatal(err)
		}
		return cut, found
	}
	b.run(tagged(most, "true")) // with a group where one is needed
	whole, found := try(most, most)
	if !found {
		t.Fatal("a start whose connection did not break is not found")
	}
	request, answer := most-whole.out, most-whole.in
	for n := range request {
		if _, found := try(n, most); found {
			t.Errorf("%d bytes of a request of %d started something", n, request)
		}
	}
	for n := range answer {
		try(request, n)
	}
	if r := b.shell("wc -l < /tmp/runs"); strings.TrimSpace(r.stdout) != fmt.Sprint(runs) {
		t.Errorf("commands have run %s times, and were found %d times", strings.TrimSpace(r.stdout), runs)
	}
}

// testTagsRace: who asks while a command is being started is told what comes of it.
func testTagsRace(t *testing.T, h Harness) {
	b := create(t, h, h.New(t))
	for tag := range uint64(100) {
		tag++
		asked := make(chan uint64)
		go func() {
			p, err := b.FindTag(t.Context(), tag)
			if err != nil {
				t.Error(err)
			}
			asked <- p
		}()
		s, err := b.start(tagged(tag, "true"))
		p := <-asked
		if p == 0 {
			p = b.find(tag)
		}
		if err == nil {
			if r := b.collect(s, 0); r.process != p {
				t.Fatalf("tag %d was started as process %d, and found as %d", tag, r.process, p)
			}
			continue
		}
		want(t, "the start of a tag that was asked for before", err, "tag", dsec.CodeConflict)
		if p != 0 {
			t.Fatalf("tag %d was found as process %d, and not started: %v", tag, p, err)
		}
	}
}

// testTagsMany: of what ended those go first that nobody may look for.
func testTagsMany(t *testing.T, h Harness) {
	const over = 6
	b := create(t, h, h.New(t))
	var others []uint64
	for range over {
		others = append(others, b.detach(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"true"}}}))
	}
	b.noneLingers()
	tag := uint64(0)
	add := func(n int) {
		for range n {
			tag++
			b.run(tagged(tag, fmt.Sprintf("echo %d; exit 4", tag)))
		}
	}
	finds := func(from, to uint64) {
		t.Helper()
		for tag := from; tag <= to; tag++ {
			p := b.find(tag)
			if p == 0 {
				t.Fatalf("tag %d is of no process", tag)
			}
			if r := b.attach(p, 0); r.stdout != fmt.Sprintln(tag) || r.outcome.Code != 4 {
				t.Errorf("tag %d: %+v", tag, r)
			}
		}
	}
	gone := func(process uint64) {
		t.Helper()
		b.eventually("a process is forgotten", func() bool {
			_, err := b.Attach(b.ctx(), process, 0)
			return err != nil && dsec.CodeOf(err) == dsec.CodeNotFound
		})
	}
	add(chronusapi.MaxEnded)
	for _, p := range others {
		gone(p)
	}
	finds(1, tag)
	last := b.find(over)
	add(over)
	gone(last)
	finds(over+1, tag)
	for tag := uint64(1); tag <= over; tag++ {
		_, err := b.FindTag(b.ctx(), tag)
		want(t, "a tag that may have been dropped", err, "tag", dsec.CodeOutcomeUnknown)
		_, err = b.start(tagged(tag, "true"))
		want(t, "a start with it", err, "tag", dsec.CodeConflict)
	}
	last = b.find(tag)
	if err := b.ForgetTag(b.ctx(), tag); err != nil {
		t.Fatal(err)
	}
	add(1)
	gone(last)
	finds(over+1, tag-2)
	finds(tag, tag)
}
