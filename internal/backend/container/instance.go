package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/disk"
)

// instance is one sandbox.
type instance struct {
	b      *Backend
	id     dsec.SandboxID
	limits dsec.Limits
	layers []backend.Layer
	handle backend.Handle
	volume *disk.Volume // stays when it is removed: it knows when it was held

	done chan struct{} // closed when PID 1 ended, or was given up

	files  filesServer
	pauses pauses

	mu        sync.Mutex
	sh        *shell
	held      []backend.Layer // references to give back
	cpus      []int
	exit      backend.Exit
	killed    bool
	cause     string      // why this process ended it, where nobody asked for that
	hoarded   time.Time   // when its commands were last killed for what they kept in the kernel
	hoards    hoards      // what they kept there when that was last looked at
	forNode   []time.Time // when they were killed for what all sandboxes kept
	destroyed bool
	abandoned bool
}

var (
	_ backend.Instance = (*instance)(nil)
	_ backend.Grouper  = (*instance)(nil)
)

func (b *Backend) newInstance(id dsec.SandboxID, limits dsec.Limits, layers []backend.Layer) *instance {
	return &instance{b: b, id: id, limits: limits, layers: layers, done: make(chan struct{}), pauses: pauses{turn: make(chan struct{}, 1)}}
}

// handleVersion is the version of handle; N-1 is read too, once there is one.
const handleVersion = 1

// handle is what finds a container again.
type handle struct {
	Version int
	Slot    slot
	PID     int
	Inode   uint64 `json:",omitempty"` // of PID's pidfd, see process.inode
	Start   uint64 `json:",omitempty"` // of PID, see startTime; where the kernel has no such inodes
	Boot    string
	Group   string
	Limits  dsec.Limits
	Layers  []backend.Layer
	CPUs    []int `json:",omitempty"`
}

func (i *instance) makeHandle() error {
	inode, err := i.sh.proc.inode()
	if err != nil {
		return err
	}
	var start uint64
	if inode == 0 {
		if start, err = startTime(i.sh.proc.pid); err != nil {
			return err
		}
	}
	raw, err := json.Marshal(handle{
		Version: handleVersion, Slot: i.sh.slot, PID: i.sh.proc.pid, Inode: inode, Start: start, Boot: i.b.boot,
		Group: i.sh.group.Name(), Limits: i.limits, Layers: i.layers, CPUs: i.cpus,
	})
	i.handle = raw
	return err
}

// Handle implements backend.Instance.
func (i *instance) Handle() backend.Handle { return i.handle }

// Warm implements backend.Instance.
func (i *instance) Warm() bool { return i.sh.warm }

// Dial implements backend.Instance.
func (i *instance) Dial(ctx context.Context) (net.Conn, error) {
	return i.b.slots.dial(ctx, i.sh.slot)
}

// Client implements backend.Caller.
func (i *instance) Client() *chronusapi.Client { return i.sh.takeClient() }

// AddGroup implements backend.Grouper.
func (i *instance) AddGroup(ctx context.Context) error {
	c, err := i.sh.group.AddCommandGroup()
	if err != nil {
		return err
	}
	defer c.Close()
	client := chronusapi.NewClient(i.Dial)
	defer client.Close()
	return client.AddGroup(ctx, commandGroup(c))
}

// Usage implements backend.Instance.
func (i *instance) Usage(context.Context) (dsec.Usage, error) {
	u, err := i.sh.group.Usage()
	if err != nil {
		return u, err
	}
	u.Pids++ // chronus, which is outside of the limits
	d, err := i.volume.Usage()
	u.DiskBytes, u.DiskInodes, u.DiskLimit = d.Bytes, d.Inodes, i.limits.DiskBytes
	return u, err
}

// Done implements backend.Instance.
func (i *instance) Done() <-chan struct{} { return i.done }

// Exit implements backend.Instance.
func (i *instance) Exit() backend.Exit {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.exit
}

// watch closes Done when PID 1 ends.
func (i *instance) watch() {
	i.sh.proc.onEnd(func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.ended()
	})
}

// ended tells that PID 1 has ended, once. The caller holds the lock.
func (i *instance) ended() {
	select {
	case <-i.done:
		return
	default:
	}
	if i.abandoned {
		return
	}
	i.exit = backend.Exit{At: time.Now(), Reason: i.reason()}
	close(i.done)
}

func (i *instance) reason() string {
	if i.killed {
		return "killed"
	}
	if i.cause != "" {
		return i.cause
	}
	status, ok := i.sh.proc.status()
	switch {
	case ok && status.Signaled():
		return fmt.Sprintf("PID 1 was killed by signal %d (%s)", status.Signal(), unix.SignalName(status.Signal()))
	case ok:
		return fmt.Sprintf("PID 1 exited with status %d", status.ExitStatus())
	}
	return "PID 1 ended"
}

// Destroy implements backend.Instance.
func (i *instance) Destroy(ctx context.Context) error {
	i.mu.Lock()
	i.killed = true
	i.mu.Unlock()
	return i.destroy(ctx)
}

func (i *instance) destroy(ctx context.Context) error {
	i.pauses.interrupt()
	i.files.close()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.destroyed {
		return nil
	}
	if i.sh != nil {
		// The lock is not held while PID 1 dies: watch takes it.
		sh := i.sh
		i.mu.Unlock()
		err := sh.destroy(ctx, i.b)
		i.mu.Lock()
		if err != nil {
			return i.failed(err)
		}
		if i.destroyed { // by another caller meanwhile
			return nil
		}
		if sh.proc != nil {
			i.ended() // before this returns, however late watch is told
		}
	}
	// The claim first: what it names may be another's as soon as it is removed.
	i.b.crash("remove-claim")
	if i.sh != nil {
		if err := i.b.slots.disclaim(i.sh.slot); err != nil {
			return i.failed(err)
		}
	}
	i.b.crash("remove-volume")
	if i.volume != nil {
		if err := i.volume.Remove(ctx); err != nil {
			return i.failed(err)
		}
	}
	i.b.crash("remove-slot")
	if i.sh != nil {
		if err := i.b.slots.release(i.sh.slot); err != nil {
			return i.failed(err)
		}
		if i.sh.proc != nil {
			i.sh.proc.close()
		}
	}
	i.b.layers.release(i.held)
	i.held = nil
	i.b.cpus.release(i.cpus)
	i.cpus = nil
	i.destroyed = true
	i.b.forget(i.id, i)
	return nil
}

func (i *instance) failed(err error) error {
	i.b.log.Error("sandbox is not gone", "sandbox", i.id, "err", err)
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	return &dsec.Error{Code: dsec.CodeInternal, Message: "the sandbox could not be taken down whole", Err: err}
}

// abandon lets go of an instance that goes on without this backend.
func (i *instance) abandon() {
	i.files.abandon()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.abandoned = true
	if i.sh != nil && i.sh.proc != nil {
		i.sh.proc.close()
	}
}
