package container

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// A sandbox is paused by the freezer of cgroup v2, which chronus does not see: so
// chronus is told before, and after, that time does not count. In between a mark is
// at the sandbox's group, by which the next edge finishes what a crash left half done.

var _ backend.Pauser = (*instance)(nil)

// pauses is the state of an instance's pauses.
type pauses struct {
	turn  chan struct{}                 // has one element while a method is at work
	paged bool                          // something may be in swap; of whoever has the turn
	back  atomic.Pointer[chan struct{}] // closed when it has come back; nil before the first time

	mu      sync.Mutex
	hurried int                     // callers who want what takes long to end
	stop    context.CancelCauseFunc // ends that; nil: there is nothing
}

// errHurried is why what takes long was ended.
var errHurried = dsec.Errorf(dsec.CodeConflict, "the sandbox was resumed, or ended, meanwhile")

// take waits for the turn. The caller gives it back by what is returned.
func (p *pauses) take(ctx context.Context) (give func(), err error) {
	select {
	case p.turn <- struct{}{}:
		return func() { <-p.turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// interrupt ends what takes long, and has nothing such begin until calm is called.
func (p *pauses) interrupt() (calm func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hurried++
	if p.stop != nil {
		p.stop(errHurried)
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.hurried--
	}
}

// takeNow is take of a caller for whom what takes long ends.
func (p *pauses) takeNow(ctx context.Context) (give func(), err error) {
	defer p.interrupt()()
	return p.take(ctx)
}

// begin returns a context for something that takes long, which interrupt ends. The
// caller has the turn.
func (p *pauses) begin(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hurried > 0 {
		cancel(errHurried)
	}
	p.stop = cancel
	return ctx, func() { cancel(nil) }
}

// Paused implements backend.Pauser.
func (i *instance) Paused() bool {
	sh := i.shell()
	if sh == nil {
		return false
	}
	frozen, err := sh.group.Frozen()
	return err == nil && frozen
}

// Pause implements backend.Pauser.
func (i *instance) Pause(ctx context.Context) error {
	sh := i.shell()
	if sh == nil {
		return errGone
	}
	give, err := i.pauses.takeNow(ctx) // pages may still be coming back
	if err != nil {
		return err
	}
	defer give()
	frozen, err := sh.group.Frozen()
	if err != nil {
		return err
	}
	return i.freeze(ctx, sh, frozen)
}

// freeze is stop, which is undone where it fails.
func (i *instance) freeze(ctx context.Context, sh *shell, frozen bool) error {
	err := i.stop(ctx, sh, frozen)
	if err != nil {
		if undo := i.goOn(context.WithoutCancel(ctx), sh); undo != nil && i.running() && !i.isKilled() {
			i.b.log.Error("a pause that failed is not undone", "sandbox", i.id, "err", undo)
		}
	}
	return err
}

func (i *instance) isKilled() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.killed
}

// stop freezes the sandbox. One that is frozen, or about to be, cannot be spoken to.
func (i *instance) stop(ctx context.Context, sh *shell, frozen bool) error {
	if err := i.files.pause(ctx); err != nil {
		return err
	}
	if !frozen {
		if err := sh.group.MarkPaused(true); err != nil {
			return err
		}
		i.b.crash("pause-hold")
		if err := i.tell(ctx, (*chronusapi.Client).Hold); err != nil {
			return err
		}
	}
	i.b.crash("pause-freeze")
	if err := sh.group.Freeze(ctx); err != nil {
		return err
	}
	i.b.crash("paused")
	return nil
}

// tell makes a call of chronus.
func (i *instance) tell(ctx context.Context, call func(*chronusapi.Client, context.Context) error) error {
	ctx, cancel := stepContext(ctx)
	defer cancel()
	defer i.sh.untilDead(&ctx)()
	client := chronusapi.NewClient(i.Dial)
	defer client.Close()
	err := call(client, ctx)
	if errors.Is(err, errDied) || errors.Is(err, errSlow) {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the sandbox does not answer", Err: err}
	}
	if err != nil && dsec.CodeOf(err) == dsec.CodeUnsupported {
		return &dsec.Error{Code: dsec.CodeUnsupported, Message: "the sandbox was made by an earlier version, which could not pause it", Err: err}
	}
	return err
}

// PageOut implements backend.Pauser.
func (i *instance) PageOut(ctx context.Context) (out backend.PagedOut, err error) {
	sh := i.shell()
	if sh == nil {
		return out, errGone
	}
	give, err := i.pauses.take(ctx)
	if err != nil {
		return out, err
	}
	defer give()
	frozen, err := sh.group.Frozen()
	if err == nil && !frozen {
		err = dsec.Errorf(dsec.CodeConflict, "sandbox %s is not paused", i.id)
	}
	if err != nil {
		return out, err
	}
	if out.Before, err = sh.group.Memory(); err != nil {
		return out, err
	}
	moved, err := sh.group.Swapped()
	if err != nil {
		return out, err
	}
	out.Before += moved
	ctx, cancel := i.pauses.begin(ctx)
	defer cancel()
	i.pauses.paged = true
	out.Reason, err = sh.group.PageOut(ctx, sh.proc.pid)
	out.After, _ = sh.group.Memory()
	return out, err
}

// Resume implements backend.Pauser.
func (i *instance) Resume(ctx context.Context) error {
	sh := i.shell()
	if sh == nil {
		return errGone
	}
	give, err := i.pauses.takeNow(ctx)
	if err != nil {
		return err
	}
	defer give()
	frozen, err := sh.group.Frozen()
	if err != nil || !frozen && !sh.group.MarkedPaused() {
		return err
	}
	if err := i.goOn(context.WithoutCancel(ctx), sh); err != nil {
		return err
	}
	i.prefetch(sh)
	return nil
}

// CameBack implements backend.Pauser.
func (i *instance) CameBack() <-chan struct{} {
	if back := i.pauses.back.Load(); back != nil {
		return *back
	}
	back := make(chan struct{})
	close(back)
	return back
}

// goOn has a sandbox go on that is paused, or is so by half. It may be done again.
func (i *instance) goOn(ctx context.Context, sh *shell) error {
	if err := sh.group.RestoreMemory(); err != nil {
		return err
	}
	i.b.crash("resume-thaw")
	if err := sh.group.Thaw(); err != nil {
		return err
	}
	i.files.goOn()
	i.b.crash("resume-release")
	// One that could not be held is not.
	if err := i.tell(ctx, (*chronusapi.Client).Release); err != nil && dsec.CodeOf(err) != dsec.CodeUnsupported {
		return err
	}
	i.b.crash("resumed")
	return sh.group.MarkPaused(false)
}

// prefetch has what is in swap read back while the sandbox runs. The caller has the turn.
func (i *instance) prefetch(sh *shell) {
	if !i.pauses.paged {
		return
	}
	i.pauses.paged = false
	i.b.mu.Lock()
	defer i.b.mu.Unlock()
	if i.b.closed {
		return // nothing begins any more
	}
	ctx, cancel := i.pauses.begin(i.b.watching)
	back := make(chan struct{})
	i.pauses.back.Store(&back)
	i.b.watches.Go(func() {
		defer close(back)
		defer cancel()
		if err := sh.group.Prefetch(ctx, sh.proc.pid); err != nil && ctx.Err() == nil && dsec.CodeOf(err) != dsec.CodeLost {
			i.b.log.Warn("memory of a resumed sandbox comes back as it is used", "sandbox", i.id, "err", err)
		}
	})
}

// recoverPause takes over what a pause has left: a sandbox that is frozen stays so,
// and one that is so by half goes on.
func (i *instance) recoverPause(ctx context.Context) {
	if i.Paused() {
		i.pauses.paged = true  // it may be
		_ = i.files.pause(ctx) // nothing is started
		return
	}
	if !i.sh.group.MarkedPaused() {
		return
	}
	if err := i.goOn(ctx, i.sh); err != nil {
		i.b.log.Error("a pause that was under way is not undone", "sandbox", i.id, "err", err)
	}
}
