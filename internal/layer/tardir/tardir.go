// Package tardir writes a directory as a tar stream, for imports and uploads.
// It imports only what a client may carry.
package tardir

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// LeftOut is what of a directory no tar stream can have.
type LeftOut struct{ sockets, attributes tally }

type tally struct {
	n     int
	first string
}

func (t *tally) count(name string) {
	if t.n++; t.n == 1 {
		t.first = filepath.ToSlash(name)
	}
}

// Findings tells of it as the server tells of what it left out of an archive, whose root
// becomes the directory at of a sandbox.
func (l LeftOut) Findings(at string) (list []string) {
	for _, of := range []struct {
		what string
		tally
	}{{"sockets left out", l.sockets}, {"attributes left out (a tar has none with = in its name)", l.attributes}} {
		if of.n > 0 {
			list = append(list, fmt.Sprintf("%s: %d, the first at %s", of.what, of.n, strconv.QuoteToASCII(path.Join("/", at, of.first))))
		}
	}
	return list
}

// Write writes the tree below dir, dir itself as "./", in constant memory but
// for one name per file that has several. Kept are modes, owners by number,
// times, symbolic and hard links, attributes, pipes, device nodes, and
// names of any bytes; holes become zeros; sockets are left out. Whoever reads the
// stream decides which attributes it takes, and tells of the others. A file that
// changes its size while it is read is an error: the archive would not be what
// anyone meant.
func Write(w io.Writer, dir string) (LeftOut, error) { return write(w, dir, false) }

// WriteAsRoot is Write with root as the owner of all.
func WriteAsRoot(w io.Writer, dir string) (LeftOut, error) { return write(w, dir, true) }

func write(w io.Writer, dir string, asRoot bool) (LeftOut, error) {
	dir, err := filepath.EvalSymlinks(dir) // WalkDir does not go into a link
	if err != nil {
		return LeftOut{}, err
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return LeftOut{}, err
	}
	if !fi.IsDir() {
		return LeftOut{}, &fs.PathError{Op: "tar", Path: dir, Err: unix.ENOTDIR}
	}
	t := &writer{tw: tar.NewWriter(w), dir: dir, asRoot: asRoot, links: map[fileID]string{}, buf: make([]byte, 256<<10)}
	if err := filepath.WalkDir(dir, t.entry); err != nil {
		return t.left, err
	}
	return t.left, t.tw.Close()
}

type fileID struct{ dev, ino uint64 }

type writer struct {
	tw     *tar.Writer
	dir    string
	asRoot bool
	links  map[fileID]string // first name of files that have several
	left   LeftOut
	buf    []byte
}

func (t *writer) entry(path string, d fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(t.dir, path)
	if err != nil {
		return err
	}
	fi, err := d.Info()
	if err != nil {
		return err
	}
	if fi.Mode()&fs.ModeSocket != 0 {
		t.left.sockets.count(rel)
		return nil
	}
	if fi.Mode().IsRegular() {
		return t.regular(path, rel)
	}
	target := ""
	if fi.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	hdr, _, err := t.header(rel, fi, target)
	if err != nil {
		return err
	}
	if fi.IsDir() {
		if hdr.PAXRecords, err = t.xattrs(path, rel); err != nil {
			return err
		}
	}
	return t.tw.WriteHeader(hdr)
}

// regular reads a file through one descriptor, so that what was looked at is
// what is read.
func (t *writer) regular(path, rel string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if !fi.Mode().IsRegular() {
		return &fs.PathError{Op: "tar", Path: path, Err: errors.New("changed while it was read")}
	}
	hdr, linked, err := t.header(rel, fi, "")
	if err != nil {
		return err
	}
	if !linked {
		if hdr.PAXRecords, err = t.xattrs(path, rel); err != nil {
			return err
		}
	}
	if err := t.tw.WriteHeader(hdr); err != nil || linked {
		return err
	}
	n, err := io.CopyBuffer(onlyWriter{t.tw}, io.LimitReader(f, fi.Size()), t.buf)
	if err != nil {
		return err
	}
	after, err := f.Stat()
	if err != nil {
		return err
	}
	if n != fi.Size() || after.Size() != fi.Size() {
		return &fs.PathError{Op: "tar", Path: path, Err: errors.New("changed while it was read")}
	}
	return nil
}

type onlyWriter struct{ io.Writer }

// header makes an entry's header; linked says that it is one more name of a
// file that is in the stream already.
func (t *writer) header(rel string, fi fs.FileInfo, target string) (hdr *tar.Header, linked bool, err error) {
	if hdr, err = tar.FileInfoHeader(fi, target); err != nil {
		return nil, false, fmt.Errorf("%s: %w", rel, err)
	}
	hdr.Name = filepath.ToSlash(rel)
	if fi.IsDir() {
		hdr.Name += "/"
	}
	// Owners are numbers: this machine's names mean nothing in an image.
	hdr.Uname, hdr.Gname = "", ""
	if t.asRoot {
		hdr.Uid, hdr.Gid = 0, 0
	}
	hdr.AccessTime, hdr.ChangeTime = time.Time{}, time.Time{}
	hdr.Format = tar.FormatPAX
	st, ok := fi.Sys().(*syscall.Stat_t)
	if ok && !fi.IsDir() && st.Nlink > 1 {
		id := fileID{st.Dev, st.Ino}
		if first, seen := t.links[id]; seen {
			hdr.Typeflag, hdr.Linkname, hdr.Size = tar.TypeLink, first, 0
			return hdr, true, nil
		}
		t.links[id] = hdr.Name
	}
	return hdr, false, nil
}

// ofMachine is the attribute that every file has where SELinux runs: it is the
// machine's word on the file, and nothing that was put there.
const ofMachine = "security.selinux"

// xattrs gives the attributes of a file as PAX records.
func (t *writer) xattrs(path, rel string) (map[string]string, error) {
	names, err := Sized(func(b []byte) (int, error) { return unix.Llistxattr(path, b) })
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "listxattr", Path: path, Err: err}
	}
	var records map[string]string
	for name := range strings.SplitSeq(string(names), "\x00") {
		if name == "" || name == ofMachine {
			continue
		}
		if strings.Contains(name, "=") {
			t.left.attributes.count(rel)
			continue
		}
		value, err := Sized(func(b []byte) (int, error) { return unix.Lgetxattr(path, name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil && !strings.HasPrefix(name, "user.") {
			value, err = nil, nil // that there is one is told all the same
		}
		if err != nil {
			return nil, &fs.PathError{Op: "getxattr", Path: path, Err: err}
		}
		if records == nil {
			records = map[string]string{}
		}
		records["SCHILY.xattr."+name] = string(value)
	}
	return records, nil
}

// Sized calls a system call that lists or reads attributes, with a buffer that is large enough.
func Sized(call func([]byte) (int, error)) ([]byte, error) {
	buf := make([]byte, 1024)
	for {
		n, err := call(buf)
		if !errors.Is(err, unix.ERANGE) {
			return buf[:max(n, 0)], err
		}
		if n, err = call(nil); err != nil {
			return nil, err
		}
		buf = make([]byte, n+1024)
	}
}
