// Package backend is the contract between an edge and what makes machines.
//
// The words: a backend makes instances; an instance is an isolated machine
// with chronus as its PID 1; a handle is all that a backend needs to find its
// instance again after the edge was restarted, opaque to the edge, which
// stores it.
//
// A backend's job ends at Dial. Commands, files and terminals go through
// chronus and are the same on every kind. What differs between backends is
// data, in Info, or an optional interface, found by assertion: Grouper, Caller,
// FileServer, Pauser, Snapshotter, DiskSharer, DiskUser and NodeUser here, later Resizer, Reclaimer and Displayer. A backend never
// implements a method to say "not supported".
//
// A life, as the edge drives it:
//
//	inst, err := b.Create(ctx, req)   // the edge wrote "creating id" to its journal before
//	journal.Handle(id, inst.Handle())
//	conn, err := inst.Dial(ctx)       // speaks chronusapi
//	...                               // the edge dies here; a new one starts
//	inst, err = b.Recover(ctx, id, h) // the same instance, its processes untouched
//	<-inst.Done()                     // PID 1 ended, for whatever reason
//	inst.Destroy(ctx)                 // any time, any goroutine, any number of times
//
// What a crash between Create's first effect and the journaled handle left
// behind is found by ID: every object that a backend makes leads to the
// sandbox's ID by itself or by another that does, and Sweep removes those of IDs not in the list.
package backend

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// Handle finds an instance again. It is small, and versioned by its backend.
type Handle json.RawMessage

// Info is what a backend offers on this host.
type Info struct {
	Kind dsec.Kind
	// Available is false where the host cannot run it; Notes say why not, to
	// the operator: they may name paths of the host.
	Available bool
	Notes     []string
	// Features names what is in force: seccomp, userns, disk-quota:btrfs, ...
	Features []string
}

// CreateRequest is a Spec with everything resolved.
type CreateRequest struct {
	ID   dsec.SandboxID
	Spec dsec.Spec
	// Layers are of the node's layer store, lowest first; the
	// edge holds a reference to each until the instance is destroyed.
	Layers []Layer
}

// Layer is one immutable layer of the node's store.
type Layer struct {
	Digest string // sha256:<hex>
	// Open opens what it is mounted from. It is called where the layer is not mounted.
	Open func(context.Context) (Devices, error) `json:"-"`
	// Release is called, where it is set, when what Open gave is not mounted any more.
	Release func() `json:"-"`
}

// Devices are what a layer is mounted from: an EROFS image, and after it the
// image's other device where it has one. Whoever gets them closes them.
type Devices struct {
	Files []*os.File
	// OnRead: the kernel has the last file filled when it is read as a file. A loop
	// device of it would read the holes.
	OnRead bool
}

// Close closes the files.
func (d Devices) Close() {
	for _, f := range d.Files {
		_ = f.Close()
	}
}

// LayerDropper is a backend that keeps layers mounted that no instance uses.
type LayerDropper interface {
	// DropLayer unmounts a layer: nothing of it can be read any more when it
	// returns. The error is conflict while an instance uses it.
	DropLayer(ctx context.Context, digest string) error
}

// FileLayer is a layer whose image is one file.
func FileLayer(digest, path string) Layer {
	return Layer{Digest: digest, Open: func(context.Context) (Devices, error) {
		f, err := os.Open(path)
		if err != nil {
			return Devices{}, err
		}
		return Devices{Files: []*os.File{f}}, nil
	}}
}

// Backend makes instances of one kind.
type Backend interface {
	// Probe tells what this host can do. It leaves nothing behind.
	Probe(ctx context.Context) (Info, error)
	// Create returns when chronus answers. On error nothing is left behind.
	// The request's Limits and Layers are filled in; errors are *dsec.Error.
	Create(ctx context.Context, req CreateRequest) (Instance, error)
	// Recover takes an instance over after a restart of the edge. Its error
	// has code lost where the instance died meanwhile; Sweep then frees the rest.
	Recover(ctx context.Context, id dsec.SandboxID, h Handle) (Instance, error)
	// Sweep removes every object of sandboxes that are not in keep, whatever
	// state a crash left them in. It is called once before the first Create.
	Sweep(ctx context.Context, keep map[dsec.SandboxID]bool) error
	// Close frees what the backend holds ready. Running instances go on.
	Close() error
}

// Instance is one isolated machine.
type Instance interface {
	Handle() Handle
	// Warm reports whether it was made from the pool.
	Warm() bool
	// Dial opens a connection to chronus.
	Dial(ctx context.Context) (net.Conn, error)
	Usage(ctx context.Context) (dsec.Usage, error)
	// Done is closed when PID 1 ended.
	Done() <-chan struct{}
	// Exit tells how PID 1 ended; valid after Done.
	Exit() Exit
	// Destroy ends every process and frees every object. It returns nil only
	// once nothing is left, which on a busy host may take minutes, and an error
	// once nothing goes on any more, or ctx ends. Safe at any time, from any
	// goroutine, repeatedly.
	Destroy(ctx context.Context) error
}

// Exit tells how an instance ended.
type Exit struct {
	At     time.Time
	Reason string // for people: "killed", "PID 1 exited with status 2"
}

