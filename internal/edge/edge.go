// Package edge owns every sandbox of one node: it admits, journals, makes,
// commands, expires, recovers and frees them. It knows backends by their
// contract alone and serves EdgeService, ProcessService, SessionService and
// FileService of proto/dsec/v1.
//
// The words: a call is one request that works in a sandbox; a record is what
// the journal holds of one sandbox, enough to take it over after the edge
// died at any instruction; an ended sandbox is one in a terminal state, whose
// record is kept for a while to answer for it and for its request id.
//
// Activity, for the idle timeout, is a call: exec, process, session and file
// calls, from their begin to their end. So a command counts for as long as the
// stream that started it or is attached to it is open; a detached command that
// nobody watches does not. Get, List, Usage and Kill are no activity; Extend
// is. After a restart of the edge the time without activity begins anew.
//
// All timeouts run on the clock that counts from boot and through suspends, so
// that steps of the host's clock do not matter.
package edge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/journal"
	"github.com/opendsec/dsec/internal/trajectory"
)

// Edge is the node agent.
type Edge struct {
	cfg          Config
	id           dsec.EdgeID
	log          *slog.Logger
	journal      *journal.Journal
	trajectories *trajectory.Log
	events       *eventLog
	backends     map[dsec.Kind]*offer
	kinds        []dsec.Kind // in the order of the configuration
	metrics      *metrics
	timers       *timers
	clock        func() time.Duration // since boot
	bootID       string
	replay       journal.Replay // until Recover
	lost         []string       // layers that were lost when this edge began, until Recover
	degraded     degraded       // layers of which reads fail
	creates      chan struct{}  // holds a token for each create under way

	// closing is canceled by Close; it ends calls in progress.
	closing   context.Context
	close     context.CancelCauseFunc
	ready     atomic.Bool
	draining  atomic.Bool
	calls     atomic.Int64 // in progress
	quiet     chan struct{}
	output    heldOutput    // of Exec calls
	pageOuts  chan struct{} // holds a token for each sandbox whose memory is being moved
	packs     chan struct{} // holds a token for each pack under way
	resuming  resuming
	goroutine sync.WaitGroup

	mu        sync.RWMutex
	sandboxes map[dsec.SandboxID]*sandbox
	keys      map[requestKey]*sandbox
	live      int        // sandboxes that hold objects or soon will
	liveSize  int        // bytes of what their callers gave of text
	ended     []*sandbox // oldest first
	endedSize int
}

// requestKey names a create for its repetitions.
type requestKey struct{ project, id string }

// errClosing is the cause of calls that Close ended.
var errClosing = dsec.Restarting("the edge restarts; commands go on: attach again")

// New makes an edge on cfg.StateDir and opens its journal. It refuses every
// request before Recover.
func New(cfg Config) (*Edge, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	e := &Edge{
		cfg: cfg, log: cfg.Logger, backends: make(map[dsec.Kind]*offer),
		clock: cfg.clock, output: heldOutput{most: cfg.texts.held}, creates: make(chan struct{}, cfg.CreateConcurrency), quiet: make(chan struct{}, 1), pageOuts: make(chan struct{}, runtime.GOMAXPROCS(0)), packs: make(chan struct{}, packsAtOnce),
		sandboxes: make(map[dsec.SandboxID]*sandbox), keys: make(map[requestKey]*sandbox),
	}
	e.closing, e.close = context.WithCancelCause(context.Background())
	opts := journal.Options{Dir: filepath.Join(cfg.StateDir, "journal"), Logger: e.log}
	if cfg.RunDir != "" {
		opts.Mirror = filepath.Join(cfg.RunDir, "journal")
	}
	var err error
	if e.bootID, err = hostos.BootID(); err != nil {
		return nil, err
	}
	if e.journal, e.replay, err = journal.Open(opts); err != nil {
		return nil, fmt.Errorf("edge: state directory: %w", err)
	}
	if err := e.identify(); err != nil {
		return nil, errors.Join(err, e.journal.Close())
	}
	if err := e.openTrajectories(); err != nil {
		return nil, errors.Join(fmt.Errorf("edge: trajectory log: %w", err), e.journal.Close())
	}
	if err := e.openEvents(); err != nil {
		return nil, errors.Join(fmt.Errorf("edge: log of events: %w", err), e.trajectories.Close(), e.journal.Close())
	}
	e.metrics = newMetrics(e)
	e.timers = newTimers(e.clock, e.fire)
	return e, nil
}

// ID names this edge; it is the first part of its sandboxes' IDs.
func (e *Edge) ID() dsec.EdgeID { return e.id }

// Close ends calls in progress and what the edge runs for itself, and closes
// the journal and the backends. Sandboxes and their commands go on, for the
// next edge to take over.
func (e *Edge) Close() error {
	e.draining.Store(true)
	e.close(errClosing)
	// What is in progress ends now, but for streams whose client does not
	// read: those end with their connections.
	ctx, cancel := context.WithTimeout(context.Background(), closeGrace)
	defer cancel()
	if err := e.Drain(ctx); err != nil {
		e.log.Warn("closed with calls in progress", "calls", e.calls.Load())
	}
	e.timers.stop()
	e.goroutine.Wait()
	e.letGo()
	e.mu.Lock()
	for _, s := range e.sandboxes {
		s.mu.Lock()
		s.dropClient()
		s.mu.Unlock()
	}
	e.mu.Unlock()
	var errs []error
	for _, o := range e.backends {
		errs = append(errs, o.Close())
	}
	return errors.Join(append(errs, e.events.events.Close(), e.trajectories.Close(), e.journal.Close())...)
}

// closeGrace is how long Close waits for calls to end.
const closeGrace = 5 * time.Second

// Drain refuses new work as unavailable and waits until the calls in progress
// have ended, or ctx has. Sandboxes go on.
func (e *Edge) Drain(ctx context.Context) error {
	e.draining.Store(true)
	for e.calls.Load() > 0 {
		select {
		case <-e.quiet:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// begin counts a request in, or refuses it.
func (e *Edge) begin() error {
	e.calls.Add(1)
	switch {
	case e.draining.Load():
		e.end()
		return errDraining
	case !e.ready.Load():
		e.end()
		return errStarting
	}
	return nil
}

// beginEnd counts a request in that is served while the edge drains too.
func (e *Edge) beginEnd() error {
	e.calls.Add(1)
	switch {
	case e.closing.Err() != nil:
		e.end()
		return errClosing
	case !e.ready.Load():
		e.end()
		return errStarting
	}
	return nil
}

var (
	errStarting = dsec.Restarting("the edge starts up")
	errDraining = dsec.Restarting("the edge shuts down")
)

func (e *Edge) end() {
	if e.calls.Add(-1) == 0 && e.draining.Load() {
		select {
		case e.quiet <- struct{}{}:
		default:
		}
	}
}

// run runs f on a goroutine that Close waits for.
func (e *Edge) run(f func()) { e.goroutine.Go(f) }

// background is a context for work that no caller waits for.
func (e *Edge) background(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(e.closing), d)
}
