package edge

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
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

	// MaxSandboxes at once on this edge: 4096.
	MaxSandboxes int
	// MaxCalls in progress at once in one sandbox: 128.
	MaxCalls int
	// CreateConcurrency bounds how many of one batch are made at once: 8.
	CreateConcurrency int
	// CreateTimeout bounds the making of one sandbox: 60 s.
	CreateTimeout time.Duration
	// DestroyTimeout bounds one attempt to take a sandbox down: 30 s.
	DestroyTimeout time.Duration
	// Retention is how long the record of an ended sandbox, and with it its
	// request id, is kept: 24 h.
	Retention time.Duration
	// MaxEnded bounds those records; the oldest go first: 100,000.
	MaxEnded int
	// MinFreeBytes and MinFreeInodes of StateDir's file system: below either,
	// creates are refused: 256 MiB and 10,000.
	MinFreeBytes  int64
	MinFreeInodes int64

	// Version is what EdgeInfo tells of the binary.
	Version string
	// Logger: slog.Default().
	Logger *slog.Logger
	// Metrics is where the edge's metrics are registered. Nil: nowhere.
	Metrics prometheus.Registerer
	// Crash, where set, is called with the name of each step in CrashSteps
	// before it. The crash suite kills the process there; nothing else sets it.
	Crash func(step string)
}

// Layers is what the edge needs of the node's layer store; *layer.Store is one.
type Layers interface {
	// Hold keeps a layer from being removed until release is called. Its error
	// is not_found where there is no such layer.
	Hold(digest string) (release func(), err error)
	// Path is the image's path on the host.
	Path(digest string) string
}
