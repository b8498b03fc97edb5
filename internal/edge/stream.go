package edge

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// events are those of one process. Where the connection to chronus breaks in
// mid-stream, they go on over another from the next byte: only what came from
// wait(2) is ever told as an exit.
type events struct {
	c       *call
	stream  *chronusapi.Events
	ctx     context.Context // of the stream
	stop    func()
	action  *trajectory.Action // takes the output; nil: nothing is noted
	follows *following         // hears how much there is of it; nil: nobody asks
	process uint64             // 0: not known yet, and so not attached to again
	pid     int
	next    uint64
	exited  bool
}

// open opens a stream. Until its first event came the client's going away does
// not break it off: what was started must be known by then, to be killed.
func (c *call) open(process uint64, f func(context.Context) (*chronusapi.Events, error)) (*events, error) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(c.ctx))
	timer := time.AfterFunc(openTimeout, func() { cancel(errSilent) })
	stream, err := f(ctx)
	timer.Stop()
	if err != nil {
		cancel(nil)
		return nil, err
	}
	unhook := context.AfterFunc(c.ctx, func() { cancel(context.Cause(c.ctx)) })
	stop := func() {
		unhook()
		cancel(nil)
	}
	return &events{c: c, stream: stream, ctx: ctx, stop: stop, process: process}, nil
}

// openTimeout is how long chronus may take to start a command.
const openTimeout = 30 * time.Second

var errSilent = dsec.Errorf(dsec.CodeOutcomeUnknown, "the sandbox does not answer")

// start starts a command.
func (c *call) start(req chronusapi.StartRequest) (ev *events, err error) {
	err = c.grouped(func() (err error) {
		ev, err = c.open(0, func(ctx context.Context) (*chronusapi.Events, error) { return c.client.Start(ctx, req) })
		return err
	})
	return ev, err
}

// grouped runs what needs a command group, with one more where the sandbox
// asks for it.
func (c *call) grouped(f func() error) error {
	for tries := 0; ; tries++ {
		err := f()
		if err == nil {
			return nil
		}
		g, ok := c.inst.(backend.Grouper)
		if !errors.Is(err, chronusapi.ErrNeedGroup) || !ok || tries >= maxGroupTries {
			return err
		}
		if err := g.AddGroup(c.ctx); err != nil {
			return err
		}
	}
}

// maxGroupTries bounds how often another command may take the group that was
// made for this one.
const maxGroupTries = 8

// reattachDelays are the waits before each attempt to attach again.
var reattachDelays = []time.Duration{0, 20 * time.Millisecond, 200 * time.Millisecond}

// Next returns the next event, and io.EOF after the last.
func (ev *events) Next() (chronusapi.Event, error) {
	for {
		e, err := ev.stream.Next()
		if err == nil {
			switch e.Kind {
			case chronusapi.EventStarted:
				if ev.process != 0 {
					continue // of an attach that goes on with a known process
				}
				ev.process, ev.pid = e.Process, e.PID
				if ev.action != nil {
					ev.follows = ev.c.s.known(ev.action.Seq, e.Process, e.PID)
				}
			case chronusapi.EventOutput:
				ev.next = e.Seq + uint64(len(e.Data))
				if ev.action != nil {
					ev.action.Output(dsecv1.Stream(e.Stream), e.Data)
				}
				if ev.follows != nil {
					ev.follows.tell(ev.next)
				}
			case chronusapi.EventGap:
				ev.next = e.To
				if ev.follows != nil {
					ev.follows.tell(ev.next)
				}
				if ev.action != nil {
					ev.action.Gap(int64(e.To-e.Seq), "the spool was full")
				}
			case chronusapi.EventExited:
				ev.exited = true
			}
			return e, nil
		}
		if err == io.EOF || ev.process == 0 || ev.c.ctx.Err() != nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
			return e, err
		}
		if !ev.reattach() {
			return e, err
		}
	}
}

func (ev *events) reattach() bool {
	_ = ev.stream.Close()
	for _, d := range reattachDelays {
		select {
		case <-time.After(d):
		case <-ev.c.inst.Done():
			return false
		case <-ev.c.ctx.Done():
			return false
		}
		if stream, err := ev.c.client.Attach(ev.ctx, ev.process, ev.next); err == nil {
			ev.stream = stream
			return true
		}
	}
	return false
}

// Close gives the stream up. The process goes on: all are started as orphans,
// and where the client went away it is kill that ends them.
func (ev *events) Close() {
	_ = ev.stream.Close()
	ev.stop()
}

// kill ends everything that the command of a process started, unless somebody
// else has come for it meanwhile. Process 0 is one that is not known.
func (c *call) kill(process uint64) {
	if process == 0 || !c.e.cutOff(c.s, process) {
		return
	}
	c.e.cfg.Crash("cut.kill")
	select {
	case <-c.inst.Done():
		return // and all its processes with it
	default:
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), killTimeout)
	defer cancel()
	switch err := c.client.Signal(ctx, process, 9, true); {
	case err == nil:
	case dsec.CodeOf(err) == dsec.CodeNotFound:
		c.e.spared(c.s, process)
	default:
		c.s.mu.Lock()
		later := c.s.killLater() // it was being frozen
		c.s.mu.Unlock()
		if later {
			return
		}
		c.e.log.Warn("command of a client that went away is not killed", "sandbox", c.s.id, "process", process, "err", err)
	}
}

