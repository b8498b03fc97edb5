package convert

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// readArchive applies the stream that came in to t. The stream is read to its end,
// so that what is cut off short is noticed.
func (c *converter) readArchive(t *tree, r io.Reader) error {
	r = &capped{c: c, r: r}
	in, done, err := c.open(r)
	if err != nil {
		return err
	}
	defer done()
	src := &source{c: c, r: in, outer: true}
	if err := c.apply(t, src, c.upper); err != nil {
		return err
	}
	// A tar ends with blocks of zeros. One cut off between two entries looks
	// whole but for them; padding is less than a block.
	if src.total-src.entryEnd < 512 {
		return dsec.Invalid("data", "truncated: the archive has no end mark")
	}
	if _, err := io.CopyBuffer(discard{}, in, make([]byte, copySize)); err != nil {
		return err
	}
	return nil
}

const copySize = 256 << 10

// discard has no ReadFrom, which would read in small pieces.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// capped ends a stream that is longer than allowed with an error.
type capped struct {
	c *converter
	r io.Reader
}

func (r *capped) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if r.c.came.Add(int64(n)) > r.c.limits.ArchiveBytes {
		return 0, dsec.Invalid("data", "the archive has more bytes than allowed")
	}
	return n, err
}

// source is one tar stream being read. It counts, and hashes if asked.
type source struct {
	c     *converter
	r     io.Reader
	hash  *hasher // nil: not hashed
	outer bool    // it is the archive itself, which may be one of an image
	err   error   // of r, not io.EOF: not the archive's fault unless typed

	total    int64 // bytes read
	entryEnd int64 // total after the last entry's content
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if n > 0 {
		if e := s.c.addContent(int64(n)); e != nil {
			s.err = e
			return 0, e
		}
		if s.hash != nil {
			s.hash.add(p[:n])
		}
		s.total += int64(n)
	}
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// apply adds the entries of one tar stream to the tree. With whiteouts, the
// stream may hide what is below it: of a layer of an image that is merged, in the
// tree; else in the image that is made.
func (c *converter) apply(t *tree, src *source, whiteouts bool) error {
	tr := tar.NewReader(src)
	buf := make([]byte, copySize)
	for n := 1; ; n++ {
		hdr, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return src.tarError(err, n, "")
		}
		if err := c.addEntry(1); err != nil {
			return err
		}
		if err := c.applyEntry(t, src, tr, hdr, whiteouts, buf); err != nil {
			return src.tarError(err, n, hdr.Name)
		}
		src.entryEnd = src.total
	}
}

// tarError says which entry an error is about.
func (s *source) tarError(err error, n int, name string) error {
	switch {
	case s.err != nil:
		return s.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return dsec.Invalid("data", "entry %d: the archive is truncated", n)
	case errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong):
		return dsec.Invalid("data", "entry %d: malformed tar header", n)
	}
	return prefixed(err, fmt.Sprintf("entry %d, %s: ", n, quote(name)))
}

// prefixed puts words before the message of an invalid error.
func prefixed(err error, words string) error {
	var e *dsec.Error
	if !errors.As(err, &e) || e.Code != dsec.CodeInvalid {
		return err
	}
	return &dsec.Error{Code: e.Code, Field: e.Field, Message: words + e.Message, Err: e.Err}
}

