package disk

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// recovered implements rationer. The volume may be held by an earlier Store.
func (b *btrfs) recovered(name string, bytes int64) (held bool, err error) {
	fd, err := unix.Openat(b.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("btrfs: open subvolume: %w", err)
	}
	defer unix.Close(fd)
	id, err := b.subvolID(fd)
	if err != nil {
		return false, err
	}
	limit, err := b.quota(id, "max_referenced")
	if err != nil {
		return false, err
	}
	if limit > bytes { // it had a copy
		if err := b.limit(id, bytes); err != nil {
			return false, err
		}
		limit = bytes
	}
	b.free.give(name, subvolume{id: id, limit: limit, own: bytes})
	return limit < bytes, nil
}

// ration implements rationer.
func (b *btrfs) ration(part int64, begin func(name string)) (held []string, err error) {
	var errs []error
	for name, sub := range b.free.beyond(part) {
		now, err := b.hold(name, sub, part, begin)
		if errors.Is(err, unix.ENOENT) {
			continue // it was removed meanwhile
		}
		errs = append(errs, err)
		if now < sub.own {
			held = append(held, name)
		}
	}
	return held, errors.Join(errs...)
}

// hold sets the limit of a subvolume that may have part and still grow, and returns
// what it is.
func (b *btrfs) hold(name string, sub subvolume, part int64, begin func(name string)) (int64, error) {
	want := sub.own
	if want > part {
		has, err := b.stored(sub.id)
		if err != nil {
			return sub.limit, err
		}
		switch {
		case sub.limit < sub.own && has > part-part/8: // let go of with some distance
			return sub.limit, nil
		case has > part:
			want = min(want, has)
		}
	}
	if want == sub.limit {
		return want, nil
	}
	return b.free.limit(name, sub, want, begin)
}

// disown implements rationer.
func (b *btrfs) disown(name string) { b.free.disown(name) }

// stored is what a subvolume has on the disk and on its way there, in bytes.
func (b *btrfs) stored(id uint64) (int64, error) {
	has, err := b.quota(id, "referenced")
	if err != nil {
		return 0, err
	}
	coming, err := b.quota(id, "rsv_data")
	return has + coming, err
}

// beyond has the subvolumes whose owners' limits are more than so much, which is
// none but on a disk that is nearly full, and those that are held.
func (r *recycler) beyond(bytes int64) map[string]subvolume {
	r.mu.Lock()
	defer r.mu.Unlock()
	some := map[string]subvolume{}
	for name, sub := range r.known {
		if sub.own > bytes || sub.limit < sub.own {
			some[name] = sub
		}
	}
	return some
}

// limit changes the limit of a subvolume, unless it has become another's meanwhile,
// and returns what that is. begin is called first where its owner is to have less.
func (r *recycler) limit(name string, sub subvolume, bytes int64, begin func(name string)) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waitLimited()
	if r.known[name] != sub {
		return sub.own, nil
	}
	if bytes < sub.own {
		begin(name)
	}
	if err := r.set(name, sub.id, bytes); err != nil {
		return sub.limit, err
	}
	sub.limit = bytes
	r.known[name] = sub
	return bytes, nil
}

// disown notes that a subvolume is nobody's, once no change of its limit is under way.
func (r *recycler) disown(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.limiting == name {
		r.limited.Wait()
	}
	if sub, ok := r.known[name]; ok {
		sub.own = 0
		r.known[name] = sub
	}
}