const killTimeout = 5 * time.Second

// keepalive is how long a stream is silent before it says that it lives.
const keepalive = 15 * time.Second

// sender sends process events to a client. Its messages are used again and
// again, which is safe because a message is encoded before Send returns.
type sender struct {
	send   func(*dsecv1.ProcessEvent) error
	answer *daemon.Answer // what is put goes out when the sender is flushed

	mu     sync.Mutex
	timer  *time.Timer
	closed bool

	event  dsecv1.ProcessEvent
	output dsecv1.ProcessEvent_Output
}

func newSender(ctx context.Context, send func(*dsecv1.ProcessEvent) error) *sender {
	s := &sender{send: send, answer: daemon.AnswerOf(ctx)}
	s.answer.Hold(true)
	s.output.Output = new(dsecv1.Output)
	s.mu.Lock() // alive may run before AfterFunc has returned
	defer s.mu.Unlock()
	s.timer = time.AfterFunc(keepalive, s.alive)
	return s
}

func (s *sender) alive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.event.Event = &dsecv1.ProcessEvent_Keepalive{Keepalive: &dsecv1.Keepalive{}}
	// An error means that the client is gone, which ctx tells the reader.
	_ = s.send(&s.event)
	s.answer.Release()
	s.timer.Reset(keepalive)
}

// again marks what is sent from now on as an answer from the log.
func (s *sender) again() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.event.Replayed = true
}

// flush sends what was put.
func (s *sender) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer.Release()
}

// close waits for a keepalive under way; none comes after it.
func (s *sender) close() {
	s.timer.Stop()
	s.mu.Lock()
	s.closed = true
	s.answer.Hold(false)
	s.mu.Unlock()
}

// put sends one event, when the sender is flushed.
func (s *sender) put(e *chronusapi.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errLeft
	}
	switch e.Kind {
	case chronusapi.EventStarted:
		s.event.Event = &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: e.Process, Pid: int32(e.PID)}}
	case chronusapi.EventOutput:
		o := s.output.Output
		o.Stream, o.Seq, o.Data = dsecv1.Stream(e.Stream), e.Seq, e.Data
		s.event.Event = &s.output
	case chronusapi.EventGap:
		s.event.Event = &dsecv1.ProcessEvent_Gap{Gap: &dsecv1.Gap{From: e.Seq, To: e.To}}
	case chronusapi.EventExited:
		s.event.Event = &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: outcomeProto(&e.Outcome)}}
	default:
		return nil // of a newer chronus
	}
	s.timer.Reset(keepalive)
	return s.send(&s.event)
}

// errLeft: the client is gone.
var errLeft = dsec.Errorf(dsec.CodeOutcomeUnknown, "the caller has left")

// message sends one message.
func (s *sender) message(m *dsecv1.ProcessEvent) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errLeft
	}
	return s.send(m)
}

// forward sends all events of a stream to a client: those that are there
// together at once, and the exit with the end of the stream, which follows it. The
// action of a command ends before its exit is told.
func (ev *events) forward(out *sender) error { return ev.forwardFrom(nil, out) }

// forwardFrom is forward with an event before the others, which was read already.
func (ev *events) forwardFrom(first *chronusapi.Event, out *sender) error {
	for {
		if out != nil && !ev.exited && !ev.stream.Ready() {
			out.flush()
		}
		var e chronusapi.Event
		var err error
		if first != nil {
			e, first = *first, nil
		} else if e, err = ev.Next(); err == io.EOF { // wrapped it would be a broken stream
			return nil
		}
		if err != nil {
			return err
		}
		if e.Kind == chronusapi.EventExited {
			if err := ev.noteExit(&e); err != nil {
				return err
			}
		}
		if out == nil {
			continue
		}
		if err := out.put(&e); err != nil {
			switch {
			case ev.exited:
				return nil
			case !ev.c.alone:
				return err
			}
			out = nil // it is followed to its end without its client
		}
	}
}

// noteExit notes the end of a command.
func (ev *events) noteExit(e *chronusapi.Event) error {
	err := ev.c.ended(ev.process, &e.Outcome)
	if ev.action == nil {
		return err
	}
	entry := &dsecv1.TrajectoryEntry{ProcessId: ev.process}
	if err == nil {
		entry.Outcome = outcomeProto(&e.Outcome)
	}
	return ev.c.finish(ev.action, entry, err)
}

// attach follows a process that somebody started. Its first event may be long
// in coming, and nothing has to be killed where the client does not wait.
func (c *call) attach(process, from uint64) (*events, error) {
	s, err := c.client.Attach(c.ctx, process, from)
	if err != nil {
		return nil, err
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return &events{c: c, stream: s, ctx: c.ctx, stop: func() {}, follows: c.s.followed(process), process: process, next: from}, nil
}