func (c *converter) applyEntry(t *tree, src *source, tr *tar.Reader, hdr *tar.Header, whiteouts bool, buf []byte) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := splitPath(hdr.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		if hdr.Typeflag != tar.TypeDir {
			return dsec.Invalid("data", "the root is not a directory")
		}
		t.root = t.own(t.root)
		return c.setAttributes(t.root, hdr)
	}
	base := parts[len(parts)-1]
	if whiteouts && strings.HasPrefix(base, whiteoutPrefix) {
		return t.whiteout(parts)
	}
	dir, err := t.dir(parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	if c.diffs > 0 && hdr.Typeflag == tar.TypeChar && hdr.Devmajor == 0 && hdr.Devminor == 0 {
		return t.add(dir, base, t.newWhiteout())
	}
	if whiteouts && t.layer == 0 && hdr.Typeflag == tar.TypeChar && hdr.Devmajor == 0 && hdr.Devminor == 0 {
		return t.hideByNode(dir, parts)
	}
	switch hdr.Typeflag {
	case tar.TypeLink:
		return t.link(dir, parts, hdr.Linkname)
	case tar.TypeChar, tar.TypeBlock:
		return t.leaveOut(dir, parts)
	case tar.TypeDir:
		return c.applyDir(t, dir, base, len(parts), hdr)
	}
	node := &inode{layer: t.layer}
	switch hdr.Typeflag {
	case tar.TypeReg, '\x00', tar.TypeCont, tar.TypeGNUSparse:
		node.mode = unix.S_IFREG
		if err := c.readContent(t, node, src, tr, hdr, buf); err != nil {
			return err
		}
	case tar.TypeSymlink:
		node.mode = unix.S_IFLNK
		if err := checkTarget(hdr.Linkname); err != nil {
			return err
		}
		if err := c.addMetadata(len(hdr.Linkname)); err != nil {
			return err
		}
		node.target = hdr.Linkname
	case tar.TypeFifo:
		node.mode = unix.S_IFIFO
	default:
		return dsec.Invalid("data", "entry of unknown type %q", hdr.Typeflag)
	}
	if err := c.setAttributes(node, hdr); err != nil {
		return err
	}
	return t.add(dir, base, node)
}

func checkTarget(target string) error {
	if target == "" || len(target) > maxTarget || strings.IndexByte(target, 0) >= 0 {
		return dsec.Invalid("data", "link target of %d bytes, want 1 to %d and no NUL", len(target), maxTarget)
	}
	return nil
}

// applyDir makes a directory, or gives the one that is there new attributes.
func (c *converter) applyDir(t *tree, dir *inode, base string, depth int, hdr *tar.Header) error {
	if depth >= c.limits.Depth {
		return dsec.Invalid("data", "directories more than %d deep", c.limits.Depth)
	}
	opaque := c.upper && takeOpaque(hdr)
	if e, ok := dir.children[base]; ok && e.n.isDir() {
		node := t.own(e.n)
		dir.children[base] = dirent{node, t.layer}
		if opaque {
			t.prune(node)
			node.opaque = true
		}
		return c.setAttributes(node, hdr)
	}
	node := t.newDir()
	if err := c.setAttributes(node, hdr); err != nil {
		return err
	}
	err := t.add(dir, base, node)
	node.opaque = node.opaque || opaque
	return err
}

// takeOpaque takes overlayfs's own mark of a directory that hides all below it out of
// the header of an upper directory's tar.
func takeOpaque(hdr *tar.Header) (found bool) {
	for _, name := range []string{"trusted.overlay.opaque", "user.overlay.opaque"} {
		if hdr.PAXRecords[xattrPAX+name] == "y" {
			delete(hdr.PAXRecords, xattrPAX+name)
			found = true
		}
	}
	return found
}

// link gives one more name to an inode that an earlier entry, of this layer or
// one below, made. A symbolic link gets one as itself, as link(2) does.
func (t *tree) link(dir *inode, name []string, target string) error {
	parts, err := splitPath(target)
	if err != nil {
		return prefixed(err, "hard link target: ")
	}
	n, err := t.lookup(parts, false)
	switch {
	case err != nil:
		return err
	case n == nil || n.isWhiteout():
		if made := t.c.devices[strings.Join(parts, "/")]; made != nil {
			return made(t, dir, name)
		}
		return dsec.Invalid("data", "hard link to %s, which no earlier entry made", quote(target))
	case n.isDir():
		return dsec.Invalid("data", "hard link to the directory %s", quote(target))
	}
	return t.add(dir, name[len(name)-1], n)
}

