package dsec

import "fmt"

// Stack checks the order of a sandbox's layers, which are added lowest first: one
// base, and on it toolkits and at most one workspace.
type Stack struct {
	n         int
	workspace string // field of the one that is there; empty if none
}

// Add adds a layer; name is what the caller knows it by. The error is invalid, of
// the field layers[i].
func (s *Stack) Add(name string, kind LayerKind) error {
	field := fmt.Sprintf("layers[%d]", s.n)
	s.n++
	switch {
	case s.n == 1 && kind != LayerBase:
		return Invalid(field, "%.300q is a %s, want a base as the first layer", name, kind)
	case s.n > 1 && kind == LayerBase:
		return Invalid(field, "%.300q is a base, want a workspace or a toolkit on the base that is layers[0]", name)
	case kind == LayerWorkspace && s.workspace != "":
		return Invalid(field, "%.300q is a workspace, want at most one; %s is one", name, s.workspace)
	case kind == LayerWorkspace:
		s.workspace = field
	}
	return nil
}
