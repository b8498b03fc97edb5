package container

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/hostos"
)

func init() { tries["netlinks"], tries["locks"], tries["tcps"] = netlinks, locks, tcps }

// tcps sends through one connection after the other, and receives nothing. Where it
// can have no more it begins anew: a look comes when memory grows, and may have come
// when it did not have enough.
func tcps([]string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	for err == nil {
		for err == nil {
			err = unread(l)
		}
		if len(kept) > 0 {
			err = nil
		}
		for i, f := range kept {
			_, _ = f.Close(), keptConns[i].Close()
		}
		kept, keptConns = nil, nil
	}
	say("connect", err)
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// unread is one connection through which as much is sent as can be.
func unread(l net.Listener) error {
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	defer c.Close()
	d, err := l.Accept()
	if err != nil {
		return err
	}
	f, err := c.(*net.TCPConn).File() // out of Go's poller
	if err != nil {
		_ = d.Close()
		return err
	}
	fd := int(f.Fd()) // which makes it block
	_ = unix.SetNonblock(fd, true)
	for buf := make([]byte, 64<<10); err == nil; {
		_, err = unix.Write(fd, buf)
	}
	kept, keptConns = append(kept, f), append(keptConns, d)
	return nil
}

var keptConns []net.Conn

// netlinks asks the kernel questions through one socket after the other, and
// reads no answer, until so many MiB wait there.
func netlinks(args []string) {
	most := int64(1) << 40
	if len(args) > 0 {
		n, _ := strconv.ParseInt(args[0], 10, 64)
		most = n << 20
	}
	var q [32]byte // struct nlmsghdr, struct ifinfomsg
	binary.NativeEndian.PutUint32(q[0:], uint32(len(q)))
	binary.NativeEndian.PutUint16(q[4:], unix.RTM_GETLINK)
	binary.NativeEndian.PutUint16(q[6:], unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(q[20:], 1) // loopback
	for waiting := int64(0); waiting < most; {
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
				waiting += int64(info[0])
				break
			}
		}
	}
	fmt.Println("ready")
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

// What has the kernel keep much that no limit counts is killed, and its sandbox,
// too, if that happens again soon; not the sandbox beside it.
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
		start := chronusapi.StartRequest{Command: chronusapi.Command{Argv: tt.argv, Env: []string{"PATH=/bin"}}, OpenStdin: true}
		stream, err := s.client.Start(t.Context(), start)
		check(t, err)
		for ended := false; !ended; {
			ev, err := stream.Next()
			check(t, err)
			if ended = ev.Kind == chronusapi.EventExited; ended && ev.Outcome.Signal != int(unix.SIGKILL) {
				t.Errorf("%v ended with %+v", tt.argv, ev.Outcome)
			}
		}
		_ = stream.Close()
		if o := s.sh("echo here"); o.out != "here\n" {
			t.Errorf("%v: its sandbox afterwards: %+v", tt.argv, o)
		}
		for again := true; again; { // once more within hoardAgain, which a slow machine may take longer for
			stream, err = s.client.Start(t.Context(), start)
			check(t, err)
			again = false
			for {
				ev, err := stream.Next()
				if again = err == nil && ev.Kind == chronusapi.EventExited; again || err != nil {
					break
				}
			}
			_ = stream.Close()
		}
		<-s.i.Done()
		if reason := s.i.Exit().Reason; !strings.Contains(reason, tt.reason) {
			t.Errorf("%v: it ended for %q, want %q in it", tt.argv, reason, tt.reason)
		}
	}
	if o := beside.sh("echo here"); o.out != "here\n" {
		t.Errorf("the one beside it: %+v", o)
	}
	_ = held.Close()
}

// selfWalk counts the locks of this process.
func selfWalk() *lockWalk {
	return &lockWalk{limit: 1000, list: func() ([]int, error) { return []int{os.Getpid()}, nil }}
}

func never() bool  { return false }
func always() bool { return true }

func heldLocks(t *testing.T, w *lockWalk) int {
	t.Helper()
	if done, err := w.run(never); !done || err != nil {
		t.Fatalf("not done, or %v", err)
	}
	return w.sum
}

// lockRanges locks so many ranges, from one on.
func lockRanges(t *testing.T, fd uintptr, cmd, from, n int) {
	t.Helper()
	for r := range n {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(from + 2*r), Len: 1}
		check(t, unix.FcntlFlock(fd, cmd, &l))
	}
}

