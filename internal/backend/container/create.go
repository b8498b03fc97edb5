package container

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/disk"
)

// CrashSteps are the names with which Config.Crash is called, each before its
// step: those of a create, of a destroy and of a sweep.
var CrashSteps = []string{
	"slot", "listen", "group", "start", "command", "volume", "claim-slot", "claim-group", "compose", "setup", "adopt-group", "adopt-slot", "handle",
	"kill", "remove-group", "remove-claim", "remove-volume", "remove-slot",
	"sweep-groups", "sweep-volumes", "sweep-slots",
}

// PauseCrashSteps are those of a pause, or of the standstill for a snapshot, and of a resume.
var PauseCrashSteps = []string{"pause-hold", "pause-freeze", "paused", "snapshot", "resume-thaw", "resume-release", "resumed"}

func (b *Backend) crash(step string) {
	if b.config.Crash != nil {
		b.config.Crash(step)
	}
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, req backend.CreateRequest) (_ backend.Instance, err error) {
	if err := b.check(req); err != nil {
		return nil, err
	}
	b.pool.calls.begin()
	defer b.pool.calls.end()
	i, sh := b.pool.take(req)
	if i == nil {
		i = b.newInstance(req.ID, req.Spec.Limits, req.Layers)
		i.sh = sh
	}
	defer func() {
		if err == nil {
			return
		}
		err = typed(err)
		if derr := i.destroy(context.WithoutCancel(ctx)); derr != nil {
			err = errors.Join(err, derr)
		}
	}()
	if err := b.add(req.ID, i); err != nil {
		return nil, err
	}
	if i.volume != nil {
		err = b.adopt(i, req.ID)
	} else {
		err = b.build(ctx, i)
	}
	if err != nil {
		return nil, err
	}
	b.crash("handle")
	if err := i.makeHandle(); err != nil {
		return nil, err
	}
	i.watch()
	return i, nil
}

