package disk

import (
	"errors"
	"fmt"
	"os"
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

// sample is one look at the disk that volumes share.
type sample struct {
	Space
	// nearlyFull is set where a disk that can grow is to do so, and growable is how
	// much larger it can become.
	nearlyFull bool
	growable   int64
}

// looker is a driver that knows better than statfs.
type looker interface {
	look() (sample, error)
}

// Space tells how full the shared disk is. ok is false where volumes share none:
// those of tmpfs are charged to their sandboxes.
func (s *Store) Space() (space Space, ok bool, err error) {
	now, ok, err := s.look()
	return now.Space, ok, err
}

func (s *Store) look() (now sample, ok bool, err error) {
	switch d := s.driver.(type) {
	case looker:
		now, err = d.look()
	case *tmpfs:
		return now, false, nil
	default:
		now.Space, err = spaceOf(s.opts.Dir)
	}
	return now, true, err
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

// Inspect tells how full the shared disk of the Store in o.Dir is, and the most that
// one volume may be limited to (0: no bound), from another process than the one that
// has the Store open. driver is the one that made the volumes there, and empty where
// none did.
func Inspect(o Options) (driver string, space Space, largest int64, err error) {
	root, err := os.OpenRoot(o.Dir)
	if errors.Is(err, os.ErrNotExist) {
		return "", Space{}, 0, nil
	}
	if err != nil {
		return "", Space{}, 0, err
	}
	defer root.Close()
	s := &Store{opts: o, root: root}
	now, err := s.inspect()
	if share := o.share(); share < noShare {
		largest = most(now.capacity(), share)
	}
	return s.present(), now.Space, largest, err
}

func (s *Store) inspect() (now sample, err error) {
	if s.present() != "btrfs" {
		now.Space, err = spaceOf(s.opts.Dir)
		return now, err
	}
	b := &btrfs{s: s, fd: -1}
	if _, yes, err := mounted(s.path(mountName)); err != nil || !yes { // an image without volumes
		info, serr := os.Stat(s.path(imageName))
		if err = errors.Join(err, serr); err != nil {
			return now, err
		}
		now.Size, now.Free = info.Size(), info.Size()
		left, err := b.growable(now.Size)
		now.growable = max(0, left)
		return now, err
	}
	if err := b.openMount(); err != nil {
		return now, err
	}
	now, err = b.look()
	return now, errors.Join(err, b.closeMount())
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

// taken is what nobody else can have: what is used, what is on its way to the disk,
// and what was given back and is not free before the next commit.
func (i spaceInfo) taken() int64 { return i.used + i.pinned + i.reserved }

func (i spaceInfo) free() int64 { return i.total - i.taken() - i.readonly }

func (p btrfsSpace) sample() sample {
	free := p.unallocated + p.data.free() - p.data.promised
	// Chunks of metadata are read-only while the kernel, which found them unused,
	// gives them back.
	meta := p.unallocated + p.meta.free() + p.meta.readonly - p.reserve
	s := sample{Space: Space{
		Size: p.size, Used: p.data.taken() + p.data.promised + p.meta.taken(), Allocated: p.size - p.unallocated, Free: max(0, free),
	}}
	if meta < metaRoom {
		s.Free = 0
	}
	s.nearlyFull = free < min(growBelow, p.size/growPart) || meta < 2*metaRoom
	return s
}

// counters are the files of sysfs below allocation, and what they tell. They are
// open for as long as the image is in use: to open one costs twenty reads.
var counters = []struct {
	file string
	of   func(*btrfsSpace) *int64
}{
	{"data/total_bytes", func(p *btrfsSpace) *int64 { return &p.data.total }},
	{"data/bytes_used", func(p *btrfsSpace) *int64 { return &p.data.used }},
	{"data/bytes_pinned", func(p *btrfsSpace) *int64 { return &p.data.pinned }},
	{"data/bytes_reserved", func(p *btrfsSpace) *int64 { return &p.data.reserved }},
	{"data/bytes_readonly", func(p *btrfsSpace) *int64 { return &p.data.readonly }},
	{"data/bytes_may_use", func(p *btrfsSpace) *int64 { return &p.data.promised }},
	{"metadata/total_bytes", func(p *btrfsSpace) *int64 { return &p.meta.total }},
	{"metadata/bytes_used", func(p *btrfsSpace) *int64 { return &p.meta.used }},
	{"metadata/bytes_pinned", func(p *btrfsSpace) *int64 { return &p.meta.pinned }},
	{"metadata/bytes_reserved", func(p *btrfsSpace) *int64 { return &p.meta.reserved }},
	{"metadata/bytes_readonly", func(p *btrfsSpace) *int64 { return &p.meta.readonly }},
	{"metadata/bytes_may_use", func(p *btrfsSpace) *int64 { return &p.meta.promised }},
	{"global_rsv_size", func(p *btrfsSpace) *int64 { return &p.reserve }},
}

// openCounters opens the files of counters.
func (b *btrfs) openCounters() error {
	for _, c := range counters {
		fd, err := unix.Open(b.sysfs+"/allocation/"+c.file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("btrfs: %s: %w", c.file, err)
		}
		b.counters = append(b.counters, fd)
	}
	return nil
}

func (b *btrfs) closeCounters() {
	for _, fd := range b.counters {
		_ = unix.Close(fd)
	}
	b.counters = nil
}

// look reads the live counters: statfs knows nothing of what is written and not
// yet on disk.
func (b *btrfs) look() (sample, error) {
	dev := devInfo{id: 1}
	if err := ioctl(b.fd, iocDevInfo, &dev); err != nil {
		return sample{}, fmt.Errorf("btrfs: device info: %w", err)
	}
	p := btrfsSpace{size: int64(dev.total), unallocated: int64(dev.total - dev.used)}
	for i, c := range counters {
		var err error
		if *c.of(&p), err = readNumber(b.counters[i]); err != nil {
			return sample{}, fmt.Errorf("btrfs: %s: %w", c.file, err)
		}
	}
	s := p.sample()
	left, err := b.growable(p.size)
	s.growable = max(0, left)
	return s, err
}

// readNumber reads the number that an open file of sysfs has now.
func readNumber(fd int) (int64, error) {
	var text [32]byte
	n, err := unix.Pread(fd, text[:], 0)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text[:n])), 10, 64)
}
