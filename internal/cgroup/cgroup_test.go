package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestOOMIsToldForItsCommandAndSparesTheRest(t *testing.T) {
	// The first command's memory is counted where the sandbox's is.
	t.Run("of the first", func(t *testing.T) { testOOM(t, true) })
	t.Run("of the second", func(t *testing.T) { testOOM(t, false) })
}

func testOOM(t *testing.T, first bool) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	init := chronus(t, g, "sleep 1000")
	quiet, hungry := command(t, g), command(t, g)
	if first {
		quiet, hungry = hungry, quiet
	}
	neighbour := start(t, in(quiet, exec.Command("/bin/sleep", "1000")))

	err := start(t, in(hungry, helper("eat"))).Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the command ended with %v, want killed", err)
	}
	if n := oomKills(t, hungry); n < 1 {
		t.Errorf("%d OOM kills in the command's group, want 1 or more", n)
	}
	if n := oomKills(t, quiet); n != 0 {
		t.Errorf("%d OOM kills in another command's group, want 0", n)
	}
	for name, cmd := range map[string]*exec.Cmd{"chronus": init, "another command": neighbour} {
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("%s: %v, want alive", name, err)
		}
	}
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.OOMKills < 1 || u.MemoryPeak < small.MemoryBytes*9/10 || u.MemoryPeak > small.MemoryBytes*11/10 || u.MemoryLimit != small.MemoryBytes {
		t.Errorf("usage %+v after an OOM at %d", u, small.MemoryBytes)
	}
}

// What sockets buffer counts: v1 has a counter of its own for it, which works
// only once it was given a limit.
func TestSocketBuffersAreCounted(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	cmd := in(command(t, g), helper("flood"))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	start(t, cmd)
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "flooded\n" {
		t.Fatalf("%q, %v", line, err)
	}
	var held int64
	if tree.layout.Unified {
		held, err = readKey(tree.v2, g.name+"/work/memory.stat", "sock")
	} else {
		held, err = readInt(tree.v1["memory"], g.name+"/memory.kmem.tcp.usage_in_bytes")
	}
	if err != nil || held < 1<<20 || held > small.MemoryBytes {
		t.Errorf("sockets hold %d bytes, want what they hold, within %d: %v", held, small.MemoryBytes, err)
	}
	_ = stdin.Close()
}

