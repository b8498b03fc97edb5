// Package upper writes what a sandbox has written over its layers, which is the upper
// directory of an overlay, as a tar stream for package convert: whiteouts are device nodes
// 0:0 in it, opaque directories have overlayfs's mark, and names that look like the
// whiteouts of OCI are ordinary.
//
// The directory was shaped by a stranger, and nothing in it is followed: each step is
// one name below a descriptor. Nobody writes to it meanwhile. What is to be left out is
// told from names, attributes and the start of a file, before a byte of it is written.
package upper

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// Options of one stream.
type Options struct {
	Owner  uint32 // of a sandbox's IDs the first, as they are on the disk
	Scrub  Scrub
	Limits convert.Limits // of content, entries and depth; zero fields take the default
}

// ids is how many of its own a sandbox has. It sees any other as nobody's.
const (
	ids    = 1 << 16
	nobody = 65534
)

// linkBytes bounds what is remembered of names of files that have several.
const linkBytes = 64 << 20

// Write writes the tree below dir, dir itself as "./". Errors that the tree caused are
// unsupported, or invalid for a secret that is refused, and name the file at fault.
func Write(ctx context.Context, out io.Writer, dir *os.File, opt Options) (Report, error) {
	tw := tar.NewWriter(out)
	filter, err := NewFilter(tw, &opt.Scrub)
	if err != nil {
		return Report{}, err
	}
	w := &writer{
		Filter: filter, ctx: ctx, tw: tw, owner: opt.Owner, limits: opt.Limits.WithDefaults(),
		links: map[uint64]string{}, buf: make([]byte, 256<<10),
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return Report{}, os.NewSyscallError("fstat", err)
	}
	if err := w.dir(dir, &st, nil, Inside{}); err != nil {
		return Report{}, err
	}
	return w.Report, w.tw.Close()
}

type writer struct {
	*Filter
	ctx    context.Context
	tw     *tar.Writer
	owner  uint32
	limits convert.Limits
	links  map[uint64]string // first name of files that have several
	linked int               // bytes of these names
	buf    []byte

	entries, size int64
}

// entry writes one name of a directory.
func (w *writer) entry(dir *os.File, parts []string, in Inside) error {
	if err := w.ctx.Err(); err != nil {
		return context.Cause(w.ctx)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), parts[len(parts)-1], &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &fs.PathError{Op: "stat", Path: quote(parts), Err: err}
	}
	if err := w.count(parts); err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	whiteout := kind == unix.S_IFCHR && st.Rdev == 0
	if in = w.Judge(parts, in, whiteout); kind != unix.S_IFDIR && in.Removed(kind == unix.S_IFREG, st.Size) {
		return nil
	}
	switch {
	case kind == unix.S_IFDIR:
		d, err := openBelow(dir, parts, unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer func() { _ = d.Close() }()
		return w.dir(d, &st, parts, in)
	case kind == unix.S_IFREG:
		return w.regular(dir, parts, in)
	case kind == unix.S_IFLNK:
		return w.symlink(dir, &st, parts)
	case kind == unix.S_IFIFO:
		return w.Put(w.header(&st, parts, tar.TypeFifo))
	case whiteout:
		return w.Put(w.header(&st, parts, tar.TypeChar))
	}
	w.Report.begin(plain(parts), reasonSpecial, "a socket or a device").count(false, 0)
	return nil
}

// count bounds the tree.
func (w *writer) count(parts []string) error {
	w.entries++
	switch length := len(plain(parts)); {
	case w.entries > w.limits.Entries:
		return dsec.Errorf(dsec.CodeUnsupported, "more than %d files were written, which no layer holds", w.limits.Entries)
	case len(parts) >= w.limits.Depth || length > 4095:
		return dsec.Errorf(dsec.CodeUnsupported, "%s is deeper than %d directories or 4095 bytes, which no layer holds", quote(parts), w.limits.Depth)
	}
	return nil
}

// dir writes a directory and what is in it.
func (w *writer) dir(d *os.File, st *unix.Stat_t, parts []string, in Inside) error {
	hdr := w.header(st, parts, tar.TypeDir)
	opaque, err := w.attributes(d, parts, hdr)
	if err != nil {
		return err
	}
	return w.Dir(hdr, opaque, in, func() error { return w.below(d, parts, in) })
}

