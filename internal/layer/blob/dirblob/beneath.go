package dirblob

import (
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// retry calls f again while a signal interrupts it: the Go scheduler's own reach
// system calls that wait for a server.
func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func openRoot(dir string) (*os.File, error) {
	return os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// openBeneath opens a path below dir; none of its parts is a symbolic link.
func openBeneath(dir *os.File, name string, flags, mode uint64) (*os.File, error) {
	how := &unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Mode: mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat2(int(dir.Fd()), name, how)
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path.Base(name)), nil
}

// openParent opens the directory that a key is in, and returns its name there.
func openParent(root *os.File, key string) (parent *os.File, name string, err error) {
	parent, err = openBeneath(root, path.Dir(key), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	return parent, path.Base(key), err
}

// makeParent is openParent, which makes directories that are missing.
func makeParent(root *os.File, key string) (parent *os.File, name string, err error) {
	parent, name, err = openParent(root, key)
	if !errors.Is(err, unix.ENOENT) {
		return parent, name, err
	}
	above, dir, err := makeParent(root, path.Dir(key))
	if err != nil {
		return nil, "", err
	}
	defer above.Close()
	if err := mkdir(above, dir); err != nil {
		return nil, "", err
	}
	parent, err = openBeneath(above, dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	return parent, name, err
}

// parentTries is how often the directory of a blob is made anew that went before the
// blob was in it, with the last of the blobs that were.
const parentTries = 100

// inParent calls f with the directory that a key is in, which is made where it is
// missing, and its name there; again where f does not find a file. What f says then may
// as well be about another one.
func inParent(root *os.File, key string, f func(parent *os.File, name string) error) (err error) {
	for range parentTries {
		var parent *os.File
		var name string
		if parent, name, err = makeParent(root, key); err == nil {
			err = errors.Join(f(parent, name), parent.Close())
		}
		if !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return err
}

// removeEmpty removes a directory below root, and those above it, as far as they are
// empty. What fails is left to the sweep.
func removeEmpty(root *os.File, dir string) {
	for err := error(nil); err == nil && dir != "."; dir = path.Dir(dir) {
		var parent *os.File
		var name string
		if parent, name, err = openParent(root, dir); err == nil {
			err = retry(func() error { return unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR) })
			_ = parent.Close()
		}
	}
}

// mkdir makes a directory durably. That it is there already is no error.
func mkdir(parent *os.File, name string) error {
	err := retry(func() error { return unix.Mkdirat(int(parent.Fd()), name, dirMode) })
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err != nil {
		return err
	}
	return syncDir(parent)
}

// syncDir returns once the names in dir are durable, as far as the file system
// can say: some have no such call and need none.
func syncDir(dir *os.File) error {
	err := retry(func() error { return unix.Fsync(int(dir.Fd())) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// writeID gives a directory that has none its ID. Of hosts that open a new store at
// once, one does; none sees an ID half written.
func (s *Store) writeID(root *os.File) error {
	if _, err := stat(root, idFile); !errors.Is(err, unix.ENOENT) {
		return err
	}
	name := s.tempName()
	f, err := openBeneath(root, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, fileMode)
	if err != nil {
		return err
	}
	_, err = f.WriteString(rand.Text() + "\n")
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = s.move(root, name, root, idFile)
	}
	if err != nil {
		_ = retry(func() error { return unix.Unlinkat(int(root.Fd()), name, 0) })
	}
	if errors.Is(err, unix.EEXIST) {
		err = nil
	}
	if err != nil {
		return err
	}
	return syncDir(root)
}

// readID is empty where the directory has no ID.
func readID(root *os.File) (string, error) {
	f, err := openBeneath(root, idFile, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENOENT) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 64))
	return string(b), err
}
