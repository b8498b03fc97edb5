// Package event is what edges and apiservers both know of events: their kinds, and which a
// filter picks.
package event

import (
	"slices"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Kinds of events. Only the first two can be left out by a filter.
const (
	Sandbox     = "sandbox"
	Job         = "job"
	Gap         = "gap"
	Unreachable = "unreachable"
	Reachable   = "reachable"
)

// Picks reports whether a filter picks an event.
func Picks(f *dsecv1.EventFilter, e *dsecv1.Event) bool {
	if e.Kind != Sandbox && e.Kind != Job {
		return true
	}
	for k, v := range f.GetLabels() {
		if have, ok := e.Labels[k]; !ok || have != v {
			return false
		}
	}
	return (f.GetJob() == "" || f.Job == e.Job) && among(f.GetKinds(), e.Kind) && among(f.GetSandboxIds(), e.SandboxId) && among(f.GetStates(), e.State)
}

// among reports whether a list has something; an empty list has all.
func among(list []string, s string) bool { return len(list) == 0 || slices.Contains(list, s) }
