package container

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// What the platform needs of a root file system is the same for every sandbox
// of a list of layers, and is a layer too, the highest: a small EROFS image
// that is mounted, shared, idmapped and dropped as the others are. A sandbox
// therefore starts with an empty upper directory and its own writes are all
// that is ever in it. Nothing of the image is followed to make the layer: the
// image only tells which of these names it has.

// mountPoints are directories of the root that get a mount or must be there.
var mountPoints = []struct {
	name string
	mode uint32
}{
	{"proc", 0o555}, {"sys", 0o555}, {"dev", 0o755}, {"tmp", 0o1777}, {"etc", 0o755},
}

type etcFile struct{ name, data string }

var etcFiles = []etcFile{
	{"hostname", hostname + "\n"},
	{"hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + hostname + "\n"},
	{"resolv.conf", "# This sandbox has no network.\n"},
}

// platforms makes the platform's layers.
type platforms struct {
	temp string // for what is gone when an image is made
	dir  string // for images, on a disk: EROFS takes no file of a tmpfs
}

// platform is the platform's layer for a list of layers. Its image is made
// anew whenever it is to be mounted, and comes out the same each time.
type platform struct {
	in     platforms
	dirs   []dirPlan
	time   time.Time
	digest string
}

type dirPlan struct {
	name     string
	mode     uint32
	uid, gid uint32 // inside
}

// platformTime is the time of the platform's files where the image has no
// /etc: archivers refuse files from before 1980.
var platformTime = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// plan looks at the layers, lowest first. A name that is there and is no
// directory is refused: an image whose /proc, /dev or /etc is a symlink would
// lead the platform's mounts to a place of its choice.
func (in platforms) plan(layers []int) (*platform, error) {
	p := &platform{in: in, time: platformTime}
	for _, mp := range mountPoints {
		found, err := findDir(layers, mp.name)
		if err != nil {
			return nil, err
		}
		switch {
		case found == nil:
			p.dirs = append(p.dirs, dirPlan{name: mp.name, mode: mp.mode})
		case mp.name == "etc":
			// It gets files of ours, so the layer has it, looking as in the image.
			if found.Uid >= idsPerSlot || found.Gid >= idsPerSlot {
				return nil, dsec.Invalid("layers", "want /%s of the image owned by IDs below %d", mp.name, idsPerSlot)
			}
			p.dirs = append(p.dirs, dirPlan{name: mp.name, mode: found.Mode & 0o7777, uid: found.Uid, gid: found.Gid})
			p.time = time.Unix(found.Mtim.Unix())
		}
	}
	image, err := p.open()
	if err != nil {
		return nil, err
	}
	defer image.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, image); err != nil {
		return nil, fmt.Errorf("platform's layer: %w", err)
	}
	p.digest = "sha256:" + hex.EncodeToString(sum.Sum(nil))
	return p, nil
}

func findDir(layers []int, name string) (*unix.Stat_t, error) {
	for i, layer := range slices.Backward(layers) {
		var st unix.Stat_t
		err := unix.Fstatat(layer, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("layer %d: %s: %w", i, name, err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
			return nil, nil // a whiteout: it is in none
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

// layer is the image as a layer.
func (p *platform) layer() backend.Layer {
	return backend.Layer{Digest: p.digest, Open: func(context.Context) (backend.Devices, error) {
		image, err := p.open()
		return backend.Devices{Files: []*os.File{image}}, err
	}}
}

// open returns the image, at its start, in a file without a name: it lasts as
// long as a mount of it, and no crash leaves it.
func (p *platform) open() (*os.File, error) {
	image, err := p.in.newFile()
	if err == nil {
		err = p.write(image)
		if err == nil {
			_, err = image.Seek(0, io.SeekStart)
		}
		if err == nil {
			return image, nil
		}
		_ = image.Close()
	}
	return nil, fmt.Errorf("platform's layer: %w", err)
}

// newFile makes a file without a name on the disk, or in memory where the
// disk's file system has no such files: then it takes a loop device.
func (in platforms) newFile() (*os.File, error) {
	fd, err := unix.Open(in.dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == unix.EOPNOTSUPP {
		fd, err = unix.MemfdCreate("platform", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "platform"), nil
}

// write writes the EROFS image.
func (p *platform) write(out io.WriteSeeker) error {
	w := erofs.Create(out, erofs.WithBuildTime(0, 0), erofs.WithBlockSize(4096), erofs.WithTempDir(p.in.temp))
	for _, d := range append([]dirPlan{{name: "/", mode: 0o755}}, p.dirs...) {
		mode := fs.FileMode(d.mode & 0o777)
		for bit, m := range map[uint32]fs.FileMode{unix.S_ISVTX: fs.ModeSticky, unix.S_ISGID: fs.ModeSetgid, unix.S_ISUID: fs.ModeSetuid} {
			if d.mode&bit != 0 {
				mode |= m
			}
		}
		if err := errors.Join(w.Mkdir(d.name, mode), w.Chmod(d.name, mode), w.Chown(d.name, int(d.uid), int(d.gid)), w.Chtimes(d.name, p.time, p.time)); err != nil {
			return err
		}
	}
	for _, f := range etcFiles {
		name := "etc/" + f.name
		file, err := w.Create(name)
		if err != nil {
			return err
		}
		if _, err := io.WriteString(file, f.data); err != nil {
			return err
		}
		if err := errors.Join(file.Close(), w.Chmod(name, 0o644), w.Chtimes(name, p.time, p.time)); err != nil {
			return err
		}
	}
	return w.Close()
}
