// Package disk gives each sandbox a writable volume that holds so many bytes
// and files and no more.
//
// The words: a Store is one directory of the node and what holds its volumes;
// a Volume is the writable layer of one sandbox, a directory with two in it,
// upper and work, ready for overlayfs; a driver is a way to bound one:
//
//	project  a project quota of the file system that the Store's directory is on
//	btrfs    a subvolume of one image that all sandboxes share, with simple quotas (Linux 6.7)
//	ext4     an image per volume, without a journal, on a loop device
//	tmpfs    memory; only where asked for, since filling it is an OOM
//
// What df shows inside is the file system that holds the volume: on btrfs the
// image of all, not the sandbox's part.
//
// Each volume has a name, which its Store picks and its owner keeps where it keeps
// what it owns: Sweep removes every volume that no owner tells. Volumes survive
// the edge: a new Store on the same directory has them all. What it holds is
// scratch: nothing here is synced, and after a loss of power a Store may start
// empty.
//
// Nothing here opens a path below upper. Removal drops a whole subvolume,
// image or mount; where it must walk a tree that programs of a sandbox made
// (project), it goes by descriptors and follows no links.
package disk

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Options configure a Store.
type Options struct {
	// Dir is the Store's own directory, on the disk that volumes use. It is made
	// if it is missing.
	Dir string
	// Driver forces one; empty picks that of the volumes that are there, or else
	// the first of project, btrfs and ext4 that works.
	Driver string
	// ImageBytes is the size of the image that the btrfs driver makes, allocated
	// at once; 0 is half of what is free, at most 32 GiB. One that is there is left as it is.
	ImageBytes int64
	// MaxImageBytes is how large that image may grow where it becomes full, as
	// long as the disk of Dir keeps a tenth of it free, but at least 1 and at most
	// 16 GiB; 0 is no other bound than that, and what the image has already keeps
	// it from growing. It never shrinks.
	MaxImageBytes int64
	// Share is the part of the disk that all volumes share, in percent, that one
	// may have; see ration.go. 0 is 80, 100 is no bound but its own limit.
	Share int
	Log   *slog.Logger
}

// Request is what a volume must hold.
type Request struct {
	Bytes  int64 // above 0
	Inodes int64 // 0 is no limit of their own
	// UID and GID are the host's ids of root inside the sandbox; upper is theirs.
	UID, GID int
}

// Usage is what a volume holds.
type Usage struct {
	Bytes  int64
	Inodes int64 // dsec.NotCounted where the driver does not count them
}

// Store makes volumes.
type Store struct {
	opts   Options
	root   *os.Root // of Dir
	driver driver
	log    *slog.Logger
	// starved is nil where the volumes share no disk.
	starved *starvation

	wg   sync.WaitGroup // removals that go on in the background
	stop chan struct{}
}

// driver is one way to bound a volume. All are safe for use by many.
type driver interface {
	name() string
	// inodes tells whether a limit on files is kept apart from that on bytes.
	inodes() bool
	// create makes an empty volume, or takes one that was emptied, and returns its
	// name and a descriptor of its top directory. An error with a name wants that
	// removed.
	create(ctx context.Context, req Request) (name string, top int, err error)
	// open returns a descriptor of a volume's top directory; ENOENT if there is none.
	open(name string) (int, error)
	usage(name string) (Usage, error)
	// remove makes the volume go from list at once; space may come back later.
	remove(ctx context.Context, name string) error
	// list has volumes in any state, half-made ones too.
	list() ([]string, error)
	// close ends what the driver runs, and leaves volumes as they are. Where
	// there are none, no mount is left either.
	close() error
	// destroy removes what the driver made for all volumes together.
	destroy() error
}

// drivers in the order in which they are tried. A probe's error has code
// unsupported where the host cannot; any other error ends the search, since it
// would hide a fault.
var drivers = []struct {
	name string
	open func(*Store) (driver, error)
}{
	{"project", openProject},
	{"btrfs", openBtrfs},
	{"ext4", openExt4},
	{"tmpfs", openTmpfs},
}

