package chronusapi

import (
	"context"
	"net"
	"syscall"

	"github.com/opendsec/dsec"
)

// Setup, AddGroup and Hold are the calls of the container backend alone. The first two carry
// descriptors, by SCM_RIGHTS on the first byte of their request, in the order
// in which the request names them.
//
// A warm container is chronus in all its namespaces, on a minimal root that
// has proc, dev and sys mounted below /. It waits. Setup makes it a sandbox,
// once; every other call but Info is refused with conflict until then. chronus:
//
//  1. moves the detached mount Root to /newroot;
//  2. moves each mount of Move (a path on the minimal root, such as /proc) to
//     the same path below it. The backend made the targets; a symlink on the
//     way is refused (RESOLVE_NO_SYMLINKS); then attaches each of Mounts there;
//  3. pivots into it and detaches the old root;
//  4. sets the host name, if there is one;
//  5. drops every capability that is not in KeepCaps, from the bounding set too,
//     sets no_new_privs, and installs Filter;
//  6. keeps Groups, Rlimits and ChildFilter for the commands, and answers.
//
// An error may leave steps half done: the backend then kills the instance.
//
// A command is cloned into its group's Dir, where there is one. Its child,
// before it execs: writes "0" to each of its group's Procs, sets its affinity to
// CPUs, applies Rlimits, becomes its user, and installs ChildFilter.
//
// This package has the client's side alone: chronus itself is not in Go.

// SetupRequest turns a warm container into a sandbox. Descriptors stay the
// caller's.
type SetupRequest struct {
	Root        int // detached mount of the sandbox's root (open_tree, fsmount)
	Move        []string
	Mounts      []Mount // in this order
	CPUs        []byte  // affinity of commands, as sched_setaffinity(2) takes it; empty: all
	Hostname    string
	KeepCaps    uint64   // bit n is capability n
	Filter      []byte   // seccomp program for chronus and all commands: array of struct sock_filter; may be empty
	ChildFilter []byte   // a second one, for commands only; may be empty
	Rlimits     []Rlimit // of commands
	Groups      []Group
}

// Mount is a detached mount for an absolute path of the sandbox, where the
// backend made sure of a target.
type Mount struct {
	FD   int
	Path string
}

// Rlimit is one resource limit (RLIMIT_* of Linux).
type Rlimit struct {
	Resource   uint32
	Soft, Hard uint64
}

// Group is a control group for one command at a time, by descriptors that the
// host opened. -1 stands for one that is not there.
type Group struct {
	Dir int // v2 directory to clone the command into (CLONE_INTO_CGROUP)
	// Procs is cgroup.procs (v1: tasks), one per hierarchy, open for writing; where
	// Dir is -1 the first is that of v2. Chronus-files joins those of v1 of the first
	// group, but for the last: it has a share of the sandbox's memory and CPU time
	// and is no process of a command.
	Procs  []int
	Kill   int // cgroup.kill of v2, open for writing
	Events int // cgroup.events of v2, open for reading: "populated N" tells whether it is free
	OOM    int // memory.oom_control (v1) or memory.events (v2), open for reading: a line "oom_kill N"
}

// Limits of a setup.
const (
	MaxGroupProcs  = 8
	MaxSetupGroups = 16
	maxMoves       = 16 // and Mounts
	maxRlimits     = 16
)

// Setup makes a warm container a sandbox. The client's connections must be
// Unix sockets.
func (c *Client) Setup(ctx context.Context, req SetupRequest) error {
	var e enc
	fds := []int{req.Root}
	e.strs(req.Move)
	e.u32(uint32(len(req.Mounts)))
	for _, m := range req.Mounts {
		fds = append(fds, m.FD)
		e.str(m.Path)
	}
	e.bytes(req.CPUs)
	e.str(req.Hostname)
	e.u64(req.KeepCaps)
	e.bytes(req.Filter)
	e.bytes(req.ChildFilter)
	e.u32(uint32(len(req.Rlimits)))
	for _, l := range req.Rlimits {
		e.u32(l.Resource)
		e.u64(l.Soft)
		e.u64(l.Hard)
	}
	if len(req.Groups) > MaxSetupGroups || len(req.Move) > maxMoves || len(req.Mounts) > maxMoves || len(req.Rlimits) > maxRlimits {
		return dsec.Errorf(dsec.CodeInternal, "chronus setup: more than %d groups, %d moves or mounts, or %d rlimits",
			MaxSetupGroups, maxMoves, maxRlimits)
	}
	e.u32(uint32(len(req.Groups)))
	for i := range req.Groups {
		fds = e.group(&req.Groups[i], fds)
	}
	return c.sendRights(ctx, callSetup, e.b, fds)
}

// Hold has all that is measured by time stand still in chronus: the timeouts of
// commands, how long they take, and how long what has ended is kept. A caller holds
// it before it freezes the sandbox, and releases it after it thawed it: no timeout
// is over in between. The error is unsupported where chronus is of the version before.
func (c *Client) Hold(ctx context.Context) error { return c.hold(ctx, true) }

// Release has it go on, where it was held.
func (c *Client) Release(ctx context.Context) error { return c.hold(ctx, false) }

func (c *Client) hold(ctx context.Context, hold bool) error {
	var e enc
	e.bool(hold)
	return c.simple(ctx, callHold, e.b, dsec.CodeUnavailable, nil)
}

// AddGroup hands one more command group to chronus.
func (c *Client) AddGroup(ctx context.Context, g Group) error {
	var e enc
	fds := e.group(&g, nil)
	return c.sendRights(ctx, callAddGroup, e.b, fds)
}

func (e *enc) group(g *Group, fds []int) []int {
	e.u8(uint8(len(g.Procs)))
	fds = append(fds, g.Procs...)
	for _, fd := range []int{g.Dir, g.Kill, g.Events, g.OOM} {
		e.bool(fd >= 0)
		if fd >= 0 {
			fds = append(fds, fd)
		}
	}
	return fds
}

// sendRights makes a call whose request carries descriptors.
func (c *Client) sendRights(ctx context.Context, typ uint8, payload []byte, fds []int) error {
	if len(payload) > MaxFrame {
		return dsec.Errorf(dsec.CodeInternal, "chronus setup: %d bytes in a request", len(payload))
	}
	cn, _, err := c.take(ctx, typ)
	if err != nil {
		return err
	}
	uc, ok := cn.nc.(*net.UnixConn)
	if !ok {
		cn.nc.Close()
		return dsec.Errorf(dsec.CodeInternal, "chronus setup: want a Unix connection, got %T", cn.nc)
	}
	k := &call{c: c, typ: typ, cn: cn, ctx: ctx, lost: dsec.CodeOutcomeUnknown}
	k.stop = context.AfterFunc(ctx, func() { uc.Close() })
	cn.put(typ, payload)
	n, _, err := uc.WriteMsgUnix(cn.out, syscall.UnixRights(fds...), nil)
	if err == nil && n < len(cn.out) {
		_, err = uc.Write(cn.out[n:])
	}
	cn.out = cn.out[:0]
	if err != nil {
		return k.broken(err)
	}
	return k.finish(nil)
}