// build makes all of an instance, of its shell if it has one.
func (b *Backend) build(ctx context.Context, i *instance) error {
	layers, held, err := b.layers.holdRoot(ctx, i.layers)
	if err != nil {
		return err
	}
	i.held = held
	if i.sh == nil {
		sh, err := b.newShell(ctx)
		i.mu.Lock() // others look at it already
		i.sh = sh
		i.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return b.claim(ctx, i, layers)
}

// check refuses what no container can be.
func (b *Backend) check(req backend.CreateRequest) error {
	if _, err := dsec.ParseSandboxID(string(req.ID)); err != nil {
		return err
	}
	if len(req.Layers) > dsec.MaxLayers {
		return dsec.Invalid("layers", "want at most %d layers, have %d", dsec.MaxLayers, len(req.Layers))
	}
	for _, l := range []struct {
		field string
		value int64
	}{
		{"limits.milli_cpu", req.Spec.Limits.MilliCPU},
		{"limits.memory_bytes", req.Spec.Limits.MemoryBytes},
		{"limits.disk_bytes", req.Spec.Limits.DiskBytes},
		{"limits.disk_inodes", req.Spec.Limits.DiskInodes},
		{"limits.pids", req.Spec.Limits.Pids},
	} {
		if l.value <= 0 {
			return dsec.Invalid(l.field, "want more than 0, have %d", l.value)
		}
	}
	return nil
}

// claim makes a shell the sandbox of i. What needs no process is done first:
// the launcher may still be at it.
func (b *Backend) claim(ctx context.Context, i *instance, layers lower) (err error) {
	sh := i.sh
	volume, err := b.makeVolume(ctx, i)
	if err != nil {
		return err
	}
	defer b.composer.closer.later(volume)
	b.crash("claim-slot")
	if err := b.slots.claim(sh.slot, claim{i.id, i.volume.Name()}); err != nil {
		return err
	}
	b.crash("claim-group")
	if err := sh.group.Claim(i.id, i.limits); err != nil {
		return err
	}
	mounts, err := b.mountsOf(i)
	defer func() {
		for _, m := range mounts {
			closeAll([]int{m.FD})
		}
	}()
	if err != nil {
		return err
	}
	if err := sh.started(ctx); err != nil {
		return err
	}
	b.crash("compose")
	root, err := b.composer.compose(layers, sh.userns, volume)
	if err != nil {
		return fmt.Errorf("root: %w", err)
	}
	defer unix.Close(root)
	_ = unix.Close(sh.userns)
	sh.userns = -1
	b.crash("setup")
	return b.setup(ctx, i, root, mounts)
}

// makeVolume makes the volume and returns a detached mount of it, which keeps
// the host's paths out of the sandbox's mountinfo.
func (b *Backend) makeVolume(ctx context.Context, i *instance) (_ int, err error) {
	base := i.sh.slot.base()
	b.crash("volume")
	if i.volume, err = b.disk.Create(ctx, disk.Request{
		Bytes: i.limits.DiskBytes, Inodes: i.limits.DiskInodes, UID: int(base), GID: int(base),
	}); err != nil {
		return -1, err
	}
	dir, err := i.volume.Open()
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	volume, err := cloneMount(dir, "", 0)
	if err != nil {
		return -1, fmt.Errorf("volume: %w", err)
	}
	return volume, nil
}

// hostname is every sandbox's: a program that runs again in another one, or in
// a fork, finds the same name.
const hostname = "sandbox"

// mountsOf makes the mounts that tell a sandbox its own limits.
func (b *Backend) mountsOf(i *instance) (mounts []chronusapi.Mount, err error) {
	if mounts, err = b.facts.mounts(b.cpus.count(i.limits.MilliCPU), i.limits.MemoryBytes); err != nil {
		return mounts, err
	}
	add := func(path string, make func() (int, error)) {
		if err != nil {
			return
		}
		var fd int
		if fd, err = make(); err == nil {
			mounts = append(mounts, chronusapi.Mount{FD: fd, Path: path})
		}
	}
	add("/dev/shm", func() (int, error) { return shmMount(i.limits.MemoryBytes, i.sh.slot.base()) })
	if err != nil {
		return mounts, err
	}
	dirs, err := i.sh.group.Dirs()
	for _, d := range dirs {
		add(cgroupPath(d), func() (int, error) {
			return cloneMount(d.FD, "", attrReadOnly|unix.MOUNT_ATTR_NOEXEC)
		})
		_ = unix.Close(d.FD)
	}
	return mounts, err
}

func cgroupPath(d cgroup.Dir) string {
	if d.Path == "." {
		return "/sys/fs/cgroup"
	}
	return "/sys/fs/cgroup/" + d.Path
}

// shmMount makes a /dev/shm that is as large as that of a machine with so much
// memory: half of it. What is in it counts as the sandbox's memory.
func shmMount(memory int64, base uint32) (int, error) {
	owner := strconv.FormatUint(uint64(base), 10)
	return newMount("tmpfs", attrPlain|unix.MOUNT_ATTR_NOEXEC,
		option{Key: "source", Value: "shm"}, option{Key: "mode", Value: "1777"},
		option{Key: "uid", Value: owner}, option{Key: "gid", Value: owner},
		option{Key: "size", Value: strconv.FormatInt(max(memory/2, 1<<20), 10)})
}

// setup hands everything to chronus, which becomes the sandbox's PID 1.
func (b *Backend) setup(ctx context.Context, i *instance, root int, mounts []chronusapi.Mount) error {
	ctx, cancel := stepContext(ctx)
	defer cancel()
	sh := i.sh
	defer sh.untilDead(&ctx)()
	i.cpus = b.cpus.take(b.cpus.count(i.limits.MilliCPU))
	keep := confine.KeepCaps
	if b.tree.CommandNamespaces() {
		keep |= 1 << unix.CAP_SYS_ADMIN // of chronus alone: no command has it after its exec
	}
	err := sh.client.Setup(ctx, chronusapi.SetupRequest{
		Root:        root,
		Move:        []string{"/proc", "/dev"},
		Mounts:      mounts,
		CPUs:        cpuMask(i.cpus),
		Hostname:    hostname,
		KeepCaps:    keep,
		Filter:      b.program.filter,
		ChildFilter: b.program.child,
		Rlimits:     b.program.rlimits,
		Groups:      []chronusapi.Group{commandGroup(sh.command)},
	})
	if err != nil {
		return sh.explain(err)
	}
	sh.dropCommand()
	return nil
}

func commandGroup(c *cgroup.CommandGroup) chronusapi.Group {
	g := chronusapi.Group{Dir: c.Dir, Procs: c.Join, Kill: c.Kill, Events: c.Events, OOM: c.OOM}
	if c.Dir < 0 {
		g.Procs = append([]int{c.Procs}, c.Join...)
	}
	return g
}

// program is what every setup carries and is made once.
type program struct {
	filter, child []byte
	rlimits       []chronusapi.Rlimit
}

func newProgram() (*program, error) {
	p := &program{filter: confine.Bytes(confine.Filter()), child: confine.Bytes(confine.ChildFilter())}
	limits, err := confine.Rlimits()
	for _, l := range limits {
		p.rlimits = append(p.rlimits, chronusapi.Rlimit{Resource: uint32(l.Resource), Soft: l.Soft, Hard: l.Hard})
	}
	return p, err
}

// typed makes err one that a user may see. Where the message of an error holds
// the text of its cause, which has the kernel's words and the host's paths, the
// user gets the code and the field alone; the rest is for the log. So it is with an
// internal one, unless it names what was asked for and cannot be had.
func typed(err error) error {
	const message = "the container could not be made"
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	var e *dsec.Error
	switch {
	case !errors.As(err, &e):
		return &dsec.Error{Code: dsec.CodeInternal, Message: message, Err: err}
	case e.Code == dsec.CodeInternal && e.Field == "" || e.Err != nil && strings.Contains(e.Message, e.Err.Error()):
		return &dsec.Error{Code: e.Code, Field: e.Field, Message: message, Err: err}
	}
	return err
}
