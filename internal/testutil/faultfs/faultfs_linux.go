// Package faultfs is a FUSE file system that shows a directory as a bad network
// would: late, with errors, or not at all. It is for tests and measurements.
package faultfs

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Op is a request of the kernel's to a file system.
type Op string

// The requests that a Rule is asked of.
const (
	Lookup   Op = "lookup"
	GetAttr  Op = "getattr"
	SetAttr  Op = "setattr"
	Mkdir    Op = "mkdir"
	Create   Op = "create"
	Tmpfile  Op = "tmpfile"
	Open     Op = "open"
	Read     Op = "read"
	Write    Op = "write"
	Flush    Op = "flush"
	Fsync    Op = "fsync"
	FsyncDir Op = "fsyncdir"
	Unlink   Op = "unlink"
	Rename   Op = "rename"
	Rename2  Op = "rename2" // with flags, such as RENAME_NOREPLACE
	Link     Op = "link"
	OpenDir  Op = "opendir"
	ReadDir  Op = "readdir"
	StatFS   Op = "statfs"
)

// Fault is what a request meets. Of several the delay comes first.
type Fault struct {
	Delay time.Duration
	// Hang keeps the request until Set or Close; not even a signal ends it.
	Hang  bool
	Errno syscall.Errno
	// Lie has a read give other bytes than there are: the first of them is not right.
	Lie bool
	// Done has the request done before it fails with Errno, as where an answer is
	// lost and the question, which a client repeats, finds nothing left to do.
	Done bool
}

// Rule says which fault a request meets. It is called from many goroutines.
type Rule func(Op) Fault

// FS is a mounted file system.
type FS struct {
	dir    string
	server *fuse.Server

	mu      sync.Mutex
	rule    Rule
	changed chan struct{} // closed by Set
	count   map[Op]int64
	read    int64
}

// Mount shows backing at dir, both directories that are there. It needs root.
// Nothing is cached: each path is looked up and each byte read by a request.
func Mount(dir, backing string) (*FS, error) {
	f := &FS{dir: dir, changed: make(chan struct{}), count: map[Op]int64{}}
	root, err := fs.NewLoopbackRoot(backing)
	if err != nil {
		return nil, fmt.Errorf("show %s: %w", backing, err)
	}
	raw := fs.NewNodeFS(root, &fs.Options{})
	f.server, err = fuse.NewServer(&faulty{RawFileSystem: raw, fs: f}, dir, &fuse.MountOptions{
		FsName: "dsec-faultfs", Name: "dsec-faultfs", AllowOther: true, DirectMountStrict: true, DisableReadDirPlus: true,
		MaxWrite:      1 << 20, // as network file systems have, NFS or what libfuse serves
		DisableSplice: true,    // whose pipes stay
		MaxStackDepth: -1,      // else the kernel would read and write backing by itself
	})
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", dir, err)
	}
	go f.server.Serve()
	if err := f.server.WaitMount(); err != nil {
		return nil, errors.Join(fmt.Errorf("mount %s: %w", dir, err), unix.Unmount(dir, unix.MNT_DETACH))
	}
	return f, nil
}

// Dir is where the file system is mounted.
func (f *FS) Dir() string { return f.dir }

// Set has requests meet faults by the rule, or none where it is nil. It lets go of
// all that hang, with the fault that the new rule has for them.
func (f *FS) Set(rule Rule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rule = rule
	close(f.changed)
	f.changed = make(chan struct{})
}

// Count is how many requests of a kind there were.
func (f *FS) Count(op Op) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count[op]
}

// BytesRead is how many bytes all reads were given.
func (f *FS) BytesRead() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.read
}

// Abort ends the file system as the death of its process would: it stays mounted,
// and each request that is there or comes is ENOTCONN. Close is still to be called.
func (f *FS) Abort() error {
	f.Set(nil)
	// In use, it is not unmounted by force, only cut off.
	fd, err := unix.Open(f.dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Unmount(f.dir, unix.MNT_FORCE)
		_ = unix.Close(fd)
	}
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("abort %s: %w", f.dir, err)
	}
	return nil
}

// Close lets go of what hangs and unmounts the file system, also where it is in use.
func (f *FS) Close() error {
	f.Set(nil)
	if err := unix.Unmount(f.dir, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", f.dir, err)
	}
	return nil
}

// meet does a request, and to it what the rule says.
func (f *FS) meet(op Op, do func() fuse.Status) fuse.Status {
	return f.do(f.wait(op), do)
}

// do does a request that meets a fault.
func (f *FS) do(fault Fault, do func() fuse.Status) fuse.Status {
	if fault.Errno != 0 && !fault.Done {
		return fuse.Status(fault.Errno)
	}
	if status := do(); fault.Errno == 0 {
		return status
	}
	return fuse.Status(fault.Errno)
}

// wait returns the fault that is to be met once its delay is over.
func (f *FS) wait(op Op) Fault {
	f.mu.Lock()
	f.count[op]++
	f.mu.Unlock()
	for {
		f.mu.Lock()
		rule, changed := f.rule, f.changed
		f.mu.Unlock()
		if rule == nil {
			return Fault{}
		}
		fault := rule(op)
		if fault.Delay > 0 {
			timer := time.NewTimer(fault.Delay)
			select {
			case <-timer.C:
			case <-changed: // the rest of a delay that is over counts no more
				timer.Stop()
			}
		}
		if !fault.Hang {
			return fault
		}
		<-changed
	}
}