// Open opens the Store in opts.Dir, with the volumes that are in it.
func Open(opts Options) (*Store, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(opts.Dir)
	if err != nil {
		return nil, err
	}
	s := &Store{opts: opts, root: root, log: opts.Log, stop: make(chan struct{})}
	want := opts.Driver
	if want == "" {
		want = s.present()
	}
	var notes []error
	for _, d := range drivers {
		if want != d.name && (want != "" || d.name == "tmpfs") {
			continue
		}
		s.driver, err = d.open(s)
		if err == nil {
			s.log.Info("disk", "driver", d.name, "notes", errors.Join(notes...))
			if s.starved, err = openStarvation(s); err != nil {
				return nil, errors.Join(err, s.Close())
			}
			return s, nil
		}
		err = fmt.Errorf("disk: %s: %w", d.name, err)
		if dsec.CodeOf(err) != dsec.CodeUnsupported {
			_ = root.Close()
			return nil, err
		}
		notes = append(notes, err)
	}
	_ = root.Close()
	if len(notes) == 0 {
		return nil, dsec.Invalid("disk.driver", "want project, btrfs, ext4 or tmpfs, have %q", opts.Driver)
	}
	return nil, dsec.Errorf(dsec.CodeUnsupported, "disk: no driver works here: %w", errors.Join(notes...))
}

// present is the driver that made what is in the directory: a host that has
// learned of a better one meanwhile must not lose its volumes.
func (s *Store) present() string {
	for _, d := range []struct{ file, driver string }{
		{imageName, "btrfs"}, {imagesName, "ext4"}, {trashName, "project"},
	} {
		if _, err := s.root.Lstat(d.file); err == nil {
			return d.driver
		}
	}
	return ""
}

// Driver names the driver in use.
func (s *Store) Driver() string { return s.driver.name() }

// CountsInodes tells whether Request.Inodes is enforced by itself. On btrfs it
// is not: files take bytes of the volume, 0.36 KiB for an empty one.
func (s *Store) CountsInodes() bool { return s.driver.inodes() }

// newName makes a name that no volume has.
func newName() string { return rand.Text() }

// validName is what can be a volume's name in a directory.
func validName(name string) bool {
	return 0 < len(name) && len(name) < 64 && !strings.ContainsFunc(name, func(r rune) bool {
		return !('A' <= r && r <= 'Z' || 'a' <= r && r <= 'z' || '0' <= r && r <= '9')
	})
}

// Volume is one sandbox's. It holds no descriptor.
type Volume struct {
	store *Store
	name  string

	mu      sync.Mutex
	removed bool // what has the name now is another's
	held    span // when it was held, if it was, once it is no more
}

// Create makes an empty volume. Until its owner has its name on record, it is
// nobody's: a Sweep of the next Store removes it.
func (s *Store) Create(ctx context.Context, req Request) (*Volume, error) {
	if req.Bytes <= 0 {
		return nil, dsec.Invalid("limits.disk_bytes", "want more than 0, have %d", req.Bytes)
	}
	if req.Inodes < 0 {
		return nil, dsec.Invalid("limits.disk_inodes", "want 0 or more, have %d", req.Inodes)
	}
	if err := s.Admit(); err != nil {
		return nil, err
	}
	name, fd, err := s.driver.create(ctx, req)
	v := &Volume{store: s, name: name}
	if err == nil {
		err = populate(fd, req)
		_ = unix.Close(fd)
	}
	if err != nil && name != "" {
		err = errors.Join(err, v.Remove(context.WithoutCancel(ctx)))
	}
	if err != nil {
		return nil, noRoom(err)
	}
	return v, nil
}

