package chronusfiles

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// beneath keeps every path of a tar below its target, also through symlinks
// that are there or that the tar itself made.
const beneath = unix.RESOLVE_BENEATH

// Upload implements chronusapi.FileHandler. Entries that would leave the target,
// and devices, are refused.
func (fs *Files) Upload(ctx context.Context, req chronusapi.UploadRequest, r io.Reader) (chronusapi.UploadResult, error) {
	var res chronusapi.UploadResult
	if err := req.Validate(); err != nil {
		return res, err
	}
	who, err := lookupAccount(req.User, "user")
	if err != nil {
		return res, err
	}
	fd, err := mkdirAll(req.Path, 0o755)
	if err != nil {
		return res, fileError(err, "path", req.Path)
	}
	defer unix.Close(fd)
	u := &upload{top: fd, chown: req.User != "", who: who, asRoot: fs.asRoot}
	src := &source{r: r}
	tr := tar.NewReader(src)
	for {
		if err := ctx.Err(); err != nil {
			return u.res, err
		}
		h, err := tr.Next()
		if err == io.EOF {
			return u.res, nil
		}
		if err != nil {
			return u.res, src.error(err)
		}
		if err := u.entry(h, tr); err != nil {
			if cause, ok := errors.AsType[errSource](err); ok {
				return u.res, src.error(cause.error)
			}
			return u.res, entryError(err, h.Name)
		}
	}
}

// source is the client's data; it tells a connection that broke from a tar
// that is none.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func (s *source) error(err error) error {
	if s.err != nil {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the data ended too soon", Err: s.err}
	}
	return &dsec.Error{Code: dsec.CodeInvalid, Field: "tar", Message: "not a whole tar stream: " + err.Error(), Err: err}
}

// entryError names the entry at fault.
func entryError(err error, name string) error {
	if err == unix.EXDEV || err == unix.ELOOP {
		return dsec.Invalid("tar", "entry %s leads out of the target directory", shown(name))
	}
	e := fileError(err, "path", name)
	var de *dsec.Error
	if errors.As(e, &de) && de.Code == dsec.CodeInvalid {
		return &dsec.Error{Code: de.Code, Field: "tar", Message: "entry " + shown(name) + ": " + de.Message, Err: err}
	}
	return e
}

func shown(name string) string { return strconv.Quote(name[:min(len(name), 200)]) }

type upload struct {
	top    int
	chown  bool // to who; else as in the tar
	who    account
	asRoot bool
	res    chronusapi.UploadResult
}

// entry unpacks one entry of a tar.
func (u *upload) entry(h *tar.Header, r io.Reader) error {
	name := h.Name
	if len(name) >= chronusapi.MaxPath || strings.IndexByte(name, 0) >= 0 || strings.IndexByte(h.Linkname, 0) >= 0 {
		return dsec.Invalid("tar", "entry %s has an impossible name", shown(name))
	}
	if strings.HasPrefix(name, "/") || hasDotDot(name) {
		return dsec.Invalid("tar", "entry %s leads out of the target directory", shown(name))
	}
	a := attrs{mode: uint32(h.Mode) & 0o7777, uid: h.Uid, gid: h.Gid}
	if u.chown {
		a.uid, a.gid = int(u.who.uid), int(u.who.gid)
	}
	if !u.asRoot {
		a.uid, a.gid = -1, -1
	} else if a.uid < 0 || a.gid < 0 || int64(a.uid) >= 1<<32-1 || int64(a.gid) >= 1<<32-1 {
		return dsec.Invalid("tar", "entry %s has an owner that no file can have", shown(name))
	}
	name = path.Clean(name)
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return dsec.Invalid("tar", "entry %s would replace the target directory", shown(h.Name))
		}
		return u.touchDir(u.top, a)
	}
	p, err := u.parent(name)
	if err != nil {
		return err
	}
	defer p.close()
	u.res.Entries++
	switch h.Typeflag {
	case tar.TypeDir:
		return u.makeDir(p, a)
	case tar.TypeReg, tar.TypeGNUSparse:
		n, err := replace(p, a, r)
		u.res.Bytes += n
		if err == nil {
			err = setModified(p, h.ModTime)
		}
		return err
	case tar.TypeSymlink:
		return u.makeNode(p, a, func() error { return unix.Symlinkat(h.Linkname, p.fd, p.base) })
	case tar.TypeFifo:
		return u.makeNode(p, a, func() error { return unix.Mkfifoat(p.fd, p.base, 0o600) })
	case tar.TypeLink:
		return u.makeLink(p, h)
	}
	return dsec.Invalid("tar", "entry %s is of type %q; want files, directories, links and FIFOs", shown(h.Name), h.Typeflag)
}

