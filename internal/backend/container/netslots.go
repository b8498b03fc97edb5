package container

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// netSlots holds network namespaces ready: each has a loopback interface that
// is up, and nothing else. A slot is used once, because what a sandbox left in
// it (sockets in TIME_WAIT, cached metrics) would be seen by the next.
type netSlots struct {
	ready chan netSlot
}

// maxNetSlots keeps the launcher's descriptors low: see shellProgram.
const maxNetSlots = 100

type netSlot struct {
	fd  int
	err error
}

// newNetSlots makes slots ahead, in the background.
func newNetSlots(n int) *netSlots {
	s := &netSlots{ready: make(chan netSlot, n)}
	onThread(func() {
		for {
			fd, err := newNetSlot()
			s.ready <- netSlot{fd, err} // an error is for who asks next
		}
	})
	return s
}

// take returns a descriptor of an unused slot.
func (s *netSlots) take() (int, error) {
	slot := <-s.ready
	return slot.fd, slot.err
}

// newNetSlot moves the calling thread to a new network namespace and returns it.
func newNetSlot() (int, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("network slot: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return -1, fmt.Errorf("network slot: %w", err)
	}
	// The namespace is the host's, so root inside has no rights in it; with
	// these it can serve any port and ping without.
	for path, value := range map[string]string{
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return -1, fmt.Errorf("network slot: %w", err)
		}
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("network slot: %w", err)
	}
	return fd, nil
}

func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(ifr))); errno != 0 {
		return errno
	}
	return nil
}
