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

	"github.com/opendsec/dsec"
)

// What the platform needs of a root file system. All is made in the empty
// upper directory before overlayfs joins it with the layers, so nothing of the
// image is ever followed: the image only tells which of these names it has.

// mountPoints are directories of the root that get a mount or must be there.
var mountPoints = []struct {
	name string
	mode uint32
}{
	{"proc", 0o555}, {"sys", 0o555}, {"dev", 0o755}, {"tmp", 0o1777}, {"etc", 0o755},
}

// rootPlan is what an upper directory needs for one list of layers. It is
// found once for the list.
type rootPlan struct {
	make []dirPlan
}

type dirPlan struct {
	name     string
	mode     uint32
	uid, gid uint32 // inside
}

// planRoot looks at the layers, highest first. A name that is there and is no
// directory is refused: an image whose /proc, /dev or /etc is a symlink would
// lead the platform's mounts to a place of its choice.
func planRoot(layers []int) (*rootPlan, error) {
	var p rootPlan
	for _, mp := range mountPoints {
		found, err := findDir(layers, mp.name)
		if err != nil {
			return nil, err
		}
		switch {
		case found == nil:
			p.make = append(p.make, dirPlan{name: mp.name, mode: mp.mode})
		case mp.name == "etc":
			// It gets files of ours, so the upper needs it, looking as in the image.
			p.make = append(p.make, dirPlan{name: mp.name, mode: uint32(found.Mode) & 0o7777, uid: found.Uid, gid: found.Gid})
		}
	}
	return &p, nil
}

func findDir(layers []int, name string) (*unix.Stat_t, error) {
	for i := len(layers) - 1; i >= 0; i-- {
		var st unix.Stat_t
		err := unix.Fstatat(layers[i], name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("layer %d: %s: %w", i, name, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return nil, dsec.Invalid("layers", "want /%s of the image to be a directory or missing, have a %s", name, fileType(st.Mode))
		}
		return &st, nil
	}
	return nil, nil
}

func fileType(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFLNK:
		return "symlink"
	case unix.S_IFREG:
		return "file"
	}
	return "special file"
}

// fillUpper makes the plan's directories and the platform's files in an empty
// upper directory, owned by the sandbox's IDs.
func (p *rootPlan) fillUpper(upper int, base uint32) error {
	for _, d := range p.make {
		if d.uid >= idsPerSlot || d.gid >= idsPerSlot {
			return dsec.Invalid("layers", "want /%s of the image owned by IDs below %d", d.name, idsPerSlot)
		}
		if err := unix.Mkdirat(upper, d.name, 0o700); err != nil {
			return fmt.Errorf("upper: mkdir %s: %w", d.name, err)
		}
		if err := unix.Fchownat(upper, d.name, int(base+d.uid), int(base+d.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("upper: chown %s: %w", d.name, err)
		}
		if err := unix.Fchmodat(upper, d.name, d.mode, 0); err != nil { // nobody else can reach upper yet
			return fmt.Errorf("upper: chmod %s: %w", d.name, err)
		}
	}
	for _, f := range etcFiles {
		if err := writeOwned(upper, "etc/"+f.name, f.data, base); err != nil {
			return err
		}
	}
	return nil
}

type etcFile struct{ name, data string }

var etcFiles = []etcFile{
	{"hostname", hostname + "\n"},
	{"hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostname + "\n"},
	{"resolv.conf", "# This sandbox has no network.\n"},
}

func writeOwned(dir int, path, data string, owner uint32) error {
	fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return fmt.Errorf("upper: %s: %w", path, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(data)); err != nil {
		return fmt.Errorf("upper: %s: %w", path, err)
	}
	if err := unix.Fchown(fd, int(owner), int(owner)); err != nil {
		return fmt.Errorf("upper: %s: chown: %w", path, err)
	}
	if err := unix.Fchmod(fd, 0o644); err != nil { // the umask is the edge's
		return fmt.Errorf("upper: %s: chmod: %w", path, err)
	}
	return nil
}

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
// layers are descriptors of directories, volume is a detached mount. idmap is
// false for layers of the platform, whose owner nobody needs to see.
//
// The overlay belongs to the host's user namespace: its marks are trusted.*
// attributes, which nothing inside can set.
func (c *composer) compose(layers lower, idmap bool, userns, volume int) (root int, err error) {
	in := c.ns.do
	if layers.free {
		in = here
	}
	var copies []int
	defer func() { c.closer.later(copies...) }()
	if err := in(func() (err error) {
		copies, err = copyLayers(layers.fds, idmap, userns)
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
func copyLayers(layers []int, idmap bool, userns int) (copies []int, err error) {
	for i, layer := range slices.Backward(layers) {
		fd, err := cloneMount(layer, "", 0)
		if err != nil {
			return copies, fmt.Errorf("layer %d: %w", i, err)
		}
		copies = append(copies, fd)
		if !idmap {
			continue
		}
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
