package container

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/confine"
)

// Every mount here is made detached, by descriptor: nothing is looked up in a
// tree that a sandbox has shaped, and a crash leaves nothing, because what was
// never attached dies with its last descriptor.

// Attributes of mounts.
const (
	attrPlain    = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	attrReadOnly = attrPlain | unix.MOUNT_ATTR_RDONLY
)

// option is one fsconfig call: a string, a flag where Value is empty, or a
// descriptor where FD is set.
type option struct {
	Key, Value string
	FD         int // used where Value is empty and it is > 0
}

// newMount makes a file system and a detached mount of it.
func newMount(fstype string, attr int, options ...option) (int, error) {
	fs, err := newContext(fstype, options...)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return -1, fmt.Errorf("fsmount %s: %w", fstype, err)
	}
	return fd, nil
}

// newContext returns the context of a made superblock. What the kernel has to
// say about a refusal is in it and becomes part of the error.
func newContext(fstype string, options ...option) (int, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen %s: %w", fstype, err)
	}
	for _, o := range options {
		switch {
		case o.Value != "":
			err = unix.FsconfigSetString(fs, o.Key, o.Value)
		case o.FD > 0:
			err = unix.FsconfigSetFd(fs, o.Key, o.FD)
		default:
			err = unix.FsconfigSetFlag(fs, o.Key)
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		err = fmt.Errorf("fsconfig %s: %w%s", fstype, err, contextLog(fs))
		_ = unix.Close(fs)
		return -1, err
	}
	return fs, nil
}

// contextLog returns the messages that the kernel left in a context.
func contextLog(fs int) string {
	var log string
	b := make([]byte, 512)
	for {
		n, err := unix.Read(fs, b)
		if n <= 0 || err != nil {
			return log
		}
		log += "; " + string(b[:n])
	}
}

// cloneMount returns a detached copy of the mount below a descriptor, rooted at path.
func cloneMount(dir int, path string, attr uint64) (int, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	fd, err := unix.OpenTree(dir, path, flags)
	if err != nil {
		return -1, fmt.Errorf("open_tree: %w", err)
	}
	if attr != 0 {
		if err := setAttr(fd, &unix.MountAttr{Attr_set: attr}); err != nil {
			_ = unix.Close(fd)
			return -1, err
		}
	}
	return fd, nil
}

func setAttr(mount int, attr *unix.MountAttr) error {
	if err := unix.MountSetattr(mount, "", unix.AT_EMPTY_PATH, attr); err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	return nil
}

// attach moves a detached mount to path below dir.
func attach(mount, dir int, path string) error {
	if err := unix.MoveMount(mount, "", dir, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount to %s: %w", path, err)
	}
	return nil
}

// newTmpfs makes a small detached tmpfs. Its files are the platform's.
func newTmpfs(attr int, options ...option) (int, error) {
	return newMount("tmpfs", attr, append([]option{{Key: "source", Value: "dsec"}, {Key: "mode", Value: "0755"}}, options...)...)
}

// enterAlone makes a detached mount the root of the calling thread, whose mount
// namespace must be its own and private; nothing else stays mounted in it.
// over is any directory of the old tree.
func enterAlone(mount int, over string) error {
	if err := attach(mount, unix.AT_FDCWD, over); err != nil {
		return err
	}
	if err := unix.Fchdir(mount); err != nil {
		return fmt.Errorf("fchdir: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	return unix.Chdir("/")
}

// writeFile makes a file of the platform, below a directory descriptor.
func writeFile(dir int, path string, data []byte, mode uint32) error {
	fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// copyFile makes a file of the platform with the contents of another.
func copyFile(dir int, path string, from *os.File, mode uint32) error {
	fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if _, err := io.Copy(f, io.NewSectionReader(from, 0, 1<<62)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return f.Chmod(os.FileMode(mode))
}

// procPath names what a descriptor refers to, for the calls that take no descriptor.
func procPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// writeFiles makes files of the platform below a prefix, with the directories
// above them.
func writeFiles(dir int, prefix string, files []confine.File) error {
	for _, f := range files {
		path := prefix + f.Path
		for i := len(prefix); i < len(path); i++ {
			if path[i] != '/' {
				continue
			}
			if err := makeDir(dir, path[:i]); err != nil {
				return err
			}
		}
		var err error
		switch {
		case f.Dir:
			err = makeDir(dir, path)
		case f.Link != "":
			err = unix.Symlinkat(f.Link, dir, path)
		default:
			err = writeFile(dir, path, f.Data, 0o444)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

func makeDir(dir int, path string) error {
	if err := unix.Mkdirat(dir, path, 0o755); err != nil && err != unix.EEXIST {
		return fmt.Errorf("mkdir %s: %w", path, err)
	}
	return nil
}
