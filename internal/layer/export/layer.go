package export

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/opendsec/dsec"
)

// What go-erofs tells of a file beside fs.FileInfo.
type (
	owned interface {
		UID() uint32
		GID() uint32
	}
	linked interface {
		Ino() uint64
		Nlink() uint64
	}
	device     interface{ Rdev() uint64 }
	attributed interface{ GetAllXattr() map[string]string }
)

// Whiteouts as OCI layers have them, and the opaque mark of overlayfs.
const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	xattrOpaque    = "trusted.overlay.opaque"
	xattrPAX       = "SCHILY.xattr."
)

// layerWriter writes a layer as a tar stream, in the order of its names.
type layerWriter struct {
	ctx   context.Context
	tw    *tar.Writer
	fs    fs.FS
	first map[uint64]string // names of files that have several, by inode
	buf   []byte
}

// dir writes a directory and what is below it. Its path is "." or has no leading
// slash.
func (t *layerWriter) dir(path string, fi fs.FileInfo) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	hdr := t.header(path+"/", fi, tar.TypeDir)
	opaque := false
	if a, ok := fi.(attributed); ok {
		opaque = a.GetAllXattr()[xattrOpaque] == "y"
	}
	if err := t.tw.WriteHeader(hdr); err != nil {
		return err
	}
	if opaque {
		if err := t.whiteout(path + "/" + whiteoutOpaque); err != nil {
			return err
		}
	}
	entries, err := fs.ReadDir(t.fs, path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			return err
		}
		name := e.Name()
		if path != "." {
			name = path + "/" + name
		}
		if fi.IsDir() {
			err = t.dir(name, fi)
		} else {
			err = t.file(name, e.Name(), fi)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// file writes what is no directory.
func (t *layerWriter) file(path, base string, fi fs.FileInfo) error {
	if fi.Mode()&fs.ModeCharDevice != 0 {
		if d, ok := fi.(device); ok && d.Rdev() == 0 {
			return t.whiteout(strings.TrimSuffix(path, base) + whiteoutPrefix + base)
		}
	}
	if strings.HasPrefix(base, whiteoutPrefix) {
		return &dsec.Error{Code: dsec.CodeUnsupported, Message: fmt.Sprintf("%.200q: an image would take a file of this name for a whiteout", path)}
	}
	if l, ok := fi.(linked); ok && l.Nlink() > 1 {
		if first, seen := t.first[l.Ino()]; seen {
			hdr := t.header(path, fi, tar.TypeLink)
			hdr.Linkname, hdr.PAXRecords = first, nil
			return t.tw.WriteHeader(hdr)
		}
		t.first[l.Ino()] = path
	}
	switch fi.Mode().Type() {
	case 0:
		return t.regular(path, fi)
	case fs.ModeSymlink:
		target, err := fs.ReadLink(t.fs, path)
		if err != nil {
			return err
		}
		hdr := t.header(path, fi, tar.TypeSymlink)
		hdr.Linkname = target
		return t.tw.WriteHeader(hdr)
	case fs.ModeNamedPipe:
		return t.tw.WriteHeader(t.header(path, fi, tar.TypeFifo))
	}
	return fmt.Errorf("%.200q: of type %v, which no import makes", path, fi.Mode().Type())
}

func (t *layerWriter) regular(path string, fi fs.FileInfo) error {
	hdr := t.header(path, fi, tar.TypeReg)
	hdr.Size = fi.Size()
	if err := t.tw.WriteHeader(hdr); err != nil || hdr.Size == 0 {
		return err
	}
	f, err := t.fs.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	n, err := io.CopyBuffer(struct{ io.Writer }{t.tw}, io.LimitReader(&bounded{t.ctx, f}, hdr.Size), t.buf)
	if err == nil && n != hdr.Size {
		err = fmt.Errorf("%.200q: %w", path, io.ErrUnexpectedEOF)
	}
	return err
}

// bounded reads until its context ends.
type bounded struct {
	ctx context.Context
	r   io.Reader
}

func (b *bounded) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	return b.r.Read(p)
}

// whiteout writes a name that hides another.
func (t *layerWriter) whiteout(path string) error {
	return t.tw.WriteHeader(&tar.Header{Name: strings.TrimPrefix(path, "./"), Typeflag: tar.TypeReg, Format: tar.FormatPAX})
}

// header is that of a file of the layer.
func (t *layerWriter) header(path string, fi fs.FileInfo, kind byte) *tar.Header {
	hdr := &tar.Header{Name: path, Typeflag: kind, Mode: int64(fi.Mode().Perm()), ModTime: fi.ModTime(), Format: tar.FormatPAX}
	for mode, bit := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if fi.Mode()&mode != 0 {
			hdr.Mode |= bit
		}
	}
	if o, ok := fi.(owned); ok {
		hdr.Uid, hdr.Gid = int(o.UID()), int(o.GID())
	}
	if a, ok := fi.(attributed); ok {
		for name, value := range a.GetAllXattr() {
			if !strings.HasPrefix(name, "user.") {
				continue // the opaque mark, which is told otherwise
			}
			if hdr.PAXRecords == nil {
				hdr.PAXRecords = map[string]string{}
			}
			hdr.PAXRecords[xattrPAX+name] = value
		}
	}
	return hdr
}
