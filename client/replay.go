package client

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// ReplayOptions say how a trajectory is replayed, and what is compared.
type ReplayOptions struct {
	// Layers are in place of those that the sandbox was made of; none: the same.
	Layers []string
	// Until is the number of the last entry that is looked at; 0: the last there is.
	Until uint64
	// IgnoreOutput compares how actions ended alone, not what they wrote or answered.
	IgnoreOutput bool
	// Mask is what is taken for equal in output, such as times.
	Mask []*regexp.Regexp
	// Keep leaves the fresh sandbox running.
	Keep bool
	// Step, where not nil, is called after each action.
	Step func(ReplayStep)
}

// ReplayStep is an action that was done again.
type ReplayStep struct {
	// Seq is of the entry with which it began.
	Seq     uint64
	Kind    dsecv1.TrajectoryKind
	Request *dsecv1.TrajectoryRequest
	// Original and Replayed are how long it took then and now.
	Original, Replayed time.Duration
}

// ReplayDifference is the first that a replay found.
type ReplayDifference struct {
	ReplayStep
	// What differs: outcome, error, stdout, stderr, output or answer.
	What string
	// Expected is of the trajectory; Got, of the replay. Of output they are the first
	// lines that differ.
	Expected, Got string
}

// Replay is what came of one.
type Replay struct {
	// Sandbox is the fresh one. It has ended, unless it was to be kept.
	Sandbox *Sandbox
	// Steps are the actions that were done again and compared.
	Steps int
	// Unended are those that were begun again, and whose end the trajectory does not have.
	Unended int
	// Skipped are entries of what is not repeated: pauses, packs, changes of state, and
	// calls that the server had refused to do.
	Skipped int
	// Original and Replayed are how long the steps took then and now, together.
	Original, Replayed time.Duration
	// Difference is nil where there was none.
	Difference *ReplayDifference
}

// Equal reports whether all that was replayed came to the same.
func (r *Replay) Equal() bool { return r.Difference == nil }

// Replay does again, in a fresh sandbox, what the sandbox's trajectory tells, up to the
// first action that comes to something else. What was done one after the other is done
// so; of what overlapped the begins keep their order. Where the trajectory does not hold
// what it takes to go on, because entries, inputs or outputs are gone, the error is
// outcome_unknown and names the entry; its Replay tells how far it came.
func (s *Sandbox) Replay(ctx context.Context, o ReplayOptions) (*Replay, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p, err := s.plan(ctx, o.Until)
	if err != nil {
		return nil, err
	}
	fresh, err := s.c.CreateSandbox(ctx, p.options(o))
	if err != nil {
		return nil, err
	}
	out := &Replay{Sandbox: fresh}
	if !o.Keep {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
			defer cancel()
			_ = fresh.Kill(ctx) // its lifetime ends it else
		}()
	}
	r := &replayer{
		of: s, to: fresh, o: o, plan: p, out: out, steps: make(map[uint64]*step), told: make(chan entryOrError),
		processes: make(map[uint64]uint64), sessions: make(map[string]string), written: make(map[uint64]*written),
	}
	r.context = ctx
	go r.follow()
	err = r.run()
	return out, err
}

// endTimeout bounds the kill of a sandbox that is not kept.
const endTimeout = 30 * time.Second

// plan is what is to be known of a trajectory before it is replayed.
type plan struct {
	spec dsec.Spec
	last uint64
	ends map[uint64]*end // by the entry with which the action began
}

// end is what is known of the end of an action.
type end struct {
	seq     uint64
	process uint64
	code    dsec.Code // of its error
	message string
	input   *dsecv1.TrajectoryOutput // without the bytes, unless they are all here
	marks   []*dsecv1.TrajectoryMark // of input
	// over: it ended with its sandbox, and by that.
	over bool
}

// plan reads the trajectory once. Of what overlapped the first must know of the last.
func (s *Sandbox) plan(ctx context.Context, until uint64) (*plan, error) {
	p := &plan{ends: make(map[uint64]*end)}
	made, begun, ended := false, uint64(0), false
	for e, err := range s.Trajectory(ctx, TrajectoryOptions{}) {
		if err != nil {
			return nil, err
		}
		if until > 0 && e.Seq > until {
			break
		}
		p.last = max(e.Seq, e.Gap.GetLastSeq())
		switch {
		case e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_CREATE && len(e.Spec) > 0 && !made:
			if err := json.Unmarshal(e.Spec, &p.spec); err != nil {
				return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "entry %d does not tell of what the sandbox was made: %v", e.Seq, err)
			}
			made = true
		case e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_STATE:
			ended = ended || dsec.State(e.State).Terminal()
		case e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN:
			begun = e.Seq
		case e.Phase == dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED:
			p.ends[e.BegunSeq] = &end{
				seq: e.Seq, process: e.ProcessId, code: dsec.Code(e.GetError().GetDetail().GetCode()), message: e.GetError().GetMessage(), input: e.Input, marks: e.Marks,
			}
		}
	}
	if !made {
		return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "entry 1 is to tell of what the sandbox was made, and does not")
	}
	for _, x := range p.ends {
		x.over = ended && x.seq > begun && (x.code == dsec.CodeConflict || x.code == dsec.CodeLost)
	}
	return p, nil
}

