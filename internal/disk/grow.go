package disk

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// grower is a driver whose shared disk can become larger while it is in use.
type grower interface {
	// grow makes it larger than size, which it is now. It does nothing where that is
	// as large as it may be, or nothing is left to take.
	grow(size int64) error
	// commitSoon has what was removed become free.
	commitSoon()
}

const (
	// The image grows while less than growPart of it is free, but at most
	// growBelow, by growStep at most and minStep at least.
	growPart  = 4
	growBelow = 8 << 30
	growStep  = 8 << 30
	minStep   = 64 << 20
	// What the disk below the image keeps free: a part of it, within bounds.
	keepPart  = 10
	keepLeast = 1 << 30
	keepMost  = 16 << 30
)

// grow takes more of the disk below for the image. The blocks are allocated
// before the file system has them: on a full node its writes cannot fail.
func (b *btrfs) grow(size int64) error {
	left, err := b.growable(size)
	if err != nil {
		return err
	}
	step := growth(size, left)
	if step == 0 {
		return nil
	}
	if err := b.extend(step); err != nil {
		return err
	}
	b.s.log.Info("disk: the image of all volumes grows", "by", step, "to", size+step)
	return b.fit()
}

// growable is by how much the image of that size may still grow in all. It is
// negative where it has more than it would get.
func (b *btrfs) growable(size int64) (int64, error) {
	var below unix.Statfs_t
	if err := unix.Statfs(b.s.opts.Dir, &below); err != nil {
		return 0, fmt.Errorf("space below the image: %w", err)
	}
	return spare(size, b.s.opts.MaxImageBytes, int64(below.Blocks)*below.Bsize, int64(below.Bavail)*below.Bsize), nil
}

// spare is what an image may take of a disk of that size with that much free; most
// of 0 is no other bound.
func spare(image, most, disk, free int64) int64 {
	left := free - max(keepLeast, min(keepMost, disk/keepPart))
	if most > 0 {
		left = min(left, most-image)
	}
	return left
}

// growth is by how much an image grows at once that may grow by left.
func growth(image, left int64) int64 {
	step := min(growStep, image/2, left)
	if step &^= 1<<20 - 1; step < minStep {
		return 0
	}
	return step
}

// extend makes the file of the image longer, or leaves it as it is.
func (b *btrfs) extend(step int64) error {
	f, err := os.OpenFile(b.s.path(imageName), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, info.Size(), step)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = f.Truncate(info.Size() + step)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("allocate %d bytes: %w", step, err), f.Truncate(info.Size()))
	}
	return nil
}

// fit lets the file system have all of its image's file.
func (b *btrfs) fit() error {
	info, err := os.Stat(b.s.path(imageName))
	if err != nil {
		return err
	}
	dev := devInfo{id: 1}
	if err := ioctl(b.fd, iocDevInfo, &dev); err != nil {
		return fmt.Errorf("btrfs: device info: %w", err)
	}
	if int64(dev.total) > info.Size()-4096 { // mkfs rounds down
		return nil
	}
	loops, err := os.ReadDir(b.sysfs + "/devices")
	if err != nil {
		return err
	}
	if len(loops) != 1 {
		return fmt.Errorf("the image is on %d devices, want 1", len(loops))
	}
	loop, err := os.OpenFile("/dev/"+loops[0].Name(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer loop.Close()
	if _, err := unix.IoctlRetInt(int(loop.Fd()), unix.LOOP_SET_CAPACITY); err != nil {
		return fmt.Errorf("size of %s: %w", loop.Name(), err)
	}
	var args volArgs
	copy(args.name[:], "1:max")
	if err := ioctl(b.fd, iocResize, &args); err != nil {
		return fmt.Errorf("btrfs: resize: %w", err)
	}
	return nil
}
