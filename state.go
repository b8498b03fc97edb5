package dsec

import "slices"

// State is where a sandbox is in its life.
type State string

// The states. Terminal ones never change again.
const (
	StatePending  State = "pending"  // admitted, nothing made yet
	StateStarting State = "starting" // being made
	StateRunning  State = "running"
	StatePaused   State = "paused"
	StateStopping State = "stopping" // being taken down
	StateStopped  State = "stopped"  // ended as asked: kill, idle timeout, lifetime
	StateFailed   State = "failed"   // never ran, or its PID 1 died
	StateLost     State = "lost"     // the platform lost it; its results must not be scored
)

var transitions = map[State][]State{
	StatePending:  {StateStarting, StateStopping, StateFailed},
	StateStarting: {StateRunning, StateStopping, StateFailed, StateLost},
	StateRunning:  {StatePaused, StateStopping, StateFailed, StateLost},
	StatePaused:   {StateRunning, StateStopping, StateFailed, StateLost},
	StateStopping: {StateStopped, StateFailed, StateLost},
}

// Terminal reports whether s never changes again.
func (s State) Terminal() bool {
	return s == StateStopped || s == StateFailed || s == StateLost
}

// Valid reports whether s is one of the states.
func (s State) Valid() bool {
	_, ok := transitions[s]
	return ok || s.Terminal()
}

// To returns next if the table allows the change, and a conflict if not.
func (s State) To(next State) (State, error) {
	if slices.Contains(transitions[s], next) {
		return next, nil
	}
	return s, Errorf(CodeConflict, "state: %s cannot become %s", s, next)
}
