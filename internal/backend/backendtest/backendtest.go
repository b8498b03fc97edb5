// Package backendtest is the suite that every backend passes. A backend's test
// is a Harness and a call of Run:
//
//	func TestSuite(t *testing.T) {
//		world := fake.NewWorld()
//		backendtest.Run(t, backendtest.Harness{
//			New:  func(testing.TB) backend.Backend { return fake.New(fake.Options{World: world}) },
//			Spec: dsec.Spec{Kind: dsec.KindFake, Limits: backendtest.Limits},
//		})
//	}
//
// New is called several times, and what one backend made the next must be able
// to recover: that is how an edge restarts. The sandbox must have sh, echo, cat,
// printf, sleep, yes, head, wc, env and pwd; busybox is enough. What only a
// real kernel can show is keyed by flags of the Harness.
package backendtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// Limits are small limits that every test can live with.
var Limits = dsec.Limits{MilliCPU: 1000, MemoryBytes: 128 << 20, DiskBytes: 64 << 20, DiskInodes: 4096, Pids: 64}

// Harness tells the suite how to make and judge a backend.
type Harness struct {
	// New makes a backend over the same objects as the ones before it. It
	// closes it by t.Cleanup if it must.
	New func(t testing.TB) backend.Backend
	// Spec and Layers of every instance.
	Spec   dsec.Spec
	Layers []backend.Layer
	// Ledger, where set, notes what the host holds, and checks at the end of t
	// that it holds no more.
	Ledger func(t testing.TB)
	// Flush, where set, has the file systems that count what an instance wrote
	// write it out now: some count only then, and a sync inside asks for nothing.
	Flush func()

	// OOM: a command that takes more memory than the sandbox has is killed
	// and says so.
	OOM bool
	// Pids: more processes than the limit cannot be started.
	Pids bool
	// Disk: more bytes or files than the limits cannot be written.
	Disk bool
	// Users: commands run as the user asked for, and files have owners.
	Users bool
	// Terminal: a pty is one, with line discipline and size.
	Terminal bool
}

// hang is how long anything may take before the suite calls it hung.
const hang = 60 * time.Second

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	for _, part := range []struct {
		name string
		f    func(*testing.T, Harness)
	}{
		{"Probe", testProbe},
		{"Outcomes", testOutcomes},
		{"StartErrors", testStartErrors},
		{"Streams", testStreams},
		{"Environment", testEnvironment},
		{"Stdin", testStdin},
		{"Timeout", testTimeout},
		{"OutputLimit", testOutputLimit},
		{"BackPressure", testBackPressure},
		{"Detach", testDetach},
		{"Gap", testGap},
		{"Background", testBackground},
		{"ClientGone", testClientGone},
		{"Tags", testTags},
		{"TagsBroken", testTagsBroken},
		{"TagsRace", testTagsRace},
		{"TagsMany", testTagsMany},
		{"Signal", testSignal},
		{"PTY", testPTY},
		{"Sessions", testSessions},
		{"Interrupt", testInterrupt},
		{"InterruptStress", testInterruptStress},
		{"Files", testFiles},
		{"FileErrors", testFileErrors},
		{"Tar", testTar},
		{"ConcurrentExecs", testConcurrentExecs},
		{"Usage", testUsage},
		{"DestroyIsIdempotent", testDestroy},
		{"CreateGivenUp", testCreateGivenUp},
		{"Recover", testRecover},
		{"RecoverLost", testRecoverLost},
		{"Sweep", testSweep},
		{"Pause", testPause},
		{"PauseDeadlines", testPauseDeadlines},
		{"PauseRecover", testPauseRecover},
		{"PauseSweep", testPauseSweep},
		{"PauseDestroy", testPauseDestroy},
		{"PauseBesideCalls", testPauseBesideCalls},
		{"PauseRandom", testPauseRandom},
		{"Snapshot", testSnapshot},
		{"SnapshotIsOfOneMoment", testSnapshotIsOfOneMoment},
		{"SnapshotDestroy", testSnapshotDestroy},
		{"Limits", testLimits},
	} {
		t.Run(part.name, func(t *testing.T) {
			if h.Ledger != nil {
				h.Ledger(t)
			}
			part.f(t, h)
		})
	}
}

// box is an instance under test.
type box struct {
	*chronusapi.Client
	t    *testing.T
	id   dsec.SandboxID
	inst backend.Instance
}

// create makes an instance that goes at the end of the test.
func create(t *testing.T, h Harness, b backend.Backend) *box {
	t.Helper()
	id := dsec.NewSandboxID("testd")
	inst, err := b.Create(t.Context(), h.request(id))
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() { destroy(t, inst) })
	return newBox(t, id, inst)
}

func newBox(t *testing.T, id dsec.SandboxID, inst backend.Instance) *box {
	c := chronusapi.NewClient(inst.Dial)
	if files, ok := inst.(backend.FileServer); ok {
		c.WithFiles(files.DialFiles)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &box{Client: c, t: t, id: id, inst: inst}
}

func destroy(t *testing.T, inst backend.Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), hang)
	defer cancel()
	if err := inst.Destroy(ctx); err != nil {
		t.Errorf("destroy: %v", err)
	}
}