// leaveOut has a name lead to a device node, which no layer has, nor another name of it.
func (t *tree) leaveOut(dir *inode, name []string) error {
	base, whole := name[len(name)-1], strings.Join(name, "/")
	// Last writer wins even where it leaves nothing: nor does what is below the image come back.
	if _, ok := dir.children[base]; ok && t.c.upper {
		dir.children[base] = dirent{t.newWhiteout(), t.layer}
	} else {
		delete(dir.children, base)
	}
	t.c.findings.count("device nodes left out", whole)
	t.c.devices[whole] = (*tree).leaveOut
	return t.c.addMetadata(len(whole))
}

// hideByNode hides by a device node 0:0, as overlayfs does, in the tar of an upper directory:
// there most are names of one.
func (t *tree) hideByNode(dir *inode, name []string) error {
	whole := strings.Join(name, "/")
	t.c.devices[whole] = (*tree).hideByNode
	if err := t.c.addMetadata(len(whole)); err != nil {
		return err
	}
	return t.hide(dir, name[len(name)-1])
}

// setAttributes takes mode, owner, time and attributes from a header.
func (c *converter) setAttributes(n *inode, hdr *tar.Header) error {
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) >= math.MaxUint32 || int64(hdr.Gid) >= math.MaxUint32 {
		return dsec.Invalid("data", "owner %d:%d, want 0 to %d", hdr.Uid, hdr.Gid, uint32(math.MaxUint32-1))
	}
	n.mode = n.mode&unix.S_IFMT | uint32(hdr.Mode)&0o7777
	if n.isSymlink() {
		n.mode = unix.S_IFLNK | 0o777
	}
	n.uid, n.gid = uint32(hdr.Uid), uint32(hdr.Gid)
	if hdr.Uid > 65535 || hdr.Gid > 65535 {
		c.findings.count("owners above 65535, unmapped in a sandbox", hdr.Name)
	}
	// Times that no file system keeps are not worth a refusal.
	n.mtime = min(max(hdr.ModTime.Unix(), math.MinInt32), 1<<34)
	n.mtimeNs = uint32(hdr.ModTime.Nanosecond())
	return c.setXattrs(n, hdr)
}

const xattrPAX = "SCHILY.xattr."

// xattrBytes bounds the attributes of one file: what Linux lists in one call.
const xattrBytes = 64 << 10

func (c *converter) setXattrs(n *inode, hdr *tar.Header) error {
	n.xattrs = nil
	total := 0
	for key, value := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPAX)
		if !ok {
			continue
		}
		// What the kernel, an LSM or overlayfs reads never comes from an
		// archive; links and pipes cannot have user attributes.
		suffix, ok := strings.CutPrefix(name, "user.")
		if !ok || suffix == "" || strings.HasPrefix(suffix, "overlay.") || !n.isDir() && !n.isRegular() {
			c.findings.count("attributes left out (all but user.* of files and directories)", hdr.Name)
			continue
		}
		if len(suffix) > maxName || len(value) > math.MaxUint16 {
			return dsec.Invalid("data", "attribute of %d bytes with a name of %d, want at most %d and %d", len(value), len(name), math.MaxUint16, maxName)
		}
		if total += 8 + len(suffix) + len(value); total > xattrBytes {
			return dsec.Invalid("data", "attributes of more than %d bytes", xattrBytes)
		}
		if n.xattrs == nil {
			n.xattrs = map[string]string{}
		}
		n.xattrs[name] = value
	}
	return c.addMetadata(total)
}

// smallSize is the most that a file may have which go-erofs may put beside its
// inode: it decides that when it knows all of them.
const smallSize = blockSize - inodeSlot

