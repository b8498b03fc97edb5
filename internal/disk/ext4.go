package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// mounts is what the drivers share whose volume is a file system of its own,
// mounted at Dir/volumes/<name>: the mount is the record that it exists, and is
// there after a restart.
type mounts struct{ s *Store }

const volumesName = "volumes"

func (m mounts) init() error {
	if err := m.s.root.Mkdir(volumesName, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

func (m mounts) dir(name string) string { return m.s.path(volumesName, name) }

func (m mounts) open(name string) (int, error) {
	fd, err := unix.Open(m.dir(name), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: m.dir(name), Err: err}
	}
	if _, yes, err := mounted(m.dir(name)); err != nil || !yes {
		_ = unix.Close(fd)
		return -1, errors.Join(err, os.ErrNotExist)
	}
	return fd, nil
}

func (m mounts) usage(name string) (Usage, error) {
	fd, err := m.open(name)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(fd)
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return Usage{}, err
	}
	return Usage{Bytes: int64(st.Blocks-st.Bfree) * st.Bsize, Inodes: int64(st.Files - st.Ffree)}, nil
}

// remove detaches the mount: what still has it open, a dying sandbox, lets go
// of it later.
func (m mounts) remove(_ context.Context, name string) error {
	err := unix.Unmount(m.dir(name), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: nothing is mounted there
		return &os.PathError{Op: "unmount", Path: m.dir(name), Err: err}
	}
	return os.Remove(m.dir(name))
}

func (m mounts) list() ([]string, error) {
	return readNames(unix.AT_FDCWD, m.s.path(volumesName))
}

func (m mounts) close() error   { return nil }
func (m mounts) destroy() error { return os.Remove(m.s.path(volumesName)) }

// ext4 gives each volume an image of its own, without a journal: what is in it
// is scratch, and a journal costs a kernel thread. Making a file system takes
// some ms, so one is made for each pair of limits and its few written blocks
// are copied.
type ext4 struct {
	mounts
	mkfs string

	mu sync.Mutex // template being made
}

const imagesName = "images"

func openExt4(s *Store) (driver, error) {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		return nil, unsupported("mkfs.ext4 is not installed")
	}
	if err := errors.Join(needKernel("ext4", 0, 0), needLoop()); err != nil {
		return nil, unsupported("%w", err)
	}
	if err := s.root.Mkdir(imagesName, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	e := &ext4{mounts: mounts{s}, mkfs: mkfs}
	return e, e.init()
}

func (e *ext4) name() string { return "ext4" }
func (e *ext4) inodes() bool { return true }

func (e *ext4) image(name string) string { return e.s.path(imagesName, name) }

func (e *ext4) create(ctx context.Context, req Request) (string, int, error) {
	template, err := e.template(ctx, req)
	if err != nil {
		return "", -1, err
	}
	name := newName()
	// The directory comes first, so that list finds whatever follows.
	if err := os.Mkdir(e.dir(name), 0o700); err != nil {
		return "", -1, err
	}
	if err := copySparse(e.image(name), template); err != nil {
		return name, -1, err
	}
	if err := mountImage(e.image(name), e.dir(name), "ext4", "nodelalloc,noinit_itable,nobarrier"); err != nil {
		return name, -1, err
	}
	fd, err := e.open(name)
	return name, fd, err
}

// template returns an empty file system of the wanted limits.
func (e *ext4) template(ctx context.Context, req Request) (string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	inodes := req.Inodes
	if inodes == 0 {
		inodes = max(req.Bytes/8192, 64)
	}
	// The limits are what the sandbox may use; the file system's own part (256
	// bytes an inode, bitmaps, 11 reserved inodes, two directories) is on top.
	size := req.Bytes + 256*inodes + req.Bytes/2048 + 1<<20
	size = (size + 4095) &^ 4095
	path := e.s.path(imagesName, fmt.Sprintf("template-%d-%d", size, inodes))
	if _, err := os.Lstat(path); err == nil {
		return path, nil
	}
	tmp := path + ".new"
	defer os.Remove(tmp)
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return "", err
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, e.mkfs, "-q", "-F", "-b", "4096", "-m", "0", "-I", "256",
		"-N", fmt.Sprint(inodes+13), "-O", "^has_journal,^resize_inode,^metadata_csum,^huge_file,extent",
		"-E", "nodiscard,lazy_itable_init=1,root_owner=0:0", tmp).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mkfs.ext4: %w: %s", err, bytes.TrimSpace(out))
	}
	return path, os.Rename(tmp, path)
}

// copySparse copies the data of a file and leaves its holes.
func copySparse(to, from string) (err error) {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	info, err := src.Stat()
	if err != nil {
		return err
	}
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if err := dst.Truncate(info.Size()); err != nil {
		return err
	}
	for at := int64(0); ; {
		start, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(src.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.NewOffsetWriter(dst, start), io.NewSectionReader(src, start, end-start))
		if err != nil {
			return err
		}
		at = end
	}
}

func (e *ext4) remove(ctx context.Context, name string) error {
	err := e.mounts.remove(ctx, name)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if rerr := os.Remove(e.image(name)); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
		return rerr
	}
	return err
}

// list includes images whose directory is gone: a removal that was cut short.
func (e *ext4) list() ([]string, error) {
	names, err := e.mounts.list()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(e.s.path(imagesName))
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), "template-") {
			names = append(names, entry.Name())
		}
	}
	return names, err
}

func (e *ext4) destroy() error {
	templates, err := filepath.Glob(e.s.path(imagesName, "template-*"))
	errs := []error{err, e.mounts.destroy()}
	for _, t := range templates {
		errs = append(errs, os.Remove(t))
	}
	return errors.Join(append(errs, os.Remove(e.s.path(imagesName)))...)
}

// tmpfs volumes are memory, charged to whoever writes.
type tmpfs struct{ mounts }

func openTmpfs(s *Store) (driver, error) {
	t := &tmpfs{mounts{s}}
	return t, t.init()
}

func (t *tmpfs) name() string { return "tmpfs" }
func (t *tmpfs) inodes() bool { return true }

func (t *tmpfs) create(_ context.Context, req Request) (string, int, error) {
	name := newName()
	if err := os.Mkdir(t.dir(name), 0o700); err != nil {
		return "", -1, err
	}
	options := fmt.Sprintf("mode=0700,size=%d", req.Bytes)
	if req.Inodes > 0 {
		options += fmt.Sprintf(",nr_inodes=%d", req.Inodes+3) // its top and the two directories
	}
	if err := mount("dsec", t.dir(name), "tmpfs", options); err != nil {
		return name, -1, err
	}
	fd, err := t.open(name)
	return name, fd, err
}
