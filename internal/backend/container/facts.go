package container

import (
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
)

// facts are read-only files that tell programs inside what their sandbox has:
// the /sys of so many CPUs, the /proc/meminfo of so much memory. They lie in
// one tmpfs of this process, each made once, and every sandbox that has the
// same limits gets a mount of the same file.
type facts struct {
	mountPoints []string // of cgroups, below /sys
	cpuinfo     []byte   // of the host

	mount int // detached tmpfs
	empty int // another: the layer of sandboxes that have none

	mu   sync.Mutex
	made map[string]bool
}

func newFacts(mountPoints []string) (*facts, error) {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	fd, err := newTmpfs(attrPlain | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	empty, err := newTmpfs(attrReadOnly | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &facts{mountPoints: mountPoints, cpuinfo: cpuinfo, mount: fd, empty: empty, made: map[string]bool{}}, nil
}

func (f *facts) close() { closeAll([]int{f.mount, f.empty}) }

// maxFacts bounds the files that differing limits make.
const maxFacts = 4096

// sysMount returns a mount of the /sys of so many CPUs.
func (f *facts) sysMount(cpus int) (int, error) {
	name := "sys-" + strconv.Itoa(cpus)
	return f.get(name, func() error {
		if err := unix.Mkdirat(f.mount, name, 0o755); err != nil {
			return err
		}
		files := confine.SysFiles(cpus)
		for _, path := range f.mountPoints {
			files = append(files, confine.File{Path: path, Dir: true})
		}
		return writeFiles(f.mount, name+"/", files)
	})
}

// cpuinfoMount returns a mount of the /proc/cpuinfo of so many CPUs.
func (f *facts) cpuinfoMount(cpus int) (int, error) {
	name := "cpuinfo-" + strconv.Itoa(cpus)
	return f.get(name, func() error {
		return writeFile(f.mount, name, confine.CPUInfo(f.cpuinfo, cpus), 0o444)
	})
}

// meminfoMount returns a mount of the /proc/meminfo of so much memory.
func (f *facts) meminfoMount(bytes int64) (int, error) {
	const page = 4096
	name := "meminfo-" + strconv.FormatInt(bytes/page, 10)
	return f.get(name, func() error {
		return writeFile(f.mount, name, confine.Meminfo(bytes/page*page), 0o444)
	})
}

func (f *facts) get(name string, make func() error) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.made[name] {
		if len(f.made) >= maxFacts {
			f.forget()
		}
		if err := make(); err != nil {
			_ = os.RemoveAll(procPath(f.mount) + "/" + name)
			return -1, fmt.Errorf("facts: %w", err)
		}
		f.made[name] = true
	}
	return cloneMount(f.mount, name, unix.MOUNT_ATTR_RDONLY)
}

// forget removes one fact; mounts of it in sandboxes keep its files.
func (f *facts) forget() {
	for name := range f.made {
		_ = os.RemoveAll(procPath(f.mount) + "/" + name)
		delete(f.made, name)
		return
	}
}