// readContent reads a file's data, whose holes are filled.
func (c *converter) readContent(t *tree, n *inode, src *source, tr *tar.Reader, hdr *tar.Header, buf []byte) error {
	if !isSparse(hdr) {
		return c.readData(t, n, src, tr, hdr, buf)
	}
	if err := c.addContent(hdr.Size); err != nil {
		return err
	}
	if err := c.readData(t, n, src, tr, hdr, buf); err != nil {
		return err
	}
	return c.addSparse(hdr.Size)
}

// readData reads what is large to its place in the image, small files and blobs of an
// image to the scratch.
func (c *converter) readData(t *tree, n *inode, src *source, tr *tar.Reader, hdr *tar.Header, buf []byte) error {
	n.size = hdr.Size
	if src.outer {
		done, err := c.applyEarly(t, tr, hdr)
		if err != nil {
			if src.err == nil && !errors.Is(err, io.ErrUnexpectedEOF) {
				src.err = err // it says itself where it is
			}
			return err
		}
		if n.gone = done; done {
			return nil
		}
	}
	if n.size > smallSize && !(src.outer && isPart(hdr.Name)) {
		n.image = c.image
		if !src.outer {
			c.cuts.placed = append(c.cuts.placed, n)
		}
		var err error
		n.off, err = c.image.place(tr, n.size, func(head []byte) { n.token = findToken(head) })
		return src.diskError(err)
	}
	n.off = c.scratch.next()
	for left := n.size; left > 0; {
		b := buf[:min(int64(len(buf)), left)]
		if _, err := io.ReadFull(tr, b); err == io.EOF {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
		if left == n.size {
			n.token = findToken(b)
		}
		if _, err := c.scratch.Write(b); err != nil {
			return src.diskError(err)
		}
		left -= int64(len(b))
	}
	return nil
}

// diskError keeps an error of this node's disk from being taken for the archive's.
func (s *source) diskError(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		s.err = err
	}
	return err
}

// isPart reports whether a file may be a blob or a document of an image, by its
// name alone. If it is none, no harm is done.
func isPart(name string) bool {
	name = strings.TrimPrefix(path.Clean(name), "/")
	return strings.HasPrefix(name, "blobs/") || strings.HasSuffix(name, ".tar") || !strings.Contains(name, "/") && strings.HasSuffix(name, ".json")
}

func isSparse(hdr *tar.Header) bool {
	if hdr.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// Whiteouts as the OCI image specification has them, after AUFS.
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
)

// whiteout hides what layers below this one put at a place. It never touches
// what this layer wrote, in whichever order the entries come.
func (t *tree) whiteout(parts []string) error {
	base := parts[len(parts)-1]
	kept := t.c.upper // something is below that is not in this tree
	dir, err := t.dir(parts[:len(parts)-1], kept)
	if err == nil && dir != nil && !kept {
		dir, err = t.dir(parts[:len(parts)-1], true)
	}
	if err != nil || dir == nil {
		return err // nothing there to hide
	}
	switch {
	case base == whiteoutOpaque:
		if kept && dir == t.root {
			return dsec.Invalid("data", "an opaque root would hide every layer below")
		}
		t.prune(dir)
		dir.opaque = kept
	case strings.HasPrefix(base, whiteoutMeta):
		// AUFS's own files.
	default:
		name := strings.TrimPrefix(base, whiteoutPrefix)
		if name == "" || name == "." || name == ".." {
			return dsec.Invalid("data", "whiteout of %s, want the name of a file", quote(name))
		}
		t.pruneName(dir, name)
		if kept {
			return t.hide(dir, name)
		}
	}
	return nil
}

func (t *tree) newWhiteout() *inode { return &inode{mode: unix.S_IFCHR, layer: t.layer} }

// hide puts a whiteout where the layer has nothing of that name itself.
func (t *tree) hide(dir *inode, name string) error {
	if e, ok := dir.children[name]; ok {
		e.n.opaque = e.n.isDir()
		return nil
	}
	return t.add(dir, name, t.newWhiteout())
}
