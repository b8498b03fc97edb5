package edge

import (
	"cmp"
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// A paused sandbox is frozen where it is, its calls in progress with it: their
// streams stay open and silent, and go on when it does. A call that comes later
// resumes it first. Its timeouts stand still: what is left of its lifetime when it
// is paused is left when it resumes.

// pauseTimeout bounds one freeze, and one thaw. pageOutTimeout bounds how long the memory
// of one sandbox is moved out: an agent can have as many mappings as it likes.
const (
	pauseTimeout   = 30 * time.Second
	pageOutTimeout = 5 * time.Minute
)

// pauseOptions are what holds while a sandbox is paused.
type pauseOptions struct {
	reason        string
	caller        string        // who asked for it; empty: the edge itself
	most          time.Duration // then it is killed; 0 is never
	countLifetime bool
}

// pausing is what the edge knows of a paused sandbox.
type pausing struct {
	since         time.Time
	at            time.Duration // on the boot clock
	until         time.Duration // on the boot clock; 0 is never
	countLifetime bool
	cut           bool         // callers of commands have left meanwhile
	actions       []unfinished // to be seen to when it goes on

	out  backend.PagedOut // of the memory, once done is closed
	stop context.CancelFunc
	done chan struct{} // closed when no more memory is moved
}

// pauseRecord is that in the journal.
type pauseRecord struct {
	Since         time.Time     `json:"since"`
	At            time.Duration `json:"at"`
	Until         time.Duration `json:"until,omitempty"`
	CountLifetime bool          `json:"count_lifetime,omitempty"`
}

func (p *pausing) record() *pauseRecord {
	if p == nil {
		return nil
	}
	return &pauseRecord{Since: p.since, At: p.at, Until: p.until, CountLifetime: p.countLifetime}
}

// takeTurn has a pause or a resume under way be the caller's alone, until giveTurn.
// over means that the sandbox is as it should come to be.
func (s *sandbox) takeTurn(ctx context.Context, want dsec.State) (over bool, err error) {
	for {
		s.mu.Lock()
		turn := s.turn
		if turn == nil {
			defer s.mu.Unlock()
			if s.state == want {
				return true, nil
			}
			if err := s.notLive(); err != nil {
				return false, err
			}
			s.turn = make(chan struct{})
			return false, nil
		}
		s.mu.Unlock()
		select {
		case <-turn:
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

func (s *sandbox) giveTurn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.turn)
	s.turn = nil
}

// pause freezes a sandbox. On error it goes on as before.
func (e *Edge) pause(ctx context.Context, s *sandbox, o pauseOptions) error {
	if over, err := s.takeTurn(ctx, dsec.StatePaused); over || err != nil {
		return err
	}
	defer s.giveTurn()
	s.mu.Lock()
	p, ok := s.instance.(backend.Pauser)
	idle := o.reason == reasonIdle && !s.isIdle(e.clock())
	s.mu.Unlock()
	if !ok {
		return errNoPause(s.spec.Kind)
	}
	if idle {
		return nil
	}
	// The caller may leave: half a pause is of no use to anybody.
	ctx, cancel := e.background(pauseTimeout)
	defer cancel()
	if err := p.Pause(ctx); err != nil {
		return e.frozen(s, err)
	}
	e.cfg.Crash("pause.frozen")
	if err := e.publishPause(s, p, o); err != nil {
		if rerr := p.Resume(ctx); rerr != nil {
			e.staysPaused(s, &pausing{since: time.Now().UTC(), at: e.clock(), stop: func() {}, done: closedChan})
			return e.frozen(s, rerr)
		}
		return err
	}
	e.metrics.paused.Inc()
	e.tell(s, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_PAUSE, Caller: o.caller, Reason: o.reason})
	e.arm(s)
	return nil
}

func errNoPause(kind dsec.Kind) error {
	return dsec.Errorf(dsec.CodeUnsupported, "sandboxes of backend %s cannot be paused", kind)
}

// publishPause makes a frozen sandbox a paused one.
func (e *Edge) publishPause(s *sandbox, p backend.Pauser, o pauseOptions) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.notRunning(); err != nil { // it ended meanwhile
		return err
	}
	now := e.clock()
	s.paused = &pausing{since: time.Now().UTC(), at: now, countLifetime: o.countLifetime}
	if o.most > 0 {
		s.paused.until = now + o.most
	}
	reason := s.reason
	_ = s.move(dsec.StatePaused, o.reason)
	if err := e.writeChange(s); err != nil {
		s.paused = nil
		_ = s.move(dsec.StateRunning, reason)
		return err
	}
	if s.calls == 0 {
		s.dropClient()
	}
	e.beginPageOut(s, p)
	return nil
}

// beginPageOut has the memory of a paused sandbox moved out. The caller holds s.mu.
func (e *Edge) beginPageOut(s *sandbox, p backend.Pauser) {
	own := s.paused
	ctx, stop := context.WithCancel(e.closing)
	own.stop, own.done = stop, make(chan struct{})
	e.run(func() {
		defer stop()
		out := backend.PagedOut{Reason: "given up: the sandbox was to go on"}
		select {
		case e.pageOuts <- struct{}{}:
			ctx, cancel := context.WithTimeout(ctx, pageOutTimeout)
			defer cancel()
			var err error
			if out, err = p.PageOut(ctx); err != nil {
				e.log.Warn("memory of a paused sandbox stays", "sandbox", s.id, "err", err)
				out.Reason = safeText(err)
			}
			<-e.pageOuts
		case <-ctx.Done():
		}
		s.mu.Lock()
		own.out = out
		close(own.done)
		s.signal()
		s.mu.Unlock()
	})
}

