package container

import (
	"context"
	"encoding/json"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// Recover implements backend.Backend.
func (b *Backend) Recover(ctx context.Context, id dsec.SandboxID, raw backend.Handle) (_ backend.Instance, err error) {
	var h handle
	if err := json.Unmarshal(raw, &h); err != nil || h.Version != handleVersion {
		return nil, &dsec.Error{Code: dsec.CodeLost, Message: "the record of the sandbox cannot be read", Err: err}
	}
	if h.Boot != b.boot {
		return nil, dsec.Errorf(dsec.CodeLost, "the node was restarted while the sandbox ran")
	}
	claim, err := b.slots.claimed(h.Slot)
	if err != nil {
		return nil, err
	}
	if claim.id != id {
		return nil, dsec.Errorf(dsec.CodeLost, "the sandbox is gone")
	}
	proc, err := reopen(&h)
	if err != nil {
		return nil, err
	}
	i := b.newInstance(id, h.Limits, h.Layers)
	i.handle = raw
	i.sh = &shell{slot: h.Slot, userns: -1, proc: proc}
	i.sh.client = chronusapi.NewClient(i.sh.dial(b))
	defer func() {
		if err != nil {
			proc.close()
		}
	}()
	if i.sh.group, err = b.tree.Attach(h.Group, id, int(h.Slot.base()), h.Limits); err != nil {
		return nil, err
	}
	if i.volume, err = b.disk.Recover(claim.volume, h.Limits.DiskBytes); err != nil {
		return nil, err
	}
	if err := b.add(id, i); err != nil {
		return nil, err
	}
	// The sandbox has its layers whatever happens here; a reference keeps the
	// next create from making a second copy of their page cache.
	if _, err := b.layers.hold(ctx, h.Layers); err != nil {
		b.log.Warn("layers of a recovered sandbox", "sandbox", id, "err", err)
	} else {
		i.held = h.Layers
	}
	i.cpus = h.CPUs
	b.cpus.restore(i.cpus)
	i.watch()
	i.recoverPause(ctx)
	return i, nil
}

// reopen finds a process again. Its error is lost where that has ended.
func reopen(h *handle) (*process, error) {
	pidfd, err := unix.PidfdOpen(h.PID, 0)
	if err != nil {
		return nil, &dsec.Error{Code: dsec.CodeLost, Message: "PID 1 of the sandbox has ended", Err: err}
	}
	// Only now is the PID kept from being another process's, so that what it
	// says of itself is of the process that is held.
	if same, err := h.isProcess(pidfd); !same || ended(uintptr(pidfd)) {
		_ = unix.Close(pidfd)
		return nil, &dsec.Error{Code: dsec.CodeLost, Message: "PID 1 of the sandbox has ended", Err: err}
	}
	return newProcess(h.PID, pidfd)
}

func (h *handle) isProcess(pidfd int) (bool, error) {
	if h.Inode != 0 {
		inode, err := pidfdInode(pidfd)
		return inode == h.Inode, err
	}
	start, err := startTime(h.PID)
	return err == nil && start == h.Start, err
}

// Sweep implements backend.Backend. It works from what is there, not from what
// the last run meant to do, so that it may be interrupted and repeated.
func (b *Backend) Sweep(ctx context.Context, keep map[dsec.SandboxID]bool) error {
	// Processes first: what they use cannot be freed while they live. Each was
	// born in its cgroup, so that no crash leaves one elsewhere.
	b.crash("sweep-groups")
	if err := b.tree.Sweep(ctx, keep); err != nil {
		return err
	}
	all, err := b.slots.list()
	if err != nil {
		return err
	}
	volumes := map[string]bool{}
	var free []slot
	for _, n := range all {
		claim, err := b.slots.claimed(n)
		if err != nil {
			return err
		}
		if keep[claim.id] {
			volumes[claim.volume] = true
		} else {
			free = append(free, n)
		}
	}
	b.crash("sweep-volumes")
	if err := b.disk.Sweep(ctx, volumes); err != nil {
		return err
	}
	b.crash("sweep-slots")
	var errs []error
	for _, n := range free {
		errs = append(errs, b.slots.release(n))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	b.pool.start()
	return nil
}
