package chronus

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// setup is what Setup left for the commands.
type setup struct {
	rlimits []chronusapi.Rlimit
	cpus    []byte            // affinity of commands; empty: all
	filter  []unix.SockFilter // of a command's child
	grouped bool              // commands need a group each
}

// newRoot is where the sandbox's root is attached on the minimal root.
const newRoot = "/newroot"

// Setup implements chronusapi.SetupHandler: it makes a warm container a
// sandbox, as chronusapi/setup.go tells. It works once. After an error the
// instance is of no use, and its backend kills it.
func (c *Chronus) Setup(_ context.Context, req chronusapi.SetupRequest) error {
	defer syscall.Close(req.Root)
	defer func() {
		for _, m := range req.Mounts {
			_ = syscall.Close(m.FD)
		}
	}()
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.setUp(&req)
	if err != nil {
		for i := range req.Groups {
			closeGroup(&req.Groups[i])
		}
		return err
	}
	c.ready = true
	return nil
}

func (c *Chronus) setUp(req *chronusapi.SetupRequest) error {
	if c.ready {
		return dsec.Errorf(dsec.CodeConflict, "this sandbox has been set up already")
	}
	filter, err := instructions(req.Filter)
	if err != nil {
		return err
	}
	childFilter, err := instructions(req.ChildFilter)
	if err != nil {
		return err
	}
	if err := enterRoot(req.Root, req.Move, req.Mounts); err != nil {
		return setupError(err)
	}
	if req.Hostname != "" {
		if err := unix.Sethostname([]byte(req.Hostname)); err != nil {
			return setupError(fmt.Errorf("set host name: %w", err))
		}
	}
	if err := confine(req.KeepCaps, filter); err != nil {
		return setupError(err)
	}
	c.setup = setup{rlimits: req.Rlimits, cpus: req.CPUs, filter: childFilter, grouped: len(req.Groups) > 0}
	for _, g := range req.Groups {
		c.groups = append(c.groups, newGroup(g))
	}
	return nil
}

// setupError is for the log of the backend; a user never reads it.
func setupError(err error) error {
	return &dsec.Error{Code: dsec.CodeInternal, Message: "set up: " + err.Error(), Err: err}
}

// enterRoot makes the detached mount root this mount namespace's root, with
// the mounts of the minimal root that move names, and the detached ones, below
// it. The current directory and root are shared by all threads.
func enterRoot(root int, move []string, mounts []chronusapi.Mount) error {
	if err := unix.Mkdir(newRoot, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("mkdir %s: %w", newRoot, err)
	}
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, newRoot, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the root: %w", err)
	}
	top, err := unix.Open(newRoot, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(top)
	for _, path := range move {
		if err := attachBelow(top, unix.AT_FDCWD, path, path); err != nil {
			return fmt.Errorf("move %s: %w", path, err)
		}
	}
	for _, m := range mounts {
		if err := attachBelow(top, m.FD, "", m.Path); err != nil {
			return fmt.Errorf("attach %s: %w", m.Path, err)
		}
	}
	if err := unix.Fchdir(top); err != nil {
		return fmt.Errorf("chdir to the root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	// The old root now lies on top of the new one, at ".".
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("chdir to /: %w", err)
	}
	return nil
}

// attachBelow moves the mount at from (of the directory at, or at itself where
// from is empty) to path below top. No part of path may be a symlink.
func attachBelow(top, at int, from, path string) error {
	if len(path) < 2 || path[0] != '/' {
		return unix.EINVAL
	}
	target, err := unix.Openat2(top, path[1:], &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH,
	})
	if err != nil {
		return fmt.Errorf("open the target: %w", err)
	}
	defer unix.Close(target)
	flags := unix.MOVE_MOUNT_T_EMPTY_PATH
	if from == "" {
		flags |= unix.MOVE_MOUNT_F_EMPTY_PATH
	}
	return unix.MoveMount(at, from, target, "", flags)
}

// confine drops every capability that is not in keep and installs the seccomp
// program, on all threads.
func confine(keep uint64, filter []unix.SockFilter) error {
	runtime.LockOSThread() // no_new_privs below belongs to this thread
	defer runtime.UnlockOSThread()
	if err := dropBounding(keep); err != nil {
		return fmt.Errorf("drop bounding set: %w", err)
	}
	if err := dropCapabilities(keep); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if len(filter) == 0 {
		return allThreads(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	// TSYNC gives the filter, and no_new_privs, to all threads.
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	tid, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("seccomp: %w", errno)
	}
	if tid != 0 {
		return fmt.Errorf("seccomp: thread %d has another filter", tid)
	}
	return nil
}

// dropBounding drops what the launcher has not dropped yet: it can do so for
// next to nothing, in the child that execs chronus, if it makes the
// capabilities inheritable before. Here each one stops all threads.
func dropBounding(keep uint64) error {
	for n := 0; n <= 63; n++ {
		set, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(n), 0, 0, 0)
		if err != nil {
			return nil // past the last one
		}
		if set == 0 || keep&(1<<n) != 0 {
			continue
		}
		if err := allThreads(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(n), 0); err != nil {
			return err
		}
	}
	return nil
}

func dropCapabilities(keep uint64) error {
	if err := allThreads(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0); err != nil {
		return err
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	for i := range data {
		half := uint32(keep >> (32 * i))
		data[i].Permitted &= half
		data[i].Effective = data[i].Permitted
		data[i].Inheritable = 0
	}
	return allThreads(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0)
}

// allThreads makes a system call on every thread of this process.
func allThreads(nr, a1, a2, a3 uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall6(nr, a1, a2, a3, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// instructions decodes a seccomp program.
func instructions(b []byte) ([]unix.SockFilter, error) {
	const size = int(unsafe.Sizeof(unix.SockFilter{}))
	if len(b)%size != 0 || len(b)/size > unix.BPF_MAXINSNS {
		return nil, dsec.Errorf(dsec.CodeInternal, "set up: a seccomp program of %d bytes", len(b))
	}
	list := make([]unix.SockFilter, len(b)/size)
	for i := range list {
		p := b[i*size:]
		list[i] = unix.SockFilter{
			Code: uint16(p[0]) | uint16(p[1])<<8, Jt: p[2], Jf: p[3],
			K: uint32(p[4]) | uint32(p[5])<<8 | uint32(p[6])<<16 | uint32(p[7])<<24,
		}
	}
	return list, nil
}

// AddGroup implements chronusapi.SetupHandler.
func (c *Chronus) AddGroup(_ context.Context, g chronusapi.Group) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.groups) >= chronusapi.MaxProcesses {
		closeGroup(&g)
		return dsec.Errorf(dsec.CodeExhausted, "%d command groups are the most of a sandbox", chronusapi.MaxProcesses)
	}
	c.groups = append(c.groups, newGroup(g))
	c.setup.grouped = true
	return nil
}

func closeGroup(g *chronusapi.Group) {
	for _, fd := range append(append([]int(nil), g.Procs...), g.Dir, g.Kill, g.Events, g.OOM) {
		if fd >= 0 {
			_ = syscall.Close(fd)
		}
	}
}
