package dirblob

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/blob/blobtest"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/testutil/faultfs"
)

// faulty is a store on a file system that does what the rule says, and the
// directory that it shows.
func faulty(t *testing.T, rule faultfs.Rule) (fs *faultfs.FS, backing string) {
	t.Helper()
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	backing, at := filepath.Join(dir, "backing"), filepath.Join(dir, "at")
	for _, d := range []string{backing, at} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	fs, err := faultfs.Mount(at, backing)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := fs.Close(); err != nil {
			t.Error(err)
		}
	})
	fs.Set(rule)
	return fs, backing
}

// only has the fault met by some requests.
func only(fault faultfs.Fault, ops ...faultfs.Op) faultfs.Rule {
	return func(op faultfs.Op) faultfs.Fault {
		if slices.Contains(ops, op) {
			return fault
		}
		return faultfs.Fault{}
	}
}

func TestSuiteOnSharedFileSystems(t *testing.T) {
	for name, rule := range map[string]faultfs.Rule{
		"each request late": func(faultfs.Op) faultfs.Fault { return faultfs.Fault{Delay: 200 * time.Microsecond} },
		// NFS: https://github.com/torvalds/linux/blob/master/fs/nfs/dir.c has nfs_rename refuse all flags.
		"links in place of renames": only(faultfs.Fault{Errno: unix.EINVAL}, faultfs.Rename2, faultfs.Tmpfile),
		"no sync of directories":    only(faultfs.Fault{Errno: unix.EINVAL}, faultfs.FsyncDir),
	} {
		t.Run(name, func(t *testing.T) {
			blobtest.Run(t, func(t *testing.T) blob.Store {
				fs, backing := faulty(t, rule)
				t.Cleanup(func() { wantNoTemps(t, backing) })
				return mustOpen(t, fs.Dir())
			})
		})
	}
}

