package dsec

import "time"

// Job is a training or evaluation run, to which sandboxes belong.
type Job struct {
	Name    string            `json:"name"`
	Labels  map[string]string `json:"labels,omitempty"`
	State   JobState          `json:"state"`
	Created time.Time         `json:"created"`
	// Lease is how long a heartbeat keeps it; 0: it never expires.
	Lease time.Duration `json:"lease,omitempty"`
	// OnExpiry is what its sandboxes are once it has expired: pause, and killed after
	// Grace; or kill.
	OnExpiry string        `json:"on_expiry"`
	Grace    time.Duration `json:"grace,omitempty"`
	Changed  time.Time     `json:"changed"` // when State became what it is
}

// JobState is where a job is in its life.
type JobState string

// The states of a job.
const (
	JobActive  JobState = "active"
	JobExpired JobState = "expired" // its lease ran out; a heartbeat makes it active again
	JobEnded   JobState = "ended"
)

// Valid reports whether s is one of the states.
func (s JobState) Valid() bool { return s == JobActive || s == JobExpired || s == JobEnded }

// Pause is what is known of a paused sandbox.
type Pause struct {
	Since time.Time `json:"since"`
	// MovedOut tells that what it held of the node's memory was moved out, as far as
	// that goes: what it held before, and what it holds now, in bytes.
	MovedOut     bool      `json:"moved_out"`
	MemoryBefore int64     `json:"memory_before,omitempty"`
	Memory       int64     `json:"memory,omitempty"`
	Note         string    `json:"note,omitempty"` // why not all of it went
	Until        time.Time `json:"until,omitzero"` // then it is killed; zero is never
}
