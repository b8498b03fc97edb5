package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

const owner = 231072

// open opens a Store whose image does not grow, and which one volume can fill.
func open(t testing.TB, dir, driver string) *Store {
	t.Helper()
	return openWith(t, Options{Dir: dir, Driver: driver, ImageBytes: minImage, MaxImageBytes: minImage, Share: noShare})
}

// openWith skips where the kernel lacks what the driver needs.
func openWith(t testing.TB, o Options) *Store {
	t.Helper()
	o.Log = testutil.Logger(t)
	s, err := Open(o)
	if err != nil && dsec.CodeOf(err) == dsec.CodeUnsupported {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func openStore(t testing.TB, driver string) *Store {
	t.Helper()
	return openNode(t, Options{Driver: driver, ImageBytes: minImage, MaxImageBytes: minImage, Share: noShare}).Store
}

// node is a Store that a test opens again, as an edge that was restarted does.
type node struct {
	*Store
	t testing.TB
}

// openNode opens a Store in a directory of its own. The test leaves nothing of it.
func openNode(t testing.TB, o Options) *node {
	t.Helper()
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	if o.Driver == "project" {
		dir = projectFS(t, dir)
	}
	o.Dir = filepath.Join(dir, "disk")
	n := &node{Store: openWith(t, o), t: t}
	t.Cleanup(func() {
		if n.Store == nil {
			return // it failed to open again, and said so
		}
		if err := n.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(o.Dir); err != nil || len(left) > 0 {
			t.Errorf("left in the store's directory: %v, %v", left, err)
		}
	})
	return n
}

// restart closes the Store, has meanwhile done what happens then, and opens it.
func (n *node) restart(meanwhile func(dir string) error) {
	n.t.Helper()
	o := n.opts
	check(n.t, n.Close())
	n.Store = nil
	if meanwhile != nil {
		check(n.t, meanwhile(o.Dir))
	}
	n.Store = openWith(n.t, o)
}

// projectFS mounts a file system with project quotas, on the kernels that have
// them: Debian's, in the guest.
func projectFS(t testing.TB, dir string) string {
	t.Helper()
	testutil.Require(t, testutil.Program("mkfs.ext4"))
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "fs")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 512<<20), os.Mkdir(at, 0o700)); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("mkfs.ext4", "-q", "-F", "-O", "quota,project", "-E", "quotatype=prjquota", image).CombinedOutput()
	if err != nil {
		t.Fatalf("mkfs.ext4: %v %s", err, out)
	}
	if err := errors.Join(needLoop(), mountImage(image, at, "ext4", "prjquota")); err != nil {
		t.Skipf("a file system with project quotas: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Error(err)
		}
	})
	return at
}

// bounded runs f as sandboxes run: without CAP_SYS_RESOURCE over the host, which
// ext4 takes for leave to pass a quota. It is dropped on a thread of its own.
func bounded(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends here
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&header, &data[0]); err != nil {
			panic(err)
		}
		data[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
		if err := unix.Capset(&header, &data[0]); err != nil {
			panic(err)
		}
		f()
	}()
	<-done
}

func each(t *testing.T, f func(t *testing.T, s *Store)) {
	for _, d := range drivers {
		t.Run(d.name, func(t *testing.T) { f(t, openStore(t, d.name)) })
	}
}

func create(t testing.TB, s *Store, bytes, inodes int64) *Volume {
	t.Helper()
	v, err := s.Create(context.Background(), Request{Bytes: bytes, Inodes: inodes, UID: owner, GID: owner})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return v
}

// upper is a path to a volume's upper directory, for the test's own use.
func upper(t testing.TB, v *Volume) string {
	t.Helper()
	path, done := use(t, v)
	t.Cleanup(done)
	return path
}

// use is upper until done: an open volume keeps its space when it is removed.
func use(t testing.TB, v *Volume) (path string, done func()) {
	t.Helper()
	fd, err := v.Open()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("/proc/self/fd/%d/upper", fd), func() { _ = unix.Close(fd) }
}

// fill writes a file until it is refused, and returns how much went in.
func fill(t testing.TB, path string) (int64, error) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	chunk := []byte(strings.Repeat("0123456789abcdef", 4096))
	var n int64
	bounded(func() {
		for err == nil && n < 1<<30 {
			var w int
			w, err = f.Write(chunk)
			n += int64(w)
			if err == nil && n%(4<<20) == 0 {
				err = f.Sync() // what was promised must be kept
			}
		}
	})
	return n, err
}

func full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

