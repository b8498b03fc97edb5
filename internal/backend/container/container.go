// Package container is the backend of kind container: sandboxes in namespaces
// of their own, made by a launcher process of ours.
//
// The words: a shell is a container that is not yet anybody's, in which chronus
// runs in all its namespaces and waits; a claim makes a shell a sandbox: it
// gets a root file system, limits and a name. A cold create makes a shell and
// claims it at once, a warm one claims a shell of the pool: there is one path.
// A spare is claimed ahead, for layers and limits that creates asked for lately;
// a create of that kind only gives it an ID.
// A slot is a number that stands for a directory of the run directory and for
// a range of user IDs. The platform is what all containers get of the host.
//
// Who owns what of a container, in the order in which it is made; it is taken
// down the other way round:
//
//	slot        a directory of RunDir, and with it 65,536 user IDs
//	group       its cgroups (internal/cgroup), found by the sandbox's ID
//	process     PID 1, and with it every namespace and mount: none of them is
//	            on the host, so nothing is unmounted
//	volume      the writable layer (internal/disk), found by the slot's claim
//	layers      references to the shared mounts of its images
//
// Nothing here resolves a path in a tree that a sandbox has shaped: see
// compose.go and chronus/setup.c for how a root is made.
package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/hostos"
)

// Config is what a Backend is made of.
type Config struct {
	// RunDir is for sockets and claims. It is made if missing, and belongs to one
	// Backend at a time; what is in it does not survive a boot.
	RunDir string
	// Disk is where the writable layers are.
	Disk disk.Options
	// Cgroup is the name of the tree of cgroups: "dsec".
	Cgroup string
	// CommandNamespaces has it done as where cgroup v2 is mounted with nsdelegate.
	CommandNamespaces bool
	// Exclusive refuses to share the tree with another process that has it so.
	Exclusive bool
	// Chronus is the path of the static chronus binary. Beside it, under the
	// same name with "-files", lies that of chronus-files.
	Chronus string
	// Launcher is the command of the launcher, whose process calls
	// LauncherMain: this binary with the argument "launcher".
	Launcher []string
	// Warm is how many containers are held ready, shells and spares together: 0
	// is none. Each takes about 1 MiB.
	Warm int
	// NetSlots is how many network namespaces, and Groups how many cgroups,
	// are held ready: 16 each.
	NetSlots int
	Groups   int
	// Crash, where set, is called with the name of each of CrashSteps and
	// PauseCrashSteps before that step. The crash suite kills the process there; nothing else sets it.
	Crash func(step string)
	// Debug lets chronus write to this process's stderr.
	Debug  bool
	Logger *slog.Logger

	hoards hoardBounds // 0: from what the host has
}

func (config Config) withDefaults() Config {
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	if config.Cgroup == "" {
		config.Cgroup = "dsec"
	}
	if config.NetSlots <= 0 {
		config.NetSlots = 16
	}
	config.NetSlots = min(config.NetSlots, maxNetSlots)
	if config.Groups <= 0 {
		config.Groups = 16
	}
	if config.hoards.growth <= 0 {
		config.hoards.growth = hoardLimit
	}
	if len(config.Launcher) == 0 {
		config.Launcher = []string{"/proc/self/exe", "launcher"}
	}
	return config
}

// stepTimeout bounds one step of making or taking down a container that has no
// deadline of its own.
const stepTimeout = 30 * time.Second

// errSlow is what a step ends with that took stepTimeout: not the end of a
// deadline that its caller has set.
var errSlow = &dsec.Error{Code: dsec.CodeUnavailable, Message: "the container was not ready after " + stepTimeout.String() + ", and was given up: the node is too busy, or hangs"}

// stepContext is the context of one such step.
func stepContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, stepTimeout, errSlow)
}

// Backend makes containers.
type Backend struct {
	config   Config
	log      *slog.Logger
	boot     string
	slots    *slots
	devices  *confine.Devices // nil where the kernel has no device programs
	tree     *cgroup.Tree
	disk     *disk.Store
	facts    *facts
	cpus     *cpus
	ns       *layerNS
	composer *composer
	layers   *layers
	launcher *launcher
	pool     *pool
	program  *program

	watching  context.Context // ends with the backend
	stopWatch context.CancelFunc
	watches   sync.WaitGroup // of what goes on until then

	probeMu sync.Mutex
	probed  backend.Info

	mu     sync.Mutex
	live   map[dsec.SandboxID]*instance
	closed bool
}

var _ backend.Backend = (*Backend)(nil)