// resume has a paused sandbox go on, as caller asks for. On error it stays paused.
func (e *Edge) resume(ctx context.Context, s *sandbox, caller string) error {
	if over, err := s.takeTurn(ctx, dsec.StateRunning); over || err != nil {
		return err
	}
	defer s.giveTurn()
	s.mu.Lock()
	inst, own := s.instance, s.paused
	s.mu.Unlock()
	p, _ := inst.(backend.Pauser) // it was paused
	own.stop()
	<-own.done
	free, err := e.makeRoom(own.out.Before - own.out.After)
	if err != nil {
		return err
	}
	resumed := false
	defer func() {
		if !resumed {
			free()
		}
	}()
	if err := e.publishResume(s); err != nil {
		return err
	}
	e.cfg.Crash("resume.intent")
	ctx, cancel := e.background(pauseTimeout)
	defer cancel()
	if err := p.Resume(ctx); err != nil {
		e.staysPaused(s, own)
		return e.frozen(s, err)
	}
	resumed = true
	e.run(func() { // until then the kernel's figure of free memory does not show what it takes
		defer free()
		select {
		case <-p.CameBack():
		case <-e.closing.Done():
		}
	})
	e.settleActions(s, inst, own.actions)
	if own.cut {
		e.killCut(s, inst, s.cutSoFar()) // before it takes calls
	}
	e.metrics.resumed.Inc()
	e.tell(s, &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESUME, Caller: caller})
	e.arm(s)
	return nil
}

// publishResume makes a paused sandbox a running one, before anything of it runs: an
// edge that dies now finds it frozen, and has it go on.
func (e *Edge) publishResume(s *sandbox) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	own, deadline, active, reason := s.paused, s.deadline, s.active, s.reason
	if err := s.move(dsec.StateRunning, ""); err != nil {
		return cmp.Or(s.notRunning(), err)
	}
	now := e.clock()
	if s.deadline > 0 && !own.countLifetime {
		s.deadline += now - own.at
	}
	s.active, s.paused = now, nil
	e.tellReads(s)
	if err := e.writeChange(s); err != nil {
		s.paused, s.deadline, s.active = own, deadline, active
		_ = s.move(dsec.StatePaused, reason)
		return err
	}
	return nil
}

// staysPaused has a sandbox that could not be thawed be what it is.
func (e *Edge) staysPaused(s *sandbox, own *pausing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == dsec.StateRunning {
		s.paused = own
		_ = s.move(dsec.StatePaused, s.reason)
		e.writeAnyway(s)
	}
}

// closedChan is of what is over from the beginning.
var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// frozen is what a caller is told of a freeze or a thaw that failed.
func (e *Edge) frozen(s *sandbox, err error) error {
	e.log.Warn("sandbox is not paused or resumed as asked", "sandbox", s.id, "err", err)
	if asError(err) != nil {
		return err
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the sandbox's processes did not stop or go on in time", Err: err}
}

// isIdle reports whether the idle timeout of a running sandbox is over. The caller
// holds s.mu.
func (s *sandbox) isIdle(now time.Duration) bool {
	return s.calls == 0 && s.idle > 0 && now-s.active >= s.idle
}

// firePaused is fire of a paused sandbox. The caller holds s.mu.
func (e *Edge) firePaused(s *sandbox, now time.Duration) (next time.Duration) {
	p := s.paused
	switch {
	case p.countLifetime && s.deadline > 0 && now >= s.deadline:
		e.run(func() { _ = e.stop(s, reasonLifetime, "") })
		return 0
	case p.until > 0 && now >= p.until:
		e.run(func() { _ = e.stop(s, reasonPaused, "") })
		return now + time.Second // it may be resumed in between
	}
	if p.countLifetime {
		next = s.deadline
	}
	if p.until > 0 && (next == 0 || p.until < next) {
		next = p.until
	}
	return next
}

// fireIdle does what was asked for after the idle timeout.
func (e *Edge) fireIdle(s *sandbox) {
	if s.spec.IdleAction != dsec.IdlePause {
		_ = e.stop(s, reasonIdle, "")
		return
	}
	if err := e.pause(e.closing, s, pauseOptions{reason: reasonIdle, most: e.cfg.DefaultMaxPaused}); err != nil {
		s.mu.Lock()
		s.active = e.clock() // tried again when that long has passed once more
		s.mu.Unlock()
		e.log.Warn("idle sandbox is not paused", "sandbox", s.id, "err", err)
	}
}

// adoptPause makes a sandbox that was taken over what its record says. A freeze that
// no record tells of was not promised to anybody. The caller is the only one who has s.
func (e *Edge) adoptPause(ctx context.Context, s *sandbox, inst backend.Instance) error {
	p, ok := inst.(backend.Pauser)
	switch {
	case !ok && s.state == dsec.StatePaused:
		return errNoPause(s.spec.Kind)
	case !ok:
		return nil
	case s.state == dsec.StateRunning:
		return p.Resume(ctx) // of one that is not paused it does nothing
	}
	if err := p.Pause(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.beginPageOut(s, p)
	return nil
}

// pauseProto is what a caller sees of a pause. The caller holds s.mu.
func (e *Edge) pauseProto(s *sandbox, now time.Duration, wall time.Time) *dsecv1.Pause {
	p := s.paused
	if p == nil {
		return nil
	}
	out := &dsecv1.Pause{Since: timestamppb.New(p.since)}
	if p.until > 0 {
		out.Until = timestamppb.New(wall.Add(p.until - now))
	}
	select {
	case <-p.done:
		out.MemoryBeforeBytes, out.MemoryBytes, out.Note = &p.out.Before, &p.out.After, p.out.Reason
	default:
	}
	return out
}
