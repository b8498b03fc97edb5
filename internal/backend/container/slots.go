package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// slots hands out the numbers of containers. A number is a directory in slots of
// the state directory and stands for a range of user IDs, so that no two containers
// ever have the same: the directory is the first thing made of a container and
// the last one removed. In it are
//
//	s   the socket of chronus
//	id  a symlink whose target is a claim, made in one step: the sandbox's ID, and
//	    after a slash the name of its volume
//
// A slot without an id is a warm container of the edge that made it, or one whose
// sandbox is being taken down. A volume that no claim names is nobody's.
type slots struct {
	path string // of the directory
	dir  int
	next atomic.Uint32
}

// slot is one of them, by number.
type slot uint32

const (
	idsPerSlot = 1 << 16
	// Far above what distributions give to people and services; the last ID is
	// the largest that ping_group_range takes.
	firstID  = 1 << 30
	maxSlots = 1 << 14
)

// base is the host's ID of root inside.
func (s slot) base() uint32 { return firstID + uint32(s)*idsPerSlot }

func (s slot) String() string { return strconv.Itoa(int(s)) }

func openSlots(state string) (*slots, error) {
	dir := state + "/slots"
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	s := &slots{path: dir, dir: fd}
	s.next.Store(rand.Uint32N(maxSlots))
	return s, nil
}

// remove removes the directory of the slots, which must be empty.
func (s *slots) remove() error {
	err := unix.Rmdir(s.path)
	if err == unix.ENOENT {
		return nil
	}
	return err
}

func (s *slots) close() { _ = unix.Close(s.dir) }

// acquire takes the next free slot. A number comes again only after all others.
func (s *slots) acquire() (slot, error) {
	for range maxSlots {
		n := slot(s.next.Add(1) % maxSlots)
		switch err := unix.Mkdirat(s.dir, n.String(), 0o700); err {
		case nil:
			return n, nil
		case unix.EEXIST:
		default:
			return 0, fmt.Errorf("slot: %w", err)
		}
	}
	return 0, dsec.Errorf(dsec.CodeExhausted, "all %d container slots of this node are taken", maxSlots)
}

// release gives a slot back. It succeeds where the slot is already gone.
func (s *slots) release(n slot) error {
	for _, name := range []string{"/s", "/id", newID} {
		if err := unix.Unlinkat(s.dir, n.String()+name, 0); err != nil && err != unix.ENOENT {
			return fmt.Errorf("slot %s: %w", n, err)
		}
	}
	if err := unix.Unlinkat(s.dir, n.String(), unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return fmt.Errorf("slot %s: %w", n, err)
	}
	return nil
}

// claim tells whose a slot is.
type claim struct {
	id     dsec.SandboxID
	volume string
}

func (c claim) String() string { return string(c.id) + "/" + c.volume }

// claim writes whose slot it is.
func (s *slots) claim(n slot, c claim) error {
	if err := unix.Symlinkat(c.String(), s.dir, n.String()+"/id"); err != nil {
		return fmt.Errorf("slot %s: claim: %w", n, err)
	}
	return nil
}

// disclaim takes a claim back. It succeeds where there is none.
func (s *slots) disclaim(n slot) error {
	if err := unix.Unlinkat(s.dir, n.String()+"/id", 0); err != nil && err != unix.ENOENT {
		return fmt.Errorf("slot %s: %w", n, err)
	}
	return nil
}

// reclaim gives a claimed slot, and the volume with it, to another sandbox, in one step.
func (s *slots) reclaim(n slot, c claim) error {
	err := unix.Symlinkat(c.String(), s.dir, n.String()+newID)
	if err == nil {
		err = unix.Renameat(s.dir, n.String()+newID, s.dir, n.String()+"/id")
	}
	if err != nil {
		return fmt.Errorf("slot %s: reclaim: %w", n, err)
	}
	return nil
}

// newID is what a crash may leave of a reclaim.
const newID = "/id.new"

// claimed returns whose slot it is; empty if nobody's. An edge that knew no other
// names for volumes gave them the sandbox's ID.
func (s *slots) claimed(n slot) (claim, error) {
	b := make([]byte, 128)
	l, err := unix.Readlinkat(s.dir, n.String()+"/id", b)
	if err == unix.ENOENT {
		return claim{}, nil
	}
	if err != nil { // not nobody's: what it has would be taken away
		return claim{}, fmt.Errorf("slot %s: claim: %w", n, err)
	}
	id, volume, named := strings.Cut(string(b[:l]), "/")
	if !named {
		volume = id
	}
	return claim{dsec.SandboxID(id), volume}, nil
}

// list returns every slot that is taken.
func (s *slots) list() ([]slot, error) {
	names, err := os.ReadDir(procPath(s.dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // removed with the last of them
	}
	if err != nil {
		return nil, err
	}
	all := make([]slot, 0, len(names))
	for _, e := range names {
		if n, err := strconv.ParseUint(e.Name(), 10, 32); err == nil && n < maxSlots {
			all = append(all, slot(n))
		}
	}
	slices.SortFunc(all, cmp.Compare[slot])
	return all, nil
}

// socket is the path of chronus's socket. It goes through a descriptor because
// an address holds 108 bytes, and RunDir may be longer.
func (s *slots) socket(n slot) string {
	return strings.Join([]string{procPath(s.dir), n.String(), "s"}, "/")
}

// listen makes the socket that chronus serves. Connections wait in it until
// chronus has started.
func (s *slots) listen(n slot) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: s.socket(n)}); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("socket: bind: %w", err)
	}
	if err := unix.Listen(fd, 128); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("socket: listen: %w", err)
	}
	return fd, nil
}

// maxDialWait is between two looks at whether chronus's socket has room.
const maxDialWait = 50 * time.Millisecond

// dial connects to chronus.
func (s *slots) dial(ctx context.Context, n slot) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", s.socket(n))
	// As many wait as the socket has room for, and nothing tells when chronus has
	// taken one. Who comes to kill a command must not go away for that.
	for wait := time.Millisecond; errors.Is(err, unix.EAGAIN); wait = min(2*wait, maxDialWait) {
		select {
		case <-time.After(wait):
			c, err = d.DialContext(ctx, "unix", s.socket(n))
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: "the sandbox's chronus cannot be reached", Err: err}
	}
	return c, nil
}
