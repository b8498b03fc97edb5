package edge

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// create makes one sandbox, or finds the one that the same request id made.
func (e *Edge) create(ctx context.Context, c *create) (*sandbox, error) {
	if c.requestID == "" {
		return e.createNew(ctx, c)
	}
	for {
		s, mine, err := e.claim(c)
		if err != nil {
			return nil, err
		}
		if mine {
			return s, e.make(ctx, s, c)
		}
		if err := s.sameBody(c); err != nil {
			return nil, err
		}
		again, err := s.waitStarted(ctx)
		if !again {
			return s, err
		}
	}
}

func (e *Edge) createNew(ctx context.Context, c *create) (*sandbox, error) {
	s, _, err := e.claim(c)
	if err != nil {
		return nil, err
	}
	if err := e.make(ctx, s, c); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		// Nobody was told the ID, and no request id leads to it.
		_ = e.stop(s, "the client went away while it was made", "")
		return nil, context.Cause(ctx)
	}
	return s, nil
}

// claim takes a place for a new sandbox, or returns the one that holds the
// request id. Nothing is made or held yet.
func (e *Edge) claim(c *create) (s *sandbox, mine bool, err error) {
	key := requestKey{c.project, c.requestID}
	roomErr := cmp.Or(c.fitDisk(), e.room())
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.requestID != "" {
		if s := e.keys[key]; s != nil {
			return s, false, nil
		}
	}
	switch {
	case roomErr != nil:
		return nil, false, roomErr
	case e.live >= e.cfg.MaxSandboxes:
		return nil, false, dsec.Errorf(dsec.CodeExhausted, "the node has %d sandboxes, which is its most", e.live)
	case e.liveSize+textSize(c.spec) > e.cfg.texts.live:
		return nil, false, dsec.Errorf(dsec.CodeExhausted, "the environments and labels of the node's sandboxes have %d bytes, which is about their most", e.liveSize)
	}
	now := e.clock()
	s = &sandbox{
		id: dsec.NewSandboxID(e.id), project: c.project, spec: c.spec, layerNames: c.layerNames,
		requestID: c.requestID, digest: c.digest, created: time.Now().UTC(), offer: c.offer, origin: c.origin,
		state: dsec.StatePending, idle: c.idle, active: now,
	}
	if c.lifetime > 0 {
		s.deadline = now + c.lifetime
	}
	e.sandboxes[s.id] = s
	if c.requestID != "" {
		e.keys[key] = s
	}
	e.live++
	s.size = textSize(c.spec)
	e.liveSize += s.size
	return s, true, nil
}

// forget takes a claim back. A create that failed leaves no record: its caller
// got the error, and the same request id may try again.
func (e *Edge) forget(s *sandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.sandboxes, s.id)
	e.freeKey(s)
	e.live--
	e.liveSize -= s.size
}

// freeKey lets another create have the request id of s. The caller holds e.mu.
func (e *Edge) freeKey(s *sandbox) {
	key := requestKey{s.project, s.requestID}
	if e.keys[key] == s {
		delete(e.keys, key)
	}
}

