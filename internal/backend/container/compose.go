package container

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// composer makes roots, on a thread of the layers' namespace where need be.
type composer struct {
	ns *layerNS
	// attached is set where overlayfs takes no detached mounts (before Linux
	// 6.15) or no descriptors (before 6.13).
	attached atomic.Bool

	closer closer
}

// compose returns the detached mount of a sandbox's root: an overlay of
// idmapped copies of the layers, lowest first, and of the upper directory of
// a volume, which is owned by the sandbox's IDs and therefore not idmapped.
// layers are descriptors of directories, volume is a detached mount.
//
// The overlay belongs to the host's user namespace: its marks are trusted.*
// attributes, which nothing inside can set.
func (c *composer) compose(layers lower, userns, volume int) (root int, err error) {
	in := c.ns.do
	if layers.free {
		in = here
	}
	var copies []int
	defer func() { c.closer.later(copies...) }()
	if err := in(func() (err error) {
		copies, err = copyLayers(layers.fds, userns)
		return err
	}); err != nil {
		return -1, err
	}
	if !c.attached.Load() {
		err = in(func() (err error) {
			root, err = overlayDetached(copies, volume)
			return err
		})
		if !takesNoDescriptors(err) {
			return root, err
		}
	}
	aerr := c.ns.do(func() (err error) {
		root, err = overlayAttached(copies, volume)
		return err
	})
	if aerr != nil {
		return -1, errors.Join(err, aerr)
	}
	c.attached.Store(true)
	return root, nil
}

// here runs f on the calling thread, as layerNS.do does on one of its own.
func here(f func() error) error { return f() }

// takesNoDescriptors tells what overlayfs says where it wants paths. Linux 6.12
// looks for the text of a descriptor that it was given as a file.
func takesNoDescriptors(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EBADF)
}

// copyLayers returns detached copies of the layers, highest first, as
// overlayfs takes them. On error those that were made.
func copyLayers(layers []int, userns int) (copies []int, err error) {
	for i, layer := range slices.Backward(layers) {
		fd, err := cloneMount(layer, "", 0)
		if err != nil {
			return copies, fmt.Errorf("layer %d: %w", i, err)
		}
		copies = append(copies, fd)
		if err := setAttr(fd, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)}); err != nil {
			return copies, fmt.Errorf("layer %d: idmap: %w", i, err)
		}
	}
	return copies, nil
}

// overlayDetached hands everything to overlayfs by descriptor.
func overlayDetached(copies []int, volume int) (_ int, err error) {
	options := []option{{Key: "source", Value: "overlay"}}
	for _, fd := range copies {
		options = append(options, option{Key: "lowerdir+", FD: fd})
	}
	for _, name := range []string{"upper", "work"} {
		fd, err := unix.Openat(volume, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("volume: %s: %w", name, err)
		}
		defer unix.Close(fd)
		options = append(options, option{Key: name + "dir", FD: fd})
	}
	return overlay(options)
}

// overlayAttached hands everything to overlayfs by path. The mounts are
// attached in the namespace for that long, in a directory of this thread, and
// the paths are relative to it, because a list of them holds 256 bytes.
func overlayAttached(copies []int, volume int) (_ int, err error) {
	dir := fmt.Sprintf("/compose/%d", unix.Gettid())
	if err := os.Mkdir(dir, 0o700); err != nil {
		return -1, err
	}
	defer func() { err = errors.Join(err, unix.Chdir("/"), os.Remove(dir)) }()
	if err := unix.Chdir(dir); err != nil { // the thread shares its directory with no other
		return -1, err
	}
	var lower []string
	for i, fd := range append(slices.Clone(copies), volume) {
		name := strconv.Itoa(i)
		if err := os.Mkdir(name, 0o700); err != nil {
			return -1, err
		}
		defer os.Remove(name)
		if err := attach(fd, unix.AT_FDCWD, name); err != nil {
			return -1, err
		}
		defer unix.Unmount(name, unix.MNT_DETACH) //nolint:errcheck // the overlay has its own copy
		lower = append(lower, name)
	}
	vol := lower[len(copies)]
	return overlay([]option{
		{Key: "source", Value: "overlay"},
		{Key: "lowerdir", Value: strings.Join(lower[:len(copies)], ":")},
		{Key: "upperdir", Value: vol + "/upper"}, {Key: "workdir", Value: vol + "/work"},
	})
}

func overlay(options []option) (int, error) {
	root, err := newMount("overlay", attrPlain, append(options, option{Key: "volatile"})...)
	if err != nil {
		return -1, err
	}
	// Where overlayfs cannot use the work directory it mounts read-only and
	// says so in the kernel's log only.
	var st unix.Statfs_t
	if err := unix.Fstatfs(root, &st); err != nil {
		_ = unix.Close(root)
		return -1, fmt.Errorf("overlay: %w", err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		_ = unix.Close(root)
		return -1, errors.New("overlay: the kernel made it read-only")
	}
	return root, nil
}
