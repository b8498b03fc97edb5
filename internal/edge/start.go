package edge

import (
	"context"
	"sync/atomic"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Start runs a command and streams its events.
func (p processService) Start(ctx context.Context, req *connect.Request[dsecv1.StartRequest], stream *connect.ServerStream[dsecv1.ProcessEvent]) error {
	c, err := p.e.enter(ctx, req.Header(), req.Msg.SandboxId)
	if err != nil {
		return err
	}
	defer c.end()
	start, err := startRequest(c.spec, req.Msg)
	if err != nil {
		return err
	}
	a, earlier, err := c.beginAside(dsecv1.TrajectoryKind_TRAJECTORY_KIND_START, req.Msg, ofCommand(&start.Command, len(start.Stdin)))
	if err != nil {
		return err
	}
	if earlier == nil {
		start.Tag = c.tagFor(a)
	}
	out := newSender(ctx, stream.Send)
	defer out.close()
	switch {
	case earlier != nil:
		return c.startAgain(out, earlier, start.Detach)
	case c.origin.action == "" && !start.Detach:
		return c.run(a, start, out)
	}
	// It goes on where the caller leaves, and so does what follows it for the log.
	told := make(chan struct{})
	_, err = once(c, func(own *call) (struct{}, error) {
		if start.Detach {
			return struct{}{}, own.runDetached(a, start, out, told)
		}
		return struct{}{}, own.run(a, start, out)
	}, told)
	return err
}

// startRequest checks what is to be started.
func startRequest(spec *dsec.Spec, m *dsecv1.StartRequest) (chronusapi.StartRequest, error) {
	start := chronusapi.StartRequest{Stdin: m.Stdin, OpenStdin: m.OpenStdin, Detach: m.Detach, Orphan: true}
	var err error
	if start.Command, err = command(spec, m.Command, 0, maxStartOutput); err != nil {
		return start, err
	}
	if m.Pty != nil {
		size, err := windowSize("pty", m.Pty)
		if err != nil {
			return start, err
		}
		start.PTY = &size
	}
	if len(m.Stdin) > chronusapi.MaxStdin {
		return start, dsec.Invalid("stdin", "want at most %d bytes, got %d: set open_stdin and write the rest", chronusapi.MaxStdin, len(m.Stdin))
	}
	return start, nil
}

// run runs a command to its end and forwards its events. Where it is to go on without
// its caller, it is followed to the end all the same.
func (c *call) run(a *trajectory.Action, start chronusapi.StartRequest, out *sender) error {
	ev, err := c.start(start)
	if err != nil {
		return c.finish(a, new(dsecv1.TrajectoryEntry), c.fail(err))
	}
	defer ev.Close()
	defer c.forget(start.Tag)
	ev.action = a
	defer c.s.follow(a.Seq)()
	err = ev.forward(out)
	if ev.exited {
		return err // forward has noted it
	}
	if c.leaves(ev.process) {
		return c.failStarted(ev.process, err)
	}
	return c.finish(a, &dsecv1.TrajectoryEntry{ProcessId: ev.process}, c.failStarted(ev.process, err))
}

// runDetached starts a command, tells that, and follows it to its end for the log.
func (c *call) runDetached(a *trajectory.Action, start chronusapi.StartRequest, out *sender, told chan struct{}) error {
	ev, err := c.start(start)
	if err == nil {
		err = ev.forward(out)
		ev.Close()
	}
	if err != nil {
		err = c.failStarted(ev.number(), err)
		return c.finish(a, &dsecv1.TrajectoryEntry{ProcessId: ev.number()}, err)
	}
	defer c.forget(start.Tag)
	close(told)
	return c.followOn(a, ev.process, ev.pid)
}

// followOn follows a command that was started, from its first byte on, for the log.
func (c *call) followOn(a *trajectory.Action, process uint64, pid int) error {
	defer c.s.follow(a.Seq)()
	c.s.known(a.Seq, process, pid) // attach finds it
	ev, err := c.attach(process, 0)
	if err == nil {
		defer ev.Close()
		ev.action = a
		err = ev.forward(nil)
		if ev.exited {
			return err
		}
	}
	if c.closing() {
		return c.failStarted(process, err) // the next edge follows it
	}
	return c.finish(a, &dsecv1.TrajectoryEntry{ProcessId: process}, c.failStarted(process, err))
}

// number is the process's, as far as it is known.
func (ev *events) number() uint64 {
	if ev == nil {
		return 0
	}
	return ev.process
}

// following is a command whose action is under way.
type following struct {
	known   chan struct{} // closed when the rest is
	process uint64
	pid     int
	wrote   atomic.Uint64 // bytes of output, as far as anybody was told of them
}

// tell notes that somebody is told of a command's output up to a byte.
func (f *following) tell(next uint64) {
	for old := f.wrote.Load(); next > old && !f.wrote.CompareAndSwap(old, next); old = f.wrote.Load() {
	}
}

// followed is the command of a process, if its action is under way. The caller holds s.mu.
func (s *sandbox) followed(process uint64) *following {
	for _, f := range s.follows {
		if f.process == process {
			return f
		}
	}
	return nil
}

// wrote is how much a process has written that somebody may have seen.
func (s *sandbox) wrote(process uint64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.followed(process); f != nil {
		return int64(f.wrote.Load())
	}
	return 0
}

// follow has those who come again with the action's ID find the command, until the
// returned function is called.
func (s *sandbox) follow(seq uint64) (done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.follows == nil {
		s.follows = make(map[uint64]*following)
	}
	if s.follows[seq] == nil {
		s.follows[seq] = &following{known: make(chan struct{})}
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.follows, seq)
	}
}

