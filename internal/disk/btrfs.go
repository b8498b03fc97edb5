package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/units"
)

// btrfs keeps all volumes in one image: Dir/btrfs.img, mounted at Dir/btrfs. A
// volume is a subvolume; simple quotas charge data and metadata to the
// subvolume that wrote them, and cost nothing at commit, unlike full ones.
type btrfs struct {
	s        *Store
	fd       int    // of the mount
	sysfs    string // /sys/fs/btrfs/<uuid>
	counters []int  // descriptors, in the order of counters

	committed atomic.Int64 // when usage last asked for a commit, in ns since 1970

	dirty chan struct{} // a removal wants the cleaner to run
	free  *recycler
}

const (
	imageName = "btrfs.img"
	mountName = "btrfs"
)

const (
	// minImage is the least size at which btrfs works well.
	minImage = 256 << 20
	// maxDefaultImage is the most that is allocated on a disk without being told.
	maxDefaultImage = 32 << 30
)

func openBtrfs(s *Store) (driver, error) {
	if err := needKernel("btrfs", 6, 7); err != nil {
		return nil, unsupported("%w", err)
	}
	b := &btrfs{s: s, fd: -1, dirty: make(chan struct{}, 1)}
	if err := b.mount(); err != nil {
		return nil, err
	}
	if err := b.enableQuota(); err != nil {
		return nil, errors.Join(err, b.close(), b.destroy())
	}
	b.free = newRecycler(b)
	s.wg.Go(b.clean)
	return b, nil
}

// mount brings the image up: found mounted by an earlier edge, mounted, or
// made. One that does not mount is put aside: it holds nothing but scratch.
func (b *btrfs) mount() error {
	dir, image := b.s.path(mountName), b.s.path(imageName)
	if err := b.s.root.Mkdir(mountName, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	magic, yes, err := mounted(dir)
	if err != nil {
		return err
	}
	if yes && magic != unix.BTRFS_SUPER_MAGIC {
		return dsec.Errorf(dsec.CodeConflict, "another file system is mounted at %s", dir)
	}
	if !yes {
		if _, err := os.Lstat(image); errors.Is(err, os.ErrNotExist) {
			if err := b.makeImage(image); err != nil {
				return err
			}
		}
		err := mountVolumes(image, dir)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EUCLEAN) || errors.Is(err, unix.EIO) {
			b.s.log.Error("disk image does not mount, starting with an empty one", "image", image, "err", err)
			err = b.replaceImage(image, dir)
		}
		if err != nil {
			return err
		}
	}
	if err := b.openMount(); err != nil {
		return err
	}
	if err := b.fit(); err != nil { // a growth that was cut short
		b.s.log.Warn("disk: the image is used in part", "err", err)
	}
	return nil
}

// openMount finds the file system that is mounted.
func (b *btrfs) openMount() (err error) {
	if b.fd, err = unix.Open(b.s.path(mountName), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	var info fsInfo
	if err := ioctl(b.fd, iocFSInfo, &info); err != nil {
		return errors.Join(fmt.Errorf("btrfs: fs info: %w", err), b.closeMount())
	}
	u := info.uuid
	b.sysfs = fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
	if err := b.openCounters(); err != nil {
		return errors.Join(err, b.closeMount())
	}
	return nil
}

func (b *btrfs) closeMount() error {
	b.closeCounters()
	err := unix.Close(b.fd)
	b.fd = -1
	return err
}

// btrfsOptions are for scratch: no data checksums, no copy on write, and no
// waiting for the disk's cache: a volume that comes near its limit makes the
// kernel commit over and over. No discard, so that the image keeps the blocks
// that were allocated for it and a full node cannot fail its writes.
const btrfsOptions = "nobarrier,nodatacow,nodiscard,space_cache=v2"

// metadataRatio is after how many chunks of data the kernel sets one apart for
// metadata. Without, it does so when it needs one: then who writes one large file
// takes the room for everybody's metadata, and all writes fail on a disk of which a
// fifth is free. From 50 GiB on its chunks for metadata are as large as those for
// data, below a quarter of that.
func metadataRatio(image int64) int {
	if image >= 50<<30 {
		return 16
	}
	return 4
}

// mountVolumes mounts an image of volumes.
func mountVolumes(image, dir string) error {
	info, err := os.Stat(image)
	if err != nil {
		return err
	}
	return mountImage(image, dir, "btrfs", fmt.Sprintf("%s,metadata_ratio=%d", btrfsOptions, metadataRatio(info.Size())))
}

func (b *btrfs) makeImage(image string) error {
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return unsupported("mkfs.btrfs is not installed")
	}
	size := b.s.opts.ImageBytes
	if size == 0 {
		var st unix.Statfs_t
		if err := unix.Statfs(b.s.opts.Dir, &st); err != nil {
			return err
		}
		size = min(int64(st.Bavail)*st.Bsize/2, maxDefaultImage)
	}
	if size &^= 1<<20 - 1; size < minImage {
		return unsupported("an image of %s is too small, want at least %s", units.Bytes(size), units.Bytes(minImage))
	}
	// Made under another name: a crash leaves no half-made image.
	tmp := image + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer os.Remove(tmp)
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = f.Truncate(size)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("image of %d bytes: %w", size, err)
	}
	out, err := exec.Command(mkfs, "--quiet", "--nodiscard", "--metadata", "single", "--data", "single", "--label", "dsec", tmp).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mkfs.btrfs: %w: %s", err, bytes.TrimSpace(out))
	}
	return os.Rename(tmp, image)
}

