package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// How memory of a frozen sandbox is given back. What belongs to one process alone
// is moved by process_madvise, many times as fast; it does nothing to pages that
// processes share since a fork. These, and files in memory, are reclaimed by the
// group: on v2 by memory.reclaim, on v1 by a limit that is lowered for the while.

const (
	// reclaimStep is how much is asked for at once: it can be given up after each.
	reclaimStep = 16 << 20
	// reclaimTries is how often nothing may come of it. The first time the kernel
	// only notes that pages were used.
	reclaimTries = 4
)

// PageOut has the kernel write what a frozen group has in memory into the host's
// swap. The process keep is left alone. Where nothing, or not all, could be moved the
// reason tells why. It ends with ctx, at the latest after some 32 MiB.
func (g *Group) PageOut(ctx context.Context, keep int) (reason string, err error) {
	if free, err := freeSwap(); err != nil || free == 0 {
		return "this node has no swap, or none that is free", err
	}
	allowed, err := g.allowSwap()
	if err != nil || !allowed {
		return "the sandbox may not use this node's swap", gone(err)
	}
	err = g.adviseAll(ctx, keep, unix.MADV_PAGEOUT, func(m mapping) int64 {
		if !m.private || m.fixed {
			return 0
		}
		return m.resident
	})
	if err == nil || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) { // the group alone, then: slower
		err = g.reclaim(ctx)
	}
	if err := errors.Join(err, g.RestoreMemory()); err != nil {
		return "", gone(err)
	}
	if free, err := freeSwap(); err != nil || free == 0 {
		return "this node's swap is full", err
	}
	return "", nil
}

// Prefetch reads back what the processes of the group have in swap, but for those of
// keep. It ends with ctx.
func (g *Group) Prefetch(ctx context.Context, keep int) error {
	// Of a file the kernel would read all that is mapped, used or not.
	return g.adviseAll(ctx, keep, unix.MADV_WILLNEED, func(m mapping) int64 {
		if m.file {
			return 0
		}
		return m.swapped
	})
}

// RestoreMemory sets the group's limits again that PageOut changes. It need not be
// called after that, unless the process that did it was killed.
func (g *Group) RestoreMemory() error {
	g.mu.Lock()
	limits := g.limits
	g.mu.Unlock()
	if !g.tree.layout.Unified {
		return gone(g.setV1Memory(limits.MemoryBytes))
	}
	return gone(g.setSwapMax(noSwap))
}

// allowSwap has the group use the host's swap, and tells whether it may.
func (g *Group) allowSwap() (bool, error) {
	if !g.tree.layout.Unified {
		n, err := readInt(g.tree.v1["memory"], g.name+"/memory.swappiness")
		return n != 0, err
	}
	return true, g.setSwapMax("max")
}

// adviseAll is advise of all processes of the group.
func (g *Group) adviseAll(ctx context.Context, keep, advice int, moved func(mapping) int64) error {
	for _, dir := range g.processDirs() {
		held, err := holdProcesses(g.tree.v2, dir)
		if err != nil {
			return gone(err)
		}
		for pid, fd := range held {
			if pid != keep && err == nil {
				err = advise(ctx, pid, fd, advice, moved)
			}
		}
		held.close()
		if err != nil {
			return err
		}
	}
	return nil
}

// processDirs are the v2 directories in which the group's processes are.
func (g *Group) processDirs() []string {
	dirs := []string{g.name}
	if g.tree.layout.Unified {
		dirs[0] += "/init"
	}
	for n := range g.CommandGroups() {
		dirs = append(dirs, g.name+g.commandDir()+"/"+strconv.Itoa(n))
	}
	return dirs
}

// reclaim has the kernel write out what the group has in memory, step by step, as
// long as something comes of it.
func (g *Group) reclaim(ctx context.Context) error {
	for tries, last := 0, int64(1)<<62; tries < reclaimTries; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		used, err := g.Memory()
		if err != nil || used == 0 {
			return err
		}
		if tries++; used < last-reclaimStep/64 {
			tries = 0
		}
		last = min(last, used)
		switch err := g.reclaimSome(used); {
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EAGAIN):
			// The kernel goes by its statistics of the group, which may be two seconds
			// old, and then takes no page for one that was not used lately. Who reads
			// them has them made anew.
			if err := g.freshStatistics(); err != nil {
				return err
			}
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		}
	}
	return nil
}

// reclaimSome asks for one step of what the group uses.
func (g *Group) reclaimSome(used int64) error {
	if g.tree.layout.Unified {
		return writeAt(g.tree.v2, g.name+"/work/memory.reclaim", strconv.Itoa(reclaimStep))
	}
	// A limit below what is used reclaims first, and is not set where that is not
	// enough. It never has anything killed.
	limit := max(used-reclaimStep, 0)
	return writeAt(g.tree.v1["memory"], g.name+"/memory.limit_in_bytes", strconv.FormatInt(limit, 10))
}

func (g *Group) freshStatistics() error {
	dir, at := g.tree.memory(), g.name
	if g.tree.layout.Unified {
		dir, at = g.tree.v2, g.name+"/work"
	}
	_, err := readAt(dir, at+"/memory.stat")
	return err
}

// freeSwap is how many bytes of the host's swap are free.
func freeSwap() (free int64, err error) {
	text, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return 0, err
	}
	_, text, _ = bytes.Cut(text, []byte("\n")) // the heading
	for line := range bytes.Lines(text) {
		// Filename Type Size Used Priority; a blank in a name is written \040
		f := strings.Fields(string(line))
		if len(f) < 4 {
			return 0, fmt.Errorf("/proc/swaps: %q", line)
		}
		size, err1 := strconv.ParseInt(f[2], 10, 64)
		used, err2 := strconv.ParseInt(f[3], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, fmt.Errorf("/proc/swaps: %w", err)
		}
		free += (size - used) << 10
	}
	return free, nil
}
