package container

import (
	"errors"
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

// mounts returns those of a sandbox that sees so many CPUs and so much memory.
func (f *facts) mounts(cpus int, memory int64) ([]chronusapi.Mount, error) {
	const page = 4096
	sys := "sys-" + strconv.Itoa(cpus)
	cpuinfo := "cpuinfo-" + strconv.Itoa(cpus)
	stat := "stat-" + strconv.Itoa(cpus)
	meminfo := "meminfo-" + strconv.FormatInt(memory/page, 10)
	f.mu.Lock()
	defer f.mu.Unlock()
	err := errors.Join(
		f.need(sys, func() error {
			if err := makeDir(f.dir, sys); err != nil {
				return err
			}
			files := confine.SysFiles(cpus)
			for _, path := range f.mountPoints {
				files = append(files, confine.File{Path: path, Dir: true})
			}
			return writeFiles(f.dir, sys+"/", files)
		}),
		f.need(cpuinfo, func() error {
			return writeFile(f.dir, cpuinfo, confine.CPUInfo(f.cpuinfo, cpus), 0o444)
		}),
		f.need(stat, func() error {
			return writeFile(f.dir, stat, confine.ProcStat(f.btime, cpus), 0o444)
		}),
		f.need(meminfo, func() error {
			return writeFile(f.dir, meminfo, confine.Meminfo(memory/page*page), 0o444)
		}),
	)
	if err != nil {
		return nil, err
	}
	mounts := []chronusapi.Mount{{FD: -1, Path: "/sys"}, {FD: -1, Path: "/proc/cpuinfo"}, {FD: -1, Path: "/proc/meminfo"}, {FD: -1, Path: "/proc/stat"}}
	do, dir, attr := f.ns.do, f.dir, uint64(unix.MOUNT_ATTR_RDONLY)
	if f.free {
		do, dir, attr = here, f.seen, 0
	}
	return mounts, do(func() (err error) {
		for i, name := range []string{sys, cpuinfo, meminfo, stat} {
			if mounts[i].FD, err = cloneMount(dir, name, attr); err != nil {
				return fmt.Errorf("facts: %s: %w", name, err)
			}
		}
		return nil
	})
}

// maxFacts bounds the files that differing limits make.
const maxFacts = 4096

// need makes a file or directory that is not there yet.
func (f *facts) need(name string, make func() error) error {
	if f.made[name] {
		return nil
	}
	if len(f.made) >= maxFacts {
		f.forget()
	}
	if err := make(); err != nil {
		_ = os.RemoveAll(procPath(f.dir) + "/" + name)
		return fmt.Errorf("facts: %s: %w", name, err)
	}
	f.made[name] = true
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