// options are those of the fresh sandbox. It belongs to no job: one may have ended.
func (p *plan) options(o ReplayOptions) SandboxOptions {
	out := SandboxOptions{
		Backend: p.spec.Kind, Layers: p.spec.Layers, Limits: p.spec.Limits, User: p.spec.User, Workdir: p.spec.Workdir, Labels: p.spec.Labels,
		IdleTimeout: cmp.Or(p.spec.IdleTimeout, Never), MaxLifetime: cmp.Or(p.spec.MaxLifetime, Never), IdleAction: p.spec.IdleAction,
		Env: make(map[string]string),
	}
	for _, kv := range p.spec.Env {
		k, v, _ := strings.Cut(kv, "=")
		out.Env[k] = v
	}
	if len(o.Layers) > 0 {
		out.Layers = o.Layers
	}
	return out
}

// replayer is a replay under way.
type replayer struct {
	of, to  *Sandbox
	o       ReplayOptions
	plan    *plan
	out     *Replay
	context context.Context

	steps map[uint64]*step // under way, by the entry with which the original began
	told  chan entryOrError
	seen  uint64 // the last entry that was told
	// What the original's names are in the fresh sandbox.
	processes map[uint64]uint64
	sessions  map[string]string
	written   map[uint64]*written // by the fresh sandbox's processes
	before    time.Time           // the time of the entry before
}

type entryOrError struct {
	entry *dsecv1.TrajectoryEntry
	err   error
}

// follow hands on what the fresh sandbox's own trajectory tells: there the replay is
// told of in the same words as the original.
func (r *replayer) follow() {
	for e, err := range r.to.Trajectory(r.context, TrajectoryOptions{Follow: true}) {
		select {
		case r.told <- entryOrError{e, err}:
		case <-r.context.Done():
			return
		}
	}
	select {
	case r.told <- entryOrError{err: dsec.Errorf(dsec.CodeLost, "sandbox %s ended in mid-replay", r.to.id)}:
	case <-r.context.Done():
	}
}

// run goes through the trajectory.
func (r *replayer) run() error {
	for e, err := range r.of.Trajectory(r.context, TrajectoryOptions{}) {
		if err != nil {
			return err
		}
		if e.Seq > r.plan.last {
			break
		}
		switch e.Phase {
		case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP:
			err = dsec.Errorf(dsec.CodeOutcomeUnknown, "entries %d to %d are gone (%s): what was done then cannot be replayed", e.Seq, e.Gap.GetLastSeq(), e.Gap.GetReason())
		case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN:
			err = r.begin(e)
		case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED:
			err = r.end(e)
		default:
			if e.Kind != dsecv1.TrajectoryKind_TRAJECTORY_KIND_CREATE {
				r.out.Skipped++
			}
		}
		if err != nil || r.out.Difference != nil {
			return err
		}
		r.before = e.Time.AsTime()
	}
	r.out.Unended += len(r.steps)
	return nil
}

// begin has an action begin, and returns once the fresh sandbox's trajectory says so.
func (r *replayer) begin(e *dsecv1.TrajectoryEntry) error {
	x := r.plan.ends[e.Seq]
	switch {
	case e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_PACK, x != nil && dsec.Codes[x.code].Retry:
		r.out.Skipped++
		return nil
	case x != nil && x.code.Platform() && !x.over:
		return dsec.Errorf(dsec.CodeOutcomeUnknown, "what came of entry %d the platform does not know (%s): it cannot be replayed", e.Seq, x.message)
	}
	st := &step{begun: e, end: x, action: fmt.Sprintf("replay-%d", e.Seq), done: make(chan error, 1), started: make(chan uint64, 1)}
	if err := r.load(st); err != nil {
		return err
	}
	do, err := r.calls(st)
	if err != nil {
		return err
	}
	r.pace(e)
	r.steps[e.Seq] = st
	go func() { st.done <- do(r.context) }()
	if e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_START {
		if err := r.await(st, beginTimeout, func() bool { return st.process > 0 || st.ended != nil }); err != nil {
			return err
		}
		r.written[st.process] = st.written
		if x != nil && x.process > 0 && st.process > 0 {
			r.processes[x.process] = st.process
		}
		return nil
	}
	return r.await(st, beginTimeout, func() bool { return st.seq > 0 })
}

// beginTimeout is how long an action may take to begin.
const beginTimeout = time.Minute

// end waits for the end of an action and compares it.
func (r *replayer) end(e *dsecv1.TrajectoryEntry) error {
	st := r.steps[e.BegunSeq]
	if st == nil {
		return nil // it was skipped
	}
	if st.end.over {
		delete(r.steps, e.BegunSeq)
		r.out.Unended++
		return nil
	}
	original := e.Duration.AsDuration()
	limit := time.Minute + 10*original
	if err := r.await(st, limit, func() bool { return st.ended != nil }); err != nil {
		return err
	}
	delete(r.steps, e.BegunSeq)
	r.out.Steps++
	done := st.told(original)
	r.out.Original += original
	r.out.Replayed += done.Replayed
	if r.o.Step != nil {
		r.o.Step(done)
	}
	d, err := r.compare(st, e)
	if d != nil {
		d.ReplayStep = done
		r.out.Difference = d
	}
	return err
}

// await takes in what the fresh sandbox's trajectory tells, until what is awaited was
// told, the step's call has failed, or so much time has gone by.
func (r *replayer) await(st *step, limit time.Duration, is func() bool) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for !is() && st.failed == nil && !st.late {
		select {
		case t := <-r.told:
			if t.err != nil {
				return t.err
			}
			r.take(t.entry)
		case st.process = <-st.started:
		case err := <-st.done:
			// Where it was begun, the trajectory tells how it ended.
			if err != nil && st.seq == 0 && !r.began(st) {
				st.failed = err
			}
			st.done = nil
		case <-timer.C:
			st.late = true
		case <-r.context.Done():
			return context.Cause(r.context)
		}
	}
	return nil
}
