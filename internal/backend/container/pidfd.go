package container

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process is a PID 1, held by a pidfd, which never names another process.
type process struct {
	pid  int
	file *os.File // the pidfd
	done chan struct{}

	mu     sync.Mutex
	ending map[*func()]struct{} // called once done is closed
}

// newProcess takes over a pidfd and waits for the process's end in the
// runtime's poller, without a thread.
func newProcess(pid, pidfd int) (*process, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return nil, fmt.Errorf("pidfd: %w", err)
	}
	p := &process{pid: pid, file: os.NewFile(uintptr(pidfd), "pidfd"), done: make(chan struct{})}
	raw, err := p.file.SyscallConn()
	if err != nil {
		_ = p.file.Close()
		return nil, fmt.Errorf("pidfd: %w", err)
	}
	go func() {
		// An error means that the file was closed: the instance is destroyed,
		// or the backend is closed and another one will recover it.
		if raw.Read(ended) == nil {
			p.end()
		}
	}()
	return p, nil
}

func (p *process) end() {
	p.mu.Lock()
	close(p.done)
	calls := p.ending
	p.ending = nil
	p.mu.Unlock()
	for f := range calls {
		(*f)()
	}
}

// onEnd has f called once the process has ended, unless what it returns is
// called before. f must not wait for long. It costs no goroutine.
func (p *process) onEnd(f func()) (stop func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.done:
		go f()
		return func() {}
	default:
	}
	if p.ending == nil {
		p.ending = map[*func()]struct{}{}
	}
	p.ending[&f] = struct{}{}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.ending, &f)
	}
}

// ended reports whether the process of a pidfd has ended.
func ended(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// dup returns a pidfd of its own to the caller.
func (p *process) dup() (fd int, err error) {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("pidfd: %w", err)
	}
	if cerr := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return -1, fmt.Errorf("pidfd: %w", cerr)
	}
	return fd, err
}

// kill sends SIGKILL. It succeeds where the process is gone.
func (p *process) kill() error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := raw.Control(func(fd uintptr) {
		serr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0)
	}); err != nil {
		return err
	}
	if serr == unix.ESRCH {
		return nil
	}
	return serr
}

// wait waits for the process's end.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// close lets the process go without waiting for its end any more.
func (p *process) close() { _ = p.file.Close() }

// status tells how the process ended, where the kernel keeps that for others
// than its parent (6.15) and the parent has waited for it.
func (p *process) status() (unix.WaitStatus, bool) {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return 0, false
	}
	const exit = 1 << 3 // PIDFD_INFO_EXIT
	info := struct {
		Mask, CgroupID                          uint64
		PID, TGID, PPID, RUID, RGID, EUID, EGID uint32
		SUID, SGID, FSUID, FSGID                uint32
		ExitCode                                int32
	}{Mask: exit}
	// PIDFD_GET_INFO is _IOWR(0xFF, 11, struct pidfd_info); the kernel takes
	// the size from the number.
	request := 3<<30 | 0xFF<<8 | 11 | unsafe.Sizeof(info)<<16
	var errno syscall.Errno
	if err := raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(unsafe.Pointer(&info)))
	}); err != nil || errno != 0 || info.Mask&exit == 0 {
		return 0, false
	}
	return unix.WaitStatus(info.ExitCode), true
}

// inode is the number of the pidfd's inode, which since Linux 6.9 is given to one
// process of a boot and never again; 0 before. To read it costs a hundredth of
// what startTime does.
func (p *process) inode() (uint64, error) {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n uint64
	var serr error
	if err := raw.Control(func(fd uintptr) { n, serr = pidfdInode(int(fd)) }); err != nil {
		return 0, err
	}
	return n, serr
}

func pidfdInode(fd int) (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return 0, fmt.Errorf("pidfd: %w", err)
	}
	if fs.Type != unix.PID_FS_MAGIC {
		return 0, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("pidfd: %w", err)
	}
	return st.Ino, nil
}

// startTime returns when a process started, in ticks since boot: with the PID,
// it names one process of this boot.
func startTime(pid int) (uint64, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may hold anything; field 22 counts from 1.
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(f) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat: short", pid)
	}
	return strconv.ParseUint(string(f[19]), 10, 64)
}