func TestPidsLimitStopsForksOfCommandsAlone(t *testing.T) {
	tree := openTree(t, 0)
	limits := small
	limits.Pids = 8
	g := create(t, tree, idA, limits)
	forks := "i=0; while [ $i -lt 20 ]; do sleep 1000 & i=$((i+1)); done; echo forked; wait"

	// Its children live on and hold the output: a file, which is not waited for.
	file, err := os.Create(filepath.Join(testutil.Dir(t), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := in(command(t, g), exec.Command("/bin/sh", "-c", forks))
	cmd.Stdout, cmd.Stderr = file, file
	err = start(t, cmd).Wait()
	out, _ := os.ReadFile(file.Name())
	if err == nil || !strings.Contains(string(out), "fork") || strings.Contains(string(out), "forked") {
		t.Errorf("20 forks at a limit of 8: %v, %q; want a refused fork", err, out)
	}
	if u, err := g.Usage(); err != nil || u.Pids > 8 {
		t.Errorf("usage %+v, %v; want at most 8 processes", u, err)
	}
	// The same forks from where chronus is, with the limit used up, go through.
	fd, err := g.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	cmd = exec.Command("/bin/sh", "-c", forks)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	start(t, cmd)
	if line, err := bufio.NewReader(pipe).ReadString('\n'); line != "forked\n" {
		t.Errorf("forks outside the limit: %q, %v", line, err)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
}

func TestCPUQuotaThrottles(t *testing.T) {
	tree := openTree(t, 0)
	limits := small
	limits.MilliCPU = 100
	g := create(t, tree, idA, limits)
	start(t, in(command(t, g), exec.Command("/bin/sh", "-c", "while :; do :; done")))
	testutil.WaitFor(t, 20*time.Second, "throttling", func() error {
		u, err := g.Usage()
		if err == nil && (u.CPUThrottled == 0 || u.CPU == 0) {
			err = fmt.Errorf("usage %+v", u)
		}
		return err
	})
}

func TestKillCommandsSparesChronus(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	init := chronus(t, g, "sleep 1000")
	commands := []*CommandGroup{command(t, g), command(t, g)}
	for _, c := range commands { // the kill meets forks
		start(t, in(c, exec.Command("/bin/sh", "-c", "while :; do setsid sleep 1000 & done")))
	}
	if err := g.KillCommands(); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, 10*time.Second, "the commands' end", func() error {
		if pids, err := g.CommandPIDs(); err != nil || slices.ContainsFunc(pids, func(pid int) bool { return pid != init.Process.Pid }) {
			return fmt.Errorf("%v are left, %v", pids, err)
		}
		return nil
	})
	if err := init.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("chronus: %v, want alive", err)
	}
	// What begins in the groups afterwards lives.
	for _, c := range commands {
		cmd := in(c, exec.Command("/bin/echo", "here"))
		if out, err := output(t, cmd); out != "here\n" || err != nil {
			t.Errorf("a command afterwards: %q, %v", out, err)
		}
	}
	// A crash in the middle leaves a group frozen; whoever takes over thaws it.
	frozen := g.name + g.commandDir() + "/0/cgroup.freeze"
	if err := writeAt(tree.v2, frozen, "1"); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.Attach(g.Name(), idA, -1, small); err != nil {
		t.Fatal(err)
	}
	if n, err := readInt(tree.v2, frozen); n != 0 || err != nil {
		t.Errorf("frozen: %d, %v", n, err)
	}
}

func TestKillGetsEveryDescendantOfOneCommandOrOfAll(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	init := chronus(t, g, "sleep 1000")
	one, two := command(t, g), command(t, g)
	tree1 := "for i in 1 2 3; do setsid sh -c 'sleep 1000 & sleep 1000' & done; echo up; wait"
	cmd := in(one, exec.Command("/bin/sh", "-c", tree1))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	start(t, cmd)
	if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	start(t, in(two, exec.Command("/bin/sleep", "1000")))

	if _, err := unix.Write(one.Kill, []byte("1")); err != nil {
		t.Fatal(err)
	}
	populated := func(c *CommandGroup) bool {
		b := make([]byte, 256)
		n, err := unix.Pread(c.Events, b, 0)
		if err != nil {
			t.Fatal(err)
		}
		v, _ := lookup(b[:n], "populated")
		return v != 0
	}
	testutil.WaitFor(t, 10*time.Second, "the command's end", func() error {
		if populated(one) {
			return errors.New("still populated")
		}
		return nil
	})
	if !populated(two) {
		t.Error("the other command was killed too")
	}
	if err := init.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("chronus: %v, want alive", err)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, 10*time.Second, "the sandbox's end", func() error {
		if p, err := g.Populated(); p || err != nil {
			return fmt.Errorf("populated: %v, %v", p, err)
		}
		return nil
	})
}

func TestRemoveKillsAndMayBeRepeated(t *testing.T) {
	tree := openTree(t, 0)
	g := create(t, tree, idA, small)
	chronus(t, g, "sleep 1000")
	start(t, in(command(t, g), exec.Command("/bin/sleep", "1000")))
	for range 2 {
		if err := g.Remove(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.AddCommandGroup(); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("AddCommandGroup after Remove: %v, want lost", err)
	}
	if _, err := tree.Recover(idA, -1, small); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("Recover after Remove: %v, want lost", err)
	}
	if err := g.Kill(); err != nil {
		t.Errorf("Kill after Remove: %v", err)
	}
}

func TestOneGroupIsOneSandbox(t *testing.T) {
	g := create(t, openTree(t, 0), idA, small)
	if err := g.Claim(idB, small); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("second claim: %v, want conflict", err)
	}
	if g.ID() != idA {
		t.Errorf("owner %s, want %s", g.ID(), idA)
	}
}

func TestLimitsGoUpAndDown(t *testing.T) {
	g := create(t, openTree(t, 1), idA, small)
	for _, bytes := range []int64{256 << 20, 32 << 20, 0, 64 << 20} {
		if err := g.SetLimits(dsec.Limits{MemoryBytes: bytes}); err != nil {
			t.Errorf("memory limit %d: %v", bytes, err)
		}
	}
	if err := g.SetLimits(dsec.Limits{Pids: -1}); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("negative limit: %v, want invalid", err)
	}
}

