package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// snapshotter is a driver that copies a volume at once, and without its bytes.
type snapshotter interface {
	// snapshot makes a volume that nobody owns of another.
	snapshot(of string) (name string, err error)
	// drop removes a volume that is not to be used again.
	drop(name string) error
	// spare lets a volume have its content twice, until what is returned is called.
	spare(name string) (end func(), err error)
}

// Snapshot is what a volume had at one moment. It belongs to nobody: a Sweep of the next
// Store removes it.
type Snapshot struct {
	Upper *os.File // the copy of the volume's

	from snapshotter
	name string
	end  func()
}

// CanSnapshot reports whether volumes can be copied.
func (s *Store) CanSnapshot() bool { _, ok := s.driver.(snapshotter); return ok }

// Snapshot copies the volume between freeze and thaw, while nothing is to write to it. What
// was written before is brought to the disk before that, for it would have to be then.
//
// What a sandbox overwrites while a copy of it is there takes room a second time, and it is
// not to fail for that: so until the copy is freed, and the kernel has noticed, it may
// have that much more.
func (v *Volume) Snapshot(freeze func() (thaw func() error, err error)) (*Snapshot, error) {
	d, ok := v.store.driver.(snapshotter)
	if !ok {
		return nil, unsupported("disk: volumes of driver %s cannot be copied", v.store.Driver())
	}
	snap := &Snapshot{from: d}
	err := v.owned(func() (err error) { snap.end, err = d.spare(v.name); return err })
	if err != nil {
		return nil, err
	}
	if err = v.copyTwice(snap, freeze); err == nil {
		err = snap.open(v.store.driver)
	}
	if err != nil {
		return nil, errors.Join(noRoomForCopy(err), snap.Close())
	}
	return snap, nil
}

func noRoomForCopy(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &dsec.Error{Code: dsec.CodeExhausted, Message: "the node's disk has no room for a copy of what the sandbox has written", Err: err}
	}
	return err
}

func (v *Volume) copyTwice(snap *Snapshot, freeze func() (func() error, error)) error {
	one := func() (name string, err error) {
		err = v.owned(func() (err error) { name, err = snap.from.snapshot(v.name); return err })
		return name, err
	}
	first, err := one()
	if err == nil {
		err = snap.from.drop(first)
	}
	if err != nil {
		return err
	}
	thaw, err := freeze()
	if err != nil {
		return err
	}
	snap.name, err = one()
	return errors.Join(err, thaw())
}

func (s *Snapshot) open(d driver) error {
	top, err := d.open(s.name)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	s.Upper, err = openUpper(top)
	return err
}

// Close frees it.
func (s *Snapshot) Close() error {
	defer s.end()
	var err error
	if s.Upper != nil {
		err = s.Upper.Close()
	}
	if s.name != "" {
		err = errors.Join(err, s.from.drop(s.name))
	}
	return err
}

// Upper opens the volume's own upper directory, to be read.
func (v *Volume) Upper() (f *os.File, err error) {
	err = v.owned(func() error {
		top, err := v.store.driver.open(v.name)
		if err != nil {
			return err
		}
		defer unix.Close(top)
		f, err = openUpper(top)
		return err
	})
	return f, err
}

func openUpper(top int) (*os.File, error) {
	fd, err := unix.Openat(top, upperName, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("disk: open %s: %w", upperName, err)
	}
	return os.NewFile(uintptr(fd), upperName), nil
}

// snapshot implements snapshotter. What the two share is charged to the one that wrote it.
func (b *btrfs) snapshot(of string) (string, error) {
	fd, err := unix.Openat(b.fd, of, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &fs.PathError{Op: "open", Path: of, Err: err}
	}
	defer unix.Close(fd)
	name := newName()
	args := volArgs{fd: int64(fd)}
	copy(args.name[:len(args.name)-1], name)
	if err := ioctl(b.fd, iocSnapCreate, &args); err != nil {
		return "", fmt.Errorf("btrfs: snapshot: %w", err)
	}
	return name, nil
}

// spareFor is how long a volume may have more than its limit once it has no copy any more.
const spareFor = 30 * time.Second

// spare implements snapshotter.
func (b *btrfs) spare(name string) (end func(), err error) {
	fd, err := unix.Openat(b.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	id, err := b.subvolID(fd)
	if err != nil {
		return nil, err
	}
	has, err := b.stored(id)
	if err != nil {
		return nil, err
	}
	sub, err := b.free.enlarge(name, 0, has)
	if err != nil {
		return nil, err
	}
	return func() {
		b.s.wg.Go(func() {
			b.cleaned(id, sub.own-has)
			if _, err := b.free.enlarge(name, sub.owner, -has); err != nil {
				b.s.log.Warn("disk: a volume may have more than its limit until the next start", "volume", name, "err", err)
			}
		})
	}, nil
}

// cleaned waits until the kernel has freed what was dropped, and the volume has no more than
// so many bytes, unless that takes too long.
func (b *btrfs) cleaned(id uint64, bytes int64) {
	for tries := range int(spareFor / cleanEvery) {
		select {
		case <-b.s.stop:
			return
		case <-time.After(cleanEvery):
		}
		if has, err := b.stored(id); tries > 2 && (err != nil || has <= bytes) {
			return
		}
	}
}

// enlarge changes what the owner of a subvolume may have, and returns what is known of it
// then. With an owner, nothing is done where that is another now.
func (r *recycler) enlarge(name string, owner uint64, by int64) (subvolume, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waitLimited()
	sub, ok := r.known[name]
	if !ok || sub.own == 0 || owner != 0 && sub.owner != owner {
		return sub, nil
	}
	held := sub.limit < sub.own
	sub.own += by
	if !held {
		if err := r.set(name, sub.id, sub.own); err != nil {
			return sub, err
		}
		sub.limit = sub.own
	}
	r.known[name] = sub
	return sub, nil
}

// waitLimited waits until no limit is being changed. The caller holds mu.
func (r *recycler) waitLimited() {
	for r.limiting != "" {
		r.limited.Wait()
	}
}

// set changes a limit. The kernel may have it wait for a commit, for which creates do not:
// it is made without their lock. Until it is done the subvolume stays its owner's. The
// caller holds mu.
func (r *recycler) set(name string, id uint64, bytes int64) error {
	r.limiting = name
	r.mu.Unlock()
	err := r.b.limit(id, bytes)
	r.mu.Lock()
	r.limiting = ""
	r.limited.Broadcast()
	return err
}
