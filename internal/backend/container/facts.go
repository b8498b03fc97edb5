package container

import (
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/confine"
)

// facts are read-only files that tell programs inside what their sandbox has:
// the /sys of so many CPUs, the /proc/meminfo of so much memory. They lie in
// one tmpfs in the layers' namespace, each made once, and every sandbox that
// has the same limits gets a mount of the same file.
type facts struct {
	ns          *layerNS
	mountPoints []string // of cgroups, below /sys
	cpuinfo     []byte   // of the host
	btime       int64    // of the host, in seconds since 1970

	dir  int  // of the tmpfs, to make them in
	seen int  // the same, by a mount that is read-only, as its copies are then
	free bool // as of a layer: seen is copied from outside of the namespace

	mu   sync.Mutex
	made map[string]bool
}

func newFacts(ns *layerNS, mountPoints []string) (*facts, error) {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return nil, err
	}
	btime, err := confine.BootTime(stat)
	if err != nil {
		return nil, err
	}
	f := &facts{ns: ns, mountPoints: mountPoints, cpuinfo: cpuinfo, btime: btime, dir: -1, seen: -1, made: map[string]bool{}}
	if err := f.open(); err != nil {
		f.close()
		return nil, fmt.Errorf("facts: %w", err)
	}
	return f, nil
}

func (f *facts) open() error {
	fd, err := newTmpfs(attrPlain | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if f.dir, err = unix.Openat(fd, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	if f.seen, f.free = detachedCopy(fd); f.free {
		if err := setAttr(f.seen, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return err
		}
	}
	return f.ns.do(func() error {
		// Those of the last run of the backend go; sandboxes have copies.
		if err := unix.Unmount("/facts", unix.MNT_DETACH); err != nil && err != unix.EINVAL {
			return err
		}
		return attach(fd, unix.AT_FDCWD, "/facts")
	})
}

func (f *facts) close() { closeAll([]int{f.dir, f.seen}) }

// fact is one file or directory, which is made where it is not there yet.
type fact struct {
	path string // inside
	name string // in the tmpfs
	make func(name string) error
}

// of lists the facts of a sandbox that sees so many CPUs and so much memory.
func (f *facts) of(cpus int, memory int64) []fact {
	const page = 4096
	file := func(text func() []byte) func(string) error {
		return func(name string) error { return writeFile(f.dir, name, text(), 0o444) }
	}
	perCPUs, pages := "-"+strconv.Itoa(cpus), memory/page
	return []fact{
		{"/sys", "sys" + perCPUs, func(name string) error { return f.makeSys(name, cpus) }},
		{"/proc/cpuinfo", "cpuinfo" + perCPUs, file(func() []byte { return confine.CPUInfo(f.cpuinfo, cpus) })},
		{"/proc/stat", "stat" + perCPUs, file(func() []byte { return confine.ProcStat(f.btime, cpus) })},
		{"/proc/meminfo", "meminfo-" + strconv.FormatInt(pages, 10), file(func() []byte { return confine.Meminfo(pages * page) })},
	}
}

func (f *facts) makeSys(name string, cpus int) error {
	if err := makeDir(f.dir, name); err != nil {
		return err
	}
	files := confine.SysFiles(cpus)
	for _, path := range f.mountPoints {
		files = append(files, confine.File{Path: path, Dir: true})
	}
	return writeFiles(f.dir, name+"/", files)
}

// mounts returns those of a sandbox that sees so many CPUs and so much memory.
// On error they are those that were made.
func (f *facts) mounts(cpus int, memory int64) (mounts []chronusapi.Mount, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := f.of(cpus, memory)
	for len(f.made) > maxFacts-len(list) { // before any of these is there
		f.forget()
	}
	for _, fact := range list {
		if err := f.need(fact); err != nil {
			return nil, err
		}
	}
	do, dir, attr := f.ns.do, f.dir, uint64(unix.MOUNT_ATTR_RDONLY)
	if f.free {
		do, dir, attr = here, f.seen, 0
	}
	err = do(func() error {
		for _, fact := range list {
			fd, err := cloneMount(dir, fact.name, attr)
			if err != nil {
				return fmt.Errorf("facts: %s: %w", fact.name, err)
			}
			mounts = append(mounts, chronusapi.Mount{FD: fd, Path: fact.path})
		}
		return nil
	})
	return mounts, err
}

// maxFacts bounds the files that differing limits make.
const maxFacts = 4096

// need makes a fact that is not there yet.
func (f *facts) need(fact fact) error {
	if f.made[fact.name] {
		return nil
	}
	if err := fact.make(fact.name); err != nil {
		_ = os.RemoveAll(procPath(f.dir) + "/" + fact.name)
		return fmt.Errorf("facts: %s: %w", fact.name, err)
	}
	f.made[fact.name] = true
	return nil
}

// forget removes one fact; mounts of it in sandboxes keep its files.
func (f *facts) forget() {
	for name := range f.made {
		_ = os.RemoveAll(procPath(f.dir) + "/" + name)
		delete(f.made, name)
		return
	}
}