// replaceImage puts a damaged image aside, but only once a new one is mounted.
func (b *btrfs) replaceImage(image, dir string) error {
	fresh := image + ".fresh"
	if err := b.makeImage(fresh); err != nil {
		return err
	}
	if err := mountVolumes(fresh, dir); err != nil {
		return errors.Join(err, os.Remove(fresh))
	}
	return errors.Join(os.Rename(image, image+".damaged"), os.Rename(fresh, image))
}

func mountImage(image, dir, fstype, options string) error {
	dev, err := attachLoop(image)
	if err != nil {
		return err
	}
	defer dev.Close()
	return mount(dev.Name(), dir, fstype, options)
}

func (b *btrfs) enableQuota() error {
	if mode, err := os.ReadFile(b.sysfs + "/qgroups/mode"); err == nil {
		if string(bytes.TrimSpace(mode)) == "squota" {
			return nil
		}
		return unsupported("the image has full quotas")
	}
	args := quotaCtl{cmd: quotaEnableSimple}
	if err := ioctl(b.fd, iocQuotaCtl, &args); err != nil {
		return unsupported("simple quotas: %w", err)
	}
	return nil
}

func (b *btrfs) name() string { return "btrfs" }
func (b *btrfs) inodes() bool { return false }

func (b *btrfs) create(_ context.Context, req Request) (name string, top int, err error) {
	name, sub, again := b.free.take()
	if !again {
		name = newName()
		var args volArgs
		copy(args.name[:len(args.name)-1], name)
		if err := ioctl(b.fd, iocSubvolCreate, &args); err != nil {
			return "", -1, fmt.Errorf("btrfs: create subvolume: %w", err)
		}
	}
	fd, err := unix.Openat(b.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return name, -1, fmt.Errorf("btrfs: open subvolume: %w", err)
	}
	if sub.id == 0 {
		sub.id, err = b.subvolID(fd)
	}
	if err == nil && sub.limit != req.Bytes {
		err = b.limit(sub.id, req.Bytes)
	}
	if err != nil {
		_ = unix.Close(fd)
		return name, -1, err
	}
	b.free.give(name, subvolume{id: sub.id, limit: req.Bytes, own: req.Bytes})
	return name, fd, nil
}

// limit bounds a subvolume. It is asked of the top one: of one that has reached
// its limit the kernel would not take another.
func (b *btrfs) limit(id uint64, bytes int64) error {
	l := qgroupLimit{id: id, flags: limitReferenced, maxReferenced: uint64(bytes)}
	if err := ioctl(b.fd, iocQgroupLimit, &l); err != nil {
		return fmt.Errorf("btrfs: limit: %w", err)
	}
	return nil
}

func (b *btrfs) open(name string) (int, error) {
	if b.free.owns(name) {
		return -1, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return openDirAt(b.fd, name)
}

// usage reads the quota's counter, which knows of what was written once that is on
// disk and committed. The kernel does either in its own time, half a minute each.
// The second is asked for here, so that who looks again soon sees it.
func (b *btrfs) usage(name string) (Usage, error) {
	b.commitSoon()
	fd, err := b.open(name)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(fd)
	id, err := b.subvolID(fd)
	if err != nil {
		return Usage{}, err
	}
	used, err := b.quota(id, "referenced")
	return Usage{Bytes: used, Inodes: dsec.NotCounted}, err
}

// commitEvery bounds how often looking at usage makes the kernel commit.
const commitEvery = time.Second

func (b *btrfs) commitSoon() {
	now := time.Now().UnixNano()
	last := b.committed.Load()
	if now-last < int64(commitEvery) || !b.committed.CompareAndSwap(last, now) {
		return
	}
	var transaction uint64
	if err := ioctl(b.fd, iocStartSync, &transaction); err != nil {
		b.s.log.Warn("btrfs commit", "err", err)
	}
}

// quota reads a number of a subvolume's: referenced is the bytes that it refers
// to, without what was written since the last commit, and rsv_data what of its
// data is on its way to the disk.
func (b *btrfs) quota(id uint64, what string) (int64, error) {
	// Without os.ReadFile, which asks whether the file can be polled: it can.
	fd, err := unix.Open(fmt.Sprintf("%s/qgroups/0_%d/%s", b.sysfs, id, what), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("btrfs: quota of subvolume %d: %w", id, err)
	}
	defer unix.Close(fd)
	n, err := readNumber(fd)
	if err != nil {
		return 0, fmt.Errorf("btrfs: quota of subvolume %d: %s: %w", id, what, err)
	}
	return n, nil
}

func (b *btrfs) subvolID(dir int) (uint64, error) {
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	args := inoLookup{objectid: firstFree}
	if err := ioctl(fd, iocInoLookup, &args); err != nil {
		return 0, fmt.Errorf("btrfs: subvolume id: %w", err)
	}
	return args.treeid, nil
}

func (b *btrfs) remove(_ context.Context, name string) error {
	if b.free.put(name) {
		return nil
	}
	return b.drop(name)
}

// drop removes a subvolume for good.
func (b *btrfs) drop(name string) error {
	defer b.free.forget(name) // where it could not be dropped, a sweep finds it
	var args volArgs
	copy(args.name[:len(args.name)-1], name)
	if err := ioctl(b.fd, iocSnapDestroy, &args); err != nil {
		return fmt.Errorf("btrfs: remove subvolume: %w", err)
	}
	select {
	case b.dirty <- struct{}{}:
	default:
	}
	return nil
}

// cleanEvery bounds how long removed volumes keep their space while the node
// is busy. By itself the kernel waits up to 30 s.
const cleanEvery = 500 * time.Millisecond

// clean has the kernel free removed subvolumes: one commit wakes its cleaner,
// and one after that gives back what the cleaner freed.
func (b *btrfs) clean() {
	for {
		select {
		case <-b.s.stop:
			return
		case <-b.dirty:
		}
		for range 2 {
			_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(b.fd), iocSync, 0)
			if e != 0 {
				b.s.log.Warn("btrfs sync", "err", e)
			}
			select {
			case <-b.s.stop:
				return
			case <-time.After(cleanEvery):
			}
		}
	}
}

