package chronusfiles

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// maxUnsized bounds what is read of a file that says it is empty and is not,
// as those of /proc do.
const maxUnsized = 16 << 20

// Read implements chronusapi.FileHandler. A file that grows meanwhile ends where
// it ended when it was opened.
func (*Files) Read(ctx context.Context, name string, offset, length int64, w io.Writer) error {
	f, err := openRegular(name, unix.O_RDONLY)
	if err != nil {
		return fileError(err, "path", name)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fileError(err, "path", name)
	}
	limit := max(st.Size()-offset, 0)
	if st.Size() == 0 {
		limit = maxUnsized
	}
	if length >= 0 {
		limit = min(limit, length)
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return fileError(err, "path", name)
	}
	return copyFile(ctx, w, f, limit, name)
}

// copyFile copies at most limit bytes. Errors of w are returned as they are.
func copyFile(ctx context.Context, w io.Writer, f *os.File, limit int64, name string) error {
	buf := make([]byte, min(max(limit, 1), chronusapi.MaxChunk))
	for limit > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.Read(buf[:min(limit, int64(len(buf)))])
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil {
				return werr
			}
			limit -= int64(n)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fileError(err, "path", name)
		}
	}
	return nil
}

// Write implements chronusapi.FileHandler.
func (*Files) Write(_ context.Context, req chronusapi.WriteRequest, r io.Reader) (int64, error) {
	if err := req.Validate(); err != nil {
		return 0, err
	}
	who, err := lookupAccount(req.User, "user")
	if err != nil {
		return 0, err
	}
	if req.Append {
		return appendTo(&req, who, r)
	}
	p, err := followParent(req.Path)
	if err != nil {
		return 0, fileError(err, "path", req.Path)
	}
	defer p.close()
	attrs, err := attributes(p, &req, who)
	if err != nil {
		return 0, fileError(err, "path", req.Path)
	}
	n, err := replace(p, attrs, r)
	if err != nil {
		return 0, fileError(err, "path", req.Path)
	}
	return n, nil
}

// attrs are what a new file gets.
type attrs struct {
	mode     uint32
	uid, gid int // -1: as made
}

// attributes are those of the file that is replaced, or of a new one.
func attributes(p parent, req *chronusapi.WriteRequest, who account) (attrs, error) {
	a := attrs{mode: 0o644, uid: -1, gid: -1}
	var st unix.Stat_t
	switch err := unix.Fstatat(p.fd, p.base, &st, unix.AT_SYMLINK_NOFOLLOW); err {
	case nil:
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
		case unix.S_IFDIR:
			return a, unix.EISDIR
		default:
			return a, errNotRegular
		}
		a.mode = st.Mode & 0o7777
		a.uid, a.gid = int(st.Uid), int(st.Gid)
	case unix.ENOENT:
		if req.User != "" {
			a.uid, a.gid = int(who.uid), int(who.gid)
		}
	default:
		return a, err
	}
	if req.Mode != 0 {
		a.mode = req.Mode
	}
	return a, nil
}

// followParent opens the directory of the file that name leads to: where the
// last element is a symlink, that of its target.
func followParent(name string) (parent, error) {
	at := unix.AT_FDCWD
	for range 40 {
		p, err := openParent(at, name, 0)
		if at >= 0 {
			unix.Close(at)
		}
		if err != nil {
			return parent{}, err
		}
		target := readlinkat(p.fd, p.base)
		if target == "" {
			return p, nil
		}
		if onProc(p.fd) {
			p.close()
			return parent{}, unix.ELOOP // a link out of the file tree
		}
		at, name = p.fd, target
	}
	unix.Close(at)
	return parent{}, unix.ELOOP
}

func onProc(fd int) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(fd, &st) == nil && st.Type == unix.PROC_SUPER_MAGIC
}

// replace writes a file beside the old one and puts it in its place, so that
// nobody sees half of it, and on error the old one is untouched.
func replace(p parent, a attrs, r io.Reader) (n int64, err error) {
	temp := ".dsec-" + rand.Text()
	fd, err := openat2(p.fd, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600, unix.RESOLVE_BENEATH)
	if err != nil {
		return 0, err
	}
	f := os.NewFile(uintptr(fd), temp)
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err == nil {
			err = unix.Renameat(p.fd, temp, p.fd, p.base)
		}
		if err != nil {
			_ = unix.Unlinkat(p.fd, temp, 0)
		}
	}()
	if n, err = copyIn(f, r); err != nil {
		return n, err
	}
	return n, a.apply(fd)
}

func (a attrs) apply(fd int) error {
	if a.uid >= 0 || a.gid >= 0 {
		if err := unix.Fchown(fd, a.uid, a.gid); err != nil {
			return err
		}
	}
	return unix.Fchmod(fd, a.mode) // after chown, which clears set-id bits
}

// errSource wraps what reading the request's data failed with, to tell it
// from the file's errors.
type errSource struct{ error }

func (e errSource) Unwrap() error { return e.error }

// copyIn copies r into f.
func copyIn(f *os.File, r io.Reader) (n int64, err error) {
	buf := make([]byte, chronusapi.MaxChunk)
	for {
		m, rerr := r.Read(buf)
		if m > 0 {
			w, err := f.Write(buf[:m])
			n += int64(w)
			if err != nil {
				return n, err
			}
		}
		if rerr == io.EOF {
			return n, nil
		}
		if rerr != nil {
			return n, &dsec.Error{Code: dsec.CodeUnavailable, Message: "the data ended too soon", Err: errSource{rerr}}
		}
	}
}

// appendTo writes at the end of a file, which it makes if there is none.
func appendTo(req *chronusapi.WriteRequest, who account, r io.Reader) (int64, error) {
	f, err := openAppend(req, who)
	if err != nil {
		return 0, fileError(err, "path", req.Path)
	}
	defer f.Close()
	n, err := copyIn(f, r)
	if err != nil {
		return n, fileError(err, "path", req.Path)
	}
	return n, nil
}

func openAppend(req *chronusapi.WriteRequest, who account) (*os.File, error) {
	const flags = unix.O_WRONLY | unix.O_APPEND
	for range 3 {
		f, err := openRegular(req.Path, flags)
		if err == nil && onProc(fdOf(f)) {
			f.Close()
			return nil, errNotRegular
		}
		if !errors.Is(err, unix.ENOENT) {
			return f, err
		}
		p, err := followParent(path.Clean(req.Path))
		if err != nil {
			return nil, err
		}
		a := attrs{mode: 0o644, uid: -1, gid: -1}
		if req.User != "" {
			a.uid, a.gid = int(who.uid), int(who.gid)
		}
		if req.Mode != 0 {
			a.mode = req.Mode
		}
		fd, err := openat2(p.fd, p.base, flags|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600, unix.RESOLVE_BENEATH)
		p.close()
		if err == unix.EEXIST {
			continue // made meanwhile
		}
		if err != nil {
			return nil, err
		}
		f = os.NewFile(uintptr(fd), req.Path)
		if err := a.apply(fd); err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	}
	return nil, unix.EEXIST
}
