package container

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/chronusapi"
)

func init() { tries["netlinks"], tries["locks"], tries["tcps"] = netlinks, locks, tcps }

// tcps sends through one connection after the other, and receives nothing.
func tcps([]string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	for err == nil {
		var c, d net.Conn
		if c, err = net.Dial("tcp", l.Addr().String()); err != nil {
			break
		}
		if d, err = l.Accept(); err != nil {
			break
		}
		f, ferr := c.(*net.TCPConn).File() // out of Go's poller
		if err = ferr; err != nil {
			break
		}
		c.Close()
		fd := int(f.Fd()) // which makes it block
		_ = unix.SetNonblock(fd, true)
		for buf := make([]byte, 64<<10); ; {
			if _, err := unix.Write(fd, buf); err != nil {
				break
			}
		}
		kept = append(kept, f)
		keptConns = append(keptConns, d)
	}
	say("connect", err)
	_, _ = os.Stdin.Read(make([]byte, 1))
}

var keptConns []net.Conn

// netlinks asks the kernel questions through one socket after the other, and
// reads no answer.
func netlinks([]string) {
	var q [32]byte // struct nlmsghdr, struct ifinfomsg
	binary.NativeEndian.PutUint32(q[0:], uint32(len(q)))
	binary.NativeEndian.PutUint16(q[4:], unix.RTM_GETLINK)
	binary.NativeEndian.PutUint16(q[6:], unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(q[20:], 1) // loopback
	for {
		s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)
		if err != nil {
			say("socket", err)
			break
		}
		for unix.Sendto(s, q[:], unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) == nil {
			var info [9]uint32 // SO_MEMINFO, whose first is what waits to be read
			l := uint32(4 * len(info))
			_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(s), unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&l)), 0)
			if errno != 0 || info[0] > info[1]/2 {
				break
			}
		}
	}
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// locks locks ranges of files, of which it has so many open.
func locks(args []string) {
	files, _ := strconv.Atoi(args[0])
	ranges, _ := strconv.Atoi(args[1])
	for n := range files {
		f, err := os.Create(fmt.Sprint("/dev/shm/locked", n))
		if err != nil {
			say("create", err)
			break
		}
		fd := int(f.Fd())
		for r := range ranges {
			l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * r), Len: 1}
			if err := unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &l); err != nil {
				say("lock", err)
				break
			}
		}
		kept = append(kept, f)
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

var kept []*os.File

// A sandbox that has the kernel keep much that no limit counts is ended, and
// the one beside it is not.
func TestHoardersAreEnded(t *testing.T) {
	h := newHost(t, nil)
	beside := h.create()
	held := beside.hold(nil, "/bin/inside", "locks", "100", "100") // as a database may have
	for _, tt := range []struct {
		reason string
		argv   []string
	}{
		{"netlink sockets", []string{"/bin/inside", "netlinks"}},
		{"locks of files", []string{"/bin/inside", "locks", "5000", "200"}},
		{"buffers of TCP", []string{"/bin/inside", "tcps"}},
	} {
		if tt.argv[1] == "tcps" && h.b.tree.Layout().Unified {
			continue // there it is charged, and the memory's limit holds
		}
		s := h.create()
		stream, err := s.client.Start(t.Context(), chronusapi.StartRequest{Command: chronusapi.Command{Argv: tt.argv, Env: []string{"PATH=/bin"}}, OpenStdin: true})
		check(t, err)
		select {
		case <-s.i.Done():
		case <-time.After(2 * time.Minute):
			t.Fatalf("%v goes on", tt.argv)
		}
		_ = stream.Close()
		if reason := s.i.Exit().Reason; !strings.Contains(reason, tt.reason) {
			t.Errorf("%v: it ended for %q, want %q in it", tt.argv, reason, tt.reason)
		}
	}
	if o := beside.sh("echo here"); o.out != "here\n" {
		t.Errorf("the one beside it: %+v", o)
	}
	_ = held.Close()
}

// Locks are counted once, however many descriptors of the file there are.
func TestHeldLocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	var files []*os.File
	for range 3 {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		check(t, err)
		defer f.Close()
		files = append(files, f)
	}
	before := heldLocks(os.Getpid(), 1000)
	for r := range 10 {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(2 * r), Len: 1}
		check(t, unix.FcntlFlock(files[0].Fd(), unix.F_SETLK, &l))
	}
	if n := heldLocks(os.Getpid(), 1000) - before; n != 10 {
		t.Errorf("of ten POSIX locks %d are counted", n)
	}
	for n, f := range files[1:] {
		for r := range 5 {
			l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(100 + 100*n + 2*r), Len: 1}
			check(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l))
		}
	}
	if n := heldLocks(os.Getpid(), 1000) - before; n != 20 {
		t.Errorf("with ten of open files %d are counted", n)
	}
	if n := heldLocks(os.Getpid(), 7); n < 7 || n > 8 {
		t.Errorf("%d are counted up to 7", n)
	}
}
