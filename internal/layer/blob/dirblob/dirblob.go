// Package dirblob keeps blobs as files in a directory: of a local disk, or of a
// file system that all nodes share (3FS, NFS, JuiceFS, CephFS).
//
// A blob's key is its path. A blob is written under another name, synced, and
// then gets its own by one step that replaces nothing, so that no reader on any
// host sees part of it. What dead writers leave is swept.
//
// A shared file system may hang or come back as another mount. So no call waits
// for a system call longer than its context or the store's timeout, how many wait
// is bounded, and a directory whose handle went stale is opened anew.
package dirblob

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// Store is a blob.Store, blob.Opener and blob.Linker.
type Store struct {
	path   string
	writer string // how the names of this process's unfinished files begin
	calls  calls
	files  files
	noMove atomic.Bool    // renameat2 cannot do what is asked of it here
	late   sync.WaitGroup // what frees something for which no caller waits

	mu   sync.Mutex
	root *os.File // one that was replaced is closed when nobody refers to it any more
	id   string   // what the directory's idFile holds; empty where it could not be written
}

var (
	_ blob.Store  = (*Store)(nil)
	_ blob.Opener = (*Store)(nil)
	_ blob.Linker = (*Store)(nil)
	_ blob.Rooted = (*Store)(nil)

	_ blob.Reopener = (*Store)(nil)
)

// Driver opens dir:/path.
var Driver = blob.Driver{
	Scheme: "dir",
	Open: func(_ context.Context, u *url.URL, _ blob.Credentials) (blob.Store, error) {
		if !path.IsAbs(u.Path) || u.Host != "" || u.Opaque != "" {
			return nil, dsec.Invalid("store", "want an absolute path: dir:/path")
		}
		return Open(u.Path)
	},
}

const (
	tempDir = ".tmp"     // unfinished files; no key begins with a dot
	idFile  = ".dsec-id" // tells this directory from one that is in its place

	dirMode  = 0o700
	fileMode = 0o600
)

