package fake

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

var _ backend.Snapshotter = (*Instance)(nil)

// Snapshot implements backend.Snapshotter: a directory with all that is in the file
// system, owned by this process's user, who is root inside.
func (i *Instance) Snapshot(ctx context.Context) (backend.Snapshot, error) {
	if i.b.opts.OnSnapshot != nil {
		if err := i.b.opts.OnSnapshot(ctx, i.id); err != nil {
			return backend.Snapshot{}, err
		}
	}
	if i.dead() {
		return backend.Snapshot{}, dsec.Errorf(dsec.CodeLost, "sandbox %s has ended", i.id)
	}
	begun := time.Now()
	dir, err := i.b.world.makeCopy()
	if err != nil {
		return backend.Snapshot{}, err
	}
	upper, err := i.service().fs.copyTo(dir)
	if err != nil {
		return backend.Snapshot{}, errors.Join(err, i.b.world.removeCopy(dir))
	}
	frozen := time.Since(begun)
	return backend.Snapshot{
		Upper: upper, Owner: uint32(os.Getuid()), Frozen: func() time.Duration { return frozen },
		Close: func() error { return errors.Join(upper.Close(), i.b.world.removeCopy(dir)) },
	}, nil
}

func (w *World) makeCopy() (dir string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if dir, err = os.MkdirTemp("", "dsec-fake-"); err == nil {
		w.copies[dir] = true
	}
	return dir, err
}

func (w *World) removeCopy(dir string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.copies, dir)
	return os.RemoveAll(dir)
}

// removeCopies removes what an earlier edge has left.
func (w *World) removeCopies() (err error) {
	w.mu.Lock()
	dirs := slices.Collect(maps.Keys(w.copies))
	w.mu.Unlock()
	for _, dir := range dirs {
		err = errors.Join(err, w.removeCopy(dir))
	}
	return err
}

// copyTo writes the tree below a directory.
func (f *fileSystem) copyTo(dir string) (*os.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	written := &node{entries: maps.Clone(f.root.entries)}
	for _, name := range []string{"dev", "proc", "sys"} {
		delete(written.entries, name) // of the platform's
	}
	if err := written.copyBelow(root); err != nil {
		return nil, err
	}
	return os.Open(dir)
}

func (n *node) copyBelow(dir *os.Root) error {
	for name, e := range n.entries {
		if err := e.copyAs(dir, name); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) copyAs(dir *os.Root, name string) error {
	switch n.kind {
	case kindSymlink:
		return dir.Symlink(n.target, name)
	case kindFile:
		if err := dir.WriteFile(name, n.data, 0o600); err != nil {
			return err
		}
	case kindDir:
		if err := dir.Mkdir(name, 0o700); err != nil {
			return err
		}
		below, err := dir.OpenRoot(name)
		if err != nil {
			return err
		}
		err = errors.Join(n.copyBelow(below), below.Close())
		if err != nil {
			return err
		}
	}
	mode := os.FileMode(n.mode & 0o777)
	for bit, of := range map[uint32]os.FileMode{0o4000: os.ModeSetuid, 0o2000: os.ModeSetgid, 0o1000: os.ModeSticky} {
		if n.mode&bit != 0 {
			mode |= of
		}
	}
	return errors.Join(dir.Chmod(name, mode), dir.Chtimes(name, n.modified, n.modified))
}
