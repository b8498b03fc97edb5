package main

import (
	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/trajectory"
)

// Trajectory is the section [edge.trajectory].
type Trajectory struct {
	MaxBytes              int64 `toml:"max_bytes"`
	MaxOutputBytes        int64 `toml:"max_output_bytes"`
	MaxSandboxOutputBytes int64 `toml:"max_sandbox_output_bytes"`
	MaxInputBytes         int64 `toml:"max_input_bytes"`
	MaxSandboxInputBytes  int64 `toml:"max_sandbox_input_bytes"`
}

func (t *Trajectory) validate() error {
	for _, r := range []struct {
		name         string
		v, low, high int64
	}{
		{"max_bytes", t.MaxBytes, 1 << 28, 1 << 50},
		{"max_output_bytes", t.MaxOutputBytes, 1, trajectory.MaxKept},
		{"max_sandbox_output_bytes", t.MaxSandboxOutputBytes, 1, 1 << 50},
		{"max_input_bytes", t.MaxInputBytes, 1, trajectory.MaxKept},
		{"max_sandbox_input_bytes", t.MaxSandboxInputBytes, 1, 1 << 50},
	} {
		if r.v < r.low || r.v > r.high {
			return dsec.Invalid("edge.trajectory."+r.name, "is %d, want %d to %d", r.v, r.low, r.high)
		}
	}
	return nil
}

// Limits are the sections [edge.default_limits] and [edge.max_limits].
type Limits struct {
	MilliCPU    int64 `toml:"milli_cpu"`
	MemoryBytes int64 `toml:"memory_bytes"`
	DiskBytes   int64 `toml:"disk_bytes"`
	DiskInodes  int64 `toml:"disk_inodes"`
	Pids        int64 `toml:"pids"`
}