func (h Harness) request(id dsec.SandboxID) backend.CreateRequest {
	return backend.CreateRequest{ID: id, Spec: h.Spec, Layers: h.Layers}
}

// ctx bounds one step, so that a hang is a failure with a line number.
func (b *box) ctx() context.Context {
	ctx, cancel := context.WithTimeout(b.t.Context(), hang)
	b.t.Cleanup(cancel)
	return ctx
}

// start starts a command, with one more command group where it is asked for.
func (b *box) start(req chronusapi.StartRequest) (*chronusapi.Events, error) {
	b.t.Helper()
	if req.Command.Env == nil {
		req.Command.Env = []string{"PATH=/usr/bin:/bin"}
	}
	for {
		s, err := b.Start(b.ctx(), req)
		g, ok := b.inst.(backend.Grouper)
		if !errors.Is(err, chronusapi.ErrNeedGroup) || !ok {
			return s, err
		}
		if err := g.AddGroup(b.ctx()); err != nil {
			return nil, err
		}
	}
}

// result is all that a command said.
type result struct {
	process        uint64
	stdout, stderr string
	pty            string
	lost           uint64 // bytes in gaps
	next           uint64 // bytes in all
	outcome        dsec.Outcome
}

// collect reads a stream to its end and checks that it is one: started first
// where it is to be, byte numbers without a hole, one exit.
func (b *box) collect(s *chronusapi.Events, from uint64) result {
	b.t.Helper()
	r, err := gather(s, from)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// anySeq stands for the number of whatever byte comes first: a session counts
// the bytes of its commands in a row.
const anySeq = ^uint64(0)

func gather(s *chronusapi.Events, from uint64) (r result, err error) {
	defer func() { _ = s.Close() }()
	var stdout, stderr, pty bytes.Buffer
	exited := false
	r.next = from
	for {
		e, err := s.Next()
		if errors.Is(err, io.EOF) && exited {
			r.stdout, r.stderr, r.pty = stdout.String(), stderr.String(), pty.String()
			return r, nil
		}
		if err != nil {
			return r, err
		}
		if exited {
			return r, errors.New("an event after the exit")
		}
		switch e.Kind {
		case chronusapi.EventStarted:
			r.process = e.Process
		case chronusapi.EventOutput:
			if r.next == anySeq {
				r.next = e.Seq
			}
			if e.Seq != r.next {
				return r, errors.New("byte numbers have a hole without a gap event")
			}
			r.next += uint64(len(e.Data))
			map[chronusapi.Stream]*bytes.Buffer{chronusapi.Stdout: &stdout, chronusapi.Stderr: &stderr, chronusapi.PTY: &pty}[e.Stream].Write(e.Data)
		case chronusapi.EventGap:
			r.lost += e.To - e.Seq
			r.next = e.To
		case chronusapi.EventExited:
			exited = true
			r.outcome = e.Outcome
		}
	}
}

// shell runs a script to its end.
func (b *box) shell(script string) result {
	b.t.Helper()
	return b.run(chronusapi.StartRequest{Command: chronusapi.Command{Shell: script}})
}

func (b *box) run(req chronusapi.StartRequest) result {
	b.t.Helper()
	s, err := b.start(req)
	if err != nil {
		b.t.Fatalf("start %q%v: %v", req.Command.Shell, req.Command.Argv, err)
	}
	return b.collect(s, 0)
}

// detach starts a script that nobody waits for, and returns its process.
func (b *box) detach(req chronusapi.StartRequest) uint64 {
	b.t.Helper()
	req.Detach = true
	s, err := b.start(req)
	if err != nil {
		b.t.Fatal(err)
	}
	e, err := s.Next()
	if err != nil || e.Kind != chronusapi.EventStarted {
		b.t.Fatalf("first event %v, %v; want started", e.Kind, err)
	}
	if _, err := s.Next(); !errors.Is(err, io.EOF) {
		b.t.Fatalf("after started of a detached command: %v, want io.EOF", err)
	}
	return e.Process
}

// attach follows a process to its end.
func (b *box) attach(process, from uint64) result {
	b.t.Helper()
	s, err := b.Attach(b.ctx(), process, from)
	if err != nil {
		b.t.Fatal(err)
	}
	return b.collect(s, from)
}

// want checks code and field of an error.
func want(t *testing.T, what string, err error, field string, codes ...dsec.Code) {
	t.Helper()
	var de *dsec.Error
	if !errors.As(err, &de) {
		t.Errorf("%s: error %v, want one of %v", what, err, codes)
		return
	}
	for _, c := range codes {
		if de.Code == c && de.Field == field {
			return
		}
	}
	t.Errorf("%s: error %s of %q (%s), want one of %v of %q", what, de.Code, de.Field, de.Message, codes, field)
}
