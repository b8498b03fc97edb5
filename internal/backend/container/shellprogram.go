package container

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
	"github.com/opendsec/dsec/internal/rawexec"
)

// Descriptors of a container's child; see reserveLow.
const (
	fdListener = 3 // of chronus
	fdGo       = 4
	lowFDs     = 10
)

const procFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// shellProgram is what a container's first process does before it is chronus.
// It starts on the platform (see shells) as nobody, in all its namespaces, and
// waits for its IDs. It is made once for many containers.
type shellProgram struct {
	rawexec.Program
	listener, goFD int // the calls that take these
}

// with returns the program of a container with these descriptors.
func (p *shellProgram) with(listener, goFD int) *rawexec.Program {
	p.Set(p.listener, 0, rawexec.Int(listener))
	p.Set(p.goFD, 0, rawexec.Int(goFD))
	return &p.Program
}

func newShellProgram(masks []confine.Mask, debug bool) *shellProgram {
	var p shellProgram
	i := rawexec.Int[int]
	str := rawexec.Str
	zero := i(0)
	mount := func(name, source, target, fstype string, flags int, data string) {
		args := []rawexec.Arg{zero, str(target), zero, i(flags), zero}
		if source != "" {
			args[0] = str(source)
		}
		if fstype != "" {
			args[2] = str(fstype)
		}
		if data != "" {
			args[4] = str(data)
		}
		p.Call(name, unix.SYS_MOUNT, args...)
	}

	p.listener = p.Call("listener", unix.SYS_DUP3, i(-1), i(fdListener), zero)
	p.goFD = p.Call("go", unix.SYS_DUP3, i(-1), i(fdGo), i(unix.O_CLOEXEC))
	if !debug {
		p.Call("stderr", unix.SYS_DUP3, i(0), i(2), zero)
	}
	// Other children's sockets, which would keep them from seeing this
	// launcher die, and network slots.
	p.Call("close", unix.SYS_CLOSE_RANGE, i(fdGo+1), rawexec.Int(^uint32(0)), zero)
	buf := rawexec.Bytes(make([]byte, 1))
	p.Positive(p.Call("wait for IDs", unix.SYS_READ, i(fdGo), buf, i(1)))
	p.Call("setgroups", unix.SYS_SETGROUPS, zero, zero)
	p.Call("setgid", unix.SYS_SETRESGID, zero, zero, zero)
	p.Call("setuid", unix.SYS_SETRESUID, zero, zero, zero)
	p.Call("setsid", unix.SYS_SETSID)
	p.Call("umask", unix.SYS_UMASK, i(0o022))

	mount("proc", "proc", "/proc", "proc", procFlags, "")
	for _, name := range confine.ProcReadOnly {
		path := "/proc/" + name
		mount("bind "+path, path, path, "", unix.MS_BIND, "")
		mount("read-only "+path, "", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|procFlags, "")
	}
	file, dir := str("/mask/file"), str("/mask/dir")
	for _, m := range masks { // after the binds, which would lie on top
		source := file
		if m.Dir {
			source = dir
		}
		p.Call("mask /proc/"+m.Path, unix.SYS_MOUNT, source, str("/proc/"+m.Path), zero, i(unix.MS_BIND), zero)
	}
	mount("cover /proc/loadavg", "/mask/loadavg", "/proc/loadavg", "", unix.MS_BIND, "")
	mount("bind /dev", "/dev", "/dev", "", unix.MS_BIND, "")
	mount("devpts", "devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5,max=256")
	mount("mqueue", "mqueue", "/dev/mqueue", "mqueue", procFlags, "")

	dropBounding(&p.Program)
	p.UnblockSignals()
	p.Call("exec chronus", unix.SYS_EXECVE, str("/chronus"), rawexec.Strs([]string{"chronus"}), rawexec.Strs(nil))
	return &p
}

// lastCap is the last capability that is known here; a later one is in no set
// of a container.
const lastCap = unix.CAP_LAST_CAP

// dropBounding limits what chronus's children can ever have. In chronus each
// of these calls would stop all its threads; here they are nearly free.
// chronus itself keeps all until Setup by having them inheritable: what root
// gets at exec is that and the bounding set.
func dropBounding(p *rawexec.Program) {
	const all = uint64(1)<<(lastCap+1) - 1
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	for i := range sets {
		half := uint32(all >> (32 * i))
		sets[i] = unix.CapUserData{Effective: half, Permitted: half, Inheritable: half}
	}
	p.Call("capset", unix.SYS_CAPSET, rawexec.Ptr(unsafe.Pointer(header)), rawexec.Ptr(unsafe.Pointer(&sets)))
	for n := range lastCap + 1 {
		if confine.KeepCaps&(1<<n) == 0 {
			// Its failure means that the kernel has fewer.
			p.Ignore(p.Call("drop capability", unix.SYS_PRCTL, rawexec.Int(unix.PR_CAPBSET_DROP), rawexec.Int(n)))
		}
	}
}
