package cgroup

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// The test binary is also what runs in the groups: see helpers.
func TestMain(m *testing.M) {
	if f, ok := helpers[os.Getenv("CGROUP_TEST_HELPER")]; ok {
		f()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var helpers = map[string]func(){
	// eat takes memory until the kernel ends it.
	"eat": func() {
		for {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			eaten = append(eaten, b)
		}
	},
	// flood sends itself datagrams that it does not read, more than the group's
	// limit, and then waits.
	"flood": func() {
		for range 16 {
			in, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				panic(err)
			}
			_ = in.SetReadBuffer(64 << 20) // the host bounds it
			out, err := net.DialUDP("udp", nil, in.LocalAddr().(*net.UDPAddr))
			if err != nil {
				panic(err)
			}
			flooded = append(flooded, in)
			for range 2000 {
				_, _ = out.Write(make([]byte, 32<<10)) // refused where there is no room
			}
		}
		fmt.Println("flooded")
		_, _ = os.Stdin.Read(make([]byte, 1))
	},
	"hold": holdMemory,
	// clone starts /bin/true in the group on descriptor 3, with the rights of
	// whoever runs it.
	"clone": func() {
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: 3}
		if err := cmd.Run(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	},
}

var (
	eaten   [][]byte
	flooded []net.Conn
)

func helper(name string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "CGROUP_TEST_HELPER="+name)
	return cmd
}

const (
	idA = dsec.SandboxID("aaaaabbbbbbbbbbbbbbbbbbbb")
	idB = dsec.SandboxID("aaaaacccccccccccccccccccc")
)

var small = dsec.Limits{MilliCPU: 2000, MemoryBytes: 64 << 20, Pids: 32}

func openTree(t testing.TB, pool int) *Tree {
	t.Helper()
	testutil.Require(t, testutil.Root)
	name := testutil.Name(t)
	testutil.Ledger(t, name)
	tree, err := Open(Options{Name: name, Pool: pool, Log: testutil.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.Close(); err != nil {
			t.Error(err)
		}
		if err := tree.Destroy(); err != nil {
			t.Error(err)
		}
	})
	return tree
}

func create(t testing.TB, tree *Tree, id dsec.SandboxID, limits dsec.Limits) *Group {
	t.Helper()
	g, err := tree.Create(context.Background(), id, -1, limits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return g
}

func command(t testing.TB, g *Group) *CommandGroup {
	t.Helper()
	c, err := g.AddCommandGroup()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// in makes cmd run in a command group, as chronus does: cloned into the v2
// directory, then joined to the rest by a single-threaded child before it execs.
func in(c *CommandGroup, cmd *exec.Cmd) *exec.Cmd {
	join := "for fd do case $fd in --) shift; break;; esac; echo 0 >&$fd || exit 99; shift; done; exec \"$@\""
	args := []string{"sh", "-c", join, "join"}
	for i, fd := range c.Join {
		args = append(args, strconv.Itoa(3+i))
		dup, _ := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(dup), "join"))
	}
	self, _ := os.Executable()
	if cmd.Path == "/proc/self/exe" {
		cmd.Path = self
	}
	cmd.Args = append(append(args, "--", cmd.Path), cmd.Args[1:]...)
	cmd.Path = "/bin/sh"
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: c.Dir}
	return cmd
}

// start runs cmd until the end of the test, or until something kills it.
func start(t testing.TB, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, f := range cmd.ExtraFiles {
		_ = f.Close()
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd
}

// output runs cmd, which in gave, to its end.
func output(t testing.TB, cmd *exec.Cmd) (string, error) {
	t.Helper()
	var out strings.Builder
	cmd.Stdout = &out
	start(t, cmd)
	err := cmd.Wait()
	return out.String(), err
}

// chronus runs a process where chronus lives: in the group, outside its limits.
func chronus(t testing.TB, g *Group, script string) *exec.Cmd {
	t.Helper()
	return start(t, chronusCommand(t, g, script))
}

// chronusCommand is a command of chronus's place in the group.
func chronusCommand(t testing.TB, g *Group, script string) *exec.Cmd {
	t.Helper()
	fd, err := g.Open()
	check(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	return cmd
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func oomKills(t testing.TB, c *CommandGroup) int64 {
	t.Helper()
	b := make([]byte, 4096)
	n, err := unix.Pread(c.OOM, b, 0)
	if err != nil {
		t.Fatal(err)
	}
	kills, ok := lookup(b[:n], "oom_kill")
	if !ok {
		t.Fatalf("no oom_kill in %q", b[:n])
	}
	return kills
}
