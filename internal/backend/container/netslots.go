package container

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/hostos"
)

// netSlots holds network namespaces ready: each has a loopback interface that
// is up, and nothing else. Making one and its end cost more CPU than all mounts
// of a container, so one in which no socket has left a trace is used again
// (see netstate.go). Most commands never make a socket, which the kernel tells
// at once where it has the program for that.
//
// The slot of a container that ended waits until what its sockets may have set
// off has happened, and is looked at when a new one is needed. Whatever is in
// doubt, a slot is closed and another made.
type netSlots struct {
	watch *confine.SocketWatch // of all containers; nil where the kernel has none
	ready chan readySlot
	fresh []stateFile // how a new slot looks; set before one is ready

	mu    sync.Mutex
	used  []usedSlot       // of containers that live, oldest first
	dead  []usedSlot       // of containers that ended, oldest first
	early map[int]struct{} // ended before they were known to have begun
	lost  map[int]struct{} // PID 1s that live and whose slot was closed: their end means no slot
}

const (
	// maxNetSlots, maxUsedSlots and maxDeadSlots keep the launcher's descriptors
	// few: a clone copies them all. The slot of a container that lives longer
	// than so many others is forgotten.
	maxNetSlots  = 100
	maxUsedSlots = 64
	maxDeadSlots = 64

	// settle is how long a slot is left alone after its container ended. A
	// socket that joined a multicast group makes the kernel send reports, which
	// are counted, up to 12 ms after it was closed.
	settle = 100 * time.Millisecond
	// maxUses bounds how many containers have one slot, one after the other.
	maxUses = 100
)

// netSlot is a descriptor of a network namespace.
type netSlot struct {
	fd     int
	uses   int    // containers that had it
	cookie uint64 // by which it is watched; 0 if it is not
}

// watchRoom is more slots than there are at a time.
const watchRoom = 512

type readySlot struct {
	netSlot
	err error
}

type usedSlot struct {
	netSlot
	pid   int       // PID 1 of its container
	ended time.Time // when that was reaped
}

// newNetSlots makes slots ahead, in the background.
func newNetSlots(n int, watch *confine.SocketWatch) *netSlots {
	s := &netSlots{watch: watch, ready: make(chan readySlot, n), early: map[int]struct{}{}, lost: map[int]struct{}{}}
	hostos.OnThread(func() {
		m := &slotMaker{watch: watch}
		for {
			slot, err := s.next(m)
			if s.fresh == nil && err == nil {
				s.fresh = m.state.files
			}
			s.ready <- readySlot{slot, err} // an error is for who asks next
		}
	})
	return s
}

// take returns a slot that shows no trace of another container. The caller
// drops it or gives it to began.
func (s *netSlots) take() (netSlot, error) {
	slot := <-s.ready
	return slot.netSlot, slot.err
}

// drop closes a slot.
func (s *netSlots) drop(slot netSlot) {
	if slot.cookie != 0 {
		s.watch.Remove(slot.cookie)
	}
	_ = unix.Close(slot.fd)
}

// began says whose slot it is, whose PID 1 is a child of this process.
func (s *netSlots) began(slot netSlot, pid int) {
	slot.uses++
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.early[pid]; ok {
		delete(s.early, pid)
		s.bury(usedSlot{netSlot: slot, pid: pid})
		return
	}
	if len(s.used) >= maxUsedSlots {
		s.lost[s.used[0].pid] = struct{}{}
		s.drop(s.used[0].netSlot)
		s.used = append(s.used[:0], s.used[1:]...)
	}
	s.used = append(s.used, usedSlot{netSlot: slot, pid: pid})
}

// ended says that a child was reaped. It was PID 1 of its namespace, so that no
// process of the container is left.
func (s *netSlots) ended(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, u := range s.used {
		if u.pid == pid {
			s.used = append(s.used[:i], s.used[i+1:]...)
			s.bury(u)
			return
		}
	}
	if _, ok := s.lost[pid]; ok {
		delete(s.lost, pid)
		return
	}
	// Its start is under way. Nobody else's may be kept here: the number comes
	// again, and then a container that lives would lose its slot to another.
	s.early[pid] = struct{}{}
}

