package cgroup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Group is the cgroups of one sandbox. It holds no descriptors.
type Group struct {
	tree *Tree
	name string

	mu       sync.Mutex
	id       dsec.SandboxID // empty until claimed
	limits   dsec.Limits
	owner    int // of the files by which chronus clones into a command group; -1 is root
	commands int // made so far, named 0, 1, ...
	removed  bool
}

// idAttr holds the sandbox's ID. Only privileged processes see trusted ones.
const idAttr = "trusted.dsec.id"

// Acquire returns an unclaimed group without limits, from the pool if it has
// one. owner is the host's uid of root inside the sandbox, as which chronus
// clones commands into their groups; -1 where it never will.
func (t *Tree) Acquire(ctx context.Context, owner int) (*Group, error) {
	var g *Group
	select {
	case g = <-t.ready:
	default:
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		var err error
		if g, err = t.newGroup(); err != nil {
			return nil, err
		}
	}
	g.owner = owner
	if err := g.delegate(""); err != nil {
		return nil, errors.Join(err, g.Remove(context.WithoutCancel(ctx)))
	}
	return g, nil
}

// Create is Acquire and Claim.
func (t *Tree) Create(ctx context.Context, id dsec.SandboxID, owner int, limits dsec.Limits) (*Group, error) {
	g, err := t.Acquire(ctx, owner)
	if err != nil {
		return nil, err
	}
	if err := g.Claim(id, limits); err != nil {
		return nil, errors.Join(err, g.Remove(context.WithoutCancel(ctx)))
	}
	return g, nil
}

// newGroup makes the directories of a group. The v2 one is made first and
// removed last, so that it stands for as long as anything of the group does.
func (t *Tree) newGroup() (*Group, error) {
	g := &Group{tree: t, name: t.prefix + randomName(groupNameLen-len(t.prefix)), owner: -1}
	if err := g.makeDirs(); err != nil {
		return nil, errors.Join(err, g.Remove(context.Background()))
	}
	return g, nil
}

// The limits of chronus and of what serves the sandbox's files, together. The
// memory is far more than the two take of their own, since chronus must not be
// killed for it: the rest is what the kernel keeps of the files that were looked
// at, and gives back.
const (
	initMemory = "268435456"
	initPids   = "512"
)

// groupNameLen is the length of g, then 6 characters of the Tree and 8 of the group.
const groupNameLen = 15

func randomName(n int) string { return strings.ToLower(rand.Text()[:n]) }

func (g *Group) makeDirs() error {
	if err := g.mkdir(g.tree.v2, g.name); err != nil {
		return err
	}
	if err := g.prepare(); err != nil {
		return err
	}
	if !g.tree.layout.Unified {
		for _, c := range controllers {
			if err := g.mkdir(g.tree.v1[c], g.name); err != nil {
				return err
			}
		}
		return nil
	}
	// Children made after the controllers are on get them at once.
	if err := g.write("", "cgroup.subtree_control", "+memory +pids +cpu"); err != nil {
		return err
	}
	for _, d := range []string{"/init", "/work"} {
		if err := g.mkdir(g.tree.v2, g.name+d); err != nil {
			return err
		}
	}
	// Nothing that an agent makes has its files' server take more than this.
	for _, f := range []struct{ name, value string }{{"memory.max", initMemory}, {"pids.max", initPids}} {
		if err := g.write("/init", f.name, f.value); err != nil {
			return err
		}
	}
	// Commands are told apart by memory only: for OOM.
	return g.write("/work", "cgroup.subtree_control", "+memory")
}

func (g *Group) prepare() error {
	if g.tree.opts.Prepare == nil {
		return nil
	}
	fd, err := unix.Openat(g.tree.v2, g.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", g.name, err)
	}
	defer unix.Close(fd)
	return g.tree.opts.Prepare(fd)
}

func (g *Group) mkdir(dir int, name string) error {
	if err := unix.Mkdirat(dir, name, 0o755); err != nil {
		return fmt.Errorf("cgroup %s: %w", name, err)
	}
	return nil
}

// write writes a file of the v2 directory, or of a directory below it.
func (g *Group) write(sub, file, value string) error {
	return writeAt(g.tree.v2, g.name+sub+"/"+file, value)
}

// commandDir is where the v2 directories of commands are, below the group's.
func (g *Group) commandDir() string { return g.tree.layout.commandDir() }

func (l Layout) commandDir() string {
	if l.Unified {
		return "/work"
	}
	return ""
}

// delegate lets the owner clone processes into the v2 directory sub.
// CLONE_INTO_CGROUP checks the caller's right to write cgroup.procs of the
// target and of the directory that is above both it and the caller. Inside
// the sandbox no path leads to these files but a read-only mount.
func (g *Group) delegate(sub string) error {
	if g.owner < 0 {
		return nil
	}
	name := g.name + sub + "/cgroup.procs"
	if err := unix.Fchownat(g.tree.v2, name, g.owner, -1, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("cgroup %s: chown: %w", name, err)
	}
	return nil
}

// Claim gives the group to a sandbox and sets its limits. From here on Recover
// and Sweep find it by the ID.
func (g *Group) Claim(id dsec.SandboxID, limits dsec.Limits) error {
	if err := unix.Setxattr(g.tree.procPath(g.name), idAttr, []byte(id), unix.XATTR_CREATE); err != nil {
		if err == unix.EEXIST {
			return dsec.Errorf(dsec.CodeConflict, "cgroup: the group is another sandbox's")
		}
		return fmt.Errorf("cgroup %s: claim: %w", g.name, err)
	}
	g.mu.Lock()
	g.id = id
	g.mu.Unlock()
	return g.SetLimits(limits)
}

