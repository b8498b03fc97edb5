// Package cgroup limits and accounts the processes of sandboxes, on hosts
// where all controllers are on cgroup v2 (Unified) and on hosts where memory,
// pids and cpu are still on v1 beside a v2 hierarchy without them (Hybrid).
//
// The words: a Tree is all that dsec owns, one directory of a given name at
// the top of each hierarchy in use; a Group is one sandbox; a CommandGroup is
// one command of it, so that a kill gets every descendant and an OOM is told
// for the command it hit. chronus, PID 1 of the sandbox, is in the Group but
// outside its limits: whatever the commands do, it answers. What serves the
// sandbox's files is inside, but for the limit of processes; on a Unified host it
// is with chronus, under limits of their own.
//
//	Unified:  v2      <name>/<group>/init            chronus, its files' server; limits
//	          v2      <name>/<group>/work            the limits
//	          v2      <name>/<group>/work/<n>        commands
//	Hybrid:   v2      <name>/<group>                 both of these; kill, identity
//	          v2      <name>/<group>/<n>             commands
//	          memory  <name>/<group>                 the limit; the files' server
//	          memory  <name>/<group>/<n>             commands
//	          pids    <name>/<group>                 commands; the limit
//	          cpu     <name>/<group>                 commands, the files' server; the limit
//
// Cost decides how a process gets in. Moving a process by cgroup.procs takes a
// lock that waits for an RCU grace period unless another move was just made:
// 5 ms at the median on a quiet machine. Two ways do not take it: clone3 with
// CLONE_INTO_CGROUP, on v2, and a single-threaded process writing "0" to a v1
// `tasks` file, on v1 (0.02 ms). Group.Open and AddCommandGroup hand out
// the descriptors for these two.
//
// Directories of groups have names that mean nothing, so that they can be made
// ahead in a pool (v2 cannot rename). The sandbox's ID is an extended attribute of the
// v2 directory: written at the claim in one step, found by Recover and Sweep,
// gone with the directory.
package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// controllers are those that the limits need.
var controllers = []string{"memory", "pids", "cpu"}

// Options configure a Tree.
type Options struct {
	// Name of the tree's directory at the top of each hierarchy; it may have
	// slashes, where the part before the last one exists.
	Name string
	// Pool is how many groups are kept ready; 0 is none.
	Pool int
	// Prepare, where set, is called with a descriptor of the v2 directory of each
	// new group, before anything runs in it: to attach programs.
	Prepare func(dir int) error
	// CommandNamespaces forces what CommandNamespaces of the Tree tells.
	CommandNamespaces bool
	// Exclusive makes Open fail with conflict where another process has the tree
	// open so: each would sweep the other's groups.
	Exclusive bool
	Log       *slog.Logger
}

// Tree is the cgroups of one edge.
type Tree struct {
	opts   Options
	layout Layout
	v2     int            // descriptor of <mount>/<name>
	v1     map[string]int // the same of memory, pids and cpu; empty if Unified

	prefix string      // of the names of groups that this Tree made
	ready  chan *Group // the pool
	stop   context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	claims map[dsec.SandboxID]string // names of groups, as find last saw them
}

