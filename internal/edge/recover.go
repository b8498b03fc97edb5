package edge

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// edgeKey is where the journal holds the edge's own record. It is no sandbox ID.
const edgeKey = "edge"

// edgeRecord is what the edge knows of itself.
type edgeRecord struct {
	Version int         `json:"v"`
	ID      dsec.EdgeID `json:"id"`
}

// identify finds the edge's ID, or makes one at the first start.
func (e *Edge) identify() error {
	var r edgeRecord
	if raw, ok := e.replay.Values[edgeKey]; ok {
		if err := json.Unmarshal(raw, &r); err != nil {
			return fmt.Errorf("edge: own record: %w", err)
		}
		id, err := dsec.ParseEdgeID(string(r.ID))
		if err != nil {
			return fmt.Errorf("edge: own record: %w", err)
		}
		e.id = id
		return nil
	}
	// Sandbox IDs hold the edge's, so one record that is whole tells it.
	for key := range e.replay.Values {
		if id, err := dsec.ParseSandboxID(key); err == nil {
			e.id = id.Edge()
			break
		}
	}
	e.id = cmp.Or(e.id, dsec.NewEdgeID())
	if err := e.journal.Put(edgeKey, edgeRecord{Version: recordVersion, ID: e.id}); err != nil {
		return err
	}
	return e.journal.Sync() // the ID must outlive the node's power
}

// recoverConcurrency is how many sandboxes are taken over at once, and
// recoverTimeout how long one may take.
const (
	recoverConcurrency = 16
	recoverTimeout     = 10 * time.Second
)

// Recover takes over the sandboxes that the journal knows, and sweeps what no
// record claims. It is called once, before the first request; until it
// returns, requests are refused as unavailable.
//
// It converges when it is interrupted and begun again: what it decides follows
// from the journal and from what the backends say is there, and every change
// is written after the effect that it reports.
//
// Where the state directory was put back to an older copy while sandboxes ran,
// the journal's copy in the run directory is newer and is believed: live
// sandboxes are neither swept nor made twice. With both copies old, sandboxes
// that no record knows are swept: nobody could reach them.
func (e *Edge) Recover(ctx context.Context) error {
	if err := e.probe(ctx); err != nil {
		return err
	}
	if e.replay.RolledBack {
		e.log.Error("the state directory is older than what ran here; went on with the copy in the run directory")
	}
	if e.replay.Unclaimed > 0 {
		e.log.Error("damaged records in the journal, of nobody knows which sandboxes", "count", e.replay.Unclaimed)
	}
	if e.cfg.Layers != nil {
		e.lost = e.cfg.Layers.Lost()
	}
	todo := e.restore()
	e.replay.Values = nil
	lost := e.takeOver(ctx, todo)
	if err := ctx.Err(); err != nil {
		return err
	}
	if e.replay.RolledBack {
		e.loseEntries()
	}
	e.cfg.Crash("recover.sweep")
	e.sweep(ctx)
	if err := ctx.Err(); err != nil {
		return err
	}
	e.cfg.Crash("recover.ended")
	for _, s := range lost {
		e.finish(s)
	}
	for _, digest := range e.lost {
		if err := e.settle(ctx, digest); err != nil {
			e.log.Error("layer stays lost", "digest", digest, "err", err)
		}
	}
	e.dropOld()
	e.run(e.tidyTrajectories)
	e.run(e.catchUp)
	e.ready.Store(true)
	if e.cfg.Layers != nil {
		e.run(e.settleLost)
	}
	for _, kind := range e.kinds {
		if o := e.backends[kind]; !o.info.Load().Available {
			e.run(func() { e.probeAgain(o) })
		}
	}
	e.mu.RLock()
	live := e.live
	e.mu.RUnlock()
	e.log.Info("recovered", "edge", e.id, "running", live, "ended", len(lost))
	return nil
}

// loseEntries has the logs of all sandboxes tell that some of what was done may be missing: they
// were put back with the state directory. What may have been done is then not done again.
func (e *Edge) loseEntries() {
	e.mu.RLock()
	defer e.mu.RUnlock()
	for id := range e.sandboxes {
		if err := e.trajectories.Lost(id); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
			e.log.Error("what a sandbox's log has lost is not marked", "sandbox", id, "err", err)
		}
	}
}