func (w *writer) below(d *os.File, parts []string, in Inside) error {
	for {
		names, err := d.Readdirnames(1024)
		for _, name := range names {
			if err := w.entry(d, append(slices.Clip(parts), name), in); err != nil {
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

func (w *writer) symlink(dir *os.File, st *unix.Stat_t, parts []string) error {
	target := w.buf[:unix.PathMax]
	n, err := unix.Readlinkat(int(dir.Fd()), parts[len(parts)-1], target)
	if err != nil {
		return &fs.PathError{Op: "readlink", Path: quote(parts), Err: err}
	}
	hdr := w.header(st, parts, tar.TypeSymlink)
	hdr.Linkname = string(target[:n])
	return w.Put(hdr)
}

// regular writes a file, or one more name of one that was written.
func (w *writer) regular(dir *os.File, parts []string, in Inside) error {
	f, err := openBelow(dir, parts, unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%s changed while it was read", quote(parts))
	}
	hdr := w.header(&st, parts, tar.TypeReg)
	if first, ok := w.links[st.Ino]; ok && st.Nlink > 1 {
		hdr.Typeflag, hdr.Linkname = tar.TypeLink, first
		return w.Put(hdr)
	}
	head := w.buf[:min(st.Size, convert.LintBytes)]
	if _, err := io.ReadFull(f, head); err != nil {
		return &fs.PathError{Op: "read", Path: quote(parts), Err: err}
	}
	if found, err := w.Secret(parts, head, st.Size, in); found || err != nil {
		return err
	}
	if w.size += st.Size; w.size > w.limits.ContentBytes {
		return dsec.Errorf(dsec.CodeUnsupported, "%s: files of more than %d bytes were written, which no layer holds; holes count", quote(parts), w.limits.ContentBytes)
	}
	if st.Nlink > 1 {
		if w.linked += len(hdr.Name); w.linked > linkBytes {
			return dsec.Errorf(dsec.CodeUnsupported, "the names of files that have several take more than %d bytes", linkBytes)
		}
		w.links[st.Ino] = hdr.Name
	}
	if _, err := w.attributes(f, parts, hdr); err != nil {
		return err
	}
	hdr.Size = st.Size
	if err := w.Put(hdr); err != nil {
		return err
	}
	return w.content(f, head, parts, st.Size)
}

func (w *writer) content(f *os.File, head []byte, parts []string, size int64) error {
	if _, err := w.tw.Write(head); err != nil {
		return err
	}
	rest := size - int64(len(head))
	n, err := io.CopyBuffer(struct{ io.Writer }{w.tw}, convert.UntilDone(w.ctx, io.LimitReader(f, rest)), w.buf)
	if err == nil && n != rest {
		err = fmt.Errorf("%s changed while it was read", quote(parts))
	}
	return err
}

// header is that of an entry, with IDs as the sandbox sees them.
func (w *writer) header(st *unix.Stat_t, parts []string, kind byte) *tar.Header {
	hdr := &tar.Header{
		Name: "." + plain(parts), Typeflag: kind, Mode: int64(st.Mode & 0o7777), Format: tar.FormatPAX,
		Uid: w.seen(st.Uid), Gid: w.seen(st.Gid), ModTime: time.Unix(st.Mtim.Unix()),
	}
	if kind == tar.TypeDir && len(parts) > 0 {
		hdr.Name += "/"
	}
	return hdr
}

func (w *writer) seen(id uint32) int {
	if inside := id - w.owner; id >= w.owner && inside < ids {
		return int(inside)
	}
	return nobody
}

func openBelow(dir *os.File, parts []string, flags uint64) (*os.File, error) {
	how := &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | flags,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	name := parts[len(parts)-1]
	for {
		fd, err := unix.Openat2(int(dir.Fd()), name, how)
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return nil, &fs.PathError{Op: "open", Path: quote(parts), Err: err}
		}
	}
}

// plain is a path of the sandbox.
func plain(parts []string) string { return "/" + strings.Join(parts, "/") }

// quote makes a path fit to show.
func quote(parts []string) string { return fmt.Sprintf("%+.200q", plain(parts)) }
