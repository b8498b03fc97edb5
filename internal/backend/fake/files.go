package fake

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// maxFile bounds one file in memory.
const maxFile = 64 << 20

// typed turns an error of the file system into the platform's.
func typed(field string, err error) error {
	code := dsec.CodeConflict
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errNotFound), errors.Is(err, errNotDir):
		code = dsec.CodeNotFound
	case errors.Is(err, errNoSpace):
		return &dsec.Error{Code: dsec.CodeExhausted, Field: field, Message: chronusapi.DiskFull}
	case errors.Is(err, errNoRegular), errors.Is(err, errIsDir), errors.Is(err, errLoop), errors.Is(err, errNameLong):
		code = dsec.CodeInvalid
	}
	return &dsec.Error{Code: code, Field: field, Message: err.Error()}
}

func (n *node) info(name string) chronusapi.FileInfo {
	i := chronusapi.FileInfo{
		Name: name, Type: [...]string{"file", "dir", "symlink"}[n.kind], Mode: n.mode,
		UID: n.uid, GID: n.gid, Modified: n.modified, Size: int64(len(n.data)), Target: n.target,
	}
	return i
}

// Stat implements chronusapi.Handler.
func (c *chronus) Stat(_ context.Context, name string, follow bool) (chronusapi.FileInfo, error) {
	n, err := c.fs.lookup(name, follow)
	if err != nil {
		return chronusapi.FileInfo{}, typed("path", err)
	}
	return n.info(path.Base(name)), nil
}

// ListDir implements chronusapi.Handler.
func (c *chronus) ListDir(_ context.Context, name, after string, limit int) ([]chronusapi.FileInfo, bool, error) {
	names, err := c.fs.names(name)
	if err != nil {
		return nil, false, typed("path", err)
	}
	var list []chronusapi.FileInfo
	for _, e := range names {
		if e <= after && after != "" {
			continue
		}
		if len(list) == limit {
			return list, true, nil
		}
		n, err := c.fs.lookup(name+"/"+e, false)
		if err != nil {
			continue // removed meanwhile
		}
		list = append(list, n.info(e))
	}
	return list, false, nil
}

// Mkdir implements chronusapi.Handler.
func (c *chronus) Mkdir(_ context.Context, name string, mode uint32, parents bool) error {
	if mode == 0 {
		mode = 0o755
	}
	return typed("path", c.fs.mkdir(name, mode, parents))
}

// Rename implements chronusapi.Handler.
func (c *chronus) Rename(_ context.Context, from, to string) error {
	return typed("path", c.fs.rename(from, to))
}

// Remove implements chronusapi.Handler.
func (c *chronus) Remove(_ context.Context, name string, recursive bool) error {
	return typed("path", c.fs.remove(name, recursive))
}

// Read implements chronusapi.Handler.
func (c *chronus) Read(_ context.Context, name string, offset, length int64, w io.Writer) error {
	b, err := c.fs.readFile(name)
	if err != nil {
		return typed("path", err)
	}
	b = b[min(offset, int64(len(b))):]
	if length >= 0 {
		b = b[:min(length, int64(len(b)))]
	}
	_, err = w.Write(b)
	return err
}

// Write implements chronusapi.Handler.
func (c *chronus) Write(_ context.Context, req chronusapi.WriteRequest, r io.Reader) (int64, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return 0, err
	}
	if len(b) > maxFile {
		return 0, typed("path", errNoSpace)
	}
	if err := c.fs.writeFile(req.Path, b, req.Mode, req.Append); err != nil {
		return 0, typed("path", err)
	}
	return int64(len(b)), nil
}

// Download implements chronusapi.Handler. A directory's entries are named from
// it on, its own is "./".
func (c *chronus) Download(_ context.Context, name string, w io.Writer) error {
	n, err := c.fs.lookup(name, true)
	if err != nil {
		return typed("path", err)
	}
	tw := tar.NewWriter(w)
	if n.kind == kindDir {
		err = c.pack(tw, name, ".")
	} else {
		err = packOne(tw, path.Base(name), &n)
	}
	if err != nil {
		return err
	}
	return tw.Close()
}