// probe asks the backends what this host can do.
func (e *Edge) probe(ctx context.Context) error {
	for _, b := range e.cfg.Backends {
		o := &offer{Backend: b}
		o.probe(ctx, e.log)
		info := o.info.Load()
		if info.Kind == "" || e.backends[info.Kind] != nil {
			return fmt.Errorf("edge: backends want one kind each, got %q twice or none", info.Kind)
		}
		e.backends[info.Kind] = o
		e.kinds = append(e.kinds, info.Kind)
	}
	return nil
}

// restore rebuilds the table from the journal and returns the sandboxes that
// had not ended.
func (e *Edge) restore() (todo []*sandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.readRecords() {
		if s == nil {
			continue
		}
		e.sandboxes[s.id] = s
		if s.requestID != "" {
			e.keys[requestKey{s.project, s.requestID}] = s
		}
		if s.reaped {
			e.ended = append(e.ended, s)
			e.endedSize += s.size
			continue
		}
		e.live++
		e.liveSize += s.size
		todo = append(todo, s)
	}
	slices.SortFunc(e.ended, func(a, b *sandbox) int { return a.ended.Compare(b.ended) })
	return todo
}

// readRecords reads all records of the journal, in order of their keys, on all processors:
// there may be a hundred thousand. Those that are of no sandbox, or cannot be read, are nil.
func (e *Edge) readRecords() []*sandbox {
	keys := slices.Sorted(maps.Keys(e.replay.Values))
	read := make([]*sandbox, len(keys))
	var next atomic.Int64
	var all sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(keys)); i = next.Add(1) - 1 {
				id, err := dsec.ParseSandboxID(keys[i])
				if err != nil {
					continue // the edge's own
				}
				if read[i], err = e.sandboxOf(id, e.replay.Values[keys[i]]); err != nil {
					e.log.Error("record of a sandbox cannot be read", "sandbox", id, "err", err)
				}
			}
		})
	}
	all.Wait()
	return read
}

// sandboxOf reads a record. One that had ended, but of which not all was
// freed, is not reaped: the sweep does that.
func (e *Edge) sandboxOf(id dsec.SandboxID, raw json.RawMessage) (*sandbox, error) {
	var r record
	if err := json.Unmarshal(raw, &r); err != nil {
		return nil, err
	}
	if r.Version != recordVersion || !r.State.Valid() || r.Spec == nil {
		return nil, fmt.Errorf("version %d, state %q: want version %d and a known state", r.Version, r.State, recordVersion)
	}
	now := e.clock()
	s := &sandbox{
		id: id, project: r.Project, spec: r.Spec, layerNames: r.LayerNames, requestID: r.RequestID,
		digest: r.Digest, created: r.Created, offer: e.backends[r.Spec.Kind], state: r.State,
		reason: r.Reason, conditions: r.Conditions, warm: r.Warm, handle: backend.Handle(r.Handle),
		cut: r.Cut, movedTo: r.MovedTo, endedBy: r.EndedBy, idle: r.Idle, active: now, deadline: r.Deadline, ended: r.Ended,
		reaped: r.State.Terminal() && !r.Ended.IsZero(), size: textSize(r.Spec),
	}
	if r.Paused != nil && r.State == dsec.StatePaused {
		s.paused = &pausing{since: r.Paused.Since, at: r.Paused.At, until: r.Paused.Until, countLifetime: r.Paused.CountLifetime, stop: func() {}, done: closedChan}
	}
	s.told, s.assumed = s.standing(), true
	s.well() // as far as this edge knows
	if s.noted = s.reaped; s.reaped {
		s.endedAt = now - max(0, time.Since(r.Ended))
	}
	if r.Boot != e.bootID && r.Deadline > 0 {
		// The clock of another boot says nothing; the wall clock is left.
		s.deadline = max(1, now+r.Spec.MaxLifetime-time.Since(r.Created))
	}
	if e.replay.Damaged[string(id)] && !s.reaped {
		s.quarantine()
		s.reason = "its last record in the journal is damaged"
	}
	return s, nil
}

