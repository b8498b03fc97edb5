package edge

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// What works in a sandbox is in its trajectory: an entry before it begins and one
// before its answer leaves. A call with an action ID is done once: a later one with
// the same ID gets what came of the first, or waits for it. A command that has one
// does not end with its caller, who may come back.

// Headers of a call, beside projectHeader.
const (
	callerHeader = "Dsec-Caller"    // who the apiserver authenticated
	actionHeader = "Dsec-Action-Id" // the caller's name for what is done
	syncHeader   = "Dsec-Sync"      // 1: the log is on the disk before the answer leaves

	// replayedHeader is of an answer that tells what came of an earlier call.
	replayedHeader = "Dsec-Replayed"
)

// origin is what a call's headers say of it.
type origin struct {
	caller string
	action string
	sync   bool
	mark   *replayed
}

func readOrigin(ctx context.Context, h http.Header) origin {
	o := origin{caller: h.Get(callerHeader), action: h.Get(actionHeader), sync: h.Get(syncHeader) == "1"}
	o.mark, _ = ctx.Value(replayedKey{}).(*replayed)
	return o
}

// replayed is what the answer of a call with an action ID is marked by.
type replayed struct {
	yes    bool
	header http.Header // of a stream, which is marked before anything is sent
}

type replayedKey struct{}

// markable has the answer of a call with an action ID be marked where it is one of an
// earlier call.
func markable(ctx context.Context, h http.Header) (context.Context, *replayed) {
	if h.Get(actionHeader) == "" {
		return ctx, nil
	}
	mark := new(replayed)
	return context.WithValue(ctx, replayedKey{}, mark), mark
}

// begin notes that a call begins, before it has any effect. Where its action ID is
// known already, earlier is what the log has of it, and nothing is to be done.
func (c *call) begin(kind dsecv1.TrajectoryKind, req proto.Message, what *dsecv1.TrajectoryRequest) (a *trajectory.Action, earlier *trajectory.Earlier, err error) {
	a, earlier, err = c.beginAside(kind, req, what)
	if earlier != nil && earlier.Ended == nil {
		earlier.Ended, err = c.await(earlier)
	}
	return a, earlier, err
}

// beginAside is begin that does not wait for an earlier action under way.
func (c *call) beginAside(kind dsecv1.TrajectoryKind, req proto.Message, what *dsecv1.TrajectoryRequest) (a *trajectory.Action, earlier *trajectory.Earlier, err error) {
	e := &dsecv1.TrajectoryEntry{Kind: kind, Caller: c.origin.caller, ActionId: c.origin.action, Request: what}
	if err := trajectory.Describe(e, req); err != nil {
		return nil, nil, err
	}
	a, earlier, err = c.e.trajectories.Begin(c.ctx, c.s.id, e)
	if err != nil {
		return nil, nil, err
	}
	if earlier != nil && c.origin.mark != nil {
		if c.origin.mark.yes = true; c.origin.mark.header != nil {
			c.origin.mark.header.Set(replayedHeader, "1")
		}
	}
	return a, earlier, nil
}

// await waits for the end of an action that is under way.
func (c *call) await(earlier *trajectory.Earlier) (*dsecv1.TrajectoryEntry, error) {
	select {
	case <-earlier.Action.Done():
	case <-c.ctx.Done():
		return nil, context.Cause(c.ctx)
	}
	now, err := c.e.trajectories.Lookup(c.ctx, c.s.id, c.origin.action)
	if err != nil {
		return nil, err
	}
	if now == nil || now.Ended == nil {
		return nil, dsec.Errorf(dsec.CodeUnavailable, "the action %q was not done after all: ask again", c.origin.action)
	}
	return now.Ended, nil
}