func packOne(tw *tar.Writer, name string, n *node) error {
	h := &tar.Header{Name: name, Mode: int64(n.mode), Uid: int(n.uid), Gid: int(n.gid), ModTime: n.modified, Format: tar.FormatPAX}
	switch n.kind {
	case kindDir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case kindSymlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.target
	case kindFile:
		h.Typeflag, h.Size = tar.TypeReg, int64(len(n.data))
	}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	_, err := tw.Write(n.data)
	return err
}

// pack writes the directory dir and all below it, as name.
func (c *chronus) pack(tw *tar.Writer, dir, name string) error {
	n, err := c.fs.lookup(dir, name == ".")
	if err != nil {
		return typed("path", err)
	}
	if err := packOne(tw, name, &n); err != nil || n.kind != kindDir {
		return err
	}
	names, err := c.fs.names(dir)
	if err != nil {
		return typed("path", err)
	}
	for _, e := range names {
		if err := c.pack(tw, dir+"/"+e, name+"/"+e); err != nil {
			return err
		}
	}
	return nil
}

// Upload implements chronusapi.Handler.
func (c *chronus) Upload(_ context.Context, req chronusapi.UploadRequest, r io.Reader) (res chronusapi.UploadResult, err error) {
	if err := c.fs.mkdir(req.Path, 0o755, true); err != nil {
		return res, typed("path", err)
	}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return res, nil
		}
		if err != nil {
			return res, &dsec.Error{Code: dsec.CodeInvalid, Field: "data", Message: "want a tar: " + err.Error()}
		}
		n, err := c.unpack(req.Path, h, tr)
		if err != nil {
			return res, err
		}
		res.Entries++
		res.Bytes += n
	}
}

// unpack makes one entry. A name that leaves dir, by itself or by a symlink
// that is there, is refused.
func (c *chronus) unpack(dir string, h *tar.Header, r io.Reader) (int64, error) {
	leaves := dsec.Invalid("data", "entry %q leaves the directory", h.Name)
	if path.IsAbs(h.Name) || strings.Contains("/"+h.Name+"/", "/../") {
		return 0, leaves
	}
	rel := path.Clean(h.Name)
	var at strings.Builder
	at.WriteString(dir)
	for e := range strings.SplitSeq(path.Dir(rel), "/") {
		at.WriteString("/" + e)
		if n, err := c.fs.lookup(at.String(), false); err == nil && n.kind == kindSymlink {
			return 0, leaves
		}
	}
	name, mode := dir+"/"+rel, uint32(h.Mode)&0o7777
	if err := c.fs.mkdir(path.Dir(name), 0o755, true); err != nil {
		return 0, typed("data", err)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := c.fs.mkdir(name, mode, true); err != nil {
			return 0, typed("data", err)
		}
	case tar.TypeSymlink:
		_ = c.fs.remove(name, false)
		return 0, typed("data", c.fs.symlink(name, h.Linkname))
	case tar.TypeReg:
		var b bytes.Buffer
		if _, err := io.Copy(&b, io.LimitReader(r, maxFile+1)); err != nil {
			return 0, &dsec.Error{Code: dsec.CodeInvalid, Field: "data", Message: "want a whole tar: " + err.Error()}
		}
		if b.Len() > maxFile {
			return 0, typed("data", errNoSpace)
		}
		if n, err := c.fs.lookup(name, false); err == nil && n.kind == kindSymlink {
			_ = c.fs.remove(name, false)
		}
		if err := c.fs.writeFile(name, b.Bytes(), mode, false); err != nil {
			return 0, typed("data", err)
		}
	default:
		return 0, dsec.Invalid("data", "entry %q: want files, directories and symlinks", h.Name)
	}
	c.fs.own(name, h)
	return h.Size, nil
}

func (f *fileSystem) own(name string, h *tar.Header) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n, err := f.get(name, false); err == nil {
		n.uid, n.gid = uint32(h.Uid), uint32(h.Gid)
		n.modified = h.ModTime
	}
}
