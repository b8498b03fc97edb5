package testutil

import (
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Need is one thing that a test needs from its host.
type Need struct {
	// Name is what DSEC_MUST and the skip message call it.
	Name  string
	check func() error
}

// newNeed caches the answer: a host does not change while a test binary runs.
func newNeed(name string, check func() error) Need {
	return Need{Name: name, check: sync.OnceValue(check)}
}

// Has reports whether the host has n, for a test that does more where it can.
func (n Need) Has() bool { return n.check() == nil }

// Require skips t unless the host has all needs; the message names the first
// that is missing and why. Where DSEC_MUST, a comma-separated list of names,
// holds that name (or "all"), t fails instead: that is how a CI run that is
// meant to have a thing learns that it silently lost it.
//
// Where DSEC_WITHOUT, a list alike, holds a name, the host is taken not to
// have it: so a machine whose user is root still proves that unit tests need
// no root. DSEC_MUST wins.
func Require(t testing.TB, needs ...Need) {
	t.Helper()
	for _, n := range needs {
		err := n.check()
		if err == nil && listed("DSEC_WITHOUT", n.Name) && !listed("DSEC_MUST", n.Name) {
			err = errors.New("held back by DSEC_WITHOUT")
		}
		if err == nil {
			continue
		}
		if listed("DSEC_MUST", n.Name) {
			t.Fatalf("needs %s, which DSEC_MUST says is here: %v", n.Name, err)
		}
		t.Skipf("needs %s: %v", n.Name, err)
	}
}

func listed(variable, name string) bool {
	list := strings.FieldsFunc(os.Getenv(variable), func(r rune) bool { return r == ',' || r == ' ' })
	return slices.Contains(list, name) || slices.Contains(list, "all")
}
