package disk

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// recycler keeps emptied subvolumes for the next volumes. To drop one makes the
// kernel commit a transaction for it alone (to settle its quota), ten times the
// cost of the few unlinks that empty a volume in which little was done; what
// more was done in is dropped.
//
// All inodes of an emptied volume are new, so that nothing of them outlives it:
// no data, owner, attribute or lock. Only the numbers of inodes go on counting.
type recycler struct {
	b      *btrfs
	prefix string // of the names of this Store's subvolumes that are nobody's

	dirty chan string
	done  chan struct{} // closed when the last of dirty is dealt with

	mu     sync.Mutex
	free   []string
	closed bool
}

const (
	// freePrefix is in no sandbox's ID.
	freePrefix = "free-"
	// maxFree bounds the subvolumes that are kept, emptied or not yet.
	maxFree = 32
	// maxEntries and maxResidue are what a volume may hold to be emptied.
	// Data that is freed is the volume's until the next commit.
	maxEntries = 64
	maxResidue = 256 << 10
)

func newRecycler(b *btrfs) *recycler {
	r := &recycler{b: b, prefix: freePrefix + rand.Text()[:8] + "-", dirty: make(chan string, maxFree), done: make(chan struct{})}
	go func() {
		defer close(r.done)
		for name := range r.dirty {
			r.empty(name)
		}
	}()
	return r
}

// take gives an emptied subvolume a name. It reports false where there is none.
func (r *recycler) take(id string) (bool, error) {
	r.mu.Lock()
	if len(r.free) == 0 {
		r.mu.Unlock()
		return false, nil
	}
	name := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.mu.Unlock()
	err := renameAt(r.b.fd, name, id)
	if err != nil {
		return false, errors.Join(fmt.Errorf("btrfs: rename subvolume: %w", err), r.b.drop(name))
	}
	return true, nil
}

// put takes a subvolume away from its name. It reports false where it does not
// want it.
func (r *recycler) put(id string) (bool, error) {
	if strings.HasPrefix(id, freePrefix) { // what an earlier Store left
		return false, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || len(r.free)+len(r.dirty) >= maxFree {
		return false, nil
	}
	name := r.prefix + rand.Text()
	if renameAt(r.b.fd, id, name) != nil {
		return false, nil // a full image has no room for a name; to drop one works
	}
	r.dirty <- name // there is room: only put sends, and holds the lock
	return true, nil
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
	if used, err := r.b.referenced(fd); err != nil || used > maxResidue {
		return false, err
	}
	return emptySmall(fd, &budget{maxEntries, maxResidue})
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
	for _, name := range r.free {
		errs = append(errs, r.b.drop(name))
	}
	r.free = nil
	return errors.Join(errs...)
}

// owns tells whether a name is of a subvolume that is kept here.
func (r *recycler) owns(name string) bool { return strings.HasPrefix(name, r.prefix) }