func TestVolumeIsReadyForItsOwner(t *testing.T) {
	each(t, func(t *testing.T, s *Store) {
		v := create(t, s, 64<<20, 1000)
		dir := filepath.Dir(upper(t, v))
		for _, want := range []struct {
			name  string
			mode  fs.FileMode
			owner uint32
		}{{upperName, 0o755, owner}, {workName, 0o700, 0}} {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(dir, want.name), &st); err != nil {
				t.Fatal(err)
			}
			if st.Uid != want.owner || st.Gid != want.owner || fs.FileMode(st.Mode&0o7777) != want.mode {
				t.Errorf("%s is %d:%d %o", want.name, st.Uid, st.Gid, st.Mode)
			}
		}
	})
}

func TestFillStopsAtTheLimitAndSpaceComesBack(t *testing.T) {
	const limit = 32 << 20
	each(t, func(t *testing.T, s *Store) {
		// More in all than the btrfs image has: without what removals give back,
		// the later ones could not fill up.
		rounds := 3
		if s.Driver() == "btrfs" {
			rounds = 10
		}
		for round := range rounds {
			v := create(t, s, limit, 0)
			dir, done := use(t, v)
			n, err := fill(t, dir+"/file")
			done()
			if !full(err) || n < limit*95/100 || n > limit*105/100 {
				t.Fatalf("round %d: %d bytes of %d, then %v", round, n, limit, err)
			}
			u, err := v.Usage()
			if err != nil || u.Bytes < limit*9/10 || u.Bytes > limit*11/10 {
				t.Errorf("usage of a full volume: %+v, %v", u, err)
			}
			if err := v.Remove(context.Background()); err != nil {
				t.Fatal(err)
			}
			if _, err := v.Usage(); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
				t.Errorf("usage of a removed volume: %v, want lost", err)
			}
			if s.Driver() == "btrfs" {
				waitForSpace(t, s, limit)
			}
		}
	})
}

// waitForSpace waits until less than n bytes are in use.
func waitForSpace(t testing.TB, s *Store, n int64) {
	t.Helper()
	testutil.WaitFor(t, 60*time.Second, "space", func() error {
		var st unix.Statfs_t
		err := unix.Statfs(s.path(mountName), &st)
		if used := int64(st.Blocks-st.Bfree) * st.Bsize; err == nil && used >= n {
			err = fmt.Errorf("%d bytes in use", used)
		}
		return err
	})
}

func TestOneFullVolumeLeavesTheOthersAlone(t *testing.T) {
	each(t, func(t *testing.T, s *Store) {
		a, b := create(t, s, 32<<20, 0), create(t, s, 64<<20, 0)
		if _, err := fill(t, upper(t, a)+"/file"); !full(err) {
			t.Fatal(err)
		}
		if err := os.WriteFile(upper(t, b)+"/file", make([]byte, 16<<20), 0o644); err != nil {
			t.Errorf("the other volume: %v", err)
		}
	})
}

// Every driver bounds files: by a limit on them, or, on btrfs, since each
// takes bytes of the volume.
func TestFilesAreBounded(t *testing.T) {
	const limit, inodes = 2 << 20, 500
	each(t, func(t *testing.T, s *Store) {
		v := create(t, s, limit, inodes)
		dir := upper(t, v)
		most := limit / 256 // less than that for a file is no bound
		if s.CountsInodes() {
			most = inodes*105/100 + 16 // ext4 has 16 in a block
		}
		var n int
		var err error
		top := openFD(t, dir)
		bounded(func() {
			for ; err == nil && n <= most; n++ {
				err = unix.Mknod(fmt.Sprintf("%s/%d", dir, n), unix.S_IFREG|0o644, 0)
				if n%1000 == 999 {
					_ = unix.Fsync(top) // not only reserved
				}
			}
		})
		n--
		t.Logf("%d empty files in %d bytes: %d bytes each", n, int64(limit), limit/max(n, 1))
		if !full(err) {
			t.Fatalf("%d files, then %v", n, err)
		}
		if s.CountsInodes() {
			if n < inodes*95/100 {
				t.Errorf("%d files at a limit of %d", n, inodes)
			}
			if u, err := v.Usage(); err != nil || u.Inodes < int64(n) {
				t.Errorf("usage %+v, %v, of %d files", u, err, n)
			}
		} else if u, err := v.Usage(); err != nil || u.Inodes != dsec.NotCounted {
			t.Errorf("usage %+v, %v, of files that are not counted", u, err)
		}
	})
}