// Open opens the store in dir, which is made if missing, and sweeps it. That it is
// read-only or full is no error: Put will tell.
func Open(dir string) (*Store, error) {
	writer, err := writerName()
	if err != nil {
		return nil, dsec.Errorf(dsec.CodeInternal, "blob store: this process has no name: %w", err)
	}
	s := &Store{path: dir, writer: writer, calls: newCalls(callTimeout)}
	ctx := context.Background()
	_, err = call(ctx, &s.calls, callTimeout, func() (struct{}, error) { return struct{}{}, s.prepare() }, nil)
	if err != nil {
		return nil, err
	}
	if err := s.sweepTemps(ctx); err != nil && !noRoom(err) {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// prepare makes what a store has beside its blobs, and opens it.
func (s *Store) prepare() error {
	if err := os.MkdirAll(s.path, dirMode); err != nil {
		return storeError(writing, err)
	}
	root, err := openRoot(s.path)
	if err != nil {
		return storeError(reading, err)
	}
	err = mkdir(root, tempDir)
	if err == nil {
		err = s.writeID(root)
	}
	if err != nil && !isReadOnly(err) {
		return storeError(writing, errors.Join(err, root.Close()))
	}
	if s.id, err = readID(root); err != nil {
		return storeError(reading, errors.Join(err, root.Close()))
	}
	s.root = root
	return nil
}

// Close gives the directory up: its file system can be unmounted, unless a call
// still waits for it. No call may follow.
func (s *Store) Close() error {
	idle := s.calls.end()
	for _, f := range s.files.all() {
		if !idle {
			s.closeFiles([]*os.File{f})
		} else if err := f.Close(); err != nil {
			return storeError(reading, err)
		}
	}
	if !idle {
		return nil // the directory is closed once nobody refers to it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.root.Close()
}

// dir is the open directory of the store.
func (s *Store) dir() *os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.root
}

// withDir calls f with the store's directory, and once more where its handle went
// stale and the directory could be opened anew.
func (s *Store) withDir(f func(root *os.File) error) error {
	root := s.dir()
	err := f(root)
	if isStale(err) && s.reopen(root) {
		root = s.dir()
		err = f(root)
	}
	runtime.KeepAlive(root)
	return err
}

// reopen puts a new handle in the place of old, unless that was done already. It
// reports whether there is one: what is at the store's path now may be another
// directory, as where a file system is no longer mounted.
func (s *Store) reopen(old *os.File) bool {
	if s.dir() != old {
		return true
	}
	root, err := openRoot(s.path)
	if err != nil {
		return false
	}
	if id, err := readID(root); err != nil || id != s.id {
		_ = root.Close()
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.root == old {
		s.root = root
	}
	return true
}

// Stat implements blob.Store.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := blob.CheckKey(key); err != nil {
		return blob.Info{}, err
	}
	return call(ctx, &s.calls, s.calls.timeout, func() (info blob.Info, err error) {
		err = s.withDir(func(root *os.File) error {
			info, err = stat(root, key)
			return err
		})
		return info, storeError(reading, err)
	}, nil)
}

func stat(root *os.File, key string) (blob.Info, error) {
	f, err := openBeneath(root, key, unix.O_PATH, 0)
	if err != nil {
		return blob.Info{}, err
	}
	defer f.Close()
	return infoOf(f, key)
}

// infoOf tells of an open blob, and that it is none.
func infoOf(f *os.File, key string) (blob.Info, error) {
	var st unix.Stat_t
	if err := retry(func() error { return unix.Fstat(int(f.Fd()), &st) }); err != nil {
		return blob.Info{}, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return blob.Info{}, errDirectory
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return blob.Info{}, errNotABlob
	}
	return infoFrom(key, &st), nil
}

func infoFrom(key string, st *unix.Stat_t) blob.Info {
	return blob.Info{Key: key, Size: st.Size, Created: time.Unix(st.Mtim.Unix()).UTC()}
}

// Open implements blob.Opener. It waits as long as the store's timeout.
func (s *Store) Open(key string) (*os.File, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	return call(context.Background(), &s.calls, s.calls.timeout, func() (f *os.File, err error) {
		err = s.withDir(func(root *os.File) error {
			f, err = openBlob(root, key, 0)
			return err
		})
		return f, storeError(reading, err)
	}, closeLate)
}

// Root implements blob.Rooted. It asks the file system nothing.
func (s *Store) Root() (*os.File, error) {
	root := s.dir()
	defer runtime.KeepAlive(root)
	fd, err := unix.FcntlInt(root.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, dsec.Errorf(dsec.CodeInternal, "blob store: %w", err)
	}
	return os.NewFile(uintptr(fd), root.Name()), nil
}

// OpenIn opens a blob below what Root gave, with flags beside those for reading.
// The error is that of the system call.
func OpenIn(root *os.File, key string, flags int) (*os.File, error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, err
	}
	return openBlob(root, key, uint64(flags))
}

func closeLate(f *os.File) {
	if f != nil {
		_ = f.Close()
	}
}

// openBlob opens a blob and nothing else: a pipe would not even be waited for.
func openBlob(root *os.File, key string, flags uint64) (*os.File, error) {
	f, err := openBeneath(root, key, unix.O_RDONLY|unix.O_NONBLOCK|flags, 0)
	if err != nil {
		return nil, err
	}
	if _, err := infoOf(f, key); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	s.closeFiles(s.files.drop(key, nil))
	_, err := call(ctx, &s.calls, s.calls.timeout, func() (struct{}, error) {
		err := s.withDir(func(root *os.File) error { return remove(root, key) })
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			err = nil
		}
		return struct{}{}, storeError(writing, err)
	}, nil)
	return err
}

// remove is durable, so that of two blobs the one that was deleted first is not
// there again, after a loss of power, without the other. Its directory goes with the
// last blob in it.
func remove(root *os.File, key string) error {
	parent, name, err := openParent(root, key)
	if err != nil {
		return err
	}
	defer parent.Close()
	err = retry(func() error { return unix.Unlinkat(int(parent.Fd()), name, 0) })
	if errors.Is(err, unix.EISDIR) {
		return nil // the directory of other keys is no blob
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err := syncDir(parent); err != nil { // also where another one's Delete has not come to this
		return err
	}
	removeEmpty(root, path.Dir(key))
	return nil
}
