package testutil

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// ledgerWait bounds how long a ledger waits for the kernel to finish freeing:
// network namespaces are torn down by one kernel thread, seconds late on a
// loaded machine.
const ledgerWait = 15 * time.Second

// Ledger counts what this process and its tests hold in the kernel now, and
// fails t if it has not come back to that at the end of t. Call it first: its
// check then runs after every other cleanup of t.
//
// Counted always: this process's descriptors and child processes. Counted
// where their path, source or name holds one of names (see Name and Dir):
// mounts in this and every other mount namespace that a process or a pinned
// file keeps, pinned namespaces, network links of the host, cgroups, processes
// in such cgroups, and loop devices by their backing file.
//
// With DSEC_LEDGER=machine, which `make root-test` sets because it runs one
// package at a time on a machine of its own, names do not matter and all of
// the above is counted, and also every network namespace and BPF program, map
// and link of the machine. Without it those are left out, because another
// test's would be counted too.
//
// Descriptors belong to the whole process, so a test with a ledger must not be
// parallel.
func Ledger(t testing.TB, names ...string) {
	t.Helper()
	s := scope{names: names, machine: os.Getenv("DSEC_LEDGER") == "machine"}
	// The runtime's poller opens its own descriptors at first use.
	if r, w, err := os.Pipe(); err == nil {
		_, _ = r.Close(), w.Close()
	}
	before, err := s.take()
	if err != nil {
		t.Fatalf("ledger: %v", err)
	}
	t.Cleanup(func() {
		t.Helper()
		if err := poll(ledgerWait, func() error { return s.check(before) }); err != nil {
			t.Errorf("ledger: %v", err)
		}
	})
}

// scope is what a ledger looks at.
type scope struct {
	names   []string
	machine bool
}

// mine reports whether an object that can be recognised by s1 (a path, a
// name) is of this ledger.
func (s scope) mine(texts ...string) bool {
	if s.machine {
		return true
	}
	for _, text := range texts {
		for _, name := range s.names {
			if strings.Contains(text, name) {
				return true
			}
		}
	}
	return false
}

// count is a multiset of descriptions of kernel objects.
type count map[string]int

func (c count) add(kind, format string, args ...any) {
	c[kind+" "+fmt.Sprintf(format, args...)]++
}

func (s scope) take() (count, error) {
	c := make(count)
	for _, source := range []func(count) error{
		s.descriptors, s.processes, s.mounts, s.links, s.cgroups, s.loops, s.netns, s.bpf,
	} {
		if err := source(c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (s scope) check(before count) error {
	after, err := s.take()
	if err != nil {
		return err
	}
	if diff := before.diff(after); len(diff) > 0 {
		return fmt.Errorf("not as before:\n\t%s", strings.Join(diff, "\n\t"))
	}
	return nil
}

// diff lists what is more (+) or less (-) in after. Less is a failure too: a
// test that removed what it did not make has harmed somebody. Not so for BPF, of
// which nothing can be removed by its number: it goes with its last user, which a
// test before this one may have been, and the kernel frees it some time later.
func (c count) diff(after count) []string {
	var diff []string
	for what := range union(c, after) {
		switch n := after[what] - c[what]; {
		case n > 0:
			diff = append(diff, fmt.Sprintf("+%d %s", n, what))
		case n < 0 && !strings.HasPrefix(what, "bpf "):
			diff = append(diff, fmt.Sprintf("%d %s", n, what))
		}
	}
	slices.SortFunc(diff, func(a, b string) int { return cmp.Compare(a[1:], b[1:]) })
	return diff
}

func union(a, b count) map[string]struct{} {
	keys := make(map[string]struct{}, len(a))
	for k := range a {
		keys[k] = struct{}{}
	}
	for k := range b {
		keys[k] = struct{}{}
	}
	return keys
}
