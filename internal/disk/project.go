package disk

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// project bounds directories of the file system that Dir is on by project
// quotas: what is made below a volume belongs to the volume's project. A
// process with CAP_SYS_RESOURCE over the host is not bound on ext4. Writes to an
// overlay are made with the rights of who mounted it, but for this one, which
// overlayfs leaves out.
type project struct {
	s      *Store
	fd     int // of Dir/volumes
	trash  int // of Dir/trash
	wakeup chan struct{}

	mu  sync.Mutex
	ids map[uint32]string // project ids of which there are files, and the name of the volume that they are in
}

const (
	trashName = "trash"
	// firstProject keeps clear of ids that an administrator gives out by hand.
	firstProject = 0x64730000
)

func openProject(s *Store) (driver, error) {
	p := &project{s: s, fd: -1, trash: -1, ids: map[uint32]string{}, wakeup: make(chan struct{}, 1)}
	for name, fd := range map[string]*int{volumesName: &p.fd, trashName: &p.trash} {
		if err := s.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, errors.Join(err, p.close())
		}
		var err error
		if *fd, err = unix.Open(s.path(name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
			return nil, errors.Join(err, p.close())
		}
	}
	if err := p.probe(); err != nil {
		_, _ = p.close(), p.destroy() // removes empty directories only
		return nil, err
	}
	// What is in the trash has its project still, and is counted.
	if err := errors.Join(p.known(p.trash), p.known(p.fd)); err != nil {
		return nil, errors.Join(err, p.close())
	}
	p.wakeup <- struct{}{} // for what an earlier edge left in the trash
	s.wg.Go(p.empty)
	return p, nil
}

// known notes the projects of the directories in dir.
func (p *project) known(dir int) error {
	names, err := readNames(dir, ".")
	if err != nil {
		return err
	}
	for _, name := range names {
		fd, err := openDirAt(dir, name)
		if err != nil {
			return err
		}
		id, err := projectOf(fd)
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
		if id >= firstProject {
			p.ids[id] = name
		}
	}
	return nil
}

// probe tries on a directory of its own whether a limit sticks.
func (p *project) probe() error {
	name := "probe-" + rand.Text()
	fd, err := p.mkdir(name)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Unlinkat(p.fd, name, unix.AT_REMOVEDIR) }()
	defer unix.Close(fd)
	const id = firstProject - 1
	if err := setProject(fd, id); err != nil {
		return unsupported("projects: %w", err)
	}
	if err := p.limit(id, 1<<20, 100); err != nil {
		return unsupported("project quotas: %w", err)
	}
	var q dqblk
	err = quotactl(p.fd, getQuota, id, &q)
	_ = p.limit(id, 0, 0)
	if err != nil || q.blockHard != 1024 || q.inodeHard != 100 {
		return unsupported("project quotas do not keep a limit: %v", err)
	}
	return nil
}

func (p *project) name() string { return "project" }
func (p *project) inodes() bool { return true }

