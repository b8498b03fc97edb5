package edge

import (
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// sandbox is what the edge knows of one sandbox. The first block never
// changes after it is published.
type sandbox struct {
	id         dsec.SandboxID
	project    string
	layerNames []string
	requestID  string
	digest     []byte
	created    time.Time
	offer      *offer
	origin     *dsecv1.TrajectoryOrigin // told by the create's entry; nil after a restart

	mu         sync.Mutex
	spec       *dsec.Spec // what it points to never changes; slim puts another in its place
	state      dsec.State
	reason     string
	conditions []string
	err        error // why the create failed
	warm       bool
	instance   backend.Instance
	handle     backend.Handle
	client     *chronusapi.Client // nil while no connection is kept
	release    []func()           // of its layers
	cancel     func()             // of the create under way
	reaped     bool               // holds no object any more
	reaping    bool               // an attempt to free them is under way
	noted      bool               // its trajectory has its end, or will have none
	attempts   int                // to free them, so far
	calls      int
	owners     map[uint64]int        // attached callers that a process is not to outlive
	follows    map[uint64]*following // commands whose actions are under way, by the seqs of these
	tags       map[uint64]string     // of processes whose Exec call is under way
	cut        []uint64              // processes that were killed because their caller was gone
	active     time.Duration         // end of the last call
	idle       time.Duration         // timeout, 0 is never
	deadline   time.Duration         // 0 is never
	retry      time.Duration         // when to try again to free it, 0 is never
	turn       chan struct{}         // of a pause or resume under way, closed at its end
	paused     *pausing              // while state is paused
	movedTo    dsec.SandboxID        // the sandbox that has taken its place
	endedBy    string                // who asked for its end; empty: nobody did
	told       standing              // what watchers know
	assumed    bool                  // whether they do is not known: an earlier edge may not have lived to tell
	ended      time.Time
	endedAt    time.Duration // the same on the boot clock
	changed    chan struct{} // closed at the next change; nil if nobody waits

	// Of the edge's table, under its mutex.
	size int // what its spec counts for in liveSize or endedSize

	// Of timers, under their mutex.
	timerAt    time.Duration
	timerIndex int
}

// record is the sandbox in the journal.
type record struct {
	Version    int             `json:"v"`
	Project    string          `json:"project"`
	Spec       *dsec.Spec      `json:"spec"`
	LayerNames []string        `json:"layer_names,omitempty"`
	State      dsec.State      `json:"state"`
	Reason     string          `json:"reason,omitempty"`
	Conditions []string        `json:"conditions,omitempty"`
	Created    time.Time       `json:"created"`
	Idle       time.Duration   `json:"idle,omitempty"`
	Boot       string          `json:"boot,omitempty"` // Deadline counts from this boot
	Deadline   time.Duration   `json:"deadline,omitempty"`
	Handle     json.RawMessage `json:"handle,omitempty"`
	Warm       bool            `json:"warm,omitempty"`
	Paused     *pauseRecord    `json:"paused,omitempty"`
	Cut        []uint64        `json:"cut,omitempty"`
	MovedTo    dsec.SandboxID  `json:"moved_to,omitempty"`
	RequestID  string          `json:"request_id,omitempty"`
	Digest     []byte          `json:"digest,omitempty"`
	Ended      time.Time       `json:"ended,omitzero"`
	EndedBy    string          `json:"ended_by,omitempty"`
}

const recordVersion = 1

// record is what to journal now. The caller holds s.mu.
func (e *Edge) record(s *sandbox) *record {
	r := &record{
		Version: recordVersion, Project: s.project, Spec: s.spec, LayerNames: s.layerNames,
		State: s.state, Reason: s.reason, Conditions: s.conditions, Created: s.created,
		Idle: s.idle, Boot: e.bootID, Deadline: s.deadline, Handle: json.RawMessage(s.handle),
		Warm: s.warm, RequestID: s.requestID, Digest: s.digest, Ended: s.ended,
		Paused: s.paused.record(), MovedTo: s.movedTo, EndedBy: s.endedBy,
	}
	if !s.reaped {
		r.Cut = s.cut
	}
	if s.err != nil {
		r.RequestID, r.Digest = "", nil // free for another try
	}
	return r
}

// write journals s as it is. The caller holds s.mu, so that records are in the
// order of changes.
func (e *Edge) write(s *sandbox) error {
	if err := e.journal.Put(string(s.id), e.record(s)); err != nil {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "the edge cannot write its journal", Err: err}
	}
	e.announce(s)
	return nil
}

// writeChange journals a change of s that can be refused: the last room on the disk is for ends. The
// caller holds s.mu.
func (e *Edge) writeChange(s *sandbox) error {
	if !e.journal.Reserved() {
		return dsec.Errorf(dsec.CodeExhausted, "the node's disk is full")
	}
	return e.write(s)
}

// writeAnyway journals s where not to go on would be worse: a sandbox that
// ends must end also on a full disk. The sweep of the next start finds what
// the journal then does not say. The caller holds s.mu.
func (e *Edge) writeAnyway(s *sandbox) {
	if err := e.write(s); err != nil {
		e.log.Error("a change of a sandbox is not on record", "sandbox", s.id, "state", s.state, "err", err)
		e.announce(s) // it is so all the same
	}
}