// Open makes the tree's directories where they are missing and starts to fill
// the pool. It never mounts, unmounts or moves anything. Its error is
// unsupported where the host has no layout that can enforce the limits.
func Open(opts Options) (*Tree, error) {
	if opts.Name == "" || !filepath.IsLocal(opts.Name) {
		return nil, dsec.Invalid("cgroup.name", "want a relative path, have %q", opts.Name)
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	layout, err := Detect()
	if err != nil {
		return nil, err
	}
	t := &Tree{opts: opts, layout: layout, v2: -1, v1: map[string]int{}, prefix: "g" + randomName(6)}
	if err := t.makeRoots(); err != nil {
		t.closeRoots()
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.stop = cancel
	if opts.Pool > 0 {
		t.ready = make(chan *Group, opts.Pool)
		t.wg.Go(func() { t.refill(ctx) })
	}
	return t, nil
}

func (t *Tree) makeRoots() error {
	root := filepath.Join(t.layout.V2, t.opts.Name)
	if t.layout.Unified {
		// A controller must be on in every directory above the one that uses it.
		dir := t.layout.V2
		for part := range strings.SplitSeq(t.opts.Name, "/") {
			if err := enable(dir, controllers); err != nil {
				return err
			}
			dir = filepath.Join(dir, part)
			if err := mkdir(dir); err != nil {
				return err
			}
		}
		if err := enable(dir, controllers); err != nil {
			return err
		}
	} else if err := mkdir(root); err != nil {
		return err
	}
	var err error
	if t.v2, err = openDir(root); err != nil {
		return err
	}
	if t.opts.Exclusive {
		// The kernel drops the lock with the process, however that ends.
		if err := unix.Flock(t.v2, unix.LOCK_EX|unix.LOCK_NB); err == unix.EWOULDBLOCK {
			return dsec.Errorf(dsec.CodeConflict, "cgroup: another dsec uses the tree %q; give this one a container.cgroup of its own", t.opts.Name)
		} else if err != nil {
			return fmt.Errorf("cgroup: lock: %w", err)
		}
	}
	if err := unix.Faccessat(t.v2, "cgroup.kill", unix.W_OK, 0); err != nil {
		return dsec.Errorf(dsec.CodeUnsupported, "cgroup: cgroup.kill is missing, want Linux 5.14 or later")
	}
	for name, mount := range t.layout.V1 {
		dir := filepath.Join(mount, t.opts.Name)
		if err := mkdir(dir); err != nil {
			return err
		}
		if t.v1[name], err = openDir(dir); err != nil {
			return err
		}
	}
	return nil
}

// CommandNamespaces tells that commands need cgroup namespaces of their own,
// because chronus cannot have one: with nsdelegate the kernel clones no process
// of a cgroup namespace into a directory outside of its root.
func (t *Tree) CommandNamespaces() bool { return t.layout.NSDelegate || t.opts.CommandNamespaces }

// Layout tells where the controllers are.
func (t *Tree) Layout() Layout { return t.layout }

// Join moves the calling process into the tree's own directories, outside all
// limits. The launcher does it once, so that what it starts is in the tree
// from its first instruction and needs no move, and so that a cgroup namespace
// that it unshares next shows no name above the tree. On a Unified host a
// directory of the launcher's own is used, because v2 allows no process
// beside controllers.
func (t *Tree) Join() error {
	dir := t.v2
	if t.layout.Unified {
		if err := unix.Mkdirat(t.v2, launcherDir, 0o755); err != nil && err != unix.EEXIST {
			return fmt.Errorf("cgroup %s: %w", launcherDir, err)
		}
		if err := writeAt(dir, launcherDir+"/cgroup.procs", "0"); err != nil {
			return err
		}
	} else if err := writeAt(dir, "cgroup.procs", "0"); err != nil {
		return err
	}
	for _, fd := range t.v1 {
		if err := writeAt(fd, "cgroup.procs", "0"); err != nil {
			return err
		}
	}
	return nil
}

// launcherDir is no group: sweeps leave it alone.
const launcherDir = "launcher"

// Close removes what the pool holds and frees the descriptors. Claimed groups
// stay as they are.
func (t *Tree) Close() error {
	t.stop()
	t.wg.Wait()
	var errs []error
	for len(t.ready) > 0 {
		g := <-t.ready
		errs = append(errs, g.Remove(context.Background()))
	}
	t.closeRoots()
	return errors.Join(errs...)
}

func (t *Tree) closeRoots() {
	if t.v2 >= 0 {
		_ = unix.Close(t.v2)
	}
	for _, fd := range t.v1 {
		_ = unix.Close(fd)
	}
	t.v2, t.v1 = -1, nil
}

// Destroy removes the tree's directories. It fails while a group is left.
func (t *Tree) Destroy() error {
	var errs []error
	if t.layout.Unified {
		_ = os.Remove(filepath.Join(t.layout.V2, t.opts.Name, launcherDir))
	}
	for _, mount := range append(slices.Collect(maps.Values(t.layout.V1)), t.layout.V2) {
		if err := unix.Rmdir(filepath.Join(mount, t.opts.Name)); err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("cgroup %s: %w", filepath.Join(mount, t.opts.Name), err))
		}
	}
	return errors.Join(errs...)
}

// enable turns controllers on for the children of dir.
func enable(dir string, names []string) error {
	have, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return err
	}
	for _, name := range names {
		if slices.Contains(strings.Fields(string(have)), name) {
			continue
		}
		err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+name), 0)
		if err != nil {
			return dsec.Errorf(dsec.CodeUnsupported, "cgroup: controller %s cannot be turned on below %s: %w", name, dir, errors.Unwrap(err))
		}
	}
	return nil
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

func openDir(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("cgroup %s: %w", dir, err)
	}
	return fd, nil
}

// The files of a cgroup are small and their names known, so they are read and
// written by plain system calls: no os.File, no poller.

func writeAt(dir int, name, value string) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", name, err)
	}
	_, err = unix.Write(fd, []byte(value))
	_ = unix.Close(fd)
	if err != nil {
		return fmt.Errorf("cgroup %s = %s: %w", name, value, err)
	}
	return nil
}

func readAt(dir int, name string) ([]byte, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", name, err)
	}
	defer unix.Close(fd)
	b := make([]byte, 4096) // every file read here is shorter
	n, err := unix.Read(fd, b)
	if err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", name, err)
	}
	return b[:n], nil
}

func readInt(dir int, name string) (int64, error) {
	b, err := readAt(dir, name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", name, err)
	}
	return n, nil
}

// readKey returns the number after key in a file of "key number" lines.
func readKey(dir int, name, key string) (int64, error) {
	b, err := readAt(dir, name)
	if err != nil {
		return 0, err
	}
	n, ok := lookup(b, key)
	if !ok {
		return 0, fmt.Errorf("cgroup %s: no %s", name, key)
	}
	return n, nil
}

func lookup(b []byte, key string) (int64, bool) {
	for line := range bytes.Lines(b) {
		k, v, ok := bytes.Cut(line, []byte(" "))
		if ok && string(k) == key {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(v)), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// readPIDs reads the processes of a cgroup, of which there may be many.
func readPIDs(dir int, name string) (pids []int, err error) {
	fd, err := unix.Openat(dir, name+"/cgroup.procs", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cgroup %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("cgroup %s: %w", name, err)
		}
		pids = append(pids, pid)
	}
	return pids, lines.Err()
}