// Locks are counted once, however many descriptors there are of the file that
// made them, and whatever is locked.
func TestHoardLocksAreCountedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	var files []*os.File
	for range 3 {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		check(t, err)
		defer f.Close()
		files = append(files, f)
	}
	if n := heldLocks(t, selfWalk()); n != 0 {
		t.Fatalf("there are %d locks", n)
	}
	lockRanges(t, files[0].Fd(), unix.F_SETLK, 0, 10)
	for range 3 { // closed together, since closing one unlocks
		fd, err := unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0)
		check(t, err)
		defer unix.Close(fd)
	}
	if n := heldLocks(t, selfWalk()); n != 10 {
		t.Errorf("of ten POSIX locks %d are counted", n)
	}
	lockRanges(t, files[1].Fd(), unix.F_SETLK, 100, 20)
	if n := heldLocks(t, selfWalk()); n != 30 {
		t.Errorf("with twenty of the file opened again %d are counted", n)
	}
	lockRanges(t, files[2].Fd(), unix.F_OFD_SETLK, 200, 5)
	lockRanges(t, files[1].Fd(), unix.F_OFD_SETLK, 300, 5)
	if n := heldLocks(t, selfWalk()); n != 40 {
		t.Errorf("with ten of open files %d are counted", n)
	}
	few := selfWalk()
	few.limit = 7
	if n := heldLocks(t, few); n < 7 || n > 8 {
		t.Errorf("%d are counted up to 7", n)
	}

	r, w, err := os.Pipe()
	check(t, err)
	defer r.Close() // by a collection it would be closed in a later test, whose ledger misses it
	defer w.Close()
	lockRanges(t, w.Fd(), unix.F_SETLK, 0, 3)
	watch, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	check(t, err)
	defer unix.Close(watch)
	lockRanges(t, uintptr(watch), unix.F_SETLK, 0, 4)
	once := selfWalk()
	if n := heldLocks(t, once); n != 47 {
		t.Errorf("with those of a pipe and an epoll %d are counted", n)
	}
	// An epoll's fdinfo is read once.
	for range 5 {
		fd, err := unix.FcntlInt(uintptr(watch), unix.F_DUPFD_CLOEXEC, 0)
		check(t, err)
		defer unix.Close(fd)
	}
	again := selfWalk()
	if n := heldLocks(t, again); n != 47 || len(again.large) != len(once.large) || len(once.large) == 0 {
		t.Errorf("with descriptors of the epoll %d are counted, %d and %d files looked at", n, len(once.large), len(again.large))
	}
}

// A thread with descriptors of its own hides no locks, and one without counts
// nothing twice.
func TestHoardLocksOfThreads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	answer, end := make(chan error), make(chan bool)
	for _, own := range []bool{true, false} {
		hostos.OnThread(func() {
			var err error
			if own {
				err = unix.CloseRange(1<<30, 1<<30, unix.CLOSE_RANGE_UNSHARE)
			}
			fd, oerr := unix.Open(path+strconv.FormatBool(own), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
			if err = cmp.Or(err, oerr); err == nil {
				l := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
				err = unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &l)
			}
			answer <- err
			<-end
			answer <- unix.Close(fd) // which unlocks
		})
		check(t, <-answer)
	}
	defer func() {
		close(end)
		check(t, <-answer)
		check(t, <-answer)
	}()
	if n := heldLocks(t, selfWalk()); n != 2 {
		t.Errorf("of two locks %d are counted", n)
	}
}

// Nor does a process whose first thread has ended.
func TestHoardLocksWithoutLeader(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	cmd := exec.Command(python, "-c", `
import ctypes, fcntl, os, sys, threading
f = open(sys.argv[1], "w")
for n in range(5): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * n)
leader = f"/proc/self/task/{os.getpid()}/stat"
def later():
    while open(leader).read().rsplit(")")[1].split()[0] != "Z": pass
    os.write(1, b"ready\n")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=later).start()
ctypes.CDLL(None).syscall(60, 0)
`, filepath.Join(t.TempDir(), "f"))
	stdin, err := cmd.StdinPipe()
	check(t, err)
	stdout, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	defer func() {
		_ = stdin.Close()
		check(t, cmd.Wait())
	}()
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatal(line, err)
	}
	w := &lockWalk{limit: 1000, list: func() ([]int, error) { return []int{cmd.Process.Pid}, nil }}
	if n := heldLocks(t, w); n != 5 {
		t.Errorf("of five locks %d are counted", n)
	}
}

