package container

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// shell is a container that is nobody's yet: chronus runs, or is starting, in
// all its namespaces and serves the slot's socket.
type shell struct {
	mu      sync.Mutex // of destroy
	gone    bool       // destroyed
	slot    slot
	group   *cgroup.Group
	command *cgroup.CommandGroup // the first, until it is chronus's
	pending *starting            // of proc and userns, until the launcher has answered
	proc    *process
	userns  int // -1 once the root is composed
	client  *chronusapi.Client
	warm    bool
}

// newShell has a shell started. It waits neither for the launcher, see started,
// nor for chronus, see await.
func (b *Backend) newShell(ctx context.Context) (_ *shell, err error) {
	sh := &shell{userns: -1}
	b.crash("slot")
	if sh.slot, err = b.slots.acquire(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.discard(context.WithoutCancel(ctx), sh))
		}
	}()
	sh.client = chronusapi.NewClient(sh.dial(b))
	b.crash("listen")
	listener, err := b.slots.listen(sh.slot)
	if err != nil {
		return nil, err
	}
	defer unix.Close(listener)
	b.crash("group")
	if sh.group, err = b.tree.Acquire(ctx, int(sh.slot.base())); err != nil {
		return nil, err
	}
	dir, err := sh.group.Open()
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	b.crash("start")
	if sh.pending, err = b.launcher.startShell(ctx, sh.slot.base(), listener, dir); err != nil {
		return nil, err
	}
	b.crash("command")
	if sh.command, err = sh.group.AddCommandGroup(); err != nil {
		return nil, err
	}
	return sh, nil
}

// alive reports whether PID 1 of a shell that waits has not ended.
func (sh *shell) alive() bool {
	select {
	case <-sh.proc.done:
		return false
	default:
		return true
	}
}

// started waits until PID 1 is there.
func (sh *shell) started(ctx context.Context) (err error) {
	if sh.pending == nil {
		return nil
	}
	ctx, cancel := stepContext(ctx)
	defer cancel()
	sh.proc, sh.userns, err = sh.pending.wait(ctx)
	if sh.pending.answered || ctx.Err() == nil { // else destroy waits for it
		sh.pending = nil
	}
	return err
}

// await waits until chronus answers.
func (sh *shell) await(ctx context.Context) error {
	if err := sh.started(ctx); err != nil {
		return err
	}
	ctx, cancel := stepContext(ctx)
	defer cancel()
	defer sh.untilDead(&ctx)()
	if _, err := sh.client.Info(ctx); err != nil {
		return sh.explain(err)
	}
	return nil
}

func (sh *shell) dial(b *Backend) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return b.slots.dial(ctx, sh.slot) }
}

// takeClient gives what spoke to chronus until now to the one who speaks to it
// from here on.
func (sh *shell) takeClient() *chronusapi.Client {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	c := sh.client
	sh.client = nil
	return c
}

// untilDead cancels ctx when PID 1 ends, because its socket would otherwise be
// waited for until the deadline. The caller calls what it returns.
func (sh *shell) untilDead(ctx *context.Context) func() {
	watched, cancel := context.WithCancelCause(*ctx)
	*ctx = watched
	stop := sh.proc.onEnd(func() { cancel(errDied) })
	return func() { stop(); cancel(nil) }
}

var errDied = errors.New("PID 1 of the container ended before it was ready")

func (sh *shell) explain(err error) error {
	if errors.Is(err, errDied) {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the container could not be started", Err: err}
	}
	return err
}

// destroy frees all that a shell is made of. It returns nil only once nothing
// is left, and may be called again.
func (sh *shell) destroy(ctx context.Context, b *Backend) error {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.gone {
		return nil
	}
	if sh.client != nil {
		_ = sh.client.Close()
	}
	if err := sh.started(ctx); err != nil && sh.pending != nil {
		sh.pending.abandon() // what is started yet is killed with its group
		sh.pending = nil
	}
	if sh.userns >= 0 {
		_ = unix.Close(sh.userns)
		sh.userns = -1
	}
	if sh.command != nil {
		_ = sh.command.Close()
		sh.command = nil
	}
	b.crash("kill")
	if sh.group != nil {
		if err := sh.group.Kill(); err != nil {
			return fmt.Errorf("kill: %w", err)
		}
	}
	if sh.proc != nil {
		if err := sh.proc.kill(); err != nil {
			return fmt.Errorf("kill: %w", err)
		}
		if err := sh.waitKilled(ctx); err != nil {
			return err
		}
	}
	b.crash("remove-group")
	if sh.group != nil {
		if err := sh.group.Remove(ctx); err != nil {
			return fmt.Errorf("cgroups: %w", err)
		}
	}
	sh.gone = true
	return nil
}

// waitKilled waits for the end of a killed PID 1, which comes after that of all
// other processes. The error tells whether time was short or nothing goes on.
func (sh *shell) waitKilled(ctx context.Context) error {
	cancel := func() {}
	if sh.group != nil {
		ctx, cancel = sh.group.Ending(ctx)
	}
	defer cancel()
	err := sh.proc.wait(ctx)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cgroup.ErrStalled):
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "a process of the sandbox cannot be killed", Err: err}
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the processes of the sandbox are killed and have not all ended yet", Err: err}
}

// dropCommand closes the descriptors of the first command group, which chronus
// has now.
func (sh *shell) dropCommand() {
	_ = sh.command.Close()
	sh.command = nil
}