func (b *btrfs) list() ([]string, error) {
	// In this order: what the recycler gives away meanwhile is not taken for nobody's.
	owned := b.free.snapshot()
	names, err := readNames(b.fd, ".")
	return slices.DeleteFunc(names, func(name string) bool { return owned[name] }), err
}

// close unmounts an image without volumes: a node that is done with its
// sandboxes is left as it was. One that is still busy with what removals left
// stays mounted, and is found by the next Store.
func (b *btrfs) close() error {
	if b.fd < 0 {
		return nil
	}
	var err error
	if b.free != nil {
		err = b.free.close()
	}
	ids, lerr := readNames(b.fd, ".")
	err = errors.Join(err, lerr, b.closeMount())
	if err != nil || len(ids) > 0 {
		return err
	}
	if err := unix.Unmount(b.s.path(mountName), unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount: %w", err)
	}
	return nil
}

func (b *btrfs) destroy() error {
	dir := b.s.path(mountName)
	if err := unix.Unmount(dir, 0); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	images, err := filepath.Glob(b.s.path(imageName + "*"))
	errs := []error{err, os.Remove(dir)}
	for _, image := range images {
		errs = append(errs, os.Remove(image))
	}
	return errors.Join(errs...)
}

// What the kernel's btrfs.h calls these. They are the same on every
// little-endian 64-bit architecture.
const (
	iocSnapCreate   = 0x50009401 // _IOW(0x94, 1, volArgs)
	iocSubvolCreate = 0x5000940e // _IOW(0x94, 14, volArgs)
	iocSnapDestroy  = 0x5000940f // _IOW(0x94, 15, volArgs)
	iocInoLookup    = 0xd0009412 // _IOWR(0x94, 18, inoLookup)
	iocResize       = 0x50009403 // _IOW(0x94, 3, volArgs)
	iocDevInfo      = 0xd000941e // _IOWR(0x94, 30, devInfo)
	iocFSInfo       = 0x8400941f // _IOR(0x94, 31, fsInfo)
	iocQuotaCtl     = 0xc0109428 // _IOWR(0x94, 40, quotaCtl)
	iocQgroupLimit  = 0x8030942b // _IOR(0x94, 43, qgroupLimit)
	iocSync         = 0x9408     // _IO(0x94, 8)
	iocStartSync    = 0x80089418 // _IOR(0x94, 24, uint64)

	quotaEnableSimple = 4
	limitReferenced   = 1
	firstFree         = 256 // inode of a subvolume's top directory
)

type volArgs struct {
	fd   int64
	name [4088]byte
}

type inoLookup struct {
	treeid   uint64
	objectid uint64
	_        [4080]byte // the name
}

type quotaCtl struct{ cmd, _ uint64 } // the second is the status

type qgroupLimit struct {
	id, flags, maxReferenced uint64
	_                        [3]uint64 // the most exclusive bytes, and what is reserved of either
}

type fsInfo struct {
	_    [2]uint64 // the highest device, and how many there are
	uuid [16]byte
	_    [1024 - 32]byte
}

type devInfo struct {
	id          uint64
	_           [16]byte
	used, total uint64 // bytes in chunks, and of the device
	_           [379*8 + 1024]byte
}

// The sizes are part of the request numbers.
var (
	_ [4096]byte = [unsafe.Sizeof(volArgs{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(inoLookup{})]byte{}
	_ [16]byte   = [unsafe.Sizeof(quotaCtl{})]byte{}
	_ [48]byte   = [unsafe.Sizeof(qgroupLimit{})]byte{}
	_ [1024]byte = [unsafe.Sizeof(fsInfo{})]byte{}
	_ [4096]byte = [unsafe.Sizeof(devInfo{})]byte{}
)
