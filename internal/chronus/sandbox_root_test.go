package chronus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/rawexec"
	"github.com/opendsec/dsec/internal/testutil"
	"golang.org/x/sys/unix"
)

// The real thing: cmd/chronus as PID 1 in namespaces of its own, on a
// read-only view of the host's root, with control groups. The stage, which is
// this test binary again, does what a launcher does.

const stageEnv = "DSEC_CHRONUS_STAGE"

// stage runs in the new namespaces: it makes the minimal root and execs
// chronus, whose path its environment names. Descriptor 3 goes through.
func stage(path string) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	root := filepath.Join(filepath.Dir(path), "root")
	mount := func(source, target, fstype string, flags uintptr) {
		if err == nil {
			if err = unix.Mount(source, target, fstype, flags, ""); err != nil {
				err = fmt.Errorf("mount %s: %w", target, err)
			}
		}
	}
	mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE)
	mount("dsec-test", root, "tmpfs", 0)
	for _, dir := range []string{"proc", "dev"} {
		err = errors.Join(err, os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	mount("/dev", filepath.Join(root, "dev"), "", unix.MS_BIND|unix.MS_REC)
	mount("proc", filepath.Join(root, "proc"), "proc", 0)
	if err != nil {
		return err
	}
	err = errors.Join(unix.Chdir(root), unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/"))
	if err != nil {
		return err
	}
	return unix.Exec("/proc/self/fd/"+strconv.Itoa(fd), []string{"chronus"}, nil)
}

// builtDir holds the binary; TestMain removes it.
var builtDir string

// buildChronus makes the static binary, once.
var buildChronus = sync.OnceValues(func() (string, error) {
	goTool, err := lookGo()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "dsec-chronus-")
	if err != nil {
		return "", err
	}
	builtDir = dir
	out := filepath.Join(dir, "chronus")
	var p rawexec.Program
	p.UnblockSignals()
	p.Call("exec", unix.SYS_EXECVE, rawexec.Str(goTool),
		rawexec.Strs([]string{"go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, "github.com/opendsec/dsec/cmd/chronus"}),
		rawexec.Strs(append(os.Environ(), "CGO_ENABLED=0")))
	done := make(chan exit, 1)
	r := theReaper()
	r.begin()
	child, err := p.Start(rawexec.Options{Flags: unix.CLONE_VM | unix.CLONE_VFORK})
	if err == nil {
		err = child.Wait()
	}
	if err != nil {
		r.end(0, nil)
		return "", err
	}
	r.end(child.PID, func(e exit) { done <- e })
	if e := <-done; e.status.ExitStatus() != 0 {
		return "", fmt.Errorf("go build: status %d", e.status.ExitStatus())
	}
	return out, nil
})

func lookGo() (string, error) {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/local/go/bin") {
		if path := filepath.Join(dir, "go"); unix.Access(path, unix.X_OK) == nil {
			return path, nil
		}
	}
	return "", errors.New("no go tool")
}

// sandbox is a running cmd/chronus.
type sandbox struct {
	*fixture
	pid    int
	groups *groupDirs
}

// warm starts chronus up to where it waits for Setup.
func warm(t *testing.T, namespaces uintptr) *sandbox {
	t.Helper()
	testutil.Require(t, testutil.Root)
	bin, err := buildChronus()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "chronus")
	if err := errors.Join(os.Link(bin, path), os.Mkdir(filepath.Join(dir, "root"), 0o755)); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	lf, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	attr := &syscall.SysProcAttr{Cloneflags: namespaces, Setsid: true}
	if namespaces&unix.CLONE_NEWUSER != 0 {
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
		attr.UidMappings, attr.GidMappings, attr.GidMappingsEnableSetgroups = ids, ids, true
	}
	proc, err := os.StartProcess(self, []string{"stage"}, &os.ProcAttr{
		Env:   []string{stageEnv + "=" + path},
		Files: []*os.File{nil, os.Stderr, os.Stderr, lf},
		Sys:   attr,
	})
	lf.Close()
	if err != nil {
		t.Fatal(err)
	}
	client := chronusapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	})
	t.Cleanup(func() {
		client.Close()
		_ = proc.Kill() // PID 1 takes all others with it
	})
	return &sandbox{fixture: &fixture{Client: client}, pid: proc.Pid}
}

const allNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET

// newSandbox starts chronus and sets it up with n groups.
func newSandbox(t *testing.T, n int, change func(*chronusapi.SetupRequest)) *sandbox {
	t.Helper()
	testutil.Require(t, testutil.Root)
	groups := newGroupDirs(t) // removed after the sandbox was killed
	s := warm(t, allNamespaces)
	s.groups = groups
	root, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(root)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(root, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		t.Fatal(err)
	}
	tmp := detachedTmpfs(t)
	defer unix.Close(tmp)
	req := chronusapi.SetupRequest{
		Root: root, Move: []string{"/proc", "/dev"}, Mounts: []chronusapi.Mount{{FD: tmp, Path: "/tmp"}},
		Hostname: "sandbox", KeepCaps: 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_KILL | 1<<unix.CAP_CHOWN,
	}
	for range n {
		req.Groups = append(req.Groups, s.groups.add(t))
	}
	if change != nil {
		change(&req)
	}
	_, err = s.Start(t.Context(), argv("true"))
	if err == nil || !strings.Contains(err.Error(), "not been set up") {
		t.Fatalf("before Setup: %v", err)
	}
	if err := s.Setup(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	return s
}

func detachedTmpfs(t *testing.T) int {
	t.Helper()
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// groupDirs makes command groups as a backend does.
type groupDirs struct {
	v2, memory string // directories of this test; memory is "" on pure v2
	n          int
	limit      string // of memory, for the groups made from now on
}

func newGroupDirs(t *testing.T) *groupDirs {
	t.Helper()
	name := fmt.Sprintf("dsec-t-%d-%d", os.Getpid(), time.Now().UnixNano())
	g := &groupDirs{v2: "/sys/fs/cgroup/" + name}
	if _, err := os.Stat("/sys/fs/cgroup/unified/cgroup.procs"); err == nil {
		g.v2, g.memory = "/sys/fs/cgroup/unified/"+name, "/sys/fs/cgroup/memory/"+name
	}
	for _, dir := range []string{g.v2, g.memory} {
		if dir == "" {
			continue
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			// The sandbox has been killed; its processes may still be on their way out.
			for i := range g.n {
				eventually(t, "the group can be removed", func() bool {
					err := unix.Rmdir(filepath.Join(dir, strconv.Itoa(i)))
					return err == nil || err == unix.ENOENT
				})
			}
			if err := unix.Rmdir(dir); err != nil {
				t.Error(err)
			}
		})
	}
	return g
}

// add makes a group and opens its descriptors, which the test's end closes.
func (g *groupDirs) add(t *testing.T) chronusapi.Group {
	t.Helper()
	open := func(dir, file string, flags int) int {
		fd, err := unix.Open(filepath.Join(dir, strconv.Itoa(g.n), file), flags|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	for _, dir := range []string{g.v2, g.memory} {
		if dir != "" {
			if err := os.Mkdir(filepath.Join(dir, strconv.Itoa(g.n)), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	cg := chronusapi.Group{
		Dir: -1, OOM: -1, Procs: []int{open(g.v2, "cgroup.procs", unix.O_WRONLY)},
		Kill: open(g.v2, "cgroup.kill", unix.O_WRONLY), Events: open(g.v2, "cgroup.events", unix.O_RDONLY),
	}
	if g.memory != "" {
		if g.limit != "" {
			if err := os.WriteFile(filepath.Join(g.memory, strconv.Itoa(g.n), "memory.limit_in_bytes"), []byte(g.limit), 0); err != nil {
				t.Fatal(err)
			}
		}
		cg.Procs = append(cg.Procs, open(g.memory, "tasks", unix.O_WRONLY))
		cg.OOM = open(g.memory, "memory.oom_control", unix.O_RDONLY)
	}
	g.n++
	return cg
}
