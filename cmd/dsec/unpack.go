package main

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// unpack writes a tar that a sandbox made below dir. Nothing in it is trusted:
// every step goes through a root that no name and no symlink leads out of, set
// id bits are dropped, and devices, pipes and sockets are left out.
func unpack(r io.Reader, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	type late struct {
		name string
		mode fs.FileMode
		time time.Time
	}
	var dirs []late // modes and times of directories, which writing into them changes
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		if path.IsAbs(h.Name) || name == ".." || strings.HasPrefix(name, "../") {
			return dsec.Errorf(dsec.CodeInvalid, "the sandbox sent a name that leaves the directory: %q", h.Name)
		}
		if err := unpackOne(root, name, h, tr); err != nil {
			return ofUnpacked(err, filepath.Join(dir, name))
		}
		if h.Typeflag == tar.TypeDir {
			dirs = append(dirs, late{name, fs.FileMode(h.Mode & 0o777), h.ModTime})
		}
	}
	for _, d := range slices.Backward(dirs) {
		if err := errors.Join(root.Chmod(d.name, d.mode), root.Chtimes(d.name, d.time, d.time)); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, r) // the padding behind the archive's end
	return err
}

// ofUnpacked names the file of this machine that could not be made, where that is what
// is wrong, and not the stream.
func ofUnpacked(err error, file string) error {
	_, cause := inSystem(err)
	if cause == nil {
		return err
	}
	return ofSystem("DST", &fs.PathError{Path: file, Err: cause})
}

func unpackOne(root *os.Root, name string, h *tar.Header, r io.Reader) error {
	mode := fs.FileMode(h.Mode & 0o777)
	if name != "." {
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, mode|0o700)
	case tar.TypeReg:
		_ = root.Remove(name) // a symlink there is replaced, not followed
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		if err := errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
			return err
		}
		return root.Chtimes(name, h.ModTime, h.ModTime)
	case tar.TypeSymlink:
		_ = root.Remove(name)
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		_ = root.Remove(name)
		return root.Link(path.Clean(h.Linkname), name)
	}
	return nil
}