// Rename gives a claimed group to another sandbox, in one step.
func (g *Group) Rename(id dsec.SandboxID) error {
	if err := unix.Setxattr(g.tree.procPath(g.name), idAttr, []byte(id), unix.XATTR_REPLACE); err != nil {
		return gone(fmt.Errorf("cgroup %s: rename: %w", g.name, err))
	}
	g.mu.Lock()
	g.id = id
	g.mu.Unlock()
	return nil
}

// procPath names a v2 directory for the calls that take no directory descriptor.
func (t *Tree) procPath(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(t.v2) + "/" + name
}

// ID is the sandbox's, empty before the claim.
func (g *Group) ID() dsec.SandboxID {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.id
}

// Name finds the group again, with Tree.Attach.
func (g *Group) Name() string { return g.name }

// Open returns a descriptor of the v2 directory in which chronus lives, for
// CLONE_INTO_CGROUP. The caller closes it.
func (g *Group) Open() (int, error) {
	name := g.name
	if g.tree.layout.Unified {
		name += "/init"
	}
	fd, err := unix.Openat(g.tree.v2, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("cgroup %s: %w", name, err)
	}
	return fd, nil
}

// OpenFiles returns descriptors of where the process that serves the sandbox's
// files belongs: first the v2 directory, for CLONE_INTO_CGROUP, then the v1 tasks
// files to which it writes "0" while it has a single thread. The caller closes them.
func (g *Group) OpenFiles() ([]int, error) {
	dir, err := g.Open()
	if err != nil {
		return nil, gone(err)
	}
	fds := []int{dir}
	if g.tree.layout.Unified {
		return fds, nil
	}
	for _, c := range []string{"memory", "cpu"} { // and not pids, where a fork bomb would keep it out
		fd, err := unix.Openat(g.tree.v1[c], g.name+"/tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			for _, fd := range fds {
				_ = unix.Close(fd)
			}
			return nil, gone(fmt.Errorf("cgroup %s/%s/tasks: %w", c, g.name, err))
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// FilesOOMKills is how many processes were killed where that process is because
// the sandbox had used up its memory: with those of the first command. It is 0 on
// v2, where the process has memory of the platform's, and not the sandbox's.
func (g *Group) FilesOOMKills() (int64, error) {
	if g.tree.layout.Unified {
		return 0, nil
	}
	n, err := readKey(g.tree.v1["memory"], g.name+"/memory.oom_control", "oom_kill")
	return n, gone(err)
}

// Dir is one directory that programs inside look for below /sys/fs/cgroup.
type Dir struct {
	Path string // below /sys/fs/cgroup; "." is itself
	FD   int    // O_PATH; the caller closes it
}

// Dirs returns the directories whose files tell programs inside their limits,
// to be mounted read-only below /sys/fs/cgroup.
func (g *Group) Dirs() ([]Dir, error) {
	if g.tree.layout.Unified {
		fd, err := unix.Openat(g.tree.v2, g.name+"/work", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("cgroup %s: %w", g.name, err)
		}
		return []Dir{{Path: ".", FD: fd}}, nil
	}
	var dirs []Dir
	for _, c := range controllers {
		fd, err := unix.Openat(g.tree.v1[c], g.name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			for _, d := range dirs {
				_ = unix.Close(d.FD)
			}
			return nil, fmt.Errorf("cgroup %s/%s: %w", c, g.name, err)
		}
		dirs = append(dirs, Dir{Path: c, FD: fd})
	}
	return dirs, nil
}

// Kill sends SIGKILL to every process of the sandbox, chronus too. It does not
// wait for them to be gone.
func (g *Group) Kill() error {
	err := g.write("", "cgroup.kill", "1")
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// Remove kills what is left in the group and removes its directories. It
// returns nil only once nothing is left, and may be called again. It waits for
// killed processes for as long as they go on ending, see Ending.
func (g *Group) Remove(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.removed {
		return nil
	}
	ctx, cancel := g.Ending(ctx)
	defer cancel()
	if err := g.tree.remove(ctx, g.name, g.commands); err != nil {
		return err
	}
	g.removed = true
	return nil
}

// CommandPIDs lists the processes of the commands that run.
func (g *Group) CommandPIDs() (pids []int, err error) {
	if !g.tree.layout.Unified {
		return readPIDs(g.tree.v1["pids"], g.name)
	}
	for n := range g.CommandGroups() {
		more, err := readPIDs(g.tree.v2, g.name+g.commandDir()+"/"+strconv.Itoa(n))
		if err != nil {
			return nil, err
		}
		pids = append(pids, more...)
	}
	return pids, nil
}

// KillCommands kills what runs in the command groups, and not chronus, nor what
// begins in another of them once the first has heard of it. A group is frozen
// meanwhile, so that nothing forks faster than it is killed; Attach thaws what a
// crash in the middle left frozen. Not by cgroup.kill: what is cloned into a group
// after that is killed too, see docs/kernel.md.
func (g *Group) KillCommands() error {
	var run []string
	var errs []error
	for n := range g.CommandGroups() {
		dir := g.name + g.commandDir() + "/" + strconv.Itoa(n)
		populated, err := readKey(g.tree.v2, dir+"/cgroup.events", "populated")
		if errs = append(errs, err); populated != 0 {
			run = append(run, dir)
		}
	}
	for _, dir := range run {
		if err := writeAt(g.tree.v2, dir+"/cgroup.freeze", "1"); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, g.waitToKill(dir), killAll(g.tree.v2, dir), writeAt(g.tree.v2, dir+"/cgroup.freeze", "0"))
	}
	return errors.Join(errs...)
}

// Populated reports whether a process of the sandbox, chronus or a command, is left.
func (g *Group) Populated() (bool, error) {
	n, err := readKey(g.tree.v2, g.name+"/cgroup.events", "populated")
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return false, nil
	}
	return n != 0, err
}