func hasDotDot(name string) bool {
	for elem := range strings.SplitSeq(name, "/") {
		if elem == ".." {
			return true
		}
	}
	return false
}

// parent opens the directory of an entry, which it makes if the tar has no
// entry for it.
func (u *upload) parent(name string) (parent, error) {
	p, err := openParent(u.top, name, beneath)
	if err != unix.ENOENT {
		return p, err
	}
	dir := path.Dir(name)
	up, err := u.parent(dir)
	if err != nil {
		return parent{}, err
	}
	err = mkdirat(up.fd, up.base, 0o755)
	up.close()
	if err != nil && err != unix.EEXIST {
		return parent{}, err
	}
	return openParent(u.top, name, beneath)
}

func (u *upload) makeDir(p parent, a attrs) error {
	err := unix.Mkdirat(p.fd, p.base, 0o700)
	if err == unix.EEXIST {
		var st unix.Stat_t
		if err := unix.Fstatat(p.fd, p.base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return unix.EEXIST
		}
		err = nil
	}
	if err != nil {
		return err
	}
	fd, err := openat2(p.fd, p.base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, beneath)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return a.apply(fd)
}

// touchDir gives the target directory its attributes. It is open by O_PATH.
func (u *upload) touchDir(top int, a attrs) error {
	fd, err := openat2(top, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, beneath)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return a.apply(fd)
}

// makeNode makes what has no content, in place of a file that is there.
func (u *upload) makeNode(p parent, a attrs, make func() error) error {
	err := make()
	if err == unix.EEXIST {
		if err = unix.Unlinkat(p.fd, p.base, 0); err != nil && err != unix.ENOENT {
			return err
		}
		err = make()
	}
	if err != nil {
		return err
	}
	if a.uid >= 0 {
		if err := unix.Fchownat(p.fd, p.base, a.uid, a.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	var st unix.Stat_t
	if err := unix.Fstatat(p.fd, p.base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFIFO {
		return chmodNoFollow(p, a.mode)
	}
	return nil // a symlink has no mode of its own
}

// chmodNoFollow sets the mode of what is at p, unless that became a symlink.
func chmodNoFollow(p parent, mode uint32) error {
	err := unix.Fchmodat(p.fd, p.base, mode, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOSYS || err == unix.EOPNOTSUPP {
		return nil // fchmodat2 came with Linux 6.6; the mode is 0600 then
	}
	return err
}

// makeLink makes a hard link to an entry that came before.
func (u *upload) makeLink(p parent, h *tar.Header) error {
	if strings.HasPrefix(h.Linkname, "/") || hasDotDot(h.Linkname) {
		return dsec.Invalid("tar", "entry %s links to %s, out of the target directory", shown(h.Name), shown(h.Linkname))
	}
	src, err := openParent(u.top, path.Clean(h.Linkname), beneath)
	if err != nil {
		return err
	}
	defer src.close()
	err = unix.Linkat(src.fd, src.base, p.fd, p.base, 0)
	if err == unix.EEXIST {
		if err = unix.Unlinkat(p.fd, p.base, 0); err != nil && err != unix.ENOENT {
			return err
		}
		err = unix.Linkat(src.fd, src.base, p.fd, p.base, 0)
	}
	return err
}

func setModified(p parent, t time.Time) error {
	ts := []unix.Timespec{unix.NsecToTimespec(t.UnixNano()), unix.NsecToTimespec(t.UnixNano())}
	return unix.UtimesNanoAt(p.fd, p.base, ts, unix.AT_SYMLINK_NOFOLLOW)
}