// takeOver recovers what lives and returns what does not, in its final state
// but not finished: its objects are still to be swept.
func (e *Edge) takeOver(ctx context.Context, todo []*sandbox) (lost []*sandbox) {
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(recoverConcurrency)
	for _, s := range todo {
		g.Go(func() error {
			if ctx.Err() != nil || e.adopt(ctx, s) {
				return nil
			}
			mu.Lock()
			lost = append(lost, s)
			mu.Unlock()
			return nil
		})
	}
	_ = g.Wait() // no function returns an error
	return lost
}

// adopt takes one sandbox over. It reports false where the sandbox has ended
// and its objects are to be swept.
func (e *Edge) adopt(ctx context.Context, s *sandbox) bool {
	switch s.state {
	case dsec.StateStopping, dsec.StateFailed, dsec.StateLost, dsec.StateStopped:
		return false // finish says stopped where it was stopping
	case dsec.StatePending, dsec.StateStarting:
		reason := "the edge was restarted while it was made"
		if s.has(conditionQuarantined) {
			// It may have run, but without its handle nobody can reach it.
			_ = s.move(dsec.StateLost, s.reason)
			return false
		}
		// Nobody was told of it, so its request id is free again.
		s.err = errors.New(reason)
		_ = s.move(dsec.StateFailed, reason)
		return false
	}
	if digest := lostLayer(s, e.lost); digest != "" {
		_ = s.move(dsec.StateLost, lostReason(digest))
		return false
	}
	if s.offer == nil {
		_ = s.move(dsec.StateLost, fmt.Sprintf("this edge does not offer backend %s any more", s.spec.Kind))
		return false
	}
	e.cfg.Crash("recover.instance")
	ctx, cancel := context.WithTimeout(ctx, recoverTimeout)
	defer cancel()
	inst, err := s.offer.Recover(ctx, s.id, s.handle)
	switch {
	case err == nil:
	case dsec.CodeOf(err) == dsec.CodeLost:
		_ = s.move(dsec.StateLost, safeText(err))
		return false
	default:
		e.log.Error("sandbox cannot be taken over", "sandbox", s.id, "err", err)
		s.mu.Lock()
		s.quarantine()
		s.reason = "the edge could not take it over"
		s.mu.Unlock()
		e.arm(s)
		return true // not swept: it may live
	}
	if err := e.adoptPause(ctx, s, inst); err != nil {
		e.log.Error("sandbox is not paused or running as it was", "sandbox", s.id, "state", s.state, "err", err)
		s.mu.Lock()
		s.quarantine()
		s.reason = "the edge could not have it go on as it was"
		s.mu.Unlock()
	}
	release, err := e.hold(ctx, s.spec)
	if err != nil {
		e.log.Error("layers of a running sandbox are not in the store", "sandbox", s.id, "err", err)
	}
	s.mu.Lock()
	s.instance, s.release = inst, release
	e.tellReads(s)
	cut := slices.Clone(s.cut)
	if s.has(conditionQuarantined) {
		e.writeAnyway(s) // the damage itself is gone from the journal
	}
	s.mu.Unlock()
	if err := e.trajectories.Add(s.id, s.project); err != nil { // made by an edge that had no log
		e.log.Error("a sandbox has no log", "sandbox", s.id, "err", err)
	}
	e.watch(s, inst)
	e.arm(s)
	actions := e.takeOverActions(s)
	if s.paused != nil {
		s.paused.cut, s.paused.actions = len(cut) > 0, actions
		return true
	}
	e.settleActions(s, inst, actions)
	if len(cut) > 0 {
		e.run(func() { e.killCut(s, inst, cut) })
	}
	return true
}

// sweep removes the objects of all sandboxes but those that run. A backend
// that cannot sweep all is not a reason to leave the others alone.
func (e *Edge) sweep(ctx context.Context) {
	keep := make(map[dsec.SandboxID]bool)
	e.mu.RLock()
	for id, s := range e.sandboxes {
		s.mu.Lock()
		if s.state == dsec.StateRunning || s.state == dsec.StatePaused {
			keep[id] = true
		}
		s.mu.Unlock()
	}
	e.mu.RUnlock()
	for _, kind := range e.kinds {
		if err := e.backends[kind].Sweep(ctx, keep); err != nil {
			e.log.Error("backend could not free everything", "backend", kind, "err", err)
			e.metrics.stuck.Inc()
		}
	}
}
