package container

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

func init() { tries["take"] = take }

// takers take one of what the kernel has a count of for more than one sandbox.
var takers = map[string]func() error{
	"inotify": func() error {
		_, err := unix.InotifyInit1(unix.IN_CLOEXEC)
		return err
	},
	"pty": func() error {
		_, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return err
	},
	"aio": func() error {
		var ctx uintptr
		_, _, errno := unix.Syscall(unix.SYS_IO_SETUP, 1024, uintptr(unsafe.Pointer(&ctx)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	},
	"pipe": func() error {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return err
		}
		_, err := unix.FcntlInt(uintptr(p[0]), unix.F_SETPIPE_SZ, 1<<20)
		return err
	},
	"signal": func() error {
		_, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, 0, uintptr(unsafe.Pointer(new(int32))))
		if errno != 0 {
			return errno
		}
		return nil
	},
	"epoll": func() error {
		_, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		return err
	},
}

// take NAME MOST takes so many, or as many as there are, and holds them until
// the input ends.
func take(args []string) {
	var most, n int
	_, _ = fmt.Sscan(args[1], &most)
	var err error
	for ; n < most && err == nil; n++ {
		err = takers[args[0]]()
	}
	if err != nil {
		n--
	}
	say(fmt.Sprint("took ", n), err)
	fmt.Fprintln(os.Stdout, "ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// Sandboxes that take all they can get of what the kernel counts for many leave
// another, and the host, what they need.
func TestTablesOfTheKernelAreShared(t *testing.T) {
	h := newHost(t, nil)
	dir, err := programs()
	check(t, err)
	neighbour := h.create()
	var greedy []*sandbox
	for range 4 {
		greedy = append(greedy, h.create())
	}
	for name := range takers {
		t.Run(name, func(t *testing.T) {
			for _, s := range greedy {
				held := s.hold(nil, "/bin/inside", "take", name, "30000")
				defer held.Close()
			}
			want := "took 8 ok\n"
			if name == "aio" { // one table for all of the host, of which no sandbox has a part
				want = "took 0 ENOSYS\n"
			}
			if o := neighbour.run("/bin/inside", "take", name, "8"); !strings.HasPrefix(o.out, want) {
				t.Errorf("the neighbour %q, want %q", o.out, want)
			}
			if out, err := exec.Command(filepath.Join(dir, "inside"), "take", name, "1").CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "took 1 ok\n") {
				t.Errorf("the host %s, %v", out, err)
			}
		})
	}
}
