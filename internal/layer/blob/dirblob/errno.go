package dirblob

import (
	"context"
	"errors"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// intent is what a failed system call was made for.
type intent int

const (
	reading intent = iota
	writing
)

// errNotABlob is of a name that no Put made.
var errNotABlob = errors.New("neither a regular file nor a directory")

// errDirectory is of the directory of other keys.
var errDirectory = errors.Join(unix.ENOENT, blob.ErrDirectory)

// storeError gives an error of a system call its code. Its text, which may hold
// a path of this host, is for the log.
func storeError(what intent, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*dsec.Error](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	code, message := dsec.CodeInternal, "it answers what it must not"
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		code, message = codeOf(what, errno)
	}
	return &dsec.Error{Code: code, Message: "blob store: " + message, Err: err}
}

func codeOf(what intent, errno syscall.Errno) (dsec.Code, string) {
	switch errno {
	case unix.ENOENT:
		return dsec.CodeNotFound, "no such blob"
	case unix.ENOTDIR:
		if what == writing {
			return dsec.CodeConflict, "a blob is where the key needs a directory"
		}
		return dsec.CodeNotFound, "no such blob"
	case unix.EISDIR:
		return dsec.CodeConflict, "the key is the directory of other blobs"
	case unix.ENOSPC, unix.EDQUOT, unix.EMLINK:
		return dsec.CodeExhausted, "it is full"
	case unix.EFBIG:
		return dsec.CodeUnsupported, "its file system has no files of this size"
	case unix.EROFS, unix.EACCES, unix.EPERM:
		if what == writing {
			return dsec.CodeUnsupported, "it is read-only to this process"
		}
		return dsec.CodeUnavailable, "this process may not read it"
	case unix.ESTALE, unix.ENOTCONN, unix.ESHUTDOWN, unix.ENODEV, unix.ENXIO:
		return dsec.CodeUnavailable, "its file system is gone"
	case unix.EIO, unix.EREMOTEIO, unix.ETIMEDOUT, unix.EHOSTDOWN, unix.EHOSTUNREACH, unix.ENETDOWN, unix.ENETUNREACH,
		unix.ECONNREFUSED, unix.ECONNRESET, unix.ECONNABORTED, unix.EPIPE, unix.EAGAIN, unix.EBUSY, unix.ENOLCK:
		return dsec.CodeUnavailable, "its file system fails"
	case unix.ENOMEM, unix.EMFILE, unix.ENFILE:
		return dsec.CodeUnavailable, "this host has no memory or no descriptors left for it"
	}
	return dsec.CodeInternal, "it answers what it must not"
}

// isStale reports whether another handle of the same directory may do: a server
// or a FUSE process came back.
func isStale(err error) bool {
	return errors.Is(err, unix.ESTALE) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ESHUTDOWN) || errors.Is(err, unix.ENODEV)
}

func isReadOnly(err error) bool {
	return errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)
}

// cannot reports whether a file system does not have the operation.
func cannot(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP)
}
