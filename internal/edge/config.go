package edge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/registry"
	"github.com/opendsec/dsec/internal/trajectory"
	"github.com/opendsec/dsec/internal/units"
)

// Config is what an edge is made of. Zero values take the documented default.
type Config struct {
	// StateDir holds the journal. It is made if missing, and belongs to one
	// edge at a time.
	StateDir string
	// RunDir, on a file system that is emptied at boot, holds the journal's
	// second copy: where StateDir was put back to an older copy while
	// sandboxes ran, the edge finds the newer state there. Empty: no copy.
	RunDir string
	// Backends are the kinds that this edge offers, one of each kind.
	Backends []backend.Backend
	// Layers is the node's layer store. Nil: sandboxes without layers only.
	Layers Layers
	// Registry fetches images for Layers. Nil: there are no imports from registries.
	Registry *registry.Client

	// DefaultLimits fill what a create leaves at zero: 1 CPU, 1 GiB of memory,
	// 4 GiB and 262,144 files of disk, 512 processes.
	DefaultLimits dsec.Limits
	// MaxLimits is the most that one sandbox may ask for: 64 CPUs, 64 GiB of
	// memory, 256 GiB and 16,777,216 files of disk, 32,768 processes.
	MaxLimits dsec.Limits
	// DefaultIdleTimeout and DefaultMaxLifetime stand in where a create gives
	// none: 1 hour and 24 hours. Negative: never.
	DefaultIdleTimeout time.Duration
	DefaultMaxLifetime time.Duration
	// DefaultMaxPaused is how long a sandbox may be paused where its pause says
	// nothing: 7 days; negative: for ever.
	DefaultMaxPaused time.Duration
	// Trajectories bound the trajectory log, and say where it is sealed to. Dir and
	// Logger are the edge's to set.
	Trajectories trajectory.Options

	// MaxSandboxes at once on this edge: 4096.
	MaxSandboxes int
	// MaxCalls in progress at once in one sandbox: 128.
	MaxCalls int
	// CreateConcurrency bounds how many sandboxes are made at once: 8.
	CreateConcurrency int
	// Retention is how long the record of an ended sandbox, and with it its
	// request id, is kept: 24 h.
	Retention time.Duration
	// MinFreeBytes and MinFreeInodes of StateDir's file system: below either,
	// creates are refused: 256 MiB and 10,000.
	MinFreeBytes  int64
	MinFreeInodes int64

	// Version of the binary, which EdgeService.Info tells.
	Version string
	// Logger: slog.Default().
	Logger *slog.Logger
	// Metrics is where the edge's metrics are registered. Nil: nowhere.
	Metrics prometheus.Registerer
	// Crash, where set, is called with the name of each step in CrashSteps
	// before it. The crash suite kills the process there; nothing else sets it.
	Crash func(step string)

	// clock is the time since boot; tests have their own.
	clock func() time.Duration
	// availableMemory is what the node can give; tests have their own.
	availableMemory func() (int64, error)
	// settleEvery is the constant; tests have a shorter one.
	settleEvery time.Duration
	// events is how many one stretch of them has; tests have fewer.
	events uint64
	// texts bounds records and output in memory; tests have smaller ones.
	texts textBounds
}

// textBounds are the most bytes of what callers and commands choose.
type textBounds struct {
	live  int   // of the records of sandboxes that have not ended
	ended int   // of the others, of which the oldest go first
	held  int64 // of the output that all Exec calls hold together
	// page ends a page of a list early, so that long labels of many sandboxes are
	// not in one message.
	page int
}

// Records are in memory and in both copies of the journal, and a restarted edge
// reads them before it answers.
var defaultTexts = textBounds{live: 256 << 20, ended: 64 << 20, held: 512 << 20, page: 8 << 20}

// Layers is what the edge needs of the node's layer store; *layer.Store is one.
type Layers interface {
	// Get tells what the store knows of a layer; not_found where there is none.
	Get(ctx context.Context, digest string) (layer.Meta, error)
	// Hold keeps a layer from being removed until release is called. Its error
	// is not_found where there is no such layer.
	Hold(ctx context.Context, digest string) (release func(), err error)
	// Open opens what a held layer is mounted from, as backend.Layer's.
	Open(ctx context.Context, digest string) (devices []*os.File, onRead bool, err error)
	// Prefetch brings a layer to this node.
	Prefetch(ctx context.Context, digest string, progress func(done, total int64)) error
	// Release says that what Open gave is not mounted any more.
	Release(digest string)
	// Served are the layers that may be mounted and whose data another process of this
	// node serves.
	Served() []string
	// Lost are the layers whose readers may have got other bytes, until Settle says
	// that nothing has them mounted.
	Lost() []string
	Settle(ctx context.Context, digest string) error
	// Build makes a layer of an archive.
	Build(ctx context.Context, opt layer.BuildOptions, archive io.Reader) (layer.Meta, []string, error)
	// Pack makes a layer of the upper directory of a sandbox.
	Pack(ctx context.Context, opt layer.PackOptions, upper *os.File, owner uint32) (layer.Meta, layer.PackReport, error)
	// OpenFS opens the files of a layer that is held, as go-erofs shows them.
	OpenFS(ctx context.Context, digest string) (fs.FS, io.Closer, error)
	// Claim has the store belong to the control plane of a unit; conflict where it
	// belongs to another one, which CheckOwner looks for, too.
	Claim(ctx context.Context, unit string) error
	CheckOwner(ctx context.Context, unit string) error
	// Check looks whether the store has a layer as it should be; internal where not.
	Check(ctx context.Context, digest string, data bool) error
	// Forget removes what this node has of a layer, if anything; conflict while it is held.
	Forget(digest string) error
	// Remove removes a layer; conflict while it is held.
	Remove(ctx context.Context, digest string) error
	// Sweep gives the layers in the store, and removes what is of none of them.
	Sweep(ctx context.Context, age time.Duration) ([]layer.Stored, error)
}

