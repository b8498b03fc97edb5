package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Recover finds the group of a sandbox after a restart of the edge. Its error
// has code lost where there is none. limits are those of its claim.
func (t *Tree) Recover(id dsec.SandboxID, owner int, limits dsec.Limits) (*Group, error) {
	name, err := t.find(id)
	if err != nil {
		return nil, err
	}
	return t.Attach(name, id, owner, limits)
}

// find reads all claims at the first call, and again where that does not have
// the ID, so that recovering thousands of sandboxes reads each once.
func (t *Tree) find(id dsec.SandboxID) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if name, ok := t.claims[id]; ok && t.claimant(name) == id {
		return name, nil
	}
	names, err := t.names()
	if err != nil {
		return "", err
	}
	t.claims = map[dsec.SandboxID]string{}
	for _, name := range names {
		if owner := t.claimant(name); owner != "" {
			t.claims[owner] = name
		}
	}
	name, ok := t.claims[id]
	if !ok {
		return "", dsec.Errorf(dsec.CodeLost, "cgroup: the sandbox's group is gone")
	}
	return name, nil
}

// Attach is Recover for a caller that stored the group's name.
func (t *Tree) Attach(name string, id dsec.SandboxID, owner int, limits dsec.Limits) (*Group, error) {
	if !isGroup(name) || t.claimant(name) != id {
		return nil, dsec.Errorf(dsec.CodeLost, "cgroup: the sandbox's group is gone")
	}
	g := &Group{tree: t, name: name, id: id, limits: limits, owner: owner}
	for {
		// v1 memory is made after v2: a pair that is half made is made again.
		dir := g.name + g.commandDir() + "/" + strconv.Itoa(g.commands)
		at := t.v2
		if !t.layout.Unified && g.commands > 0 {
			at = t.v1["memory"]
		}
		if unix.Faccessat(at, dir, unix.F_OK, 0) != nil {
			return g, nil
		}
		_ = writeAt(t.v2, dir+"/cgroup.freeze", "0") // see KillCommands; a half made one has no such file
		g.commands++
	}
}

// Sweep kills and removes every group that an earlier Tree of this name made
// and that no sandbox in keep has claimed, in whatever state a crash left it.
func (t *Tree) Sweep(ctx context.Context, keep map[dsec.SandboxID]bool) error {
	names, err := t.names()
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var errs []error
	var g errgroup.Group
	g.SetLimit(sweepConcurrency)
	for _, name := range names {
		if id := t.claimant(name); keep[id] && id != "" || strings.HasPrefix(name, t.prefix) {
			continue
		}
		g.Go(func() error {
			ctx, cancel := t.ending(ctx, name)
			defer cancel()
			if err := t.remove(ctx, name, 0); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
			return nil
		})
	}
	_ = g.Wait() // no function returns an error
	return errors.Join(errs...)
}

// sweepConcurrency is how many groups are waited for at once: one whose processes do
// not end is waited for half a minute, and there may be many such. To look at more of
// them would take the CPU time that the others need to end.
const sweepConcurrency = 64

// names lists the groups, those too of which only a v1 part is left.
func (t *Tree) names() ([]string, error) {
	seen := map[string]bool{}
	var names []string
	mounts := []string{t.layout.V2}
	for _, m := range t.layout.V1 {
		mounts = append(mounts, m)
	}
	for _, m := range mounts {
		entries, err := os.ReadDir(filepath.Join(m, t.opts.Name))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() && isGroup(e.Name()) && !seen[e.Name()] {
				seen[e.Name()] = true
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

// isGroup keeps every path that is built from a name inside the tree, and the
// launcher's directory out of sweeps.
func isGroup(name string) bool {
	if len(name) != groupNameLen || name[0] != 'g' {
		return false
	}
	for _, c := range []byte(name) {
		if !('a' <= c && c <= 'z' || '2' <= c && c <= '7') {
			return false
		}
	}
	return true
}

// claimant returns the ID of the sandbox that claimed a group, or "".
func (t *Tree) claimant(name string) dsec.SandboxID {
	var b [64]byte
	n, err := unix.Getxattr(t.procPath(name), idAttr, b[:])
	if err != nil {
		return ""
	}
	return dsec.SandboxID(b[:n])
}

// remove kills what is in a group and removes its directories, the v2 one last.
// commands is a hint: how many there probably are.
func (t *Tree) remove(ctx context.Context, name string, commands int) error {
	_ = writeAt(t.v2, name+"/cgroup.kill", "1") // gone is fine; alive is seen below
	for n := range commands {
		dir := name + t.layout.commandDir() + "/" + strconv.Itoa(n)
		for _, at := range []int{t.v2, t.memory()} {
			if at >= 0 {
				if err := rmdir(ctx, at, dir); err != nil {
					return err
				}
			}
		}
	}
	for _, c := range controllers {
		if at, ok := t.v1[c]; ok {
			if err := rmtree(ctx, at, name); err != nil {
				return err
			}
		}
	}
	return rmtree(ctx, t.v2, name)
}

// memory is the v1 memory hierarchy, -1 if there is none.
func (t *Tree) memory() int {
	if fd, ok := t.v1["memory"]; ok {
		return fd
	}
	return -1
}

// rmtree removes a cgroup and those below it, whose names it reads only if the
// plain removal says that there are some.
func rmtree(ctx context.Context, at int, name string) error {
	if err := unix.Unlinkat(at, name, unix.AT_REMOVEDIR); err == nil || err == unix.ENOENT {
		return nil
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ENODEV {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", name, err)
	}
	d := os.NewFile(uintptr(fd), name)
	entries, err := d.ReadDir(-1)
	_ = d.Close()
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := rmtree(ctx, at, name+"/"+e.Name()); err != nil {
				return err
			}
		}
	}
	return rmdir(ctx, at, name)
}

// rmdir removes one directory, and waits for killed processes to leave it.
func rmdir(ctx context.Context, at int, name string) error {
	wait := 50 * time.Microsecond
	for {
		err := unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
		switch err {
		case nil, unix.ENOENT, unix.ENODEV:
			return nil
		case unix.EBUSY, unix.EINTR:
		default:
			return fmt.Errorf("cgroup %s: remove: %w", name, err)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("cgroup %s: remove: %w: processes are left", name, context.Cause(ctx))
		case <-t.C:
		}
		wait = min(2*wait, 20*time.Millisecond)
	}
}
