package edge

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// stop ends a sandbox and frees all that it held. It returns once that is
// done, or has failed for now: then it is tried again later. Stopping an ended
// sandbox is a success. by is who asked for it; empty: the edge itself.
func (e *Edge) stop(s *sandbox, reason, by string) error {
	e.cfg.Crash("kill.intent")
	s.mu.Lock()
	switch s.state {
	case dsec.StateStopped, dsec.StateFailed, dsec.StateLost, dsec.StateStopping:
		again := s.retry > 0
		s.mu.Unlock()
		if again {
			e.reap(s)
		}
		return nil
	case dsec.StatePending, dsec.StateStarting:
		_ = s.move(dsec.StateStopping, reason)
		s.endedBy = by
		e.writeAnyway(s)
		if s.cancel != nil {
			s.cancel() // the create ends it
		}
		s.mu.Unlock()
		return nil
	}
	// Whoever starts a call and whoever ends the sandbox for lack of calls
	// both hold s.mu: one of them comes first.
	if reason == reasonIdle && !s.isIdle(e.clock()) || reason == reasonPaused && s.state != dsec.StatePaused {
		s.mu.Unlock()
		return nil
	}
	if err := s.move(dsec.StateStopping, reason); err != nil {
		s.mu.Unlock()
		return err
	}
	s.endedBy = by
	e.writeAnyway(s)
	s.mu.Unlock()
	e.metrics.killed(reason)
	e.reap(s)
	return nil
}

// waitReaped waits until s holds nothing any more, an attempt to free it has
// failed, or ctx ends. It returns the state then.
func (s *sandbox) waitReaped(ctx context.Context) dsec.State {
	for {
		s.mu.Lock()
		state, wait := s.state, s.waiter()
		over := s.reaped || s.retry > 0
		s.mu.Unlock()
		if over {
			return state
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return state
		}
	}
}

// watch sees the end of an instance's PID 1.
func (e *Edge) watch(s *sandbox, inst backend.Instance) {
	e.run(func() {
		select {
		case <-inst.Done():
			e.died(s, inst)
		case <-e.closing.Done():
		}
	})
}

// died ends a sandbox of which PID 1 is gone.
func (e *Edge) died(s *sandbox, inst backend.Instance) {
	s.mu.Lock()
	if s.state != dsec.StateRunning && s.state != dsec.StatePaused {
		s.mu.Unlock()
		return // it was ended on purpose
	}
	e.cfg.Crash("fail.intent")
	reason := "PID 1 ended: " + inst.Exit().Reason
	_ = s.move(dsec.StateFailed, reason)
	e.writeAnyway(s)
	s.mu.Unlock()
	e.log.Warn("sandbox failed", "sandbox", s.id, "reason", reason)
	e.metrics.failed.Inc()
	e.cfg.Crash("fail.destroy")
	e.reap(s)
}

// destroyTimeout bounds one attempt to take a sandbox down. A backend gives up by
// itself where nothing goes on any more.
const destroyTimeout = 10 * time.Minute

// destroyGrace is how long an attempt under way goes on once the edge ends: the
// next one takes it up.
const destroyGrace = 30 * time.Second

// destroying is a context for one attempt to take a sandbox down.
func (e *Edge) destroying() (context.Context, context.CancelFunc) {
	ctx, cancel := e.background(destroyTimeout)
	stop := context.AfterFunc(e.closing, func() { time.AfterFunc(destroyGrace, cancel) })
	return ctx, func() {
		stop()
		cancel()
	}
}

// reap makes one attempt to free what s holds. One attempt at a time.
func (e *Edge) reap(s *sandbox) {
	s.mu.Lock()
	if s.reaped || s.reaping {
		s.mu.Unlock()
		return
	}
	s.reaping, s.retry = true, 0
	s.dropClient()
	if s.paused != nil {
		s.paused.stop() // its memory goes anyway
	}
	inst, handle := s.instance, s.handle
	s.mu.Unlock()

	e.cfg.Crash("kill.destroy")
	ctx, cancel := e.destroying()
	defer cancel()
	err := e.destroy(ctx, s, inst, handle)
	if err != nil {
		e.log.Error("sandbox is not freed", "sandbox", s.id, "err", err)
		s.mu.Lock()
		s.reaping = false
		s.quarantine()
		s.mu.Unlock()
		e.metrics.stuck.Inc()
		e.reapLater(s)
		return
	}
	e.cfg.Crash("kill.ended")
	e.finish(s)
}

