package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/faultfs"
)

// A frozen group stands still, all of it, is found so by whoever takes it over,
// goes on where it was, and can be removed.
func TestFreeze(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	said, w, err := os.Pipe()
	check(t, err)
	defer said.Close()
	for _, cmd := range []*exec.Cmd{in(command(t, g), exec.Command("/bin/sh", "-c", "while :; do echo; done")), chronusCommand(t, g, "while :; do echo; done")} {
		cmd.Stdout = w
		start(t, cmd)
	}
	check(t, w.Close())
	used := func() int64 {
		u, err := g.Usage()
		check(t, err)
		return int64(u.CPU)
	}
	drain := func() {
		for r := bufio.NewReader(said); ; {
			if _, err := r.ReadByte(); err != nil {
				return
			}
		}
	}
	go drain()
	for range 2 {
		check(t, g.Freeze(t.Context()))
	}
	// The kernel counts the last microseconds late.
	var before int64
	testutil.WaitFor(t, 20*time.Second, "its CPU time stands still", func() error {
		before = used()
		for range 100 {
			if after := used(); after != before {
				return fmt.Errorf("%v more", time.Duration(after-before))
			}
		}
		return nil
	})
	again, err := tree.Attach(g.Name(), idA, -1, small)
	check(t, err)
	if frozen, err := again.Frozen(); err != nil || !frozen {
		t.Errorf("frozen: %v, %v", frozen, err)
	}
	// What hoards is killed there too.
	for range 2 {
		check(t, g.Thaw())
	}
	if frozen, err := again.Frozen(); err != nil || frozen {
		t.Errorf("thawed: frozen %v, %v", frozen, err)
	}
	testutil.WaitFor(t, 20*time.Second, "it goes on", func() error {
		if used() == before {
			return errors.New("no CPU time is used")
		}
		return nil
	})
	check(t, g.Freeze(t.Context()))
	check(t, g.Remove(t.Context()))
	if err := g.Freeze(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("Freeze of what is gone: %v, want lost", err)
	}
}

// What is to be killed in a frozen group dies there.
func TestKillCommandsOfAFrozenGroup(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	cmd := start(t, in(command(t, g), exec.Command("/bin/sleep", "1000")))
	check(t, g.Freeze(t.Context()))
	check(t, g.KillCommands())
	if err := cmd.Wait(); err == nil {
		t.Error("it ended by itself")
	}
	if frozen, err := g.Frozen(); err != nil || !frozen {
		t.Errorf("the group: frozen %v, %v", frozen, err)
	}
}

// A process that waits for a file system cannot be frozen: nothing is, then, and
// the wait ends with its context, too.
func TestFreezeOfWhatWaitsForAFile(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	dir := testutil.Dir(t)
	backing, mount := filepath.Join(dir, "backing"), filepath.Join(dir, "mount")
	check(t, errors.Join(os.Mkdir(backing, 0o700), os.Mkdir(mount, 0o700), os.WriteFile(filepath.Join(backing, "file"), []byte("text"), 0o600)))
	fs, err := faultfs.Mount(mount, backing)
	if err != nil {
		t.Skip("needs FUSE: ", err)
	}
	defer func() { check(t, fs.Close()) }()
	fs.Set(func(op faultfs.Op) faultfs.Fault { return faultfs.Fault{Hang: op == faultfs.Read} })
	chronus(t, g, "sleep 1000")
	waits := start(t, in(command(t, g), exec.Command("/bin/cat", filepath.Join(mount, "file"))))
	start(t, in(command(t, g), exec.Command("/bin/sleep", "1000")))
	testutil.WaitFor(t, 20*time.Second, "it reads", func() error {
		if fs.Count(faultfs.Read) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(100*time.Millisecond, func() { cancel(errors.New("given up")) })
	if err := g.Freeze(ctx); err == nil || err.Error() != "given up" {
		t.Errorf("given up: %v", err)
	}
	if err := g.Freeze(t.Context()); err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Errorf("Freeze: %v, want unavailable", err)
	}
	if frozen, err := g.Frozen(); err != nil || frozen {
		t.Errorf("after that: frozen %v, %v", frozen, err)
	}
	fs.Set(nil)
	check(t, waits.Wait())
	check(t, g.Freeze(t.Context()))
	check(t, g.Thaw())
}

func TestMarkPaused(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	for _, paused := range []bool{false, true, true, false, false} {
		check(t, g.MarkPaused(paused))
		again, err := tree.Attach(g.Name(), idA, -1, small)
		check(t, err)
		if again.MarkedPaused() != paused {
			t.Errorf("marked: %v, want %v", !paused, paused)
		}
	}
	check(t, g.Remove(t.Context()))
	if err := g.MarkPaused(true); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("MarkPaused of what is gone: %v, want lost", err)
	}
}
