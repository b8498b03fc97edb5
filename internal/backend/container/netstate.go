package container

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// netState tells whether anything was done in a network namespace.
//
// A sandbox has no right in its network namespace, which is the host's: it
// cannot add interfaces, addresses, routes, neighbours, rules or xfrm, nor set
// sysctls. What it can do is make sockets, and what these leave behind is
// either shown by these files or comes from a packet, and there is no packet
// that leaves no count. Found by trying, on Linux 6.18, with the socket closed:
//
//	any packet, any failed one        dev, snmp, netstat, snmp6
//	multicast groups, joined and left reports within 12 ms: dev, snmp, netstat, snmp6
//	TIME_WAIT, routes' MTU, metrics   come from packets
//	an IPv6 flow label                ip6_flowlabel, for seconds
//	a TCP fast open listener          tcp_fastopen_key, for good
//	routes of connected UDP sockets   rt6_stats
//	sockets, orphans, those in flight sockstat
//
// Sockets of AF_UNIX leave nothing once the last one is gone, of which sockstat
// tells: two that were sent over each other stay until the kernel next looks for
// such. Asking rtnetlink for an IPv6 route is in rt6_stats for good. The seccomp
// filter allows no other family, so that where no IPv4 and no IPv6 socket was
// made (see confine.SocketWatch) these two files tell everything.
type netState struct {
	proc  string // where proc is mounted
	dir   int    // its thread-self/net, which follows the thread
	files []stateFile
	buf   []byte
}

type stateFile struct {
	name string
	want []byte // in a namespace in which nothing was done; nil if there is no such file
}

// routeStats is what rtnetlink can change.
const routeStats = "rt6_stats"

// stateFiles are those that show traces, likely ones first.
var stateFiles = []string{routeStats, "dev", "snmp", "snmp6", "netstat", "ip6_flowlabel", fastOpenKey}

// fastOpenKey is not below /proc/net.
const fastOpenKey = "tcp_fastopen_key"

// sockstat starts with this where the namespace has no socket, of whatever
// family. Its other lines have figures of the whole host.
var noSockets = []byte("sockets: used 0\n")

// openNetState is for the calling thread alone, and knows nothing yet.
func openNetState(proc string) (*netState, error) {
	dir, err := unix.Open(proc+"/thread-self/net", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/proc/net: %w", err)
	}
	return &netState{proc: proc, dir: dir, buf: make([]byte, 64<<10)}, nil
}

// newNetState learns how the calling thread's namespace looks, which must be
// new. It is for that thread alone.
func newNetState() (*netState, error) {
	s, err := openNetState("/proc")
	if err != nil {
		return nil, err
	}
	if !s.unused() {
		_ = unix.Close(s.dir)
		return nil, errors.New("a new network namespace has sockets")
	}
	for _, name := range stateFiles {
		text, err := s.read(name)
		if err != nil && err != unix.ENOENT { // IPv6 may be off
			_ = unix.Close(s.dir)
			return nil, fmt.Errorf("/proc/net/%s: %w", name, err)
		}
		s.files = append(s.files, stateFile{name, bytes.Clone(text)})
	}
	return s, nil
}

// same reports whether nothing was done in the namespace of the calling thread
// that another one could see there.
func (s *netState) same() bool {
	if !s.unused() {
		return false
	}
	for _, f := range s.files {
		if !s.unchanged(f) {
			return false
		}
	}
	return true
}

// sameButInternet is same where no Internet socket was ever made.
func (s *netState) sameButInternet() bool { return s.unused() && s.unchanged(s.files[0]) }

func (s *netState) unchanged(f stateFile) bool {
	text, err := s.read(f.name)
	return err == nil && bytes.Equal(text, f.want) || err == unix.ENOENT && f.want == nil
}

func (s *netState) unused() bool {
	text, err := s.read("sockstat")
	return err == nil && bytes.HasPrefix(text, noSockets)
}

// read returns a file's whole text, which the next call overwrites.
func (s *netState) read(name string) ([]byte, error) {
	dir := s.dir
	if name == fastOpenKey {
		dir, name = unix.AT_FDCWD, s.proc+"/sys/net/ipv4/"+fastOpenKey
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n := 0
	for {
		m, err := unix.Read(fd, s.buf[n:])
		if err != nil {
			return nil, err
		}
		if m == 0 {
			return s.buf[:n], nil
		}
		if n += m; n == len(s.buf) {
			return nil, unix.EFBIG
		}
	}
}
