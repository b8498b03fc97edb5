package container

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// Probe implements backend.Backend. It makes a container without layers and
// takes it down again: whatever a host may lack, that shows it, and a list of
// things to look for would not. A good answer is kept.
func (b *Backend) Probe(ctx context.Context) (backend.Info, error) {
	b.probeMu.Lock()
	defer b.probeMu.Unlock()
	if b.probed.Available {
		return b.probed, nil
	}
	info := backend.Info{Kind: dsec.KindContainer}
	info.Features = []string{
		"userns", "seccomp", "idmapped-layers", "network:loopback",
		"cgroup:" + b.tree.Layout().String(), "disk-quota:" + b.disk.Driver(),
	}
	if b.disk.CountsInodes() {
		info.Features = append(info.Features, "inode-quota")
	}
	if b.devices != nil {
		info.Features = append(info.Features, "device-program")
	}
	if err := b.tryErofs(); err != nil {
		info.Notes = append(info.Notes, err.Error())
	}
	if err := b.tryOne(ctx); err != nil {
		if ctx.Err() != nil {
			return info, context.Cause(ctx)
		}
		info.Notes = append(info.Notes, "a container cannot be made: "+cause(err))
	}
	info.Available = len(info.Notes) == 0
	b.probed = info
	return info, nil
}

// tryErofs asks for the file system of layers, which loads its module.
func (b *Backend) tryErofs() error {
	fd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("the kernel has no EROFS: %w", err)
	}
	return unix.Close(fd)
}

func (b *Backend) tryOne(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("want root")
	}
	i, err := b.Create(ctx, backend.CreateRequest{
		ID: dsec.NewSandboxID("probe"),
		Spec: dsec.Spec{Kind: dsec.KindContainer, Limits: dsec.Limits{
			MilliCPU: 1000, MemoryBytes: 32 << 20, DiskBytes: 16 << 20, DiskInodes: 1024, Pids: 16,
		}},
	})
	if err != nil {
		return err
	}
	return i.Destroy(context.WithoutCancel(ctx))
}

// cause is what a typed error hides from users: a probe's reader is the operator.
func cause(err error) string {
	var e *dsec.Error
	if errors.As(err, &e) && e.Err != nil {
		return e.Message + ": " + e.Err.Error()
	}
	return err.Error()
}
