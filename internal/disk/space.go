package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Space tells how full the disk is that all volumes of a Store share, in bytes.
type Space struct {
	Size int64 `json:"size"`
	Used int64 `json:"used"`
	// Allocated is what of Size is set apart for data or for metadata, used or
	// not: on btrfs its chunks, elsewhere the same as Used.
	Allocated int64 `json:"allocated"`
	// Free is what can still be written. It is 0 where the file system has no
	// room for the metadata that any write takes.
	Free int64 `json:"free"`
}

// spacer is a driver that knows better than statfs.
type spacer interface {
	space() (Space, error)
}

// Space tells how full the shared disk is. ok is false where volumes share none:
// those of tmpfs are charged to their sandboxes.
func (s *Store) Space() (space Space, ok bool, err error) {
	switch d := s.driver.(type) {
	case spacer:
		space, err = d.space()
	case *tmpfs:
		return Space{}, false, nil
	default:
		space, err = spaceOf(s.opts.Dir)
	}
	return space, true, err
}

// spaceOf asks a file system that has no part for metadata alone.
func spaceOf(dir string) (Space, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Space{}, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	s := Space{Size: int64(st.Blocks) * st.Bsize, Used: int64(st.Blocks-st.Bfree) * st.Bsize, Free: int64(st.Bavail) * st.Bsize}
	if s.Allocated = s.Used; st.Files > 0 && st.Ffree == 0 {
		s.Free = 0
	}
	return s, nil
}

// Inspect tells how full the shared disk of the Store in dir is, from another
// process than the one that has the Store open. driver is the one that made the
// volumes there, and empty where none did.
func Inspect(dir string) (driver string, space Space, err error) {
	root, err := os.OpenRoot(dir)
	if errors.Is(err, os.ErrNotExist) {
		return "", Space{}, nil
	}
	if err != nil {
		return "", Space{}, err
	}
	defer root.Close()
	s := &Store{opts: Options{Dir: dir}, root: root}
	driver = s.present()
	if driver != "btrfs" {
		space, err = spaceOf(dir)
		return driver, space, err
	}
	if _, yes, err := mounted(s.path(mountName)); err != nil || !yes {
		info, serr := os.Stat(s.path(imageName))
		if err = errors.Join(err, serr); err != nil {
			return driver, Space{}, err
		}
		return driver, Space{Size: info.Size(), Free: info.Size()}, nil // an image without volumes
	}
	b := &btrfs{s: s, fd: -1}
	if err := b.openMount(); err != nil {
		return driver, Space{}, err
	}
	space, err = b.space()
	return driver, space, errors.Join(err, b.closeMount())
}

// metaRoom is what metadata must have left: with less, btrfs refuses writes
// however much room for data there is (seen at 2.3 MiB).
const metaRoom = 4 << 20

// btrfsSpace is one look at the image.
type btrfsSpace struct {
	size, unallocated int64
	data, meta        spaceInfo
	reserve           int64 // of metadata, for what must not fail
}

// spaceInfo is one kind of chunks. Promised is what writes that are not on disk
// yet will take.
type spaceInfo struct{ total, used, pinned, reserved, readonly, promised int64 }

// held is what nobody else can have: what is used, what is on its way to the disk,
// and what was given back and is not free before the next commit.
func (i spaceInfo) held() int64 { return i.used + i.pinned + i.reserved }

func (i spaceInfo) free() int64 { return i.total - i.held() - i.readonly }

func (p btrfsSpace) space() Space {
	s := Space{
		Size: p.size, Used: p.data.held() + p.data.promised + p.meta.held(), Allocated: p.size - p.unallocated,
		Free: max(0, p.unallocated+p.data.free()-p.data.promised),
	}
	if p.unallocated+p.meta.free()-p.reserve < metaRoom {
		s.Free = 0
	}
	return s
}

// look reads the live counters: statfs knows nothing of what is written and not
// yet on disk.
func (b *btrfs) look() (btrfsSpace, error) {
	dev := devInfo{id: 1}
	if err := ioctl(b.fd, iocDevInfo, &dev); err != nil {
		return btrfsSpace{}, fmt.Errorf("btrfs: device info: %w", err)
	}
	p := btrfsSpace{size: int64(dev.total), unallocated: int64(dev.total - dev.used)}
	var errs []error
	for name, to := range map[string]*spaceInfo{"data": &p.data, "metadata": &p.meta} {
		for file, n := range map[string]*int64{
			"total_bytes": &to.total, "bytes_used": &to.used, "bytes_pinned": &to.pinned,
			"bytes_reserved": &to.reserved, "bytes_readonly": &to.readonly, "bytes_may_use": &to.promised,
		} {
			var err error
			*n, err = readNumber(filepath.Join(b.sysfs, "allocation", name, file))
			errs = append(errs, err)
		}
	}
	var err error
	p.reserve, err = readNumber(filepath.Join(b.sysfs, "allocation/global_rsv_size"))
	return p, errors.Join(append(errs, err)...)
}

func (b *btrfs) space() (Space, error) {
	p, err := b.look()
	return p.space(), err
}

func readNumber(path string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}