// waitStarted waits until the create that s is of has ended. again means that
// it failed and the request may try anew.
func (s *sandbox) waitStarted(ctx context.Context) (again bool, err error) {
	for {
		s.mu.Lock()
		state, wait, failed, reaped := s.state, s.waiter(), s.err != nil, s.reaped
		s.mu.Unlock()
		switch {
		case state == dsec.StatePending || state == dsec.StateStarting:
		case failed && !reaped: // its request id is not free yet
		default:
			return failed, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

// make brings a claimed sandbox up. On error nothing of it is left.
func (e *Edge) make(ctx context.Context, s *sandbox, c *create) error {
	begun := time.Now()
	err := c.ofLayer(e.bringUp(ctx, s, c.caller))
	e.metrics.created(c.spec.Kind, s.warm, err, time.Since(begun))
	return err
}

func (e *Edge) bringUp(ctx context.Context, s *sandbox, caller string) error {
	// The create goes on when its caller leaves: one with the same request id
	// may wait for it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	defer context.AfterFunc(e.closing, cancel)()
	s.mu.Lock()
	s.cancel = cancel
	s.mu.Unlock()
	select {
	case e.creates <- struct{}{}:
		defer func() { <-e.creates }()
	case <-ctx.Done():
		return e.abandon(s, dsec.Errorf(dsec.CodeExhausted, "the node makes as many sandboxes as it can"))
	}
	release, err := e.hold(ctx, s.spec)
	if err != nil {
		return e.abandon(s, err)
	}
	e.cfg.Crash("create.intent")
	s.mu.Lock()
	s.release = release
	if err = s.move(dsec.StateStarting, ""); err == nil {
		err = e.write(s)
	}
	s.mu.Unlock()
	if err != nil {
		return e.abandon(s, err)
	}
	if err := e.trajectories.Add(s.id, s.project); err != nil {
		return e.abandon(s, err)
	}
	e.cfg.Crash("create.backend")
	inst, err := e.instance(ctx, s)
	if err != nil {
		return e.abandon(s, err)
	}
	e.cfg.Crash("create.handle")
	if _, ok := inst.(backend.Pauser); !ok && s.spec.IdleAction == dsec.IdlePause {
		return e.rollBack(s, inst, at(errNoPause(s.spec.Kind), "idle_action"))
	}
	return e.publish(s, inst, caller)
}

// instance calls the backend, and does not wait for ever for one that does not
// keep to its deadline: what it makes late is destroyed then.
func (e *Edge) instance(ctx context.Context, s *sandbox) (backend.Instance, error) {
	type result struct {
		inst backend.Instance
		err  error
	}
	done := make(chan result, 1)
	req := backend.CreateRequest{ID: s.id, Spec: *s.spec}
	for _, digest := range s.spec.Layers {
		req.Layers = append(req.Layers, e.layerOf(digest))
	}
	go func() {
		inst, err := s.offer.Create(ctx, req)
		done <- result{inst, err}
	}()
	select {
	case r := <-done:
		return r.inst, r.err
	case <-ctx.Done():
	}
	timer := time.NewTimer(stuckGrace)
	defer timer.Stop()
	select {
	case r := <-done:
		return r.inst, r.err
	case <-timer.C:
	}
	e.log.Error("create is stuck", "sandbox", s.id, "backend", s.spec.Kind)
	s.mu.Lock()
	s.quarantine()
	s.mu.Unlock()
	go func() {
		r := <-done
		s.mu.Lock()
		s.instance = r.inst
		s.mu.Unlock()
		e.reap(s)
	}()
	return nil, errStuck
}

// createTimeout bounds the making of one sandbox, and stuckGrace is how long a
// backend may take to give up after that.
const (
	createTimeout = time.Minute
	stuckGrace    = 5 * time.Second
)

var errStuck = errors.New("create did not come back at its deadline")

// abandon ends a create that failed. Where the sandbox was killed meanwhile,
// it has been somebody's and so keeps a record.
func (e *Edge) abandon(s *sandbox, cause error) error {
	s.mu.Lock()
	if s.state == dsec.StateStopping {
		s.mu.Unlock()
		e.reap(s)
		return dsec.Errorf(dsec.CodeConflict, "sandbox %s was killed while it was made", s.id)
	}
	stuck := errors.Is(cause, errStuck)
	if stuck {
		cause = dsec.Errorf(dsec.CodeInternal, "sandbox %s: the backend does not answer", s.id)
	}
	s.err = cause
	written := s.state != dsec.StatePending
	if err := s.move(dsec.StateFailed, "create: "+safeText(cause)); err != nil {
		e.log.Error("create ends in a state that it cannot", "sandbox", s.id, "err", err)
	}
	if stuck {
		e.writeAnyway(s)
		s.mu.Unlock()
		return cause
	}
	releaseAll(s.release)
	s.release = nil
	s.mu.Unlock()
	if written {
		if err := e.journal.Delete(string(s.id)); err != nil {
			e.log.Error("failed create keeps its record until the next start", "sandbox", s.id, "err", err)
		}
	}
	e.forget(s)
	e.forgetTrajectory(s.id)
	s.mu.Lock()
	s.reaped = true
	s.signal()
	s.mu.Unlock()
	return cause
}

// publish makes a fresh instance a running sandbox.
func (e *Edge) publish(s *sandbox, inst backend.Instance, caller string) error {
	s.mu.Lock()
	s.instance, s.handle, s.warm = inst, inst.Handle(), inst.Warm()
	if s.state == dsec.StateStopping { // killed meanwhile
		s.mu.Unlock()
		e.reap(s)
		return dsec.Errorf(dsec.CodeConflict, "sandbox %s was killed while it was made", s.id)
	}
	err := s.move(dsec.StateRunning, "")
	if err == nil {
		err = e.write(s)
	}
	if err != nil {
		s.mu.Unlock()
		return e.rollBack(s, inst, err)
	}
	if err := e.noteCreate(s, caller); err != nil {
		s.mu.Unlock()
		return e.rollBack(s, inst, err)
	}
	s.active, s.cancel = e.clock(), nil
	e.tellReads(s)
	if c, ok := inst.(backend.Caller); ok {
		s.client = withFiles(c.Client(), inst)
	}
	s.mu.Unlock()
	e.cfg.Crash("create.publish")
	e.watch(s, inst)
	e.arm(s)
	return nil
}

// rollBack destroys an instance that could not be journaled.
func (e *Edge) rollBack(s *sandbox, inst backend.Instance, cause error) error {
	ctx, cancel := e.destroying()
	defer cancel()
	if err := inst.Destroy(ctx); err != nil {
		e.log.Error("instance of a failed create is left for later", "sandbox", s.id, "err", err)
		s.mu.Lock()
		s.err = cause
		_ = s.move(dsec.StateFailed, "create: "+safeText(cause))
		s.quarantine()
		s.mu.Unlock()
		e.reapLater(s)
		return cause
	}
	return e.abandon(s, cause)
}

// arm sets the timer of a running sandbox.
func (e *Edge) arm(s *sandbox) {
	if next := e.fire(s, e.clock()); next > 0 {
		e.timers.schedule(s, next)
	}
}

// safeText is what of an error may be shown as a reason.
func safeText(err error) string {
	if de := asError(err); de != nil {
		return de.Error()
	}
	return "internal error"
}

func asError(err error) *dsec.Error {
	de, _ := errors.AsType[*dsec.Error](err)
	return de
}