// finish notes how an action ended, and is to be called before its answer leaves.
// It returns what the caller is told: err, or why nothing may be told.
func (c *call) finish(a *trajectory.Action, e *dsecv1.TrajectoryEntry, err error) error {
	if err != nil {
		safe := apierr.Safe(err)
		e.Error = &dsecv1.TrajectoryError{Detail: apierr.Detail(safe), Message: safe.Error()}
	}
	nerr := a.End(e)
	if nerr == nil && c.origin.sync {
		// The log of a sandbox that the journal does not know would be dropped.
		nerr = errors.Join(c.e.journal.Sync(), c.e.trajectories.Sync(c.ctx))
	}
	if nerr != nil {
		c.e.log.Error("the end of an action is not in the log", "sandbox", c.s.id, "action", a.Seq, "err", nerr)
		if err == nil {
			return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "it was done, but what came of it could not be noted", Err: nerr}
		}
	}
	return err
}

// do does what a call with one answer asks for, and notes it. Where that was done
// before, out becomes what was answered then.
func (c *call) do(kind dsecv1.TrajectoryKind, req proto.Message, what *dsecv1.TrajectoryRequest, out proto.Message, f func() error) error {
	a, earlier, err := c.begin(kind, req, what)
	if err != nil {
		return err
	}
	if earlier != nil {
		return c.answerOf(earlier.Ended, out)
	}
	defer c.toTheEnd()()
	c.begun = a.Seq
	began := time.Now()
	err = c.told(began, f())
	e := new(dsecv1.TrajectoryEntry)
	if err == nil {
		e.Response, err = proto.Marshal(out)
		if len(e.Response) > maxResponse {
			a.Output(dsecv1.Stream_STREAM_UNSPECIFIED, e.Response)
			e.Response = nil
		}
	}
	return c.finish(a, e, err)
}

// toTheEnd has a call with an action ID go on where its caller leaves, until the
// returned function is called: what it did half of could not be told of as done.
func (c *call) toTheEnd() (back func()) {
	if c.origin.action == "" {
		return func() {}
	}
	before := c.ctx
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(before))
	stop := context.AfterFunc(c.e.closing, func() { cancel(context.Cause(c.e.closing)) })
	c.ctx = ctx
	return func() {
		stop()
		cancel(nil)
		c.ctx = before
	}
}

// maxResponse is the most bytes of an answer that are in its entry itself.
const maxResponse = 4 << 10

// answerOf makes out what an action was answered.
func (c *call) answerOf(e *dsecv1.TrajectoryEntry, out proto.Message) error {
	if err := errorOf(e); err != nil {
		return err
	}
	data := e.Response
	if e.Output.GetTotalBytes() > 0 {
		var err error
		if data, _, err = c.output(e); err != nil {
			return err
		}
	}
	return proto.Unmarshal(data, out)
}

// errorOf is what the caller of an action was told in place of an outcome.
func errorOf(e *dsecv1.TrajectoryEntry) error {
	if e.Error == nil {
		return nil
	}
	return apierr.FromDetail(e.Error.Detail, e.Error.Message)
}

// output is all that an action wrote: standard error apart. It is held until it is sent.
func (c *call) output(e *dsecv1.TrajectoryEntry) (stdout, stderr []byte, err error) {
	if n := e.Output.GetKeptBytes(); n > 0 {
		held := &c.e.output
		held.addAgain(c, n)
		context.AfterFunc(c.request, func() { held.release(c) })
	}
	err = c.pieces(e, func(p *dsecv1.TrajectoryOutputPiece) error {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if p.Stream == dsecv1.Stream_STREAM_STDERR {
			stderr = append(stderr, p.Data...)
		} else {
			stdout = append(stdout, p.Data...)
		}
		return nil
	})
	lost := e.Output.GetTotalBytes() - e.Output.GetKeptBytes()
	switch {
	case err != nil && c.ctx.Err() != nil:
		err = context.Cause(c.ctx)
	case err == nil && lost > 0:
		err = errNotKept(lost, e.Output.GapReason)
	}
	return stdout, stderr, err
}

func errNotKept(lost int64, reason string) error {
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "%d bytes of the action's output were not kept: %s", lost, reason)
}