// destroy frees the instance. Of one that could not be taken over after a
// restart only the handle is known.
func (e *Edge) destroy(ctx context.Context, s *sandbox, inst backend.Instance, handle backend.Handle) error {
	if inst == nil && handle != nil {
		var err error
		if inst, err = s.offer.Recover(ctx, s.id, handle); err != nil {
			if dsec.CodeOf(err) == dsec.CodeLost {
				return nil // dead; the next start sweeps what is left
			}
			return err
		}
	}
	if inst == nil {
		return nil
	}
	return inst.Destroy(ctx)
}

// reapLater tries again, less and less often, for as long as the edge runs.
func (e *Edge) reapLater(s *sandbox) {
	s.mu.Lock()
	s.attempts++
	at := e.clock() + min(time.Minute, time.Second<<min(s.attempts, 6))
	s.retry = at
	s.signal()
	s.mu.Unlock()
	e.timers.schedule(s, at)
}

// finish records that s holds nothing any more.
func (e *Edge) finish(s *sandbox) {
	s.mu.Lock()
	if s.err != nil {
		// Before anybody learns that it is gone: the next create with the
		// same request id must not find it.
		s.mu.Unlock()
		e.mu.Lock()
		e.freeKey(s)
		e.mu.Unlock()
		s.mu.Lock()
	}
	if s.state == dsec.StateStopping {
		_ = s.move(dsec.StateStopped, s.reason)
	}
	release := s.release
	s.reaped, s.reaping, s.retry = true, false, 0
	s.instance, s.handle, s.release = nil, nil, nil
	s.conditions, s.paused = nil, nil
	s.ended, s.endedAt = time.Now().UTC(), e.clock()
	s.slim()
	e.writeAnyway(s)
	s.signal()
	end := &dsecv1.TrajectoryEntry{Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE, Caller: s.endedBy, State: string(s.state), Reason: s.reason}
	s.mu.Unlock()
	e.noteEnd(s, end)
	releaseAll(release)
	e.timers.remove(s)
	e.retire(s)
}

// slim drops what nobody asks of an ended sandbox. The caller holds s.mu.
func (s *sandbox) slim() {
	spec := *s.spec
	spec.Env = nil
	s.spec = &spec
	if s.calls == 0 {
		s.cut = nil
	}
}

// retire counts s as ended.
func (e *Edge) retire(s *sandbox) {
	s.mu.Lock()
	size := textSize(s.spec)
	s.mu.Unlock()
	e.mu.Lock()
	e.live--
	e.liveSize -= s.size
	s.size = size
	e.ended = append(e.ended, s)
	e.endedSize += size
	e.mu.Unlock()
	e.dropOld()
}

// dropOld drops the records that are too old or too many, and comes back when
// the next one is.
func (e *Edge) dropOld() {
	e.mu.Lock()
	old := e.expired()
	var next *sandbox
	if len(e.ended) > 0 {
		next = e.ended[0]
	}
	e.mu.Unlock()
	for _, s := range old {
		if err := e.journal.Delete(string(s.id)); err != nil {
			e.log.Warn("old record is not deleted", "sandbox", s.id, "err", err)
		}
		e.forgetTrajectory(s.id)
	}
	if next != nil {
		e.timers.schedule(next, next.endedAt+e.cfg.Retention+1)
	}
}

// maxEnded bounds the records of ended sandboxes, as textBounds does; the oldest go first.
const maxEnded = 100_000

// textSize is the bytes of a sandbox's record that its caller chose.
func textSize(spec *dsec.Spec) int {
	n := len(spec.Job) + len(spec.User) + len(spec.Workdir)
	for _, kv := range spec.Env {
		n += len(kv)
	}
	for k, v := range spec.Labels {
		n += len(k) + len(v)
	}
	for _, digest := range spec.Layers {
		n += len(digest)
	}
	return n
}

// expired takes the records out whose time is over. The caller holds e.mu.
func (e *Edge) expired() []*sandbox {
	n, keep := 0, e.endedSize
	for n < len(e.ended) && (len(e.ended)-n > maxEnded || keep > e.cfg.texts.ended || e.clock()-e.ended[n].endedAt > e.cfg.Retention) {
		keep -= e.ended[n].size
		n++
	}
	e.endedSize = keep
	old := e.ended[:n:n]
	e.ended = e.ended[n:]
	for _, s := range old {
		delete(e.sandboxes, s.id)
		e.freeKey(s)
	}
	return old
}
