package export

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/erofs/go-erofs"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/layer/upper"
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
	*upper.Filter
	ctx   context.Context
	tw    *tar.Writer
	fs    fs.FS
	diff  bool             // in the form of package upper, which has no names of its own
	first map[int64]string // names of files that have several, by inode
	buf   []byte
}

// dir writes a directory and what is below it. Its path is "." or has no leading
// slash.
func (t *layerWriter) dir(path string, fi fs.FileInfo, in upper.Inside) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	hdr, st, err := t.header(path+"/", fi, tar.TypeDir)
	if err != nil {
		return err
	}
	opaque := st.Xattrs[xattrOpaque] == "y"
	if opaque && t.diff {
		if hdr.PAXRecords == nil {
			hdr.PAXRecords = map[string]string{}
		}
		hdr.PAXRecords[xattrPAX+xattrOpaque] = "y"
	}
	return t.Dir(hdr, opaque, in, func() error {
		if opaque && !t.diff {
			if err := t.whiteout(path + "/" + whiteoutOpaque); err != nil {
				return err
			}
		}
		return t.below(path, in)
	})
}

// below writes what is in a directory.
func (t *layerWriter) below(path string, in upper.Inside) error {
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
		in := t.Judge(strings.Split(name, "/"), in, isWhiteout(fi))
		switch {
		case fi.IsDir():
			err = t.dir(name, fi, in)
		case !in.Removed(fi.Mode().IsRegular(), fi.Size()):
			err = t.file(name, e.Name(), fi, in)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func isWhiteout(fi fs.FileInfo) bool {
	st, ok := fi.Sys().(*erofs.Stat)
	return ok && fi.Mode()&fs.ModeCharDevice != 0 && st.Rdev == 0
}

// quote shows a file of a layer as imports do.
func quote(path string) string { return fmt.Sprintf("%+.200q", "/"+path) }

// kinds are the types of what an import makes beside directories.
var kinds = map[fs.FileMode]byte{0: tar.TypeReg, fs.ModeSymlink: tar.TypeSymlink, fs.ModeNamedPipe: tar.TypeFifo}

// file writes what is no directory.
func (t *layerWriter) file(path, base string, fi fs.FileInfo, in upper.Inside) error {
	kind, ok := kinds[fi.Mode().Type()]
	hdr, st, err := t.header(path, fi, kind)
	switch {
	case err != nil:
		return err
	case isWhiteout(fi) && t.diff:
		hdr.Typeflag = tar.TypeChar
		return t.Put(hdr)
	case isWhiteout(fi):
		return t.whiteout(strings.TrimSuffix(path, base) + whiteoutPrefix + base)
	case !ok:
		return fmt.Errorf("%s: of type %v, which no import makes", quote(path), fi.Mode().Type())
	case strings.HasPrefix(base, whiteoutPrefix) && !t.diff:
		return &dsec.Error{Code: dsec.CodeUnsupported, Message: quote(path) + ": an image would take a file of this name for a whiteout"}
	}
	if first, seen := t.first[st.Ino]; seen {
		hdr.Typeflag, hdr.Linkname, hdr.PAXRecords = tar.TypeLink, first, nil
		return t.Put(hdr)
	}
	if kind == tar.TypeReg && t.Scrubs() {
		if found, err := t.secret(path, fi.Size(), in); found || err != nil {
			return err
		}
	}
	if st.Nlink > 1 {
		t.first[st.Ino] = path
	}
	switch kind {
	case tar.TypeReg:
		return t.regular(path, hdr, fi.Size())
	case tar.TypeSymlink:
		if hdr.Linkname, err = fs.ReadLink(t.fs, path); err != nil {
			return err
		}
	}
	return t.Put(hdr)
}

// secret reports whether a file is left out for what it holds.
func (t *layerWriter) secret(path string, size int64, in upper.Inside) (bool, error) {
	f, err := t.fs.Open(path)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	head := t.buf[:min(size, convert.LintBytes)]
	if _, err := io.ReadFull(f, head); err != nil {
		return false, fmt.Errorf("%s: %w", quote(path), err)
	}
	return t.Secret(strings.Split(path, "/"), head, size, in)
}

func (t *layerWriter) regular(path string, hdr *tar.Header, size int64) error {
	hdr.Size = size
	if err := t.Put(hdr); err != nil || size == 0 {
		return err
	}
	f, err := t.fs.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	n, err := io.CopyBuffer(struct{ io.Writer }{t.tw}, io.LimitReader(convert.UntilDone(t.ctx, f), size), t.buf)
	if err == nil && n != size {
		err = fmt.Errorf("%s: %w", quote(path), io.ErrUnexpectedEOF)
	}
	return err
}

// whiteout writes a name that hides another.
func (t *layerWriter) whiteout(path string) error {
	return t.Put(&tar.Header{Name: strings.TrimPrefix(path, "./"), Typeflag: tar.TypeReg, Format: tar.FormatPAX})
}

// header is that of a file of the layer. The bits of set-id and of sticky are only in
// what Sys gives: go-erofs's FileInfo has them elsewhere than fs.FileMode does.
func (t *layerWriter) header(path string, fi fs.FileInfo, kind byte) (*tar.Header, *erofs.Stat, error) {
	st, ok := fi.Sys().(*erofs.Stat)
	if !ok {
		return nil, nil, fmt.Errorf("%s: no attributes: %T", quote(path), fi.Sys())
	}
	hdr := &tar.Header{
		Name: path, Typeflag: kind, Mode: int64(st.Mode.Perm()), ModTime: fi.ModTime(), Format: tar.FormatPAX,
		Uid: int(st.UID), Gid: int(st.GID),
	}
	for mode, bit := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if st.Mode&mode != 0 {
			hdr.Mode |= bit
		}
	}
	for name, value := range st.Xattrs {
		if !strings.HasPrefix(name, "user.") {
			continue // the opaque mark, which is told otherwise
		}
		if hdr.PAXRecords == nil {
			hdr.PAXRecords = map[string]string{}
		}
		hdr.PAXRecords[xattrPAX+name] = value
	}
	return hdr, st, nil
}
