package container

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestNetSlotTraces(t *testing.T) {
	testutil.Require(t, testutil.Root)
	var watch *confine.SocketWatch
	if os.Getenv(watchedEnv) != "" {
		var err error
		watch, err = confine.NewSocketWatch(3, watchRoom)
		check(t, err)
	}
	for _, c := range slotTraces {
		t.Run(c.name, func(t *testing.T) {
			if err := onOwnThread(func() error { return tryTrace(watch, c.do, c.kept) }); err != nil {
				t.Error(err)
			}
		})
	}
}

// watchedEnv makes TestNetSlotTraces watch the cgroup at descriptor 3, which is its own.
const watchedEnv = "DSEC_TEST_WATCHED"

// The verdicts are the same where the kernel tells of sockets.
func TestNetSlotTracesWatched(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.CgroupV2)
	group := newGroup(t)
	requireWatch(t, group)
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestNetSlotTraces$", "-test.v")
	cmd.Env = append(os.Environ(), watchedEnv+"=1")
	cmd.ExtraFiles = []*os.File{group}
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	out, err := cmd.CombinedOutput()
	if n := bytes.Count(out, []byte("    --- PASS")); err != nil || n != len(slotTraces) {
		t.Errorf("%d of %d traces: %v\n%s", n, len(slotTraces), err, out)
	}
}

// newGroup makes a v2 cgroup.
func newGroup(t testing.TB) *os.File {
	t.Helper()
	layout, err := cgroup.Detect()
	check(t, err)
	dir := filepath.Join(layout.V2, testutil.Name(t))
	check(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() { check(t, unix.Rmdir(dir)) })
	group, err := os.Open(dir)
	check(t, err)
	t.Cleanup(func() { check(t, group.Close()) })
	return group
}

// requireWatch skips where the kernel has no such program.
func requireWatch(t testing.TB, group *os.File) {
	t.Helper()
	watch, err := confine.NewSocketWatch(int(group.Fd()), 1)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	check(t, err)
	check(t, watch.Close())
}

// The launcher watches the tree for as long as it lives.
func TestLauncherWatchesTheTree(t *testing.T) {
	h := newHost(t, nil)
	group, err := os.Open(filepath.Join(h.b.tree.Layout().V2, h.config.Cgroup))
	check(t, err)
	defer group.Close()
	requireWatch(t, group)
	programs := func() int {
		q, err := link.QueryPrograms(link.QueryOptions{Target: int(group.Fd()), Attach: ebpf.AttachCGroupInetSockCreate})
		check(t, err)
		return len(q.Programs)
	}
	s := h.create()
	if n := programs(); n != 1 {
		t.Errorf("%d programs while the launcher lives, want 1", n)
	}
	run, err := h.b.launcher.get(t.Context())
	check(t, err)
	check(t, run.cmd.Process.Kill())
	<-run.dead
	if n := programs(); n != 0 {
		t.Errorf("%d programs after it died, want 0", n)
	}
	check(t, s.i.Destroy(t.Context()))
}

// tryTrace does something in a new slot and waits for the verdict: a kept slot
// must look new in the end, another one never within the time of settling.
func tryTrace(watch *confine.SocketWatch, do func() error, kept bool) error {
	m := &slotMaker{watch: watch}
	slot, err := m.make()
	if err != nil {
		return err
	}
	defer unix.Close(slot.fd)
	if (slot.cookie != 0) != (watch != nil) || watch != nil && !watch.Quiet(slot.cookie) {
		return errors.New("a new slot is not watched")
	}
	if !m.clean(slot) {
		return errors.New("a new slot does not look like one")
	}
	if err := do(); err != nil {
		return err
	}
	verdict := func() bool { return m.clean(slot) }
	if kept {
		return waitFor(verdict)
	}
	<-time.After(settle) // what the launcher waits too
	if verdict() {
		return errors.New("the slot looks new")
	}
	return nil
}

func waitFor(f func() bool) error {
	deadline := time.Now().Add(10 * time.Second)
	for !f() {
		if time.Now().After(deadline) {
			return errors.New("the slot does not look new")
		}
		<-time.After(time.Millisecond)
	}
	return nil
}

// onOwnThread waits for f on a thread of its own.
func onOwnThread(f func() error) error {
	ch := make(chan error, 1)
	hostos.OnThread(func() { ch <- f() })
	return <-ch
}

