package chronusfiles

import (
	"errors"
	"os"
	"strconv"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// errNotRegular is for files whose reading or writing could block or act.
var errNotRegular = errors.New("not a regular file")

// fileError makes the error of a user for what the kernel said about path,
// which the request's field named.
func fileError(err error, field, path string) error {
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	code, text := dsec.CodeInternal, err.Error()
	var errno syscall.Errno
	switch {
	case err == errNotRegular:
		code = dsec.CodeInvalid
	case errors.As(err, &errno):
		code, text = fileCode(errno)
	}
	return &dsec.Error{Code: code, Field: field, Message: strconv.Quote(path) + ": " + text, Err: err}
}

func fileCode(errno syscall.Errno) (dsec.Code, string) {
	switch errno {
	case unix.ENOENT:
		return dsec.CodeNotFound, "no such file or directory"
	case unix.ENOSPC, unix.EDQUOT:
		return dsec.CodeExhausted, chronusapi.DiskFull
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EAGAIN:
		return dsec.CodeExhausted, errno.Error()
	case unix.EACCES, unix.EPERM:
		return dsec.CodeDenied, errno.Error()
	case unix.EEXIST, unix.ENOTEMPTY, unix.EBUSY, unix.ETXTBSY, unix.EROFS, unix.EXDEV, unix.ESTALE:
		return dsec.CodeConflict, errno.Error()
	case unix.ELOOP:
		return dsec.CodeInvalid, "too many symlinks, or one of /proc that leads out of the file tree"
	case unix.ENXIO, unix.ENODEV:
		return dsec.CodeInvalid, "not a regular file"
	case unix.ENOTDIR, unix.EISDIR, unix.ENAMETOOLONG, unix.EINVAL, unix.EOPNOTSUPP, unix.EFBIG, unix.EMLINK, unix.EOVERFLOW:
		return dsec.CodeInvalid, errno.Error()
	case unix.EIO:
		return dsec.CodeUnavailable, "the file could not be read or written: " + errno.Error()
	}
	return dsec.CodeInternal, errno.Error()
}

// openat2 opens a path as the sandbox's programs see it, but through no link
// of /proc: those lead to chronus's own files.
func openat2(dir int, path string, flags int, mode uint32, resolve uint64) (int, error) {
	for {
		fd, err := unix.Openat2(dir, path, &unix.OpenHow{
			Flags: uint64(flags | unix.O_CLOEXEC), Mode: uint64(mode), Resolve: resolve | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != unix.EINTR && err != unix.EAGAIN {
			return fd, err
		}
	}
}

// openRegular opens a regular file. It neither blocks on a FIFO nor wakes a
// device: the type is looked at before the file is opened, and again after.
func openRegular(path string, flags int) (*os.File, error) {
	probe, err := openat2(unix.AT_FDCWD, path, unix.O_PATH, 0, 0)
	if err != nil {
		return nil, err
	}
	err = checkRegular(probe)
	unix.Close(probe)
	if err != nil {
		return nil, err
	}
	fd, err := openat2(unix.AT_FDCWD, path, flags|unix.O_NONBLOCK|unix.O_NOCTTY, 0, 0)
	if err != nil {
		return nil, err
	}
	if err := checkRegular(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func checkRegular(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil
	case unix.S_IFDIR:
		return unix.EISDIR
	}
	return errNotRegular
}

// fdOf is a file's descriptor, which stays in non-blocking mode (os.File.Fd
// would change that).
func fdOf(f *os.File) int {
	fd := -1
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}
