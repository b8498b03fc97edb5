package disk

import (
	"errors"
	"maps"
	"sync"

	"golang.org/x/sys/unix"
)

// recycler keeps emptied subvolumes for the next volumes. To drop one makes the
// kernel commit a transaction for it alone (to settle its quota), ten times the
// cost of the few unlinks that empty a volume in which little was done; what
// more was done in is dropped.
//
// All inodes of an emptied volume are new but for those of the top directory and
// of work, which no sandbox sees: so nothing outlives it that a sandbox could
// find, no data, owner, attribute or lock. Only the numbers of inodes go on
// counting. A subvolume keeps its name when it goes from one owner to the next:
// to rename one costs the kernel as much as to make a directory and remove it.
type recycler struct {
	b *btrfs

	dirty chan string
	done  chan struct{} // closed when the last of dirty is dealt with

	mu     sync.Mutex
	known  map[string]subvolume // whosever, that this Store has made or recovered
	kept   map[string]bool      // those that are nobody's: to be emptied, or free
	free   []string
	closed bool
	owners uint64 // so far, of all
	// limiting is the one whose limit is being changed; limited wakes who waits for the end of that.
	limiting string
	limited  *sync.Cond
}

// subvolume is what is known of one.
type subvolume struct {
	id    uint64 // 0 if that is not known yet
	limit int64  // that is set, in bytes
	own   int64  // that its owner has: more than limit while it is held; 0 if it is nobody's
	owner uint64 // tells one from the next, whose limits may be the same
}

const (
	// maxFree bounds the subvolumes that are kept, emptied or not yet.
	maxFree = 32
	// maxEntries and maxResidue are what a volume may hold to be emptied.
	// Data that is freed is the volume's until the next commit.
	maxEntries = 64
	maxResidue = 256 << 10
)

func newRecycler(b *btrfs) *recycler {
	r := &recycler{
		b: b, dirty: make(chan string, maxFree), done: make(chan struct{}),
		known: map[string]subvolume{}, kept: map[string]bool{},
	}
	r.limited = sync.NewCond(&r.mu)
	go func() {
		defer close(r.done)
		for name := range r.dirty {
			r.empty(name)
		}
	}()
	return r
}

// take gives an emptied subvolume away. It reports false where there is none.
func (r *recycler) take() (name string, sub subvolume, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.free) == 0 {
		return "", sub, false
	}
	name = r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	delete(r.kept, name)
	return name, r.known[name], true
}

// give notes whose limits a subvolume has now.
func (r *recycler) give(name string, sub subvolume) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.owners++
	sub.owner = r.owners
	r.known[name] = sub
}

// put takes a subvolume that is disowned. It reports false where it does not want it.
func (r *recycler) put(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept[name] {
		return true
	}
	if r.closed || len(r.free)+len(r.dirty) >= maxFree || !validName(name) {
		return false
	}
	r.kept[name] = true
	r.dirty <- name // there is room: only put sends, and holds the lock
	return true
}

// forget is told of a subvolume that is dropped.
func (r *recycler) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.kept, name)
	delete(r.known, name)
}

// empty makes a subvolume a free one, or drops it.
func (r *recycler) empty(name string) {
	ok, err := r.small(name)
	r.mu.Lock()
	if ok = ok && err == nil && !r.closed; ok {
		r.free = append(r.free, name)
	}
	r.mu.Unlock()
	if !ok {
		err = errors.Join(err, r.b.drop(name))
	}
	if err != nil {
		r.b.s.log.Warn("disk: a volume is not used again", "err", err)
	}
}

// small empties a subvolume, if that is little work.
func (r *recycler) small(name string) (bool, error) {
	fd, err := unix.Openat(r.b.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	r.mu.Lock()
	id := r.known[name].id
	r.mu.Unlock()
	if id == 0 { // an earlier Store's
		if id, err = r.b.subvolID(fd); err != nil {
			return false, err
		}
	}
	if used, err := r.b.quota(id, "referenced"); err != nil || used > maxResidue {
		return false, err
	}
	return emptyVolume(fd, &budget{maxEntries, maxResidue})
}

// emptyVolume removes everything from a volume but an empty work directory.
//
// What an overlay leaves in work is always the same, and to list it costs half as
// much again as to remove it. So it is removed unseen, by paths in which no sandbox
// has a say, and a look at what is left tells whether there was more.
func emptyVolume(top int, left *budget) (bool, error) {
	_ = unix.Unlinkat(top, workName+"/work/incompat/volatile/dirty", 0)
	for _, dir := range []string{"/work/incompat/volatile", "/work/incompat", "/work"} {
		_ = unix.Unlinkat(top, workName+dir, unix.AT_REMOVEDIR)
	}
	err := unix.Unlinkat(top, upperName, unix.AT_REMOVEDIR)
	if err == unix.ENOTEMPTY {
		if ok, err := emptyChild(top, upperName, left); !ok || err != nil {
			return false, err
		}
		_ = unix.Unlinkat(top, upperName, unix.AT_REMOVEDIR)
	}
	if yes, err := bare(top); yes || err != nil {
		return yes, err
	}
	return emptySmall(top, left)
}

// bare tells whether a volume has nothing but an empty work directory: on btrfs
// the size of a directory is twice the length of all names in it.
func bare(top int) (bool, error) {
	var all, work unix.Stat_t
	if err := unix.Fstat(top, &all); err != nil {
		return false, err
	}
	err := unix.Fstatat(top, workName, &work, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return all.Size == 0, nil
	}
	return err == nil && all.Size == 2*int64(len(workName)) && work.Size == 0 && work.Mode == unix.S_IFDIR|0o700 && work.Uid == 0, err
}

// budget is what may still be found in a volume. What was written lately is in
// no quota's figure yet, so the files are asked, too.
type budget struct {
	entries int
	bytes   int64
}

// emptySmall removes everything in a directory. It reports false once there is
// more than is left. A tree is as deep as it has entries at most, and nobody
// else uses it any more.
func emptySmall(dir int, left *budget) (bool, error) {
	names, err := entries(dir, left.entries)
	if err != nil {
		return false, err
	}
	if left.entries -= len(names); left.entries < 0 {
		return false, nil
	}
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return false, err
		}
		if left.bytes -= st.Size; left.bytes < 0 {
			return false, nil
		}
		how := 0
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			if ok, err := emptyChild(dir, name, left); !ok || err != nil {
				return false, err
			}
			how = unix.AT_REMOVEDIR
		}
		if err := unix.Unlinkat(dir, name, how); err != nil {
			return false, err
		}
	}
	return true, nil
}

func emptyChild(dir int, name string, left *budget) (bool, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	return emptySmall(fd, left)
}

// entries lists the names in a directory, and stops when it has more than limit.
func entries(dir, limit int) (names []string, err error) {
	buf := make([]byte, 4<<10)
	for len(names) <= limit {
		n, err := unix.ReadDirent(dir, buf)
		if err != nil || n == 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
	return names, nil
}

// close drops what is kept.
func (r *recycler) close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	close(r.dirty)
	r.mu.Unlock()
	<-r.done
	var errs []error
	r.mu.Lock()
	free := r.free
	r.free = nil
	r.mu.Unlock()
	for _, name := range free {
		errs = append(errs, r.b.drop(name))
	}
	return errors.Join(errs...)
}

// owns tells whether a subvolume is nobody's and kept here.
func (r *recycler) owns(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kept[name]
}

// snapshot has the names of all that are kept.
func (r *recycler) snapshot() map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.kept)
}
