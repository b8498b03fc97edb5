package confine

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// makeSocket is a helper: it makes a socket of a family, kind and protocol.
func makeSocket() {
	var n [3]int
	for i := range n {
		n[i], _ = strconv.Atoi(os.Args[i+1])
	}
	if _, err := unix.Socket(n[0], n[1], n[2]); err != nil {
		os.Exit(int(err.(unix.Errno)))
	}
}

// newNetns starts f in a network namespace of its own, on its own thread.
func newNetns(t *testing.T, f func(cookie uint64)) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread ends
		var cookie uint64
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			var s int
			if s, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
				cookie, err = unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
				_ = unix.Close(s)
			}
		}
		if err == nil {
			f(cookie)
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestSocketWatchSeesInternetSockets(t *testing.T) {
	cgroup := testCgroup(t)
	w, err := NewSocketWatch(cgroup, 2)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	below := "below"
	if err := unix.Mkdirat(cgroup, below, 0o755); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unlinkat(cgroup, below, unix.AT_REMOVEDIR); err != nil {
			t.Error(err)
		}
	}()
	child, err := unix.Openat(cgroup, below, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(child)
	for name, c := range map[string]struct {
		family, kind, proto int
		inside, quiet       bool
	}{
		"TCP":         {unix.AF_INET, unix.SOCK_STREAM, 0, true, false},
		"UDP":         {unix.AF_INET, unix.SOCK_DGRAM, 0, true, false},
		"raw":         {unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP, true, false},
		"TCPv6":       {unix.AF_INET6, unix.SOCK_STREAM, 0, true, false},
		"UDPv6":       {unix.AF_INET6, unix.SOCK_DGRAM, 0, true, false},
		"rawv6":       {unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6, true, false},
		"Unix":        {unix.AF_UNIX, unix.SOCK_STREAM, 0, true, true},
		"rtnetlink":   {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE, true, true},
		"no protocol": {unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_UDP, true, true}, // fails before there is a socket
		"outside":     {unix.AF_INET, unix.SOCK_STREAM, 0, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			newNetns(t, func(cookie uint64) {
				if w.Quiet(cookie) {
					t.Error("quiet before it is watched")
				}
				if err := w.Add(cookie); err != nil {
					t.Error(err)
				}
				if !w.Quiet(cookie) {
					t.Error("not quiet though nothing was done")
				}
				cmd := exec.Command("/proc/self/exe", strconv.Itoa(c.family), strconv.Itoa(c.kind), strconv.Itoa(c.proto))
				cmd.Env = append(os.Environ(), helperEnv+"=socket", "GORACE=atexit_sleep_ms=0")
				cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: c.inside, CgroupFD: child}
				if err := cmd.Run(); (err != nil) != (name == "no protocol") {
					t.Error(err)
				}
				if got := w.Quiet(cookie); got != c.quiet {
					t.Errorf("quiet: %v, want %v", got, c.quiet)
				}
				if err := w.Add(cookie); err != nil || !w.Quiet(cookie) {
					t.Errorf("not quiet when watched again (%v)", err)
				}
				w.Remove(cookie)
				if w.Quiet(cookie) {
					t.Error("quiet though it is no longer watched")
				}
			})
		})
	}
}

// One that does not fit is not watched, and so never quiet.
func TestSocketWatchHasRoomForSoMany(t *testing.T) {
	w, err := NewSocketWatch(testCgroup(t), 1)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Add(1); err != nil {
		t.Fatal(err)
	}
	if err := w.Add(2); err == nil || w.Quiet(2) || !w.Quiet(1) {
		t.Errorf("a second one: %v, quiet %v; the first one quiet %v", err, w.Quiet(2), w.Quiet(1))
	}
}