// TestErrors has each request of a call fail, and wants the same code from wherever
// it fails.
func TestErrors(t *testing.T) {
	b := blobtest.Bytes(3 << 20)
	put := func(s *Store) error { return s.Put(context.Background(), "new/key", bytes.NewReader(b), int64(len(b))) }
	read := func(s *Store) error {
		_, err := s.ReadAt(context.Background(), "old/key", make([]byte, 10), 0)
		return err
	}
	list := func(s *Store) error {
		return s.List(context.Background(), "", func(blob.Info) error { return nil })
	}
	remove := func(s *Store) error { return s.Delete(context.Background(), "old/key") }
	all := []faultfs.Op{
		faultfs.Create, faultfs.Mkdir, faultfs.Write, faultfs.Flush, faultfs.Fsync, faultfs.FsyncDir, faultfs.Rename2, faultfs.Unlink,
		faultfs.Open, faultfs.OpenDir, faultfs.Read, faultfs.ReadDir, faultfs.Lookup, faultfs.GetAttr,
	}
	for _, test := range []struct {
		errno syscall.Errno
		call  string
		f     func(*Store) error
		code  dsec.Code
		ops   []faultfs.Op
	}{
		{unix.ENOSPC, "put", put, dsec.CodeExhausted, all[:7]},
		{unix.EDQUOT, "put", put, dsec.CodeExhausted, all[:7]},
		{unix.EROFS, "put", put, dsec.CodeUnsupported, append(slices.Clone(all[:3]), faultfs.Rename2)},
		{unix.EACCES, "put", put, dsec.CodeUnsupported, []faultfs.Op{faultfs.Create, faultfs.Mkdir, faultfs.Rename2}},
		{unix.EFBIG, "put", put, dsec.CodeUnsupported, []faultfs.Op{faultfs.Write}},
		{unix.EIO, "put", put, dsec.CodeUnavailable, append(slices.Clone(all[:7]), faultfs.Lookup)},
		{unix.ESTALE, "put", put, dsec.CodeUnavailable, []faultfs.Op{faultfs.Write, faultfs.Fsync}},
		{unix.EIO, "read", read, dsec.CodeUnavailable, []faultfs.Op{faultfs.Lookup, faultfs.Open, faultfs.Read}},
		{unix.ESTALE, "read", read, dsec.CodeUnavailable, []faultfs.Op{faultfs.Open, faultfs.Read}},
		{unix.ETIMEDOUT, "read", read, dsec.CodeUnavailable, []faultfs.Op{faultfs.Lookup, faultfs.Open, faultfs.Read}},
		{unix.EACCES, "read", read, dsec.CodeUnavailable, []faultfs.Op{faultfs.Open}},
		{unix.EBADMSG, "read", read, dsec.CodeInternal, []faultfs.Op{faultfs.Lookup, faultfs.Read}},
		{unix.EIO, "list", list, dsec.CodeUnavailable, []faultfs.Op{faultfs.Lookup, faultfs.OpenDir, faultfs.ReadDir}},
		{unix.EROFS, "delete", remove, dsec.CodeUnsupported, []faultfs.Op{faultfs.Unlink}},
		{unix.EIO, "delete", remove, dsec.CodeUnavailable, []faultfs.Op{faultfs.Unlink, faultfs.FsyncDir}},
	} {
		fs, backing := faulty(t, nil)
		s := mustOpen(t, fs.Dir())
		blobtest.MustPut(t, s, "old/key", b)
		for _, op := range test.ops {
			t.Run(test.call+" "+test.errno.Error()+" of "+string(op), func(t *testing.T) {
				fs.Set(only(faultfs.Fault{Errno: test.errno}, op))
				err := test.f(s)
				fs.Set(nil)
				blobtest.WantCode(t, test.call, err, test.code, "")
				if !errors.Is(err, test.errno) {
					t.Errorf("the log would not be told of %v", test.errno)
				}
				if err != nil && strings.Contains(err.Error(), fs.Dir()) {
					t.Errorf("a path of this host in the message: %v", err)
				}
				if op == faultfs.FsyncDir { // the blob may be there, but whoever puts it again is told of it
					fs.Set(only(faultfs.Fault{Errno: test.errno}, op))
					blobtest.WantCode(t, test.call+" again", test.f(s), test.code, "")
					fs.Set(nil)
				} else if test.call == "put" {
					blobtest.WantNone(t, s, "new/key")
				}
				for _, key := range []string{"new/key", "old/key"} {
					if err := s.Delete(context.Background(), key); err != nil {
						t.Fatal(err)
					}
				}
				blobtest.MustPut(t, s, "old/key", b)
				wantNoTemps(t, backing)
			})
		}
	}
}

func TestAFileSystemThatCannotPublish(t *testing.T) {
	fs, backing := faulty(t, func(op faultfs.Op) faultfs.Fault {
		switch op {
		case faultfs.Rename2:
			return faultfs.Fault{Errno: unix.EINVAL}
		case faultfs.Link:
			return faultfs.Fault{Errno: unix.EPERM}
		}
		return faultfs.Fault{}
	})
	s := mustOpen(t, fs.Dir())
	blobtest.WantCode(t, "put", s.Put(t.Context(), "a", strings.NewReader("a"), 1), dsec.CodeUnsupported, "")
	blobtest.WantNone(t, s, "a")
	wantNoTemps(t, backing)
}

