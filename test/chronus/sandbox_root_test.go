package chronus_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
	"golang.org/x/sys/unix"
)

// The real thing: chronus as PID 1 in namespaces of its own, on a read-only view
// of the host's root, with control groups.

// sandbox is a chronus that was started as in a container.
type sandbox struct {
	*fixture
	groups *groupDirs
}

// warm starts chronus up to where it waits for Setup.
func warm(t *testing.T) *sandbox {
	t.Helper()
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	root := filepath.Join(dir, "root")
	path := filepath.Join(dir, "chronus")
	if err := errors.Join(os.Link(shipped.path(t), path), os.Mkdir(root, 0o755)); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = []string{stageEnv + "=" + path, rootEnv + "=" + root}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET,
		Setsid:     true, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
	}
	return &sandbox{fixture: startFixture(t, cmd)} // PID 1 takes all others with it
}

// newSandbox starts chronus and sets it up with n groups.
func newSandbox(t *testing.T, n int, change func(*chronusapi.SetupRequest)) *sandbox {
	t.Helper()
	testutil.Require(t, testutil.Root)
	groups := newGroupDirs(t) // removed after the sandbox was killed
	s := warm(t)
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

// start starts a command, with one group more where those there are have not
// been left yet, as an edge does.
func (s *sandbox) start(t testing.TB, req chronusapi.StartRequest) (*chronusapi.Events, error) {
	t.Helper()
	for {
		ev, err := s.Start(t.Context(), req)
		if !errors.Is(err, chronusapi.ErrNeedGroup) || s.groups.n == chronusapi.MaxSetupGroups {
			return ev, err
		}
		if err := s.AddGroup(t.Context(), s.groups.add(t)); err != nil {
			t.Fatal(err)
		}
	}
}

func (s *sandbox) run(t testing.TB, req chronusapi.StartRequest) result {
	t.Helper()
	ev, err := s.start(t, req)
	return collect(t, ev, err)
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
	name := testutil.Name(t)
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
func (g *groupDirs) add(t testing.TB) chronusapi.Group {
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