func (p *project) mkdir(name string) (int, error) {
	if err := unix.Mkdirat(p.fd, name, 0o700); err != nil {
		return -1, &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	// Not O_PATH: ioctls are made on it.
	fd, err := unix.Openat(p.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

func (p *project) create(_ context.Context, req Request) (string, int, error) {
	name := newName()
	fd, err := p.mkdir(name)
	if err != nil {
		return "", -1, err
	}
	// The limit is set before the directory gets its project: at no time does
	// an unbounded volume exist.
	n := p.allocate(name)
	inodes := req.Inodes
	if inodes > 0 {
		inodes += 3 // the volume's own directories
	}
	if err = p.limit(n, req.Bytes, inodes); err == nil {
		err = setProject(fd, n)
	}
	if err != nil {
		_ = unix.Close(fd)
		p.free(n)
		return name, -1, fmt.Errorf("project %d: %w", n, err)
	}
	return name, fd, nil
}

func (p *project) allocate(name string) uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := uint32(firstProject)
	for p.ids[n] != "" {
		n++
	}
	p.ids[n] = name
	return n
}

func (p *project) free(n uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ids, n)
}

func (p *project) open(name string) (int, error) { return openDirAt(p.fd, name) }

func (p *project) usage(name string) (Usage, error) {
	fd, err := unix.Openat(p.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Usage{}, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	n, err := projectOf(fd)
	if err != nil {
		return Usage{}, err
	}
	var q dqblk
	if err := quotactl(p.fd, getQuota, n, &q); err != nil {
		return Usage{}, err
	}
	return Usage{Bytes: int64(q.space), Inodes: int64(q.inodes)}, nil
}

func (p *project) remove(_ context.Context, name string) error {
	if err := unix.Renameat(p.fd, name, p.trash, rand.Text()); err != nil {
		return &os.PathError{Op: "remove", Path: name, Err: err}
	}
	select {
	case p.wakeup <- struct{}{}:
	default:
	}
	return nil
}

// empty removes what is in the trash. A project's id is used again only once
// no file of it is left.
func (p *project) empty() {
	for {
		select {
		case <-p.s.stop:
			return
		case <-p.wakeup:
		}
		// Before, since what is removed meanwhile may still be in the trash after.
		ids := p.removed()
		if err := emptyDir(p.trash, p.s.stop); err != nil {
			p.s.log.Warn("disk: trash", "err", err)
			continue
		}
		select {
		case <-p.s.stop:
			return // perhaps in the middle
		default:
		}
		for _, id := range ids {
			if err := p.limit(id, 0, 0); err != nil {
				p.s.log.Warn("disk: project", "id", id, "err", err)
			}
			p.free(id)
		}
	}
}

// removed has the projects whose volumes are no more.
func (p *project) removed() (ids []uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, name := range p.ids {
		if unix.Faccessat(p.fd, name, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW) != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// emptyDir removes everything in a directory, however deep the tree that a
// sandbox left is: a directory that is not empty is moved to the top and comes
// up again, so that two descriptors are enough for any depth.
func emptyDir(dir int, stop <-chan struct{}) error {
	for {
		names, err := readNames(dir, ".")
		if err != nil || len(names) == 0 {
			return err
		}
		for _, name := range names {
			select {
			case <-stop:
				return nil // the next Store goes on
			default:
			}
			if err := removeFlat(dir, name); err != nil {
				return err
			}
		}
	}
}

// removeFlat removes a file, or a directory whose own directories it moves to dir.
func removeFlat(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR {
		return err
	}
	children, err := readNames(dir, name)
	if err != nil {
		return err
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, child := range children {
		err := unix.Unlinkat(fd, child, 0)
		if err == unix.EISDIR {
			if err = unix.Unlinkat(fd, child, unix.AT_REMOVEDIR); err == unix.ENOTEMPTY {
				err = unix.Renameat(fd, child, dir, rand.Text())
			}
		}
		if err != nil {
			return err
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}

func readNames(dir int, name string) ([]string, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	return f.Readdirnames(-1)
}

func (p *project) list() ([]string, error) { return readNames(p.fd, ".") }

func (p *project) close() error {
	var errs []error
	for _, fd := range []*int{&p.fd, &p.trash} {
		if *fd >= 0 {
			errs = append(errs, unix.Close(*fd))
			*fd = -1
		}
	}
	return errors.Join(errs...)
}

func (p *project) destroy() error {
	trash, err := os.Open(p.s.path(trashName))
	if err != nil {
		return err
	}
	fd := int(trash.Fd())
	errs := []error{emptyDir(fd, nil)}
	for id := range p.ids { // the emptier, which took them back, has ended
		errs = append(errs, setLimit(fd, id, 0, 0))
	}
	return errors.Join(append(errs, trash.Close(), os.Remove(p.s.path(trashName)), os.Remove(p.s.path(volumesName)))...)
}

func (p *project) limit(id uint32, bytes, inodes int64) error {
	return setLimit(p.fd, id, bytes, inodes)
}

// setLimit bounds a project of the file system that fd is on; 0 is no limit.
func setLimit(fd int, id uint32, bytes, inodes int64) error {
	q := dqblk{blockHard: uint64(bytes+1023) / 1024, inodeHard: uint64(inodes), valid: quotaLimits}
	return quotactl(fd, setQuota, id, &q)
}

func quotactl(fd int, command uint, id uint32, q *dqblk) error {
	_, _, e := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), uintptr(command<<8|projectQuota), uintptr(id),
		uintptr(unsafe.Pointer(q)), 0, 0)
	runtime.KeepAlive(q)
	if e != 0 {
		return e
	}
	return nil
}

func projectOf(fd int) (uint32, error) {
	// An O_PATH descriptor takes no ioctl.
	dir, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(dir)
	var x fsxattr
	err = ioctl(dir, iocGetXattr, &x)
	return x.project, err
}

// setProject gives a directory, and what will be made in it, to a project.
func setProject(fd int, id uint32) error {
	var x fsxattr
	if err := ioctl(fd, iocGetXattr, &x); err != nil {
		return err
	}
	x.project, x.flags = id, x.flags|projectInherit
	return ioctl(fd, iocSetXattr, &x)
}

// What the kernel's fs.h and quota.h call these.
const (
	iocGetXattr    = 0x801c581f // FS_IOC_FSGETXATTR
	iocSetXattr    = 0x401c5820 // FS_IOC_FSSETXATTR
	projectInherit = 0x200      // FS_XFLAG_PROJINHERIT
	setQuota       = 0x800008   // Q_SETQUOTA
	getQuota       = 0x800007   // Q_GETQUOTA
	projectQuota   = 2          // PRJQUOTA
	quotaLimits    = 5          // QIF_LIMITS
)

type fsxattr struct {
	flags, _, _, project, _ uint32 // the others are of extents
	_                       [8]byte
}

type dqblk struct {
	blockHard, blockSoft, space, inodeHard, inodeSoft, inodes, blockTime, inodeTime uint64
	valid                                                                           uint32
	_                                                                               uint32
}