// A count that is stopped after each descriptor comes to the same, and one of a
// process that is not the sandbox's any more to nothing.
func TestHoardLocksGoOn(t *testing.T) {
	for n := range 20 {
		f, err := os.Create(filepath.Join(t.TempDir(), "f"))
		check(t, err)
		defer f.Close()
		lockRanges(t, f.Fd(), unix.F_SETLK, 0, n+1)
	}
	w := selfWalk()
	var runs int
	for done := false; !done; runs++ {
		var err error
		if done, err = w.run(always); err != nil {
			t.Fatal(err)
		}
	}
	if w.sum != 210 || runs < 20 {
		t.Errorf("of 210 locks %d are counted in %d runs", w.sum, runs)
	}

	asked := 0
	w.begun, w.sum = false, 0
	w.list = func() ([]int, error) {
		if asked++; asked == 1 {
			return []int{os.Getpid()}, nil
		}
		return []int{os.Getpid() + 1}, nil
	}
	if n := heldLocks(t, w); n != 0 || asked != 2 {
		t.Errorf("of a process that is another's %d are counted, and %d times it was asked whose it is", n, asked)
	}
}

// A sandbox with many descriptors does not keep the others waiting, a pass ends
// in time, and the next goes on where it stopped, later where it took longer.
func TestHoardLocksTakeTurns(t *testing.T) {
	dir := t.TempDir()
	for n := range 150 { // at 1 ms each they take more than a pass
		f, err := os.Create(filepath.Join(dir, strconv.Itoa(n)))
		check(t, err)
		defer f.Close()
	}
	for n := range 10 {
		f, err := os.Open(filepath.Join(dir, strconv.Itoa(n)))
		check(t, err)
		defer f.Close()
		l := unix.Flock_t{Type: unix.F_RDLCK, Len: 1}
		check(t, unix.FcntlFlock(f.Fd(), unix.F_SETLK, &l))
	}
	now := time.Unix(0, 0)
	l := lockLook{log: slog.New(slog.DiscardHandler), now: func() time.Time {
		now = now.Add(time.Millisecond)
		return now
	}}
	ended := map[dsec.SandboxID]int{}
	pass := 1
	add := func(id dsec.SandboxID, limit int, list func() ([]int, error)) {
		l.add(&lockTurn{id: id, walk: lockWalk{limit: limit, list: list}, counted: func(n int) {
			if n >= limit {
				ended[id] = pass
			}
		}})
	}
	self := selfWalk().list
	add("hoards", 10, self)
	add("hoards", 10, self) // its turn is still to come
	add("does not", 11, self)
	add("fails", 1, func() ([]int, error) { return nil, os.ErrNotExist })
	add("is empty", 1, func() ([]int, error) { return nil, nil })
	for ; len(l.turns) > 0; pass++ {
		start := now
		l.pass()
		if took := now.Sub(start); took > lockPassTime*11/10 {
			t.Errorf("pass %d took %v", pass, took)
		}
		if rest := l.rest.Sub(start); pass == 1 && (len(l.turns) != 2 || rest < 8*lockPassTime) {
			t.Errorf("after the first pass there are %d, and a rest of %v", len(l.turns), rest)
		}
		before := now
		l.pass() // too early
		if len(l.turns) > 0 && now.Sub(before) > time.Millisecond {
			t.Errorf("a pass just after pass %d took %v", pass, now.Sub(before))
		}
		now = l.rest
	}
	if ended["hoards"] < 2 || len(ended) != 1 {
		t.Errorf("ended in passes: %v", ended)
	}
}

// The table of netlink sockets, which the kernel makes from those of all namespaces,
// is only read where a process of this one has a socket.
func TestNetlinkTableIsReadWhereThereAreSockets(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	protocols := func(sockets int) {
		put("protocols", fmt.Sprintf("protocol  size sockets  memory press\nNETLINK   1096  %5d      -1   NI\n", sockets))
	}
	protocols(0)
	if n, err := netlinkBytes(dir, 1<<30); n != 0 || err != nil {
		t.Errorf("no sockets and no table: %d, %v; want 0", n, err)
	}
	protocols(1)
	if _, err := netlinkBytes(dir, 1<<30); err == nil {
		t.Error("a socket and no table: no error")
	}
	put("netlink", "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n0 0 7 00000000 4096 512 0 2 0 9\n")
	want := int64(netlinkSize + 4096 + 512)
	if n, err := netlinkBytes(dir, 1<<30); n != want || err != nil {
		t.Errorf("a socket: %d, %v; want %d", n, err, want)
	}
	put("protocols", "") // of a kernel that does not tell
	if n, err := netlinkBytes(dir, 1<<30); n != want || err != nil {
		t.Errorf("protocols unknown: %d, %v; want %d", n, err, want)
	}
}
