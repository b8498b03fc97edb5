package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestAnotherTreeTakesOverAndSweepsTheRest(t *testing.T) {
	tree := openTree(t, 2)
	kept, lost := create(t, tree, idA, small), create(t, tree, idB, small)
	command(t, kept)
	command(t, lost)
	survivor := chronus(t, kept, "sleep 1000")
	victim := chronus(t, lost, "sleep 1000")
	if g, err := tree.Acquire(context.Background(), -1); err != nil { // never claimed
		t.Fatal(err)
	} else {
		chronus(t, g, "sleep 1000")
	}
	// What a crash in the middle of a removal leaves: a v1 part alone.
	torn := tree.prefix + randomName(8)
	if fd := tree.memory(); fd >= 0 {
		if err := unix.Mkdirat(fd, torn, 0o755); err != nil {
			t.Fatal(err)
		}
	}

	// A crash: nothing of tree is closed, and an edge of the same name starts.
	next, err := Open(Options{Name: tree.opts.Name, Log: testutil.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	g, err := next.Recover(idA, -1, small)
	if err != nil {
		t.Fatal(err)
	}
	if g.Name() != kept.Name() || g.CommandGroups() != 1 {
		t.Errorf("recovered %s with %d command groups, want %s with 1", g.Name(), g.CommandGroups(), kept.Name())
	}
	for range 2 {
		if err := next.Sweep(context.Background(), map[dsec.SandboxID]bool{idA: true}); err != nil {
			t.Fatal(err)
		}
	}
	if err := victim.Wait(); err == nil {
		t.Error("a process of a swept sandbox ended by itself")
	}
	if err := survivor.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("a process of a kept sandbox: %v", err)
	}
	if names, err := next.names(); err != nil || len(names) != 1 || names[0] != kept.Name() {
		// The first tree's pool may have made one more meanwhile.
		for _, n := range names {
			if n != kept.Name() && next.claimant(n) != "" {
				t.Errorf("left: %v, %v; want %s", names, err, kept.Name())
			}
		}
	}
	if _, err := next.Attach(lost.Name(), idB, -1, small); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("Attach to a swept group: %v, want lost", err)
	}
	command(t, g)
}

// A group whose processes do not end keeps no other from being swept.
func TestSweepWaitsForAllAtOnce(t *testing.T) {
	tree := openTree(t, 0)
	memory := tree.memory()
	if memory < 0 {
		t.Skip("on pure cgroup v2 the kernel's kill reaches every process")
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// What a kill does not reach: a process that is in a v1 part alone. Groups are
	// swept in the order of their names.
	var names []string
	processes := map[string]*exec.Cmd{}
	for _, first := range []string{"ga", "gb", "gz"} {
		name := first + randomName(groupNameLen-2)
		check(unix.Mkdirat(memory, name, 0o755))
		cmd := start(t, exec.Command("/bin/sleep", "1000"))
		check(writeAt(memory, name+"/cgroup.procs", strconv.Itoa(cmd.Process.Pid)))
		names, processes[name] = append(names, name), cmd
	}
	swept := make(chan error, 1)
	go func() { swept <- tree.Sweep(context.Background(), nil) }()
	for _, name := range slices.Backward(names) {
		cmd := processes[name]
		check(cmd.Process.Kill())
		_ = cmd.Wait()
		testutil.WaitFor(t, 20*time.Second, "the group is swept", func() error {
			if err := unix.Faccessat(memory, name, unix.F_OK, 0); !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("it is there: %v", err)
			}
			return nil
		})
	}
	check(<-swept)
}