// TestLostAnswers repeats what was done already, as a client does whose server did
// not answer in time.
func TestLostAnswers(t *testing.T) {
	for name, rule := range map[string]faultfs.Rule{
		"rename": only(faultfs.Fault{Errno: unix.ENOENT, Done: true}, faultfs.Rename2),
		"link": func(op faultfs.Op) faultfs.Fault {
			switch op {
			case faultfs.Rename2:
				return faultfs.Fault{Errno: unix.EINVAL}
			case faultfs.Link:
				return faultfs.Fault{Errno: unix.EEXIST, Done: true}
			}
			return faultfs.Fault{}
		},
		"mkdir":  only(faultfs.Fault{Errno: unix.EEXIST, Done: true}, faultfs.Mkdir),
		"unlink": only(faultfs.Fault{Errno: unix.ENOENT, Done: true}, faultfs.Unlink),
	} {
		t.Run(name, func(t *testing.T) {
			fs, backing := faulty(t, nil)
			s := mustOpen(t, fs.Dir())
			fs.Set(rule)
			blobtest.MustPut(t, s, "dir/key", []byte("bytes"))
			blobtest.WantBlob(t, s, "dir/key", []byte("bytes"))
			if err := s.Delete(t.Context(), "dir/key"); err != nil {
				t.Error(err)
			}
			blobtest.WantNone(t, s, "dir/key")
			wantNoTemps(t, backing)
		})
	}
}

// TestHungFileSystem has every request hang, and calls return all the same.
func TestHungFileSystem(t *testing.T) {
	fs, _ := faulty(t, nil)
	s := mustOpen(t, fs.Dir())
	want := blobtest.Bytes(100_000)
	blobtest.MustPut(t, s, "a/b", want)
	calls := map[string]func(context.Context) error{
		"stat":   func(ctx context.Context) error { _, err := s.Stat(ctx, "a/b"); return err },
		"read":   func(ctx context.Context) error { _, err := s.ReadAt(ctx, "a/b", make([]byte, 10), 0); return err },
		"put":    func(ctx context.Context) error { return s.Put(ctx, "a/c", bytes.NewReader(want), int64(len(want))) },
		"list":   func(ctx context.Context) error { return s.List(ctx, "", func(blob.Info) error { return nil }) },
		"delete": func(ctx context.Context) error { return s.Delete(ctx, "a/d") },
		"sweep":  s.Sweep,
	}
	hung := only(faultfs.Fault{Hang: true}, faultfs.Lookup, faultfs.OpenDir, faultfs.Create)
	for name, call := range calls {
		fs.Set(hung)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s of a hung store: %v, want the context's error", name, err)
		}
		cancel()
		fs.Set(nil)
	}
	testutil.WaitFor(t, 10*time.Second, "calls that were left behind return", s.calls.idle)

	// Without a deadline it is the store's own, and soon none waits any more.
	s.calls.timeout = 5 * time.Millisecond
	fs.Set(hung)
	for range maxStuck {
		_, err := s.Stat(context.Background(), "a/b")
		blobtest.WantCode(t, "stat of a hung store", err, dsec.CodeUnavailable, "")
	}
	s.calls.timeout = time.Hour
	before := fs.Count(faultfs.Lookup)
	_, err := s.Stat(context.Background(), "a/b")
	blobtest.WantCode(t, "one call too many", err, dsec.CodeUnavailable, "")
	_, err = s.Open("a/b")
	blobtest.WantCode(t, "one call too many", err, dsec.CodeUnavailable, "")
	if n := fs.Count(faultfs.Lookup); n != before {
		t.Errorf("%d requests more of a store that hangs", n-before)
	}

	fs.Set(nil)
	testutil.WaitFor(t, 10*time.Second, "the calls return once the store answers", s.calls.idle)
	blobtest.WantBlob(t, s, "a/b", want)
}

// TestReadLeftBehind has a read return after its caller has gone, into memory that
// is the caller's again.
func TestReadLeftBehind(t *testing.T) {
	fs, _ := faulty(t, nil)
	s := mustOpen(t, fs.Dir())
	blobtest.MustPut(t, s, "a", bytes.Repeat([]byte("x"), 5000))
	fs.Set(only(faultfs.Fault{Hang: true}, faultfs.Read))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	p := make([]byte, 5000)
	if n, err := s.ReadAt(ctx, "a", p, 0); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%d, %v", n, err)
	}
	fs.Set(nil)
	testutil.WaitFor(t, 10*time.Second, "the read returns", s.calls.idle)
	if !bytes.Equal(p, make([]byte, 5000)) {
		t.Error("the read wrote into memory of a caller that had gone")
	}
}

