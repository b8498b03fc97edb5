package edge

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// projectHeader names the project that the apiserver authenticated.
const projectHeader = "Dsec-Project"

// call is one request at work in a sandbox. Its context ends with the
// request's, and when the edge is closed.
type call struct {
	e      *Edge
	s      *sandbox
	inst   backend.Instance
	spec   *dsec.Spec
	client *chronusapi.Client
	ctx    context.Context
	// request is the caller's context, which ends when the answer is sent.
	request context.Context
	cancel  context.CancelCauseFunc
	stop    func() bool
	origin  origin
	alone   bool   // of the edge itself: nobody waits for it
	files   bool   // of FileService
	begun   uint64 // the entry with which what do is at began
	marks   []*dsecv1.TrajectoryMark
}

// enter starts a call, which end must end.
func (e *Edge) enter(ctx context.Context, h http.Header, id string) (*call, error) {
	return e.enterIn(ctx, h, id, false)
}

// enterAsIs is enter that does not resume a paused sandbox, for a call that does nothing
// within it.
func (e *Edge) enterAsIs(ctx context.Context, h http.Header, id string) (*call, error) {
	return e.enterIn(ctx, h, id, true)
}

func (e *Edge) enterIn(ctx context.Context, h http.Header, id string, asIs bool) (*call, error) {
	fit := (*sandbox).notRunning
	if asIs {
		fit = (*sandbox).notLive
	}
	s, err := e.find(h.Get(projectHeader), id)
	if err != nil {
		return nil, err
	}
	if err := e.begin(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	for !asIs && (s.turn != nil || s.state == dsec.StatePaused) {
		s.mu.Unlock()
		if err := e.resume(ctx, s, h.Get(callerHeader)); err != nil {
			e.end()
			return nil, err
		}
		s.mu.Lock()
	}
	if err := fit(s); err != nil {
		s.mu.Unlock()
		e.end()
		return nil, err
	}
	if s.calls >= e.cfg.MaxCalls {
		s.mu.Unlock()
		e.end()
		return nil, dsec.Errorf(dsec.CodeExhausted, "sandbox %s has %d calls in progress, which is the most at once", s.id, e.cfg.MaxCalls)
	}
	s.calls++
	if s.client == nil {
		s.client = withFiles(chronusapi.NewClient(s.instance.Dial), s.instance)
	}
	c := &call{e: e, s: s, inst: s.instance, spec: s.spec, client: s.client, request: ctx, origin: readOrigin(ctx, h)}
	s.mu.Unlock()
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	c.stop = context.AfterFunc(e.closing, func() { c.cancel(context.Cause(e.closing)) })
	return c, nil
}

// withFiles has a client of an instance, if there is one, make calls for files to
// where they are served.
func withFiles(client *chronusapi.Client, inst backend.Instance) *chronusapi.Client {
	if files, ok := inst.(backend.FileServer); ok && client != nil {
		client.WithFiles(files.DialFiles)
	}
	return client
}

func (c *call) end() {
	c.stop()
	c.cancel(nil)
	if c.alone {
		return
	}
	now := c.e.clock()
	c.s.mu.Lock()
	c.s.calls--
	c.s.active = now
	if c.s.reaped {
		c.s.slim()
	}
	wake := c.s.calls == 0 && c.s.client != nil
	c.s.mu.Unlock()
	if wake {
		c.e.timers.schedule(c.s, now+connectionIdle)
	}
	c.e.end()
}

// closing reports whether the edge, not the client, ended the call.
func (c *call) closing() bool { return c.e.closing.Err() != nil }

// keeps reports whether commands go on although their stream broke: while the
// edge shuts down nobody can tell whether the client has gone.
func (c *call) keeps() bool { return c.alone || c.closing() || c.e.draining.Load() }

// fail is what a caller is told for err, which chronus or the way to it gave.
func (c *call) fail(err error) error {
	if err == nil {
		return nil
	}
	if c.ctx.Err() != nil {
		if c.closing() {
			return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the edge was restarted in mid-call", Restarting: true}
		}
		return context.Cause(c.ctx)
	}
	switch dsec.CodeOf(err) {
	case dsec.CodeUnavailable, dsec.CodeOutcomeUnknown, dsec.CodeLost:
		// The connection broke. Where that is because the sandbox ended, say so.
		if c.over() {
			c.s.mu.Lock()
			defer c.s.mu.Unlock()
			// Who took its place has nothing of the call, which must not begin there anew.
			if c.s.movedTo != "" {
				return dsec.Errorf(dsec.CodeOutcomeUnknown, "sandbox %s was moved to %s in mid-call, and what ran in it ended", c.s.id, c.s.movedTo)
			}
			if serr := c.s.notRunning(); serr != nil {
				return serr
			}
			return dsec.Errorf(dsec.CodeLost, "sandbox %s ended", c.s.id)
		}
	}
	if errors.Is(err, chronusapi.ErrNeedGroup) {
		return dsec.Errorf(dsec.CodeExhausted, "sandbox %s runs as many commands as it can", c.s.id)
	}
	return err
}

// told is fail for what was begun then, with whose fault it is put right: as its action
// ends in the log, so its caller is told.
func (c *call) told(began time.Time, err error) error {
	return c.whoseDisk(began, c.starvedFiles(began, c.fail(err)))
}

// ofProcess names the field of a process that is not there.
func ofProcess(err error) error { return missing(err, "process_id") }

// missing names the field of what chronus did not find.
func missing(err error, field string) error {
	if de := asError(err); de != nil && de.Code == dsec.CodeNotFound && de.Field == "" {
		return at(err, field)
	}
	return err
}

// failStarted is fail for a command that was started: whatever broke, it was
// accepted, and so is not to be sent again as if it were not.
func (c *call) failStarted(process uint64, err error) error {
	err = c.fail(err)
	if err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		return err
	}
	return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: fmt.Sprintf("the stream broke, process %d may go on: attach to it", process), Err: err}
}

// overGrace is how long after a connection broke the end of its sandbox may
// come to be known.
const overGrace = 100 * time.Millisecond

// over reports whether the sandbox ended, or does within a moment.
func (c *call) over() bool {
	timer := time.NewTimer(overGrace)
	defer timer.Stop()
	for {
		c.s.mu.Lock()
		wait, running := c.s.waiter(), c.s.state == dsec.StateRunning || c.s.state == dsec.StatePaused
		c.s.mu.Unlock()
		if !running {
			return true
		}
		select {
		case <-c.inst.Done():
			// The watcher sees it too and says why; its word is worth a wait.
			select {
			case <-wait:
			case <-timer.C:
			}
			return true
		case <-wait:
		case <-timer.C:
			return false
		}
	}
}

// with runs one call that has one answer.
func (e *Edge) with(ctx context.Context, h http.Header, id string, f func(*call) error) error {
	c, err := e.enter(ctx, h, id)
	if err != nil {
		return err
	}
	defer c.end()
	return c.fail(f(c))
}
