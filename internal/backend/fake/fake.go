// Package fake is a backend in memory: the control plane, the SDKs and the
// documentation are tested on it. Its sandboxes have a file system, a few
// programs and a small shell, and behave at Dial as real ones do: the same
// protocol, outcomes, spools and errors. An idle one holds no goroutine, so
// that thousands are cheap.
//
// The words: a World holds instances and outlives the Backend that made them,
// as the processes of real sandboxes outlive an edge; a program is a function
// that runs as a command.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// Options of a Backend. The functions, where set, are called before the thing
// they are named after is done; their error is returned in its place.
type Options struct {
	// World holds the instances; nil makes a new one.
	World *World
	// Kind that the backend gives out; empty is dsec.KindFake.
	Kind dsec.Kind
	// Groups, where positive, is how many commands an instance can run at once
	// before it asks for one more group.
	Groups int
	// Warm makes instances tell that they came from a pool.
	Warm bool

	OnCreate  func(ctx context.Context, req backend.CreateRequest) error
	OnRecover func(id dsec.SandboxID) error
	OnSweep   func(keep map[dsec.SandboxID]bool) error
	OnDial    func(id dsec.SandboxID) error
	OnDestroy func(ctx context.Context, id dsec.SandboxID) error
	OnProbe   func() error
	OnPause   func(ctx context.Context, id dsec.SandboxID) error
	OnResume  func(ctx context.Context, id dsec.SandboxID) error
	// OnSnapshot is called before it is taken.
	OnSnapshot func(ctx context.Context, id dsec.SandboxID) error
	// CameBack, where set, is called in its place.
	CameBack func(id dsec.SandboxID) <-chan struct{}
	// OnPageOut, where set, is called in its place.
	OnPageOut func(ctx context.Context, id dsec.SandboxID) (backend.PagedOut, error)

	// DiskStarved, where set, is what the backend says of the disk that its
	// instances share, and DiskMost, where positive, the most of it for one.
	DiskStarved func(from, until time.Time) bool
	DiskMost    int64

	// KilledForNode, where set, is what an instance says of that.
	KilledForNode func(from, until time.Time) bool
}

// World holds the instances of one host.
type World struct {
	mu        sync.Mutex
	instances map[dsec.SandboxID]*machine
	copies    map[string]bool // directories with what sandboxes had written
}

// NewWorld makes an empty world.
func NewWorld() *World {
	return &World{instances: make(map[dsec.SandboxID]*machine), copies: make(map[string]bool)}
}

// IDs lists the instances that exist, dead ones that were not destroyed too.
func (w *World) IDs() map[dsec.SandboxID]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := make(map[dsec.SandboxID]bool, len(w.instances))
	for id := range w.instances {
		ids[id] = true
	}
	return ids
}

// Paused reports whether the instance is.
func (w *World) Paused(id dsec.SandboxID) bool {
	w.mu.Lock()
	m := w.instances[id]
	w.mu.Unlock()
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pause.over != nil
}

// Kill ends the instance's PID 1, as a crash of it would.
func (w *World) Kill(id dsec.SandboxID, reason string) {
	w.mu.Lock()
	m := w.instances[id]
	w.mu.Unlock()
	if m != nil {
		m.die(reason)
	}
}

func (w *World) remove(id dsec.SandboxID) {
	w.mu.Lock()
	delete(w.instances, id)
	w.mu.Unlock()
}

// Backend makes instances in a World.
type Backend struct {
	opts  Options
	world *World
}

// New makes a backend.
func New(opts Options) *Backend {
	if opts.World == nil {
		opts.World = NewWorld()
	}
	if opts.Kind == "" {
		opts.Kind = dsec.KindFake
	}
	return &Backend{opts: opts, world: opts.World}
}

// World returns the world that the backend's instances are in.
func (b *Backend) World() *World { return b.world }

var (
	_ backend.DiskSharer = (*Backend)(nil)
	_ backend.DiskUser   = (*Instance)(nil)
)

// DiskSpace implements backend.DiskSharer: memory is not shared by a limit.
func (b *Backend) DiskSpace() (space backend.DiskSpace, ok bool, err error) { return }

// DiskMost implements backend.DiskSharer.
func (b *Backend) DiskMost() (int64, bool) { return b.opts.DiskMost, b.opts.DiskMost > 0 }

// Probe implements backend.Backend.
func (b *Backend) Probe(context.Context) (backend.Info, error) {
	if b.opts.OnProbe != nil {
		if err := b.opts.OnProbe(); err != nil {
			return backend.Info{Kind: b.opts.Kind}, err
		}
	}
	return backend.Info{
		Kind: b.opts.Kind, Available: true,
		Notes:    []string{"in memory: runs a few built-in programs, isolates nothing, ignores layers"},
		Features: []string{"disk-quota:memory"},
	}, nil
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, req backend.CreateRequest) (backend.Instance, error) {
	if b.opts.OnCreate != nil {
		if err := b.opts.OnCreate(ctx, req); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, dsec.Errorf(dsec.CodeUnavailable, "create was given up")
	}
	m := &machine{id: req.ID, limits: req.Spec.Limits, world: b.world, done: make(chan struct{}), groups: b.opts.Groups, limited: b.opts.Groups > 0}
	b.world.mu.Lock()
	defer b.world.mu.Unlock()
	if b.world.instances[req.ID] != nil {
		return nil, dsec.Errorf(dsec.CodeConflict, "sandbox %s exists", req.ID)
	}
	b.world.instances[req.ID] = m
	return &Instance{machine: m, b: b}, nil
}

