package cgroup

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// CommandGroup is the descriptors by which chronus runs one command at a time
// in a cgroup of its own. They are made here, because chronus has no right to
// open them, and closed here once chronus has its copies. All are CLOEXEC.
//
// The command's process is put in with clone3(CLONE_INTO_CGROUP, Dir), or,
// where Dir is -1, by writing "0" to Procs before it execs; then it writes "0"
// to each of Join. It must do so while it has a single thread.
type CommandGroup struct {
	Dir   int // the v2 directory, O_PATH; -1 where a process may not be cloned into it
	Procs int // the v2 cgroup.procs: works always, and stalls for 5 ms where no other move was just made
	// Join is v1 tasks files, to which "0" is written: of memory, cpu and pids;
	// empty on a Unified host.
	Join []int
	// Kill ends every process of the command when "1" is written to it.
	Kill int
	// Events is the v2 cgroup.events: "populated 0" once no process is left.
	// It is readable from offset 0 again after each POLLPRI.
	Events int
	// OOM has a line "oom_kill N" (v1 memory.oom_control, v2 memory.events):
	// how many processes of this group were killed for memory so far.
	OOM int
}

// maxCommands is chronusapi.MaxProcesses; a bound here keeps a loop in the
// caller from filling the kernel's memory.
const maxCommands = 256

// AddCommandGroup makes the cgroup for one more command at a time. It is
// freed with the group. Its error is exhausted at the limit of 256.
func (g *Group) AddCommandGroup() (_ *CommandGroup, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return nil, dsec.Errorf(dsec.CodeLost, "cgroup: the sandbox's group is gone")
	}
	if g.commands >= maxCommands {
		return nil, dsec.Errorf(dsec.CodeExhausted, "cgroup: want at most %d command groups", maxCommands)
	}
	sub := g.commandDir() + "/" + strconv.Itoa(g.commands)
	hybrid := !g.tree.layout.Unified
	made := func(dir int, name string) error {
		err := unix.Mkdirat(dir, name, 0o755)
		if err == unix.EEXIST { // of an AddCommandGroup that failed half-way
			err = nil
		}
		return err
	}
	if err := made(g.tree.v2, g.name+sub); err != nil {
		return nil, gone(fmt.Errorf("cgroup %s: %w", g.name+sub, err))
	}
	memory := g.memoryDir(g.commands)
	if hybrid && memory != g.name {
		if err := made(g.tree.v1["memory"], memory); err != nil {
			return nil, gone(fmt.Errorf("cgroup memory/%s: %w", memory, err))
		}
	}
	if err := g.delegate(sub); err != nil {
		return nil, err
	}
	c := &CommandGroup{Dir: -1, Procs: -1, Kill: -1, Events: -1, OOM: -1}
	defer func() {
		if err != nil {
			err = gone(errors.Join(err, c.Close()))
		}
	}()
	open := func(fd *int, dir int, name string, flags int) {
		if err != nil {
			return
		}
		*fd, err = unix.Openat(dir, name, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			*fd = -1
			err = fmt.Errorf("cgroup %s: %w", name, err)
		}
	}
	v2 := g.name + sub
	open(&c.Dir, g.tree.v2, v2, unix.O_PATH|unix.O_DIRECTORY)
	open(&c.Procs, g.tree.v2, v2+"/cgroup.procs", unix.O_WRONLY)
	open(&c.Kill, g.tree.v2, v2+"/cgroup.kill", unix.O_WRONLY)
	open(&c.Events, g.tree.v2, v2+"/cgroup.events", unix.O_RDONLY)
	if hybrid {
		c.Join = []int{-1, -1, -1}
		open(&c.Join[0], g.tree.v1["memory"], memory+"/tasks", unix.O_WRONLY)
		open(&c.Join[1], g.tree.v1["cpu"], g.name+"/tasks", unix.O_WRONLY)
		open(&c.Join[2], g.tree.v1["pids"], g.name+"/tasks", unix.O_WRONLY)
		open(&c.OOM, g.tree.v1["memory"], memory+"/memory.oom_control", unix.O_RDONLY)
	} else {
		open(&c.OOM, g.tree.v2, v2+"/memory.events", unix.O_RDONLY)
	}
	if err != nil {
		return nil, err
	}
	g.commands++
	return c, nil
}

// memoryDir is the v1 memory directory of command group n, whose count of OOM
// kills is that of the command. The first one's is the sandbox's own: v1 counts
// a kill only where the killed process was, and each memory cgroup costs the
// kernel 1 KiB for every 64 file systems that are mounted, which is the most
// of what a sandbox that runs one command at a time would cost.
func (g *Group) memoryDir(n int) string {
	if n == 0 {
		return g.name
	}
	return g.name + "/" + strconv.Itoa(n)
}

// CommandGroups counts those made so far.
func (g *Group) CommandGroups() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.commands
}

// Close closes the descriptors; the cgroup stays.
func (c *CommandGroup) Close() error {
	var errs []error
	for _, fd := range append([]int{c.Dir, c.Procs, c.Kill, c.Events, c.OOM}, c.Join...) {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	*c = CommandGroup{Dir: -1, Procs: -1, Kill: -1, Events: -1, OOM: -1}
	return errors.Join(errs...)
}