func (c *call) pieces(e *dsecv1.TrajectoryEntry, f func(*dsecv1.TrajectoryOutputPiece) error) error {
	if e.Output == nil {
		return nil
	}
	return c.e.trajectories.Output(c.ctx, c.s.id, e.Seq, f)
}

// own is a call of the edge itself, which goes on where its caller leaves: it ends
// with the edge alone, and is no activity.
func (c *call) own() *call {
	o := &call{e: c.e, s: c.s, inst: c.inst, spec: c.spec, client: c.client, origin: c.origin, alone: true}
	o.ctx, o.cancel = context.WithCancelCause(context.WithoutCancel(c.ctx))
	o.stop = context.AfterFunc(c.e.closing, func() { o.cancel(context.Cause(c.e.closing)) })
	return o
}

// once runs f as long as it takes, and returns when it has, when the caller has left, or
// when all was told that he waits for.
func once[T any](c *call, f func(*call) (T, error), told <-chan struct{}) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	own := c.own()
	c.e.run(func() {
		defer own.end()
		v, err := f(own)
		done <- result{v, err}
	})
	var none T
	select {
	case r := <-done:
		return r.v, r.err
	case <-told:
		return none, nil
	case <-c.ctx.Done():
		return none, c.fail(context.Cause(c.ctx))
	}
}

// unfinished is an action that an earlier edge began and did not see the end of.
type unfinished struct {
	action *trajectory.Action
	begun  *dsecv1.TrajectoryEntry // nil where it cannot be read
}

// takeOverActions takes those of a sandbox in hand, so that who comes with their IDs
// waits for what is found.
func (e *Edge) takeOverActions(s *sandbox) (all []unfinished) {
	seqs, err := e.trajectories.Unfinished(s.id)
	for _, seq := range seqs {
		a, begun, rerr := e.trajectories.Resume(e.closing, s.id, seq)
		if rerr == nil {
			all = append(all, unfinished{a, begun})
		} else if dsec.CodeOf(rerr) != dsec.CodeConflict { // in hand already: it ends by itself
			err = errors.Join(err, rerr)
		}
	}
	if err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
		e.log.Warn("actions stay unfinished in the log", "sandbox", s.id, "err", err)
	}
	return all
}

// settleActions goes on with the commands that can be found again. Of all else it is not
// known whether it was done.
func (e *Edge) settleActions(s *sandbox, inst backend.Instance, all []unfinished) {
	for _, u := range all {
		if b := u.begun; b != nil && b.ActionId != "" && inst != nil &&
			(b.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC || b.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_START) {
			e.run(func() { e.goOnWith(s, inst, u.action, b.ActionId) })
			continue
		}
		if err := u.action.End(&dsecv1.TrajectoryEntry{Error: unknownEnd("the edge was restarted meanwhile")}); err != nil {
			e.log.Warn("an action stays unfinished in the log", "sandbox", s.id, "action", u.action.Seq, "err", err)
		}
	}
}

// goOnWith follows a command that an earlier edge has started, if it did.
func (e *Edge) goOnWith(s *sandbox, inst backend.Instance, a *trajectory.Action, id string) {
	s.mu.Lock()
	c := &call{e: e, s: s, inst: inst, spec: s.spec, client: chronusapi.NewClient(inst.Dial), origin: origin{action: id}, alone: true}
	s.mu.Unlock()
	c.ctx, c.cancel = context.WithCancelCause(e.closing)
	c.stop = func() bool { return false }
	defer c.end()
	defer c.client.Close()
	process, err := c.client.FindTag(c.ctx, a.Seq)
	switch {
	case err == nil && process > 0:
		if err := c.followOn(a, process, 0); err == nil || !c.closing() {
			c.forget(a.Seq)
		}
		return
	case err == nil:
		err = dsec.Errorf(dsec.CodeUnavailable, "the edge was restarted before the command was started")
	case c.closing():
		return // the next edge looks for it
	case dsec.CodeOf(err) != dsec.CodeOutcomeUnknown:
		err = &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the edge was restarted, and cannot find out whether the command was started", Err: err}
	}
	_ = c.finish(a, new(dsecv1.TrajectoryEntry), err)
}