// populate makes the two directories in a volume that nobody has seen yet. What
// was emptied has its work directory still: overlayfs uses it and shows it to
// nobody.
func populate(fd int, req Request) error {
	if err := unix.Mkdirat(fd, workName, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("disk: mkdir %s: %w", workName, err)
	}
	if err := unix.Mkdirat(fd, upperName, upperMode); err != nil {
		return fmt.Errorf("disk: mkdir %s: %w", upperName, err)
	}
	// mkdir is subject to the umask; to look is much cheaper than to set.
	var st unix.Stat_t
	err := unix.Fstatat(fd, upperName, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&0o7777 != upperMode {
		err = unix.Fchmodat(fd, upperName, upperMode, 0)
	}
	if err != nil {
		return fmt.Errorf("disk: mode of %s: %w", upperName, err)
	}
	if err := unix.Fchownat(fd, upperName, req.UID, req.GID, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("disk: chown %s: %w", upperName, err)
	}
	return nil
}

const (
	upperName = "upper"
	upperMode = 0o755
	workName  = "work"
)

// Recover returns the volume of that name, made for so many bytes, after a restart.
// Its error has code lost where there is none.
func (s *Store) Recover(name string, bytes int64) (*Volume, error) {
	if !validName(name) {
		return nil, dsec.Errorf(dsec.CodeLost, "disk: the name of the sandbox's volume is damaged")
	}
	v := &Volume{store: s, name: name}
	fd, err := v.Open()
	if err != nil {
		return nil, err
	}
	if err := unix.Close(fd); err != nil {
		return nil, err
	}
	if d, ok := s.driver.(rationer); ok {
		held, err := d.recovered(name, bytes)
		if held && s.starved != nil {
			s.starved.holdAgain(name)
		}
		return v, err
	}
	return v, nil
}

// Name is what Recover finds the volume by.
func (v *Volume) Name() string { return v.name }

// Open returns a descriptor, O_PATH|O_DIRECTORY|O_CLOEXEC, of the directory that
// has upper and work in it. The caller closes it.
func (v *Volume) Open() (fd int, err error) {
	err = v.owned(func() (err error) { fd, err = v.store.driver.open(v.name); return err })
	if err != nil {
		return -1, err
	}
	return fd, nil
}

// Usage tells what the volume holds now.
func (v *Volume) Usage() (u Usage, err error) {
	err = v.owned(func() (err error) { u, err = v.store.driver.usage(v.name); return err })
	return u, err
}

// owned calls f while the name is this volume's.
func (v *Volume) owned(f func() error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	err := fs.ErrNotExist
	if !v.removed {
		err = f()
	}
	if errors.Is(err, fs.ErrNotExist) {
		return dsec.Errorf(dsec.CodeLost, "disk: the sandbox's volume is gone")
	}
	return err
}

// noRoom makes the error of a full disk one that a user may see.
func noRoom(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &dsec.Error{Code: dsec.CodeExhausted, Field: "limits.disk_bytes", Message: "the node's disk has no room for the volume", Err: err}
	}
	return err
}

// Remove removes the volume, whose owner has its name on record no more: soon
// another may have it. It may be called again.
func (v *Volume) Remove(ctx context.Context) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.removed {
		return nil
	}
	if s := v.store.starved; s != nil {
		if p, ok := s.letGo(v.name); ok {
			v.held = p
		}
	}
	err := v.store.remove(ctx, v.name)
	v.removed = err == nil
	return err
}

func (s *Store) remove(ctx context.Context, name string) error {
	err := s.driver.remove(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Sweep removes every volume whose name is not in keep, whatever state a crash
// left it in.
func (s *Store) Sweep(ctx context.Context, keep map[string]bool) error {
	names, err := s.driver.list()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if !keep[name] {
			if s.starved != nil {
				s.starved.letGo(name)
			}
			errs = append(errs, s.remove(ctx, name))
		}
	}
	return errors.Join(errs...)
}

// Close waits for what removals left to do. Volumes and their mounts stay for
// the next Store, and for the sandboxes that use them.
func (s *Store) Close() error {
	close(s.stop)
	s.wg.Wait()
	return errors.Join(s.driver.close(), s.root.Close())
}

// Destroy is Close, and the end of the Store: image, mounts and all. No volume
// may be in use.
func (s *Store) Destroy(ctx context.Context) error {
	err := s.Sweep(ctx, nil)
	close(s.stop)
	s.wg.Wait()
	for _, name := range []string{starvedName, starvedName + ".new", heldName, heldName + ".new"} {
		if rerr := s.root.Remove(name); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return errors.Join(err, s.driver.close(), s.driver.destroy(), s.root.Close())
}

// unsupported marks a probe's answer.
func unsupported(format string, args ...any) error {
	return dsec.Errorf(dsec.CodeUnsupported, format, args...)
}

// openDirAt opens a directory below a descriptor for its own sake: no link, no
// other mount than is at the name itself.
func openDirAt(dir int, name string) (int, error) {
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return fd, nil
}

// path is a path in the Store's directory, for mount(2) and programs.
func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.opts.Dir}, elem...)...)
}

// mounted tells whether something is mounted at a path, and its file system type.
func mounted(dir string) (magic int64, yes bool, err error) {
	var here, above unix.Stat_t
	if err := unix.Lstat(dir, &here); err != nil {
		return 0, false, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	if err := unix.Lstat(filepath.Dir(dir), &above); err != nil {
		return 0, false, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, false, err
	}
	return st.Type, here.Dev != above.Dev, nil
}

// mount mounts and keeps the mount from spreading to other namespaces.
func mount(source, dir, fstype string, options string) error {
	if err := unix.Mount(source, dir, fstype, unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOATIME, options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", fstype, dir, err)
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		return errors.Join(fmt.Errorf("make %s private: %w", dir, err), unix.Unmount(dir, unix.MNT_DETACH))
	}
	return nil
}