// move changes the state by the table. The caller holds s.mu.
func (s *sandbox) move(next dsec.State, reason string) error {
	to, err := s.state.To(next)
	if err != nil {
		return err
	}
	s.state, s.reason = to, reason
	s.signal()
	return nil
}

// signal wakes all that wait for a change. The caller holds s.mu.
func (s *sandbox) signal() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// waiter is what the next change closes. The caller holds s.mu.
func (s *sandbox) waiter() <-chan struct{} {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// has reports whether a condition stands. The caller holds s.mu.
func (s *sandbox) has(condition string) bool { return slices.Contains(s.conditions, condition) }

// conditionQuarantined: the platform could not do with the sandbox what it had
// to, and does nothing with it by itself any more but try to free it.
const conditionQuarantined = "quarantined"

func (s *sandbox) quarantine() {
	if !s.has(conditionQuarantined) {
		s.conditions = append(s.conditions, conditionQuarantined)
	}
}

// dropClient closes the connections that no call uses. The caller holds s.mu.
func (s *sandbox) dropClient() {
	if s.client != nil {
		_ = s.client.Close()
		s.client = nil
	}
}

// find returns a sandbox of the project.
func (e *Edge) find(project, id string) (*sandbox, error) {
	if project == "" {
		return nil, errNoProject
	}
	sid, err := dsec.ParseSandboxID(id)
	if err != nil {
		return nil, err
	}
	e.mu.RLock()
	s := e.sandboxes[sid]
	e.mu.RUnlock()
	if s == nil || s.project != project {
		return nil, &dsec.Error{Code: dsec.CodeNotFound, Field: "sandbox_id", Message: "no sandbox " + id}
	}
	return s, nil
}

var errNoProject = dsec.Errorf(dsec.CodeDenied, "header Dsec-Project is missing")

// notLive is the error of a call on a sandbox that has ended, or has not begun. The
// caller holds s.mu.
func (s *sandbox) notLive() error {
	if s.state == dsec.StatePaused && s.instance != nil && !s.has(conditionQuarantined) {
		return nil
	}
	return s.notRunning()
}

// notRunning is the error of a call on a sandbox that cannot take one. The
// caller holds s.mu.
func (s *sandbox) notRunning() error {
	if err := s.moved(); err != nil {
		return err
	}
	switch s.state {
	case dsec.StateLost, dsec.StateFailed:
		return dsec.Errorf(dsec.CodeLost, "sandbox %s is %s: %s", s.id, s.state, s.reason)
	case dsec.StateRunning, dsec.StatePaused:
		if s.instance == nil || s.has(conditionQuarantined) {
			return dsec.Errorf(dsec.CodeConflict, "sandbox %s is quarantined: %s; it can only be killed", s.id, s.reason)
		}
		if s.state == dsec.StateRunning {
			return nil
		}
	case dsec.StateStopping, dsec.StateStopped:
		return dsec.Errorf(dsec.CodeConflict, "sandbox %s is %s: %s", s.id, s.state, s.reason)
	}
	return dsec.Errorf(dsec.CodeConflict, "sandbox %s is %s", s.id, s.state)
}

// fire is what a timer does: it ends s where its time has come, gives up
// connections that nobody uses, and tells when to look again.
func (e *Edge) fire(s *sandbox, now time.Duration) (next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reaped {
		e.run(e.dropOld) // its record is the oldest
		return 0
	}
	if s.retry > 0 {
		if now < s.retry {
			return s.retry
		}
		s.retry = 0
		e.run(func() { e.reap(s) })
		return 0
	}
	switch s.state {
	case dsec.StateRunning:
	case dsec.StatePaused:
		return e.firePaused(s, now)
	default:
		return 0
	}
	switch {
	case s.deadline > 0 && now >= s.deadline:
		e.run(func() { _ = e.stop(s, reasonLifetime, "") })
		return 0
	case s.isIdle(now):
		e.run(func() { e.fireIdle(s) })
		return now + time.Second // a call may come in between
	}
	wants := func(at time.Duration) {
		if next == 0 || at < next {
			next = at
		}
	}
	if s.deadline > 0 {
		wants(s.deadline)
	}
	since := s.active
	if s.calls > 0 {
		since = now // its end is not before now
	}
	if s.idle > 0 {
		wants(since + s.idle)
	}
	if s.client != nil {
		if s.calls == 0 && now-s.active >= connectionIdle {
			s.dropClient()
		} else {
			wants(since + connectionIdle)
		}
	}
	return next
}

// connectionIdle is how long connections to chronus are kept without a call.
const connectionIdle = 10 * time.Second

// Reasons of a sandbox's end.
const (
	reasonKilled   = "killed"
	reasonIdle     = "idle timeout"
	reasonLifetime = "maximum lifetime"
	reasonMigrate  = "to be moved"
	reasonPaused   = "paused for too long"
)