// TestRemounted has the process behind the file system die and another one take its place.
func TestRemounted(t *testing.T) {
	fs, backing := faulty(t, nil)
	s := mustOpen(t, fs.Dir())
	blobtest.MustPut(t, s, "a", []byte("a"))
	if err := fs.Abort(); err != nil {
		t.Fatal(err)
	}
	_, err := s.Stat(t.Context(), "a")
	blobtest.WantCode(t, "stat while it is gone", err, dsec.CodeUnavailable, "")

	// What is below the mount point is a directory, but not the store's.
	if err := unix.Unmount(fs.Dir(), unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	_, err = s.Stat(t.Context(), "a")
	blobtest.WantCode(t, "stat while it is not mounted", err, dsec.CodeUnavailable, "")
	blobtest.WantCode(t, "put", s.Put(t.Context(), "b", strings.NewReader("b"), 1), dsec.CodeUnavailable, "")
	if left, err := os.ReadDir(fs.Dir()); err != nil || len(left) != 0 {
		t.Errorf("written below the mount point: %v, %v", left, err)
	}

	again, err := faultfs.Mount(fs.Dir(), backing) // the first's Close unmounts it
	if err != nil {
		t.Fatal(err)
	}
	_ = again
	blobtest.WantBlob(t, s, "a", []byte("a"))
	blobtest.MustPut(t, s, "b", []byte("b"))
}

// TestRequests bounds the questions that a call asks a server: each takes as long
// as the network.
func TestRequests(t *testing.T) {
	fs, _ := faulty(t, nil)
	s := mustOpen(t, fs.Dir())
	blobtest.MustPut(t, s, "data/key", blobtest.Bytes(1<<20))
	var n atomic.Int64
	fs.Set(func(op faultfs.Op) faultfs.Fault {
		if op == faultfs.Lookup || op == faultfs.Open { // how often attributes and bytes are asked for is the kernel's
			n.Add(1)
		}
		return faultfs.Fault{}
	})
	for i, want := range []int64{3, 0, 0} {
		n.Store(0)
		if _, err := s.ReadAt(t.Context(), "data/key", make([]byte, 128<<10), int64(i)*256<<10); err != nil {
			t.Fatal(err)
		}
		if n.Load() > want {
			t.Errorf("%d lookups and opens for read %d, want at most %d", n.Load(), i, want)
		}
	}
}

// TestAFileThatFails has one that is kept open fail where another handle does not.
func TestAFileThatFails(t *testing.T) {
	fs, _ := faulty(t, nil)
	s := mustOpen(t, fs.Dir())
	const size = 4 << 20 // of which the kernel does not read the end with the start
	want := blobtest.Bytes(size)
	blobtest.MustPut(t, s, "a", want)
	p := make([]byte, 1)
	if _, err := s.ReadAt(t.Context(), "a", p, 0); err != nil || s.files.get("a") == nil {
		t.Fatalf("%v, or it was not kept open", err)
	}
	var failed atomic.Bool
	fs.Set(func(op faultfs.Op) faultfs.Fault {
		if op == faultfs.Read && !failed.Swap(true) {
			return faultfs.Fault{Errno: unix.EIO}
		}
		return faultfs.Fault{}
	})
	if n, err := s.ReadAt(t.Context(), "a", p, size-1); n != 1 || err != nil && err != io.EOF || p[0] != want[size-1] || !failed.Load() {
		t.Errorf("%d, %v", n, err)
	}
	fs.Set(nil)
	if err := s.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	blobtest.WantNone(t, s, "a")
	_, err := s.ReadAt(t.Context(), "a", p, 0)
	blobtest.WantCode(t, "read of a deleted blob", err, dsec.CodeNotFound, "")
}
