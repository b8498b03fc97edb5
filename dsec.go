// Package dsec is the vocabulary of DSec: what a sandbox is, the states it
// goes through, what a command's end can be, and the errors the platform
// reports. It imports only the standard library and does no I/O, so that every
// other package, on the control side and on the node side, may use it.
package dsec

import (
	"time"
)

// Kind names the backend that a caller picks for a sandbox.
type Kind string

// The backends. KindFake is the in-memory one that the control plane, the
// SDKs and the documentation are tested on.
const (
	KindContainer Kind = "container"
	KindFnCall    Kind = "fncall"
	KindMicroVM   Kind = "microvm"
	KindVM        Kind = "vm"
	KindFake      Kind = "fake"
)

// LayerKind says what a layer is for, and so where it may stand in a sandbox: a
// base goes first and alone; a workspace and toolkits go on it, and each overrides
// what is below it.
type LayerKind string

// The kinds of layer.
const (
	LayerBase      LayerKind = "base"      // a root file system
	LayerWorkspace LayerKind = "workspace" // what is worked on: a project, its history, its dependencies
	LayerToolkit   LayerKind = "toolkit"   // tools and libraries, for any base that they run on
)

// Valid reports whether k is one of the kinds.
func (k LayerKind) Valid() bool { return k == LayerBase || k == LayerWorkspace || k == LayerToolkit }

// MaxLayers is the most layers of one sandbox: each costs descriptors and a
// lookup at every open. The kernel would take 500.
const MaxLayers = 32

// Spec is what a caller asks for. It is fixed at create time; deadlines are
// the only part of a sandbox that may change later.
type Spec struct {
	Kind Kind `json:"backend"`
	// Layers are names (name:tag) or digests (sha256:...), lowest first; at
	// most MaxLayers.
	Layers []string `json:"layers"`
	Limits Limits   `json:"limits"`
	// Env, User and Workdir are the defaults of every exec.
	Env     []string          `json:"env,omitempty"` // KEY=VALUE
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	Job     string            `json:"job,omitempty"`
	// IdleTimeout is how long it may be without activity until IdleAction; 0 is for ever.
	IdleTimeout time.Duration `json:"idle_timeout,omitempty"`
	IdleAction  IdleAction    `json:"idle_action,omitempty"`
	// MaxLifetime kills the sandbox that long after its create; 0 is never.
	MaxLifetime time.Duration `json:"max_lifetime,omitempty"`
}

// IdleAction is what is done with a sandbox that nobody uses.
type IdleAction string

// The idle actions; empty is IdleKill.
const (
	IdleKill  IdleAction = "kill"
	IdlePause IdleAction = "pause"
)

// Limits bound what one sandbox may use. Zero values are filled with the
// node's defaults before a Spec reaches a backend.
type Limits struct {
	MilliCPU    int64 `json:"milli_cpu"`    // thousandths of one CPU
	MemoryBytes int64 `json:"memory_bytes"` // all processes and files in memory together
	DiskBytes   int64 `json:"disk_bytes"`   // bytes of the writable layer
	DiskInodes  int64 `json:"disk_inodes"`  // files of the writable layer
	Pids        int64 `json:"pids"`         // processes and threads
}

// Sandbox is the state of one sandbox as the edge that owns it knows it.
type Sandbox struct {
	ID       SandboxID `json:"id"`
	Project  string    `json:"project"`
	Spec     Spec      `json:"spec"`
	State    State     `json:"state"`
	Reason   string    `json:"reason,omitempty"` // why State is failed, lost or stopped
	Created  time.Time `json:"created"`
	Deadline time.Time `json:"deadline,omitzero"` // end of MaxLifetime; zero is none
	// Active is when the last activity that the idle timeout counts ended.
	Active time.Time `json:"active"`
	// Conditions stand beside State: degraded, quarantined, tainted.
	Conditions []string `json:"conditions,omitempty"`
	Pause      *Pause   `json:"pause,omitempty"` // while State is paused
}

// Outcome is how a command ended. It is a result, not an error: whatever the
// command did, the platform did its part. Exactly one of Code (Signal == 0)
// and Signal tells how the started process ended, as wait(2) reported it; the
// flags tell why, where the platform ended it.
type Outcome struct {
	Code        int  // exit status, 0..255, when Signal is 0
	Signal      int  // number of the signal that ended the process
	OOM         bool // a process of this command was killed for memory
	TimedOut    bool // the command's timeout ended it
	OutputLimit bool // the command's output cap ended it
	// Claimed marks a status told by a program inside (a session's shell)
	// and not by wait(2). A claimed status is not fit for rewards.
	Claimed  bool
	Started  time.Time     // host clock
	Duration time.Duration // monotonic
	CPU      time.Duration // user + system of the process and its waited-for children
	MaxRSS   int64         // bytes
}

// OK reports whether the command exited by itself with status 0. The zero Outcome,
// which comes with every error, is of no command and not OK.
func (o Outcome) OK() bool {
	return !o.Started.IsZero() && o.Code == 0 && o.Signal == 0 && !o.OOM && !o.TimedOut && !o.OutputLimit
}

// ShellStatus is the status a POSIX shell would show: the code, or 128+n.
func (o Outcome) ShellStatus() int {
	if o.Signal != 0 {
		return 128 + o.Signal
	}
	return o.Code
}

// NotCounted is in place of an amount that a node does not know.
const NotCounted = -1

// Usage is what a sandbox uses now and has used so far.
type Usage struct {
	CPU          time.Duration
	MemoryBytes  int64 // now
	MemoryPeak   int64
	DiskBytes    int64 // of the writable layer
	DiskInodes   int64 // NotCounted where the node's disk driver does not count files
	Pids         int64
	OOMKills     int64
	MemoryLimit  int64
	DiskLimit    int64
	PidsLimit    int64
	MilliCPU     int64 // the limit
	CPUThrottled time.Duration
}
