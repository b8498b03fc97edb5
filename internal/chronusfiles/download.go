package chronusfiles

import (
	"archive/tar"
	"context"
	"io"
	"os"
	"path"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// maxLinks and maxLinkBytes bound how many files with several names are
// remembered, and what their names take, so that the second name becomes a hard
// link. Past it each is a file of its own.
const (
	maxLinks     = 16 << 10
	maxLinkBytes = 2 << 20
)

// Download implements chronusapi.FileHandler. The names in the tar are relative to
// the directory, which is "./"; a file is alone under its own name. Sockets
// and devices are left out.
func (*Files) Download(ctx context.Context, name string, w io.Writer) error {
	d := &download{ctx: ctx, tw: tar.NewWriter(w), links: make(map[fileID]string)}
	fd, err := openat2(unix.AT_FDCWD, name, unix.O_PATH, 0, 0)
	if err != nil {
		return fileError(err, "path", name)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fileError(err, "path", name)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		err = d.dir(fd, ".", "./", &st, 0)
	} else {
		var p parent
		if p, err = followParent(name); err != nil {
			return fileError(err, "path", name)
		}
		err = d.entry(p.fd, p.base, path.Base(name), 0)
		p.close()
	}
	if err != nil {
		return fileError(err, "path", name)
	}
	return d.tw.Close()
}

type fileID struct{ dev, ino uint64 }

type download struct {
	ctx       context.Context
	tw        *tar.Writer
	links     map[fileID]string
	linkBytes int
}

// dir writes a directory, which at and name lead to, and all below it.
func (d *download) dir(at int, name, as string, st *unix.Stat_t, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	f, err := openDir(at, name, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return gone(err)
	}
	defer f.Close()
	if err := d.header(st, as, tar.TypeDir, 0, ""); err != nil {
		return err
	}
	fd := fdOf(f)
	for {
		names, err := f.Readdirnames(batch)
		for _, n := range names {
			if err := d.ctx.Err(); err != nil {
				return err
			}
			if err := d.entry(fd, n, as+n, depth); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// entry writes what is at name, under the name as.
func (d *download) entry(at int, name, as string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return gone(err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return d.dir(at, name, as+"/", &st, depth+1)
	case unix.S_IFLNK:
		return d.header(&st, as, tar.TypeSymlink, 0, readlinkat(at, name))
	case unix.S_IFIFO:
		return d.header(&st, as, tar.TypeFifo, 0, "")
	case unix.S_IFREG:
		return d.file(at, name, as)
	}
	return nil
}

func (d *download) file(at int, name, as string) error {
	fd, err := openat2(at, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH)
	if err == unix.ENXIO || err == unix.ELOOP {
		return nil // another file took its place
	}
	if err != nil {
		return gone(err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return err
	}
	if st.Nlink > 1 {
		id := fileID{st.Dev, st.Ino}
		if first, ok := d.links[id]; ok {
			return d.header(&st, as, tar.TypeLink, 0, first)
		}
		if len(d.links) < maxLinks && d.linkBytes+len(as) <= maxLinkBytes {
			d.links[id] = as
			d.linkBytes += len(as)
		}
	}
	if err := d.header(&st, as, tar.TypeReg, st.Size, ""); err != nil {
		return err
	}
	n := &counter{w: d.tw}
	if err := copyFile(d.ctx, n, f, st.Size, as); err != nil {
		return err
	}
	if n.n != st.Size {
		return &dsec.Error{Code: dsec.CodeConflict, Message: as + " shrank while it was read"}
	}
	return nil
}

func (d *download) header(st *unix.Stat_t, name string, typ byte, size int64, target string) error {
	if len(name) >= chronusapi.MaxPath { // Upload takes none, and no program opens one
		return dsec.Errorf(dsec.CodeInvalid, "%s... is a path of %d bytes, and at most %d can be in a tar", shown(name), len(name), chronusapi.MaxPath-1)
	}
	h := &tar.Header{
		Typeflag: typ, Name: name, Linkname: target, Size: size, Mode: int64(st.Mode & 0o7777),
		Uid: int(st.Uid), Gid: int(st.Gid), ModTime: time.Unix(st.Mtim.Sec, 0), Format: tar.FormatUnknown,
	}
	// PAX takes UTF-8 only; GNU any bytes.
	if !ascii(name) || !ascii(target) {
		h.Format = tar.FormatGNU
	}
	return d.tw.WriteHeader(h)
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

// gone makes nothing of what was removed since its name was read.
func gone(err error) error {
	if err == unix.ENOENT || err == unix.ENOTDIR {
		return nil
	}
	return err
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