// DiskStarved implements backend.DiskUser.
func (i *Instance) DiskStarved(from, until time.Time) bool {
	return i.b.opts.DiskStarved != nil && i.b.opts.DiskStarved(from, until)
}

// KilledForNode implements backend.NodeUser.
func (i *Instance) KilledForNode(from, until time.Time) bool {
	return i.b.opts.KilledForNode != nil && i.b.opts.KilledForNode(from, until)
}

// handle is what Recover needs.
type handle struct {
	Version int            `json:"v"`
	ID      dsec.SandboxID `json:"id"`
}

// Recover implements backend.Backend.
func (b *Backend) Recover(_ context.Context, id dsec.SandboxID, h backend.Handle) (backend.Instance, error) {
	if b.opts.OnRecover != nil {
		if err := b.opts.OnRecover(id); err != nil {
			return nil, err
		}
	}
	var got handle
	if err := json.Unmarshal(h, &got); err != nil || got.Version != 1 || got.ID != id {
		return nil, dsec.Errorf(dsec.CodeLost, "sandbox %s: handle of another kind or version", id)
	}
	b.world.mu.Lock()
	m := b.world.instances[id]
	b.world.mu.Unlock()
	if m == nil || m.dead() {
		return nil, dsec.Errorf(dsec.CodeLost, "sandbox %s ended while no edge watched it", id)
	}
	return &Instance{machine: m, b: b}, nil
}

// Sweep implements backend.Backend.
func (b *Backend) Sweep(ctx context.Context, keep map[dsec.SandboxID]bool) error {
	if b.opts.OnSweep != nil {
		if err := b.opts.OnSweep(keep); err != nil {
			return err
		}
	}
	for id := range b.world.IDs() {
		if !keep[id] {
			b.world.Kill(id, "swept")
			b.world.remove(id)
		}
	}
	return errors.Join(b.world.removeCopies(), ctx.Err())
}

// Close implements backend.Backend.
func (b *Backend) Close() error { return nil }

// machine is the part of an instance that outlives its Backend.
type machine struct {
	id     dsec.SandboxID
	limits dsec.Limits
	world  *World
	done   chan struct{}

	mu      sync.Mutex
	exit    backend.Exit
	limited bool // commands need groups
	groups  int  // free ones
	chronus *chronus
	pause   standstill
}

func (m *machine) dead() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

// die ends PID 1 and with it every process.
func (m *machine) die(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead() {
		return
	}
	m.exit = backend.Exit{At: time.Now(), Reason: reason}
	close(m.done)
	if m.chronus != nil {
		m.chronus.killAll()
	}
}

// service returns the machine's chronus, which is made at the first need.
func (m *machine) service() *chronus {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.chronus == nil {
		m.chronus = newChronus(m)
	}
	return m.chronus
}

// Instance is one sandbox in memory. It is a backend.Instance and a
// backend.Grouper.
type Instance struct {
	*machine
	b *Backend
}

// Handle implements backend.Instance.
func (i *Instance) Handle() backend.Handle {
	b, err := json.Marshal(handle{Version: 1, ID: i.id})
	if err != nil {
		panic(err) // two plain fields
	}
	return backend.Handle(b)
}

// Warm implements backend.Instance.
func (i *Instance) Warm() bool { return i.b.opts.Warm }

// Dial implements backend.Instance. The connection is served by a goroutine
// until either end closes it.
func (i *Instance) Dial(context.Context) (net.Conn, error) {
	if i.b.opts.OnDial != nil {
		if err := i.b.opts.OnDial(i.id); err != nil {
			return nil, err
		}
	}
	if i.dead() {
		return nil, dsec.Errorf(dsec.CodeUnavailable, "sandbox %s has ended", i.id)
	}
	client, server := net.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		// The error is the peer's going away in mid-call.
		_ = chronusapi.Serve(ctx, standingConn{server, i.machine}, i.service())
	}()
	go func() {
		defer cancel()
		select {
		case <-i.done:
		case <-served:
		}
	}()
	return client, nil
}

// Usage implements backend.Instance.
func (i *Instance) Usage(context.Context) (dsec.Usage, error) {
	u := dsec.Usage{
		MemoryLimit: i.limits.MemoryBytes, DiskLimit: i.limits.DiskBytes,
		PidsLimit: i.limits.Pids, MilliCPU: i.limits.MilliCPU, Pids: 1,
	}
	i.mu.Lock()
	c := i.chronus
	i.mu.Unlock()
	if c != nil {
		u.DiskBytes, u.DiskInodes = c.fs.usage()
		u.Pids += int64(c.running())
	}
	return u, nil
}

// Done implements backend.Instance.
func (i *Instance) Done() <-chan struct{} { return i.done }

// Exit implements backend.Instance.
func (i *Instance) Exit() backend.Exit {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.exit
}

// Destroy implements backend.Instance.
func (i *Instance) Destroy(ctx context.Context) error {
	if i.b.opts.OnDestroy != nil {
		if err := i.b.opts.OnDestroy(ctx, i.id); err != nil {
			return err
		}
	}
	i.die("killed")
	i.world.remove(i.id)
	return nil
}

// AddGroup implements backend.Grouper.
func (i *Instance) AddGroup(context.Context) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.groups++
	return nil
}