func (c Config) withDefaults() Config {
	c.DefaultLimits = fillLimits(c.DefaultLimits, dsec.Limits{
		MilliCPU: 1000, MemoryBytes: 1 << 30, DiskBytes: 4 << 30, DiskInodes: 1 << 18, Pids: 512,
	})
	c.MaxLimits = fillLimits(c.MaxLimits, dsec.Limits{
		MilliCPU: 64_000, MemoryBytes: 64 << 30, DiskBytes: 256 << 30, DiskInodes: 1 << 24, Pids: 32_768,
	})
	c.DefaultIdleTimeout = orNever(c.DefaultIdleTimeout, time.Hour)
	c.DefaultMaxLifetime = orNever(c.DefaultMaxLifetime, 24*time.Hour)
	c.DefaultMaxPaused = orNever(c.DefaultMaxPaused, 7*24*time.Hour)
	c.MaxSandboxes = cmp.Or(c.MaxSandboxes, 4096)
	c.MaxCalls = cmp.Or(c.MaxCalls, 128)
	c.CreateConcurrency = cmp.Or(c.CreateConcurrency, 8)
	c.Retention = cmp.Or(c.Retention, 24*time.Hour)
	c.MinFreeBytes = cmp.Or(c.MinFreeBytes, 256<<20)
	c.MinFreeInodes = cmp.Or(c.MinFreeInodes, 10_000)
	c.settleEvery = cmp.Or(c.settleEvery, settleEvery)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.Logger = c.Logger.With("component", "edge")
	if c.texts == (textBounds{}) {
		c.texts = defaultTexts
	}
	if c.availableMemory == nil {
		c.availableMemory = availableMemory
	}
	if c.clock == nil {
		c.clock = bootClock
	}
	if c.Crash == nil {
		c.Crash = func(string) {}
	}
	return c
}

func orNever(d, def time.Duration) time.Duration {
	return max(0, cmp.Or(d, def)) // 0 is never, from here on
}

func (c Config) validate() error {
	if c.StateDir == "" {
		return errors.New("edge: StateDir is not set")
	}
	if c.MaxSandboxes < 1 || c.MaxCalls < 1 || c.CreateConcurrency < 1 {
		return errors.New("edge: MaxSandboxes, MaxCalls and CreateConcurrency want 1 or more")
	}
	for _, l := range limitFields {
		least, def, most := l.min, *l.of(&c.DefaultLimits), *l.of(&c.MaxLimits)
		if def < least || def > most {
			return fmt.Errorf("edge: default of limit %s: want %d to the most allowed, %d; got %d", l.name, least, most, def)
		}
	}
	return nil
}

// limitFields lists the fields of Limits, with the least that a sandbox can
// start with and how a value is written for people: unit stands once behind a range.
var limitFields = []limitField{
	{"milli_cpu", 10, cpus, "", func(l *dsec.Limits) *int64 { return &l.MilliCPU }},
	{"memory_bytes", 8 << 20, size, "", func(l *dsec.Limits) *int64 { return &l.MemoryBytes }},
	diskBytes,
	{"disk_inodes", 64, count, " files", func(l *dsec.Limits) *int64 { return &l.DiskInodes }},
	{"pids", 8, count, " processes and threads", func(l *dsec.Limits) *int64 { return &l.Pids }},
}

// limitField is one of them.
type limitField struct {
	name string
	min  int64
	text func(int64) string
	unit string
	of   func(*dsec.Limits) *int64
}

var diskBytes = limitField{"disk_bytes", 1 << 20, size, "", func(l *dsec.Limits) *int64 { return &l.DiskBytes }}

// check tells what a value should be that is too small, or more than the most.
func (f *limitField) check(got, most int64) error {
	if got >= f.min && got <= most {
		return nil
	}
	return dsec.Invalid("limits."+f.name, "want %s to %s%s, got %s", f.text(f.min), f.text(most), f.unit, f.text(got))
}

func count(n int64) string { return strconv.FormatInt(n, 10) }

// cpus writes thousandths of a CPU with what they are: 1500 (1.5 CPUs).
func cpus(n int64) string { return fmt.Sprintf("%d (%g CPUs)", n, float64(n)/1000) }

// size writes bytes as a request has them and as people read them: 8388608 (8 MiB).
func size(n int64) string {
	if n < 1<<10 {
		return units.Bytes(n)
	}
	return fmt.Sprintf("%d (%s)", n, units.Bytes(n))
}

// fillLimits puts def where l has zeros.
func fillLimits(l, def dsec.Limits) dsec.Limits {
	for _, f := range limitFields {
		if p := f.of(&l); *p == 0 {
			*p = *f.of(&def)
		}
	}
	return l
}
