package testutil

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/hostos"
)

// descriptors counts this process's, by what they refer to. Sockets, pipes and
// anonymous inodes lose their number: a connection that was replaced by a new
// one is no leak.
func (s scope) descriptors(c count) error {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // the directory's own descriptor, closed by now
		}
		if kind, _, numbered := strings.Cut(target, ":["); numbered && (kind == "socket" || kind == "pipe") {
			target = kind
		}
		c.add("descriptor", "%s", target)
	}
	return nil
}

// processes counts the children of this process, and every process that is in
// a cgroup of the ledger (a child may have been given away to init).
func (s scope) processes(c count) error {
	pids, err := allPIDs()
	if err != nil {
		return err
	}
	self := fmt.Sprintf("PPid:\t%d\n", os.Getpid())
	for _, pid := range pids {
		status, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil {
			continue // ended meanwhile
		}
		groups, err := os.ReadFile("/proc/" + pid + "/cgroup")
		if err != nil {
			continue
		}
		inGroup := false
		for _, name := range s.names {
			inGroup = inGroup || strings.Contains(string(groups), "/"+name)
		}
		if inGroup || strings.Contains(string(status), self) {
			name, _, _ := strings.Cut(strings.TrimPrefix(string(status), "Name:\t"), "\n")
			c.add("process", "%s %s", pid, name)
		}
	}
	return nil
}

func allPIDs() ([]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []string
	for _, e := range entries {
		if n := e.Name(); n[0] >= '1' && n[0] <= '9' {
			pids = append(pids, n)
		}
	}
	return pids, nil
}

// mounts counts mount points in every mount namespace that a process lives in
// and in those kept only by a file (an nsfs mount), which is where an edge
// keeps its layer mounts.
func (s scope) mounts(c count) error {
	pids, err := allPIDs()
	if err != nil {
		return err
	}
	self, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	var pinned []string
	for _, pid := range append([]string{"self"}, pids...) {
		ns, err := os.Readlink("/proc/" + pid + "/ns/mnt")
		if err != nil || seen[ns] {
			continue // ended, not ours to see, or already counted
		}
		info, err := os.ReadFile("/proc/" + pid + "/mountinfo")
		if err != nil {
			continue
		}
		seen[ns] = true
		pins := s.mountinfo(c, ns, string(info))
		if ns == self {
			pinned = pins
		}
	}
	for _, path := range pinned {
		if err := s.pinnedMounts(c, path, seen); err != nil {
			return err
		}
	}
	return nil
}

// mountinfo counts the lines of one namespace and returns the paths that pin
// other mount namespaces.
func (s scope) mountinfo(c count, ns, info string) []string {
	var pins []string
	for line := range strings.Lines(info) {
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 2 {
			continue
		}
		root, point, fstype, source := l[3], l[4], r[0], r[1]
		if fstype == "nsfs" && strings.HasPrefix(root, "mnt:") {
			pins = append(pins, point)
		}
		if s.mine(root, point, source) {
			c.add("mount", "%s %s %s %s in %s", point, fstype, source, root, ns)
		}
	}
	return pins
}

// pinnedMounts reads the mounts of a namespace that no process lives in, from
// a thread that joins it and is then thrown away.
func (s scope) pinnedMounts(c count, path string, seen map[string]bool) error {
	f, err := os.Open(path)
	if err != nil {
		return nil // unpinned meanwhile, or below a directory that hides it
	}
	defer func() { _ = f.Close() }()
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNS); errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
			return nil
		} else if err != nil {
			return fmt.Errorf("join %s: %w", path, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			return err
		}
		ns := fmt.Sprintf("mnt:[%d]", st.Ino)
		if seen[ns] {
			return nil
		}
		seen[ns] = true
		info, err := readThreadMounts()
		if err != nil {
			return fmt.Errorf("mounts of %s: %w", path, err)
		}
		s.mountinfo(c, ns, info)
		return nil
	})
}

// onThread runs f on a thread of its own, and gives what f gives.
func onThread(f func() error) error {
	done := make(chan error, 1)
	hostos.OnThread(func() { done <- f() })
	return <-done
}

// readThreadMounts needs a proc of its own, since the joined namespace may
// hold none; a detached mount adds nothing to it.
func readThreadMounts() (string, error) {
	fsfd, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fsfd) }()
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return "", err
	}
	mnt, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(mnt) }()
	fd, err := unix.Openat(mnt, "thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	f := os.NewFile(uintptr(fd), "mountinfo")
	defer func() { _ = f.Close() }()
	var b strings.Builder
	_, err = io.Copy(&b, f)
	return b.String(), err
}

// links counts network links of the host's namespace.
func (s scope) links(c count) error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("links: %w", err)
	}
	for _, l := range links {
		if name := l.Attrs().Name; s.mine(name) {
			c.add("link", "%s %s", name, l.Type())
		}
	}
	return nil
}

// cgroups counts groups whose path holds a name of the ledger, or, on a
// machine of its own, whose first part starts with dsec: the machine's other
// services make and remove groups as they like.
func (s scope) cgroups(c count) error {
	for _, fstype := range []string{"cgroup", "cgroup2"} {
		roots, err := cgroupMounts(fstype)
		if err != nil {
			return err
		}
		for _, root := range roots {
			err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
				if err != nil || !d.IsDir() {
					return nil // removed meanwhile
				}
				rel := strings.TrimPrefix(path, root)
				if s.machine && strings.Contains(rel, "/dsec") || !s.machine && s.mine(rel) {
					c.add("cgroup", "%s", path)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// cgroupMounts returns where file systems of the type are mounted.
func cgroupMounts(fstype string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	var dirs []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == fstype {
			dirs = append(dirs, f[1])
		}
	}
	return dirs, nil
}

// loops counts loop devices that have a backing file.
func (s scope) loops(c count) error {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // detached meanwhile
		}
		if backing := strings.TrimSpace(string(b)); s.mine(backing) {
			c.add("loop", "%s", backing)
		}
	}
	return nil
}

// netns counts network namespaces that processes live in. Pinned ones are
// counted as mounts, those kept by a descriptor as descriptors.
func (s scope) netns(c count) error {
	if !s.machine {
		return nil
	}
	pids, err := allPIDs()
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, pid := range pids {
		ns, err := os.Readlink("/proc/" + pid + "/ns/net")
		if err == nil && !seen[ns] {
			seen[ns] = true
			c.add("netns", "%s", ns)
		}
	}
	return nil
}

// bpf counts every BPF program, map and link of the machine by its ID.
func (s scope) bpf(c count) error {
	if !s.machine {
		return nil
	}
	if err := eachID(ebpf.ProgramGetNextID, func(id ebpf.ProgramID) { c.add("bpf program", "%d", id) }); err != nil {
		return err
	}
	if err := eachID(ebpf.MapGetNextID, func(id ebpf.MapID) { c.add("bpf map", "%d", id) }); err != nil {
		return err
	}
	it := new(link.Iterator)
	defer it.Close()
	for it.Next() {
		c.add("bpf link", "%d", it.ID)
	}
	return endOfIDs(it.Err())
}

func eachID[ID ~uint32](next func(ID) (ID, error), each func(ID)) error {
	for id := ID(0); ; {
		following, err := next(id)
		if err != nil {
			return endOfIDs(err)
		}
		id = following
		each(id)
	}
}

// endOfIDs takes the end of the list, and a host that may not read it, for no
// error.
func endOfIDs(err error) error {
	if err == nil || errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return nil
	}
	return fmt.Errorf("bpf: %w", err)
}