func TestCommandGroupsAreBounded(t *testing.T) {
	g := create(t, openTree(t, 0), idA, small)
	for n := range maxCommands {
		c, err := g.AddCommandGroup()
		if err != nil {
			t.Fatalf("number %d: %v", n, err)
		}
		_ = c.Close()
	}
	if _, err := g.AddCommandGroup(); err == nil || dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Errorf("one too many: %v, want exhausted", err)
	}
}

func TestPrepareSeesEachNewGroupAndMayRefuseIt(t *testing.T) {
	tree := openTree(t, 0)
	var seen []string
	tree.opts.Prepare = func(dir int) error {
		path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir))
		seen = append(seen, filepath.Base(path))
		return err
	}
	if g := create(t, tree, idA, small); len(seen) != 1 || seen[0] != g.Name() {
		t.Errorf("saw %v, want %s", seen, g.Name())
	}
	refusal := errors.New("no")
	tree.opts.Prepare = func(int) error { return refusal }
	if g, err := tree.Create(context.Background(), idB, -1, small); !errors.Is(err, refusal) {
		t.Errorf("got %v, %v; want the refusal", g, err)
	}
	if names, err := tree.names(); err != nil || len(names) != 1 {
		t.Errorf("left: %v, %v; want the first group alone", names, err)
	}
}

// A process without privilege, in the group, may clone into a command group if
// it is the owner, and only then.
func TestOwnerClonesIntoACommandGroup(t *testing.T) {
	const owner = 231072
	tree := openTree(t, 0)
	exe := filepath.Join(testutil.Dir(t), "helper") // where the owner can read it
	if err := os.Chmod(filepath.Dir(exe), 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(exe, b, 0o755); err != nil {
		t.Fatal(err)
	}
	for id, test := range map[dsec.SandboxID]struct {
		owner int
		want  bool
	}{idA: {owner, true}, idB: {owner + 1, false}} {
		g, err := tree.Create(context.Background(), id, test.owner, small)
		if err != nil {
			t.Fatal(err)
		}
		home, err := g.Open()
		if err != nil {
			t.Fatal(err)
		}
		c := command(t, g)
		cmd := helper("clone")
		cmd.Path, cmd.Dir = exe, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{
			UseCgroupFD: true, CgroupFD: home,
			Credential: &syscall.Credential{Uid: owner, Gid: owner},
		}
		dup, err := unix.Dup(c.Dir)
		if err != nil {
			t.Fatal(err)
		}
		cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(dup), "dir")}
		out, err := cmd.CombinedOutput()
		if (err == nil) != test.want {
			t.Errorf("owner %d of the group, %d of the process: %v %s", test.owner, owner, err, out)
		}
		_, _ = unix.Close(home), cmd.ExtraFiles[0].Close()
		if err := g.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

func BenchmarkGroup(b *testing.B) {
	tree := openTree(b, 0)
	step := func(name string, f func(), before, after func()) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				before()
				b.StartTimer()
				f()
				b.StopTimer()
				after()
				b.StartTimer()
			}
		})
	}
	runtime.GC()
	var g *Group
	var c *CommandGroup
	acquire := func() { g, _ = tree.Acquire(context.Background(), 100000) }
	remove := func() {
		if err := g.Remove(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
	none := func() {}
	step("acquire", acquire, none, remove)
	step("claim", func() { _ = g.Claim(idA, small) }, acquire, remove)
	step("command", func() { c, _ = g.AddCommandGroup() }, acquire, func() { _ = c.Close(); remove() })
	step("usage", func() { _, _ = g.Usage() }, func() { acquire(); c, _ = g.AddCommandGroup() }, func() { _ = c.Close(); remove() })
	step("remove", remove, func() { acquire(); c, _ = g.AddCommandGroup(); _ = c.Close() }, none)
}

func TestATreeHasOneOwner(t *testing.T) {
	testutil.Require(t, testutil.Root)
	first := openTree(t, 0)
	name := first.opts.Name
	open := func() (*Tree, error) { return Open(Options{Name: name, Exclusive: true}) }
	owner, err := open()
	if err != nil {
		t.Fatal(err)
	}
	if other, err := open(); dsec.CodeOf(err) != dsec.CodeConflict {
		if err == nil {
			other.Close()
		}
		t.Errorf("a second owner: %v, want conflict", err)
	}
	owner.Close()
	next, err := open()
	if err != nil {
		t.Fatalf("after the first one closed: %v", err)
	}
	next.Close()
}