func openFD(t testing.TB, path string) int {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func TestVolumesSurviveTheStoreAndAreSwept(t *testing.T) {
	each(t, func(t *testing.T, s *Store) {
		kept, lost := create(t, s, 32<<20, 100), create(t, s, 32<<20, 100)
		if err := os.WriteFile(upper(t, kept)+"/file", []byte("kept"), 0o644); err != nil {
			t.Fatal(err)
		}
		// An edge died: its Store was never closed. The next one finds the driver.
		driver := ""
		if s.Driver() == "tmpfs" {
			driver = "tmpfs" // is never picked
		}
		next := open(t, s.opts.Dir, driver)
		if next.Driver() != s.Driver() {
			t.Fatalf("%s's volumes were opened by %s", s.Driver(), next.Driver())
		}
		for range 2 {
			if err := next.Sweep(context.Background(), map[string]bool{kept.Name(): true}); err != nil {
				t.Fatal(err)
			}
		}
		v, err := next.Recover(kept.Name(), 32<<20)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(upper(t, v) + "/file"); err != nil || string(b) != "kept" {
			t.Errorf("the kept volume: %q, %v", b, err)
		}
		if _, err := next.Recover(lost.Name(), 32<<20); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("the swept volume: %v, want lost", err)
		}
		if _, err := fill(t, upper(t, v)+"/more"); !full(err) {
			t.Errorf("the recovered volume is not bounded: %v", err)
		}
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A volume that was removed is nobody's: what was its owner's neither sees nor
// removes what has its name now.
func TestRemovedVolumeIsNotTheNextOwners(t *testing.T) {
	each(t, func(t *testing.T, s *Store) {
		old := create(t, s, 32<<20, 100)
		if err := old.Remove(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recover(old.Name(), 32<<20); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("recovered: %v, want lost", err)
		}
		if b, ok := s.driver.(*btrfs); ok {
			b.awaitFree(t)
		}
		next := create(t, s, 32<<20, 100)
		if s.Driver() == "btrfs" && next.Name() != old.Name() {
			t.Errorf("%s was not used again", old.Name())
		}
		if _, err := old.Open(); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("opened: %v, want lost", err)
		}
		if _, err := old.Usage(); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("usage: %v, want lost", err)
		}
		if err := old.Remove(context.Background()); err != nil {
			t.Error(err)
		}
		if _, err := s.Recover(next.Name(), 32<<20); err != nil {
			t.Errorf("the next one: %v", err)
		}
	})
}

func TestRemoveWhileInUse(t *testing.T) {
	each(t, func(t *testing.T, s *Store) {
		v := create(t, s, 32<<20, 100)
		f, err := os.Create(upper(t, v) + "/file")
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := v.Remove(context.Background()); err != nil {
				t.Error(err)
			}
		}
		if ids, err := s.driver.list(); err != nil || len(ids) > 0 {
			t.Errorf("left: %v, %v", ids, err)
		}
		_ = f.Close()
	})
}

func TestBadRequestsChangeNothing(t *testing.T) {
	s := openStore(t, "tmpfs")
	for name, test := range map[string]struct {
		req   Request
		field string
	}{
		"no bytes":        {Request{}, "limits.disk_bytes"},
		"negative bytes":  {Request{Bytes: -1}, "limits.disk_bytes"},
		"negative inodes": {Request{Bytes: 1 << 20, Inodes: -1}, "limits.disk_inodes"},
	} {
		_, err := s.Create(context.Background(), test.req)
		if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Code != dsec.CodeInvalid || e.Field != test.field {
			t.Errorf("%s: %v, want invalid %s", name, err, test.field)
		}
	}
	for _, name := range []string{"", ".", "..", "../../etc", "a/b", "a\x00b", "template-1", strings.Repeat("a", 64)} {
		if _, err := s.Recover(name, 32<<20); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
			t.Errorf("a record that says %q: %v, want lost", name, err)
		}
	}
	if ids, err := s.driver.list(); err != nil || len(ids) > 0 {
		t.Errorf("made: %v, %v", ids, err)
	}
	if _, err := Open(Options{Dir: t.TempDir(), Driver: "zfs"}); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("an unknown driver: %v, want invalid", err)
	}
}

// Deep trees are removed with two descriptors and no recursion.
func TestEmptyDirGoesAnyDepthAndFollowsNoLink(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	victim := filepath.Join(outside, "file")
	if err := os.WriteFile(victim, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	at, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	name := strings.Repeat("d", 200)
	for range 1500 { // a path of 300 KB, which no call takes
		if err := unix.Mkdirat(at, name, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Symlinkat(outside, at, "link"); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(at)
		at = next
	}
	_ = unix.Close(at)
	if err := emptyDir(fd, nil); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := os.Stat(victim); err != nil {
		t.Errorf("behind a link: %v", err)
	}
}