// known tells them the command's process.
func (s *sandbox) known(seq, process uint64, pid int) *following {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.follows[seq]
	if f != nil && f.process == 0 {
		f.process, f.pid = process, pid
		close(f.known)
	}
	return f
}

// startAgain answers a Start whose action ID is known: from the process while that
// runs, else from the log.
func (c *call) startAgain(out *sender, earlier *trajectory.Earlier, detach bool) error {
	out.again()
	if earlier.Ended == nil {
		c.s.mu.Lock()
		f := c.s.follows[earlier.Action.Seq]
		c.s.mu.Unlock()
		if f != nil {
			if done, err := c.joinFollowed(out, f, earlier, detach); done {
				return err
			}
		}
		var err error
		if earlier.Ended, err = c.await(earlier); err != nil {
			return err
		}
	}
	return c.replay(out, earlier.Ended, detach)
}

// joinFollowed streams a command that runs. done is false where that cannot be done from
// its first byte.
func (c *call) joinFollowed(out *sender, f *following, earlier *trajectory.Earlier, detach bool) (done bool, err error) {
	select {
	case <-f.known:
	case <-earlier.Action.Done():
		return false, nil
	case <-c.ctx.Done():
		return true, c.fail(context.Cause(c.ctx))
	}
	started := chronusapi.Event{Kind: chronusapi.EventStarted, Process: f.process, PID: f.pid}
	if detach {
		return true, out.put(&started)
	}
	ev, err := c.attach(f.process, 0)
	if err != nil {
		return false, nil
	}
	defer ev.Close()
	first, err := ev.Next()
	if err != nil || first.Kind == chronusapi.EventGap {
		return false, nil
	}
	if err := out.put(&started); err != nil {
		return true, err
	}
	err = ev.forwardFrom(&first, out)
	if ev.exited || err == nil {
		return true, err
	}
	return true, c.failStarted(f.process, err)
}

// replay streams what the log has of a command that ended.
func (c *call) replay(out *sender, e *dsecv1.TrajectoryEntry, detach bool) error {
	if e.ProcessId > 0 {
		if err := out.put(&chronusapi.Event{Kind: chronusapi.EventStarted, Process: e.ProcessId}); err != nil || detach {
			return err
		}
	}
	if err := errorOf(e); err != nil {
		return err
	}
	seq := uint64(0)
	put := func(p *dsecv1.TrajectoryOutputPiece) error {
		if p.MissingBytes > 0 {
			gap := chronusapi.Event{Kind: chronusapi.EventGap, Seq: seq, To: seq + uint64(p.MissingBytes)}
			seq = gap.To
			return out.put(&gap)
		}
		ev := chronusapi.Event{Kind: chronusapi.EventOutput, Stream: chronusapi.Stream(p.Stream), Seq: seq, Data: p.Data}
		seq += uint64(len(p.Data))
		return out.put(&ev)
	}
	if err := c.pieces(e, put); err != nil {
		return err
	}
	if o := e.Output; o.GetTotalBytes() > int64(seq) {
		gap := chronusapi.Event{Kind: chronusapi.EventGap, Seq: seq, To: uint64(o.TotalBytes)}
		for _, p := range o.Tail {
			gap.To -= uint64(len(p.Data))
		}
		if err := out.put(&gap); err != nil {
			return err
		}
		seq = gap.To
		for _, p := range o.Tail {
			if err := put(p); err != nil {
				return err
			}
		}
	}
	return out.message(&dsecv1.ProcessEvent{Replayed: true, Event: &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: e.Outcome}}})
}
