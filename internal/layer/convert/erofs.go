package convert

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"strings"
	"time"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"
)

// writeImage writes the tree with go-erofs, then does what go-erofs cannot: it leads
// inodes to contents that are placed, joins the names of one inode, and names the
// image's configuration.
func (c *converter) writeImage(t *tree, id [16]byte) (files, size int64, err error) {
	if err := c.image.compact(t.placed); err != nil {
		return 0, 0, fmt.Errorf("write image: %w", err)
	}
	out := &erofsOut{w: c.image, base: c.image.pos()}
	w := erofs.Create(out, erofs.WithBuildTime(0, 0), erofs.WithBlockSize(blockSize))
	if err := w.CopyFrom(treeFS{t: t, c: c, out: out}); err != nil {
		return 0, 0, fmt.Errorf("plan image: %w", diskError(err))
	}
	if err := w.Close(); err != nil {
		return 0, 0, fmt.Errorf("write image: %w", diskError(err))
	}
	if size, err = c.image.close(); err != nil {
		return 0, 0, fmt.Errorf("write image: %w", err)
	}
	if size, err = patchImage(c.image.f, size, out, t, id); err != nil {
		return 0, 0, fmt.Errorf("patch image: %w", diskError(err))
	}
	return t.files, size, nil
}

// treeFS shows the finished tree to go-erofs. Only the first name of an inode
// has its content; the others are empty files until patchImage.
type treeFS struct {
	t   *tree
	c   *converter
	out *erofsOut
}

// find trusts the name: go-erofs made it of names that ReadDir gave.
func (f treeFS) find(name string) (dir, n *inode, base string) {
	n = f.t.root
	if name == "." {
		return nil, n, "."
	}
	for part := range strings.SplitSeq(name, "/") {
		dir, n, base = n, n.children[part].n, part
	}
	return dir, n, base
}

func (f treeFS) info(dir, n *inode, base string) fs.FileInfo {
	i := fileInfo{name: base, n: n}
	if !n.isDir() && (n.firstDir != dir || n.firstName != base) {
		i.n = &inode{mode: n.mode, nlink: 1, target: "."}
	}
	return i
}

// Stat implements fs.StatFS.
func (f treeFS) Stat(name string) (fs.FileInfo, error) {
	dir, n, base := f.find(name)
	return f.info(dir, n, base), nil
}

// Open implements fs.FS; it is called for files with content.
func (f treeFS) Open(name string) (fs.File, error) {
	_, n, _ := f.find(name)
	return &content{fs: f, n: n, name: name}, nil
}

// ReadDir implements fs.ReadDirFS.
func (f treeFS) ReadDir(name string) ([]fs.DirEntry, error) {
	_, n, _ := f.find(name)
	list := make([]fs.DirEntry, len(n.names))
	for i, base := range n.names {
		list[i] = fs.FileInfoToDirEntry(f.info(n, n.children[base].n, base))
	}
	return list, nil
}

// ReadLink is what go-erofs asks for the target of a symbolic link.
func (f treeFS) ReadLink(name string) (string, error) {
	dir, n, base := f.find(name)
	return f.info(dir, n, base).(fileInfo).n.target, nil
}

type fileInfo struct {
	name string
	n    *inode
}

func (i fileInfo) Name() string       { return i.name }
func (i fileInfo) Size() int64        { return i.n.size }
func (i fileInfo) IsDir() bool        { return i.n.isDir() }
func (i fileInfo) ModTime() time.Time { return time.Unix(i.n.mtime, int64(i.n.mtimeNs)) }

func (i fileInfo) Mode() fs.FileMode {
	m := fs.FileMode(i.n.mode & 0o777)
	switch i.n.mode & unix.S_IFMT {
	case unix.S_IFDIR:
		m |= fs.ModeDir
	case unix.S_IFLNK:
		m |= fs.ModeSymlink
	case unix.S_IFIFO:
		m |= fs.ModeNamedPipe
	case unix.S_IFCHR: // a whiteout: device 0:0
		m |= fs.ModeDevice | fs.ModeCharDevice
	}
	if i.n.mode&unix.S_ISUID != 0 {
		m |= fs.ModeSetuid
	}
	if i.n.mode&unix.S_ISGID != 0 {
		m |= fs.ModeSetgid
	}
	if i.n.mode&unix.S_ISVTX != 0 {
		m |= fs.ModeSticky
	}
	return m
}

// Sys gives go-erofs what fs.FileInfo has no method for.
func (i fileInfo) Sys() any {
	xattrs := i.n.xattrs
	if i.n.opaque || i.n.hides {
		xattrs = maps.Clone(xattrs)
		if xattrs == nil {
			xattrs = map[string]string{}
		}
		if i.n.opaque {
			xattrs["trusted.overlay.opaque"] = "y"
		}
		if i.n.hides { // without it overlayfs lists the whiteouts of a directory that no other layer has
			xattrs["trusted.overlay.origin"] = ""
		}
	}
	return &erofs.Stat{
		UID: i.n.uid, GID: i.n.gid, Nlink: int(i.n.nlink), Xattrs: xattrs,
		Mtime: uint64(i.n.mtime), MtimeNs: i.n.mtimeNs,
	}
}

// content reads one file from the scratch. Of a file that is placed it gives as many
// bytes as it has, which are dropped.
type content struct {
	fs   treeFS
	n    *inode
	name string
	off  int64
}

func (f *content) Stat() (fs.FileInfo, error) { return fileInfo{path.Base(f.name), f.n}, nil }
func (f *content) Close() error               { return nil }

func (f *content) Read(p []byte) (int, error) {
	if f.off >= f.n.size {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), f.n.size-f.off)]
	if f.n.image != nil {
		f.off += int64(len(p))
		f.fs.out.skip(int64(len(p)), f.off == f.n.size)
		return len(p), nil
	}
	n, err := f.fs.c.scratch.ReadAt(p, f.n.off+f.off)
	if n == len(p) {
		err = nil
	} else if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	f.off += int64(n)
	return n, err
}