func unknownEnd(why string) *dsecv1.TrajectoryError {
	err := dsec.Errorf(dsec.CodeOutcomeUnknown, "%s", why)
	return &dsecv1.TrajectoryError{Detail: apierr.Detail(err), Message: err.Error()}
}

// tell notes something that happens to a sandbox. A log that cannot be written does not
// keep it from happening.
func (e *Edge) tell(s *sandbox, entry *dsecv1.TrajectoryEntry) {
	if _, err := e.trajectories.Append(s.id, entry); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
		e.log.Warn("an event is not in the log", "sandbox", s.id, "kind", entry.Kind, "err", err)
	}
}

func (e *Edge) openTrajectories() error {
	opts := e.cfg.Trajectories
	opts.Dir, opts.Logger = filepath.Join(e.cfg.StateDir, "trajectories"), e.log
	var found trajectory.Recovery
	var err error
	if e.trajectories, found, err = trajectory.Open(opts); err != nil {
		return err
	}
	if found.Damaged > 0 || found.Unclaimed > 0 {
		e.log.Error("the trajectory log is damaged", "places", found.Damaged, "of nobody knows which sandboxes", found.Unclaimed)
	}
	return nil
}

// noteCreate notes that a sandbox was made. The caller holds s.mu.
func (e *Edge) noteCreate(s *sandbox, caller string) error {
	spec, err := json.Marshal(s.spec)
	if err != nil {
		return err
	}
	_, err = e.trajectories.Append(s.id, &dsecv1.TrajectoryEntry{
		Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_CREATE, Caller: caller, RequestDigest: s.digest, State: string(dsec.StateRunning), Spec: spec, Origin: s.origin,
	})
	return err
}

// noteEnd notes that a sandbox has ended, and with it all that was under way in it.
func (e *Edge) noteEnd(s *sandbox, end *dsecv1.TrajectoryEntry) {
	if s.err != nil {
		return // nobody was told of it
	}
	e.settleActions(s, nil, e.takeOverActions(s))
	e.tell(s, end)
	s.mu.Lock()
	s.noted = true
	s.mu.Unlock()
	e.run(func() { e.seal(s.id) })
}

// seal writes the trajectory of a sandbox that has ended to the store. What is cut off
// by the end of the edge the next one does.
func (e *Edge) seal(id dsec.SandboxID) {
	if e.cfg.Trajectories.Store == nil {
		return
	}
	ctx, cancel := context.WithTimeout(e.closing, sealTimeout)
	defer cancel()
	if err := e.trajectories.Seal(ctx, id); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound && e.closing.Err() == nil {
		e.log.Warn("a trajectory is not in the store yet", "sandbox", id, "err", err)
	}
}

// sealTimeout bounds one attempt to write a trajectory to the store.
const sealTimeout = 10 * time.Minute

// forgetTrajectory drops the log of a sandbox that nobody knows any more. What a crash
// keeps it from the next start does.
func (e *Edge) forgetTrajectory(id dsec.SandboxID) {
	e.run(func() {
		ctx, cancel := context.WithTimeout(e.closing, sealTimeout)
		defer cancel()
		if err := e.trajectories.Forget(ctx, id); err != nil && e.closing.Err() == nil {
			e.log.Warn("a trajectory is not removed", "sandbox", id, "err", err)
		}
	})
}

// tidyTrajectories drops the logs of sandboxes that the journal does not know, and seals
// those of sandboxes that have ended.
func (e *Edge) tidyTrajectories() {
	for _, id := range e.trajectories.Sandboxes() {
		e.mu.RLock()
		s := e.sandboxes[id]
		e.mu.RUnlock()
		if s == nil {
			e.forgetTrajectory(id)
		} else if !s.holds() {
			e.seal(id)
		}
	}
}