// Grouper is implemented by instances whose commands each run in a control
// group of their own that only the host can make. chronus asks for one more by
// answering a start with chronusapi.ErrNeedGroup.
type Grouper interface {
	// AddGroup makes one group and hands it to chronus. Its error is exhausted
	// at the limit.
	AddGroup(ctx context.Context) error
}

// Caller is implemented by instances that have spoken to chronus while they
// were made and can hand over the connection.
type Caller interface {
	// Client returns a client, which is the caller's to close, or nil where there is none (any more).
	Client() *chronusapi.Client
}

// FileServer is implemented by instances whose files are served by another process
// than chronus: calls for files are made to it, all others to chronus.
type FileServer interface {
	// DialFiles opens a connection for calls for files.
	DialFiles(ctx context.Context) (net.Conn, error)
	// FilesStarved reports whether what served them was killed since then for want
	// of memory that the sandbox itself has used up.
	FilesStarved(since time.Time) bool
}

// DiskSpace tells how full a disk is, in bytes.
type DiskSpace struct {
	Size int64
	Used int64
	// Allocated is what of Size is set apart for some use, used or not.
	Allocated int64
	// Free is what can still be written.
	Free int64
}

// DiskSharer is implemented by backends whose instances share a disk that may be
// full although none of them has reached its own limit.
type DiskSharer interface {
	// DiskSpace tells how full that disk is. ok is false where there is none.
	DiskSpace() (space DiskSpace, ok bool, err error)
	// DiskMost is the most that the limit of one instance can be there. ok is false
	// where there is no bound.
	DiskMost() (bytes int64, ok bool)
}

// DiskUser is implemented by the instances of a DiskSharer.
type DiskUser interface {
	// DiskStarved reports whether that disk had no room for the instance at some time
	// between two, though the instance was below its own limit: what failed then may
	// have failed for that. It may say so of times around it, too. It knows of an
	// instance that has ended as well.
	DiskStarved(from, until time.Time) bool
}

// Pauser is implemented by instances whose processes can be stopped where they are
// and go on later. Calls of chronus that are made meanwhile wait, as long as their
// contexts do, and streams stand still. It may be called from any goroutine; a
// Destroy waits for none of its methods, and works at any time.
type Pauser interface {
	// Paused reports whether it is paused, as one may be that Recover took over.
	Paused() bool
	// Pause stops every process where it is. Time that passes until Resume counts for
	// no timeout of a command. On error, which is unavailable where a process cannot be
	// stopped now, and unsupported where the instance is of an older version, nothing has
	// changed. A paused one stays so.
	Pause(ctx context.Context) error
	// PageOut has what the paused instance has in memory written into the host's swap.
	// It may be given up at any time by ctx, and is by Resume; what was moved by then is
	// told, and does no harm. Its error is conflict where the instance is not paused.
	PageOut(ctx context.Context) (PagedOut, error)
	// Resume has all go on where it was; what is in swap comes back meanwhile. One that
	// is not paused stays so. Once it begins to go on, ctx does not end that.
	Resume(ctx context.Context) error
	// CameBack is closed once what was in swap at the last Resume is in memory, or comes
	// only when it is used.
	CameBack() <-chan struct{}
}

// PagedOut tells what PageOut did.
type PagedOut struct {
	// Before and After are how many bytes of memory the instance had; Before counts what
	// an earlier PageOut had moved, too.
	Before, After int64
	// Reason tells, for people, why nothing or not all could be moved; empty: what
	// could be was.
	Reason string
}

// Snapshotter is implemented by instances of which can be told what was written over
// their layers.
type Snapshotter interface {
	// Snapshot keeps that as it is at one moment, for which every process stands still. A
	// paused instance stays paused. Its error is unavailable where the processes cannot be
	// stopped now, exhausted where there is no room, lost where it was destroyed; then
	// nothing of it is left. What it gives does not outlive the edge: Sweep removes it.
	Snapshot(ctx context.Context) (Snapshot, error)
}

// Snapshot is what was written over the layers of an instance. Nobody else writes to it.
type Snapshot struct {
	// Upper is a directory as overlayfs keeps one, with its marks in trusted attributes.
	// What is in it was made by an agent.
	Upper *os.File
	// Owner is the ID on the host that is 0 inside, of users and of groups; those
	// inside go up to 65,535.
	Owner uint32
	// GoOn has the processes go on, which stand still for as long as Upper is read: it is the
	// instance's own, and no copy. Nil: they have gone on. It may be called again. Where the
	// instance was destroyed before, it is lost, for so may be what was read.
	GoOn func() error
	// Frozen tells for how long processes stood still until they went on.
	Frozen func() time.Duration
	// Close frees it, closes Upper, and has the processes go on. It may be called when the
	// instance is gone.
	Close func() error
}

// NodeUser is implemented by instances whose commands may be killed for the sake of
// the node, though their sandbox is within all bounds of its own.
type NodeUser interface {
	// KilledForNode reports whether that was so at some time between two: what ended
	// then may have ended for that. It knows of an instance that has ended as well.
	KilledForNode(from, until time.Time) bool
}
