//go:build linux

// Package chronusfiles serves the calls for files of a sandbox: it is what
// chronus-files does. A Files implements chronusapi.FileHandler with what its
// process sees as the root. In a container that is the sandbox: nothing of the
// host is reachable by a path, and everything that it reads was made by the
// agent and may be hostile.
package chronusfiles

import (
	"context"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// Files implements chronusapi.FileHandler with the files that this process
// sees.
type Files struct {
	asRoot bool // may give files away
}

// New sets the process's umask to 0: modes are those of the requests.
func New() *Files {
	unix.Umask(0)
	return &Files{asRoot: os.Geteuid() == 0}
}

var _ chronusapi.FileHandler = (*Files)(nil)

// Stat implements chronusapi.FileHandler.
func (*Files) Stat(_ context.Context, name string, follow bool) (chronusapi.FileInfo, error) {
	flags := unix.O_PATH
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := openat2(unix.AT_FDCWD, name, flags, 0, 0)
	if err != nil {
		return chronusapi.FileInfo{}, fileError(err, "path", name)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return chronusapi.FileInfo{}, fileError(err, "path", name)
	}
	info := fileInfo(path.Base(name), &st)
	if info.Type == "symlink" {
		info.Target = readlinkat(fd, "")
	}
	return info, nil
}

var fileTypes = map[uint32]string{
	unix.S_IFREG: "file", unix.S_IFDIR: "dir", unix.S_IFLNK: "symlink", unix.S_IFIFO: "fifo",
	unix.S_IFSOCK: "socket", unix.S_IFCHR: "char", unix.S_IFBLK: "block",
}

func fileInfo(name string, st *unix.Stat_t) chronusapi.FileInfo {
	return chronusapi.FileInfo{
		Name: name, Type: fileTypes[st.Mode&unix.S_IFMT], Size: st.Size, Mode: st.Mode & 0o7777,
		UID: st.Uid, GID: st.Gid, Modified: time.Unix(st.Mtim.Sec, st.Mtim.Nsec),
	}
}

// readlinkat returns where a symlink points, or nothing.
func readlinkat(dir int, name string) string {
	var buf [chronusapi.MaxPath]byte
	n, err := unix.Readlinkat(dir, name, buf[:])
	if err != nil || n <= 0 {
		return ""
	}
	return string(buf[:n])
}

// openDir opens a directory for reading.
func openDir(dir int, name string, resolve uint64) (*os.File, error) {
	fd, err := openat2(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0, resolve)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// ListDir implements chronusapi.FileHandler. Its memory is bounded by limit,
// however many entries the directory has.
func (*Files) ListDir(ctx context.Context, name, after string, limit int) ([]chronusapi.FileInfo, bool, error) {
	dir, err := openDir(unix.AT_FDCWD, name, 0)
	if err != nil {
		return nil, false, fileError(err, "path", name)
	}
	defer dir.Close()
	names, err := firstNames(ctx, dir, after, limit+1)
	if err != nil {
		return nil, false, fileError(err, "path", name)
	}
	more := len(names) > limit
	list := make([]chronusapi.FileInfo, 0, min(len(names), limit))
	for _, n := range names[:min(len(names), limit)] {
		var st unix.Stat_t
		if err := unix.Fstatat(fdOf(dir), n, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			continue // removed meanwhile
		}
		info := fileInfo(n, &st)
		if info.Type == "symlink" {
			info.Target = readlinkat(fdOf(dir), n)
		}
		list = append(list, info)
	}
	return list, more, nil
}

// firstNames returns the n smallest names after after, sorted.
func firstNames(ctx context.Context, dir *os.File, after string, n int) ([]string, error) {
	var names []string
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		batch, err := dir.Readdirnames(256)
		for _, name := range batch {
			if name <= after || len(names) == n && name >= names[n-1] {
				continue
			}
			i, _ := slices.BinarySearch(names, name)
			names = slices.Insert(names, i, name)
			names = names[:min(len(names), n)]
		}
		if err == io.EOF {
			return names, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// parent is the directory that holds the last element of a path.
type parent struct {
	fd   int
	base string
}

// openParent opens the directory of name's last element. That element may
// not exist; it is never "." or "..", nor does it leave the directory.
func openParent(at int, name string, resolve uint64) (parent, error) {
	trimmed := strings.TrimRight(name, "/")
	dir, base := path.Split(trimmed)
	if base == "" || base == "." || base == ".." {
		return parent{}, unix.EINVAL
	}
	if dir == "" {
		dir = "."
	}
	fd, err := openat2(at, dir, unix.O_PATH|unix.O_DIRECTORY, 0, resolve)
	if err != nil {
		return parent{}, err
	}
	return parent{fd: fd, base: base}, nil
}

func (p parent) close() { unix.Close(p.fd) }

// Mkdir implements chronusapi.FileHandler.
func (*Files) Mkdir(_ context.Context, name string, mode uint32, parents bool) error {
	if mode == 0 {
		mode = 0o755
	}
	if mode > 0o7777 {
		return dsec.Invalid("mode", "want permission bits, at most 07777, got 0%o", mode)
	}
	if parents {
		fd, err := mkdirAll(name, mode)
		if err != nil {
			return fileError(err, "path", name)
		}
		unix.Close(fd)
		return nil
	}
	p, err := openParent(unix.AT_FDCWD, name, 0)
	if err != nil {
		return fileError(err, "path", name)
	}
	defer p.close()
	if err := mkdirat(p.fd, p.base, mode); err != nil {
		return fileError(err, "path", name)
	}
	return nil
}

// mkdirat makes a directory. The umask of chronus is 0, so that no mode needs
// to be set afterwards by a name that may have become a symlink.
func mkdirat(dir int, base string, mode uint32) error {
	if err := unix.Mkdirat(dir, base, mode&0o1777); err != nil || mode&0o6000 == 0 {
		return err
	}
	fd, err := openat2(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fchmod(fd, mode)
}

// mkdirAll makes a directory and those above it, and opens it (O_PATH). One
// that is there is taken as it is, also through symlinks.
func mkdirAll(name string, mode uint32) (int, error) {
	fd, err := openat2(unix.AT_FDCWD, "/", unix.O_PATH|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return -1, err
	}
	for elem := range strings.SplitSeq(name, "/") {
		if elem == "" || elem == "." {
			continue
		}
		next, err := openat2(fd, elem, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
		if err == unix.ENOENT {
			if err = mkdirat(fd, elem, mode); err == nil || err == unix.EEXIST {
				next, err = openat2(fd, elem, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
			}
		}
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// Rename implements chronusapi.FileHandler.
func (*Files) Rename(_ context.Context, from, to string) error {
	src, err := openParent(unix.AT_FDCWD, from, 0)
	if err != nil {
		return fileError(err, "path", from)
	}
	defer src.close()
	dst, err := openParent(unix.AT_FDCWD, to, 0)
	if err != nil {
		return fileError(err, "to", to)
	}
	defer dst.close()
	err = unix.Renameat(src.fd, src.base, dst.fd, dst.base)
	if err == nil {
		return nil
	}
	if err == unix.ENOENT {
		return fileError(err, "path", from)
	}
	return fileError(err, "to", to)
}

// maxDepth bounds how deep a tree may be for calls that walk it: each level
// holds a descriptor.
const maxDepth = 512

// batch is how many names of a directory such calls hold at each level.
const batch = 64

var errTooDeep = dsec.Errorf(dsec.CodeInvalid, "the tree is more than %d directories deep", maxDepth)

// Remove implements chronusapi.FileHandler.
func (*Files) Remove(ctx context.Context, name string, recursive bool) error {
	p, err := openParent(unix.AT_FDCWD, name, 0)
	if err != nil {
		return fileError(err, "path", name)
	}
	defer p.close()
	err = unix.Unlinkat(p.fd, p.base, 0)
	if err == unix.EISDIR || err == unix.EPERM {
		err = unix.Unlinkat(p.fd, p.base, unix.AT_REMOVEDIR)
	}
	if recursive && (err == unix.ENOTEMPTY || err == unix.EEXIST) {
		err = removeTree(ctx, p.fd, p.base, 0)
	}
	if err != nil {
		return fileError(err, "path", name)
	}
	return nil
}

// removeTree removes a directory with all below it. It follows no symlink.
func removeTree(ctx context.Context, at int, name string, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	dir, err := openDir(at, name, unix.RESOLVE_NO_SYMLINKS)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	fd := fdOf(dir)
	// A process that goes on making entries must not keep us for ever.
	for range 10 {
		for {
			if err := ctx.Err(); err != nil {
				return err
			}
			names, rerr := dir.Readdirnames(batch)
			for _, n := range names {
				err := unix.Unlinkat(fd, n, 0)
				if err == unix.EISDIR || err == unix.EPERM {
					err = removeTree(ctx, fd, n, depth+1)
				}
				if err != nil && err != unix.ENOENT {
					return err
				}
			}
			if rerr == io.EOF {
				break
			}
			if rerr != nil {
				return rerr
			}
		}
		err = unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
		if err != unix.ENOTEMPTY {
			break
		}
		if _, serr := dir.Seek(0, io.SeekStart); serr != nil {
			return serr
		}
	}
	if err == unix.ENOENT {
		return nil
	}
	return err
}