// none says that a child of this process is in no slot.
func (s *netSlots) none(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.early[pid]; ok {
		delete(s.early, pid)
		return
	}
	s.lost[pid] = struct{}{}
}

func (s *netSlots) bury(u usedSlot) {
	if len(s.dead) >= maxDeadSlots {
		s.drop(u.netSlot)
		return
	}
	u.ended = time.Now()
	s.dead = append(s.dead, u)
}

// exhume returns the slot that has waited longest, if it has waited enough and,
// where quiet is set, no Internet socket was made there.
func (s *netSlots) exhume(quiet bool) (netSlot, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.dead) == 0 || time.Since(s.dead[0].ended) < settle || quiet && !s.quiet(s.dead[0].netSlot) {
		return netSlot{}, false
	}
	u := s.dead[0]
	s.dead = append(s.dead[:0], s.dead[1:]...)
	return u.netSlot, true
}

func (s *netSlots) quiet(slot netSlot) bool {
	return slot.cookie != 0 && slot.uses < maxUses && s.watch.Quiet(slot.cookie)
}

// again moves the calling thread, whose state it is, to a slot that was used
// and shows nothing of it, if one is found quickly.
func (s *netSlots) again(state *netState) (netSlot, bool) {
	slot, ok := s.exhume(true)
	if !ok {
		return netSlot{}, false
	}
	state.files = s.fresh // there is a first slot, so this is set
	if unix.Setns(slot.fd, unix.CLONE_NEWNET) != nil || !state.sameButInternet() {
		s.drop(slot)
		return netSlot{}, false
	}
	return slot, true
}

// next returns a slot that was used and shows nothing of it, or else a new one.
func (s *netSlots) next(m *slotMaker) (netSlot, error) {
	for {
		slot, ok := s.exhume(false)
		if !ok {
			return m.make()
		}
		if slot.uses < maxUses && m.clean(slot) {
			return slot, nil
		}
		s.drop(slot)
	}
}

// slotMaker makes and looks at slots on one thread, which nothing else uses.
type slotMaker struct {
	watch *confine.SocketWatch // may be nil
	state *netState            // how a new slot looks; nil before the first
}

// make moves the thread to a new network namespace and returns it.
func (m *slotMaker) make() (netSlot, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return netSlot{}, fmt.Errorf("network slot: %w", err)
	}
	cookie, err := loopbackUp()
	if err != nil {
		return netSlot{}, fmt.Errorf("network slot: %w", err)
	}
	// The namespace is the host's, so root inside has no rights in it; with the
	// first two it can serve any port and ping without. The last bounds what a
	// socket has of options, such as groups that it joined, in bytes that no cgroup
	// counts: 20 memberships of IPv4, or 250 descriptors to pass on. It is a
	// namespace's own since Linux 6.8.
	for path, value := range map[string]string{
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
		"/proc/sys/net/core/optmem_max":                 "4096",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return netSlot{}, fmt.Errorf("network slot: %w", err)
		}
	}
	if m.state == nil {
		if m.state, err = newNetState(); err != nil {
			return netSlot{}, fmt.Errorf("network slot: %w", err)
		}
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return netSlot{}, fmt.Errorf("network slot: %w", err)
	}
	slot := netSlot{fd: fd}
	// From here on this process makes no Internet socket there.
	if m.watch != nil && m.watch.Add(cookie) == nil {
		slot.cookie = cookie
	}
	return slot, nil
}

// clean moves the thread to a slot, of which nobody else has a part any more,
// and reports whether it looks like a new one.
func (m *slotMaker) clean(slot netSlot) bool {
	if m.state == nil || unix.Setns(slot.fd, unix.CLONE_NEWNET) != nil {
		return false
	}
	if slot.cookie != 0 && m.watch.Quiet(slot.cookie) {
		return m.state.sameButInternet()
	}
	// What was done there left nothing; the next one begins with no mark.
	return m.state.same() && (slot.cookie == 0 || m.watch.Add(slot.cookie) == nil)
}

// loopbackUp sets the interface of the thread's namespace up, and returns the
// cookie of the namespace.
func loopbackUp() (cookie uint64, err error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return 0, err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(ifr))); errno != 0 {
		return 0, errno
	}
	return unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}