// New opens the backend. Nothing is started before it is needed, but the pools
// begin to fill once Sweep was called. Its error is unsupported where the host
// lacks what containers need.
func New(config Config) (_ *Backend, err error) {
	config = config.withDefaults()
	b := &Backend{config: config, log: config.Logger.With("backend", "container"), live: map[dsec.SandboxID]*instance{}}
	defer func() {
		if err != nil {
			_ = b.free()
		}
	}()
	if b.boot, err = hostos.BootID(); err != nil {
		return nil, err
	}
	if err := b.config.hoards.fill(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(config.RunDir, 0o700); err != nil {
		return nil, err
	}
	state, err := mountState(config.RunDir)
	if err != nil {
		return nil, err
	}
	if b.slots, err = openSlots(state); err != nil {
		return nil, err
	}
	if b.program, err = newProgram(); err != nil {
		return nil, err
	}
	if b.cpus, err = newCPUs(); err != nil {
		return nil, err
	}
	if b.ns, err = openLayerNS(filepath.Join(state, "layers"), b.log); err != nil {
		return nil, fmt.Errorf("layer namespace: %w", err)
	}
	b.composer = &composer{ns: b.ns}
	b.layers = newLayers(b.ns, config.RunDir, config.Disk.Dir)
	options := cgroup.Options{Name: config.Cgroup, Exclusive: config.Exclusive, CommandNamespaces: config.CommandNamespaces, Pool: config.Groups, Log: b.log}
	// A sandbox cannot make device nodes, and finds none but ours: the program
	// stands behind that, where the kernel has such programs.
	switch b.devices, err = confine.NewDevices(); {
	case err == nil:
		options.Prepare = b.devices.Attach
	case !errors.Is(err, errors.ErrUnsupported):
		return nil, err
	}
	if b.tree, err = cgroup.Open(options); err != nil {
		return nil, err
	}
	if b.facts, err = newFacts(b.ns, b.cgroupMounts()); err != nil {
		return nil, err
	}
	if b.disk, err = disk.Open(config.Disk); err != nil {
		return nil, err
	}
	b.launcher = &launcher{
		argv:    config.Launcher,
		chronus: config.Chronus,
		log:     b.log,
		hello:   helloRequest{Cgroup: config.Cgroup, CommandNamespaces: b.tree.CommandNamespaces(), NetSlots: config.NetSlots, Debug: config.Debug},
	}
	b.pool = newPool(b, config.Warm)
	b.watching, b.stopWatch = context.WithCancel(context.Background())
	b.watches.Go(func() { b.watchHoards(b.watching) })
	return b, nil
}

// cgroupMounts are the mount points of a sandbox's cgroups, below /sys.
func (b *Backend) cgroupMounts() []string {
	var dirs []string
	for controller := range b.tree.Layout().V1 {
		dirs = append(dirs, "fs/cgroup/"+controller)
	}
	return dirs
}

// mountState makes the tmpfs of what must survive this process and not the
// boot: the slots, and the pin of the layers' namespace, which the kernel
// allows only below a mount that does not propagate. /run is a disk on some
// hosts, and a journal would cost a create half a millisecond.
func mountState(runDir string) (string, error) {
	dir := filepath.Join(runDir, "state")
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	var here, above unix.Stat_t
	if err := errors.Join(unix.Stat(dir, &here), unix.Stat(runDir, &above)); err != nil {
		return "", fmt.Errorf("%s: %w", dir, err)
	}
	if here.Dev == above.Dev {
		if err := unix.Mount("dsec", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=64m"); err != nil {
			return "", fmt.Errorf("%s: %w", dir, err)
		}
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		return "", fmt.Errorf("%s: %w", dir, err)
	}
	return dir, nil
}

// removeState lets the layers' namespace go, and with it their mounts.
func removeState(runDir string) error {
	dir := filepath.Join(runDir, "state")
	for _, path := range []string{filepath.Join(dir, "layers"), dir} {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Close implements backend.Backend. Where no container is left, nothing of the
// backend is.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil
	}
	b.closed = true
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	b.stopWatch()
	b.watches.Wait()
	err := b.pool.close(ctx)
	b.mu.Lock()
	for _, i := range b.live {
		i.abandon()
	}
	b.mu.Unlock()
	return errors.Join(err, b.free())
}

// free gives back what New has opened so far.
func (b *Backend) free() error {
	var errs []error
	if b.layers != nil {
		b.composer.closer.close()
		b.layers.close()
		b.ns.close()
	}
	if b.launcher != nil {
		b.launcher.close()
	}
	if b.tree != nil {
		errs = append(errs, b.tree.Close())
	}
	if b.devices != nil {
		errs = append(errs, b.devices.Close())
	}
	if b.disk != nil {
		errs = append(errs, b.disk.Close())
	}
	if b.facts != nil {
		b.facts.close()
	}
	if b.slots != nil {
		left, err := b.slots.list()
		errs = append(errs, err)
		if err == nil && len(left) == 0 {
			errs = append(errs, b.slots.remove(), removeState(b.config.RunDir))
			if b.tree != nil && b.config.Exclusive {
				// What is busy is for the next start, which finds it by its name.
				if err := b.tree.Destroy(); err != nil && !errors.Is(err, unix.EBUSY) {
					errs = append(errs, err)
				}
			}
		}
		b.slots.close()
	}
	return errors.Join(errs...)
}

// forget takes an instance that is destroyed out of the list.
func (b *Backend) forget(id dsec.SandboxID, i *instance) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.live[id] == i {
		delete(b.live, id)
	}
}

// add puts an instance into the list. Its error is a conflict where there is
// one of that ID.
func (b *Backend) add(id dsec.SandboxID, i *instance) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return dsec.Errorf(dsec.CodeUnavailable, "the container backend is closed")
	}
	if b.live[id] != nil {
		return dsec.Errorf(dsec.CodeConflict, "sandbox %s is there already", id)
	}
	b.live[id] = i
	return nil
}
