package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// kept waits until the Store's recycler has dealt with all that was removed, and
// returns how many subvolumes it keeps.
func kept(t *testing.T, s *Store) (n int) {
	t.Helper()
	r := s.driver.(*btrfs).free
	testutil.WaitFor(t, 30*time.Second, "the recycler", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if n = len(r.free); n != len(r.kept) {
			return fmt.Errorf("%d of %d subvolumes are free", n, len(r.kept))
		}
		return nil
	})
	return n
}

func volumeNumber(t *testing.T, v *Volume) uint64 {
	t.Helper()
	fd, err := v.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	n, err := v.store.driver.(*btrfs).subvolID(fd)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// What a sandbox does to its volume is not there for the next that gets it.
func TestVolumeIsUsedAgainClean(t *testing.T) {
	s := openStore(t, "btrfs")
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	v := create(t, s, 32<<20, 0)
	number := volumeNumber(t, v)
	dir, done := use(t, v)
	deep := dir + strings.Repeat("/d", 40)
	err := errors.Join(
		os.MkdirAll(deep, 0o700), os.WriteFile(deep+"/file", make([]byte, 64<<10), 0o600),
		os.Symlink(filepath.Dir(outside), dir+"/link"), os.Link(dir+"/link", dir+"/hard"),
		unix.Mkfifo(dir+"/fifo", 0o600), os.Mkdir(dir+"/locked", 0), os.WriteFile(dir+"/-rf", nil, 0),
		unix.Setxattr(dir, "user.left", []byte("x"), 0), os.Chmod(dir, 0o707), os.Chown(dir, owner+7, owner+7),
	)
	done()
	if err = errors.Join(err, v.Remove(context.Background())); err != nil {
		t.Fatal(err)
	}
	if n := kept(t, s); n != 1 {
		t.Fatalf("%d subvolumes are kept", n)
	}
	if err := s.Sweep(context.Background(), nil); err != nil || kept(t, s) != 1 {
		t.Fatalf("after a sweep %d subvolumes are kept: %v", kept(t, s), err)
	}
	if _, err := s.Recover(v.Name(), 32<<20); err == nil {
		t.Error("the removed volume can be recovered")
	}

	const limit = 16 << 20
	v = create(t, s, limit, 0)
	if got := volumeNumber(t, v); got != number {
		t.Fatalf("subvolume %d was not used again, but %d", number, got)
	}
	dir, done = use(t, v)
	defer done()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Uid != owner || st.Gid != owner || st.Mode&0o7777 != 0o755 {
		t.Errorf("upper is of %d:%d, mode %o (%v)", st.Uid, st.Gid, st.Mode, err)
	}
	if n, err := unix.Listxattr(dir, nil); n != 0 || err != nil {
		t.Errorf("upper has attributes (%d bytes, %v)", n, err)
	}
	for _, d := range []string{dir, filepath.Dir(dir) + "/work"} {
		if names, err := os.ReadDir(d); err != nil || len(names) > 0 {
			t.Errorf("%s has %v (%v)", d, names, err)
		}
	}
	if data, err := os.ReadFile(outside); err != nil || string(data) != "mine" {
		t.Errorf("a file behind a link: %q, %v", data, err)
	}
	n, err := fill(t, dir+"/full")
	if !full(err) || n > limit || n < limit*3/4 {
		t.Errorf("%d bytes fit into a volume of %d: %v", n, limit, err)
	}
}

// A volume in which much was done is dropped: by files, and by bytes.
func TestVolumeWithMuchInItIsDropped(t *testing.T) {
	s := openStore(t, "btrfs")
	for name, do := range map[string]func(dir string) error{
		"files": func(dir string) error {
			for n := range maxEntries + 1 {
				if err := os.WriteFile(fmt.Sprintf("%s/%d", dir, n), nil, 0o600); err != nil {
					return err
				}
			}
			return nil
		},
		"bytes": func(dir string) error {
			f, err := os.Create(dir + "/file")
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.Write(make([]byte, 4*maxResidue))
			return errors.Join(err, f.Sync())
		},
	} {
		v := create(t, s, 32<<20, 0)
		dir, done := use(t, v)
		err := do(dir)
		done()
		if err := errors.Join(err, v.Remove(context.Background())); err != nil {
			t.Fatal(err)
		}
		if n := kept(t, s); n != 0 {
			t.Errorf("%s: the volume is kept", name)
		}
	}
}

// What a killed edge kept is found by the next one's sweep.
func TestKeptVolumesAreSwept(t *testing.T) {
	s := openStore(t, "btrfs")
	if err := create(t, s, 32<<20, 0).Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n := kept(t, s); n != 1 {
		t.Fatalf("%d subvolumes are kept", n)
	}
	s.driver.(*btrfs).free.free = nil // as if it was another process's
	next := open(t, s.opts.Dir, "btrfs")
	if err := errors.Join(next.Sweep(context.Background(), nil), next.driver.(*btrfs).free.close()); err != nil {
		t.Fatal(err)
	}
	if names, err := readNames(next.driver.(*btrfs).fd, "."); err != nil || len(names) > 0 {
		t.Errorf("left: %v (%v)", names, err)
	}
	close(next.stop)
	next.wg.Wait()
	if err := errors.Join(next.driver.(*btrfs).closeMount(), next.root.Close()); err != nil {
		t.Error(err)
	}
}