// A slot is worn out at last, and looked at only after it settled.
func TestNetSlotBounds(t *testing.T) {
	testutil.Require(t, testutil.Root)
	err := onOwnThread(func() error {
		s, m := &netSlots{early: map[int]struct{}{}, lost: map[int]struct{}{}}, &slotMaker{}
		slot, err := m.make()
		if err != nil {
			return err
		}
		s.ended(1) // before it was known to have begun
		s.began(slot, 1)
		if got, err := s.next(m); err != nil || got.fd == slot.fd {
			return fmt.Errorf("a slot was used again at once (%v)", err)
		}
		s.dead[0].ended = time.Now().Add(-settle)
		if got, err := s.next(m); err != nil || got.fd != slot.fd || got.uses != 1 {
			return fmt.Errorf("want the used slot again, have %v (%v)", got, err)
		}
		slot.uses = maxUses - 1
		s.began(slot, 2)
		s.ended(2)
		s.dead[0].ended = time.Now().Add(-settle)
		if got, err := s.next(m); err != nil || got.uses != 0 {
			return fmt.Errorf("a slot was used %d times (%v)", got.uses, err)
		}
		for pid := range 2 * maxUsedSlots {
			fd, err := unix.FcntlInt(uintptr(m.state.dir), unix.F_DUPFD_CLOEXEC, 3)
			if err != nil {
				return err
			}
			s.began(netSlot{fd: fd}, pid)
		}
		if len(s.used) != maxUsedSlots || s.used[0].pid != maxUsedSlots {
			return fmt.Errorf("%d slots of living containers are kept, from that of %d", len(s.used), s.used[0].pid)
		}
		for pid := range 2 * maxUsedSlots {
			s.ended(pid)
		}
		if len(s.used) != 0 || len(s.dead) > maxDeadSlots {
			return fmt.Errorf("%d used and %d dead slots are kept", len(s.used), len(s.dead))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A forker takes a slot again only where that is sure at a glance, and leaves
// others to the closer look.
func TestQuietSlotsAreHadAgain(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.CgroupV2)
	group := newGroup(t)
	requireWatch(t, group)
	watch, err := confine.NewSocketWatch(int(group.Fd()), watchRoom)
	check(t, err)
	defer watch.Close()
	err = onOwnThread(func() error {
		s, m := &netSlots{watch: watch, early: map[int]struct{}{}, lost: map[int]struct{}{}}, &slotMaker{watch: watch}
		state, err := openNetState("/proc")
		if err != nil {
			return err
		}
		defer unix.Close(state.dir)
		if _, ok := s.again(state); ok {
			return errors.New("a slot where there was none")
		}
		for _, c := range []struct {
			name        string
			uses        int
			settled     bool
			do          func(slot netSlot) // in the slot
			again, left bool               // for a closer look
		}{
			{"nothing", 0, true, nil, true, false},
			{"not settled", 0, false, nil, false, true},
			{"worn out", maxUses - 1, true, nil, false, true},
			{"a mark", 0, true, func(slot netSlot) { watch.Remove(slot.cookie) }, false, true},
			{"open socket", 0, true, func(netSlot) { _, _ = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) }, false, false},
			{"IPv6 route", 0, true, func(netSlot) { _ = askRoute(unix.AF_INET6, loopback6[:]) }, false, false},
		} {
			slot, err := m.make()
			if err != nil {
				return err
			}
			s.fresh, slot.uses = m.state.files, c.uses
			if c.do != nil {
				c.do(slot)
			}
			s.began(slot, 1)
			s.ended(1)
			if c.settled {
				s.dead[0].ended = time.Now().Add(-settle)
			}
			got, ok := s.again(state)
			if ok != c.again || ok && got.fd != slot.fd {
				return fmt.Errorf("%s: again %v, want %v", c.name, ok, c.again)
			}
			if left := len(s.dead) == 1; left != c.left {
				return fmt.Errorf("%s: left %v, want %v", c.name, left, c.left)
			}
			if !ok && !c.left && watch.Quiet(slot.cookie) {
				return fmt.Errorf("%s: a slot that was closed is still watched", c.name)
			}
			for _, u := range s.dead {
				s.drop(u.netSlot)
			}
			s.dead = nil
			if ok {
				s.drop(got)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// Sandboxes that use no network get a network namespace again in time; one in
// which a packet was sent never comes back.
func TestNetSlotsAreRecycled(t *testing.T) {
	h := newHost(t, func(c *Config) { c.NetSlots = 1 })
	seen := map[uint64]int{}
	life := func(script string) uint64 {
		s := h.create()
		cookie := netCookie(t, s)
		if o := s.sh(script); o.Code != 0 {
			t.Fatalf("%s: %+v", script, o)
		}
		check(t, s.i.Destroy(t.Context()))
		seen[cookie]++
		return cookie
	}
	again := func(script string) bool {
		for range 30 {
			if cookie := life(script); seen[cookie] > 1 {
				return true
			}
		}
		return false
	}
	if !again("exit 0") {
		t.Fatal("no network slot was used twice")
	}
	const loud = "! nc 127.0.0.1 9 2>/dev/null" // refused, in two packets
	used := map[uint64]bool{life(loud): true}
	for range 10 {
		cookie := life(loud)
		if used[cookie] {
			t.Fatal("a sandbox got the network namespace in which another one had sent packets")
		}
		used[cookie] = true
	}
}

// netCookie is the kernel's name of a sandbox's network namespace, which, unlike
// an inode, is never given to another.
func netCookie(t *testing.T, s *sandbox) (cookie uint64) {
	t.Helper()
	err := onOwnThread(func() error {
		ns, err := os.Open("/proc/" + strconv.Itoa(s.i.(*instance).sh.proc.pid) + "/ns/net")
		if err != nil {
			return err
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return withSocket(unix.AF_UNIX, unix.SOCK_DGRAM, 0, func(fd int) (err error) {
			cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
			return err
		})
	})
	check(t, err)
	if cookie == 0 {
		t.Fatal("the network namespace has no cookie")
	}
	return cookie
}

// BenchmarkNetSlotClean is a look at a slot in which nothing was done.
func BenchmarkNetSlotClean(b *testing.B) {
	testutil.Require(b, testutil.Root, testutil.CgroupV2)
	for _, watched := range []bool{false, true} {
		b.Run(fmt.Sprintf("watched=%v", watched), func(b *testing.B) {
			m := &slotMaker{}
			if watched {
				group := newGroup(b)
				requireWatch(b, group)
				var err error
				m.watch, err = confine.NewSocketWatch(int(group.Fd()), watchRoom)
				check(b, err)
				defer m.watch.Close()
			}
			check(b, onOwnThread(func() error {
				var slots [2]netSlot // so that each look moves the thread
				for i := range slots {
					var err error
					if slots[i], err = m.make(); err != nil {
						return err
					}
				}
				for i := 0; b.Loop(); i++ {
					if !m.clean(slots[i%len(slots)]) {
						return errors.New("a new slot does not look like one")
					}
				}
				return nil
			}))
		})
	}
}
