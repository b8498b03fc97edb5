package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

func TestCloseWithoutVolumesLeavesNoMount(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	for range 2 { // and the image can be used again
		s := open(t, dir, "btrfs")
		v, err := s.Create(context.Background(), Request{Bytes: 32 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(v.Remove(context.Background()), s.Close()); err != nil {
			t.Fatal(err)
		}
		if _, yes, err := mounted(filepath.Join(dir, mountName)); yes || err != nil {
			t.Errorf("mounted: %v, %v", yes, err)
		}
	}
}

// An image that a loss of power damaged is put aside: it holds nothing but scratch.
func TestDamagedImageIsReplaced(t *testing.T) {
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	image := filepath.Join(dir, imageName)
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir, "btrfs")
	t.Cleanup(func() {
		if err := s.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	})
	create(t, s, 32<<20, 0)
	if _, err := os.Stat(image + ".damaged"); err != nil {
		t.Error(err)
	}
}

// Quota groups of removed volumes must not pile up: each costs memory and
// time at every commit.
func TestRemovedVolumesLeaveNoQuotaGroup(t *testing.T) {
	s := openStore(t, "btrfs")
	b := s.driver.(*btrfs)
	for range 20 {
		v := create(t, s, 32<<20, 0)
		dir, done := use(t, v)
		var errs []error
		for n := range maxEntries { // too many to be used again
			errs = append(errs, os.WriteFile(fmt.Sprintf("%s/%d", dir, n), make([]byte, 64<<10), 0o644))
		}
		done()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if err := v.Remove(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	testutil.WaitFor(t, 60*time.Second, "the kernel's clean-up", func() error {
		groups, err := filepath.Glob(b.sysfs + "/qgroups/0_*")
		if len(groups) > 1 { // that of the top
			err = fmt.Errorf("%d quota groups", len(groups))
		}
		return err
	})
}

// A full image refuses new volumes, and lets those that are there go.
func TestFullImageLetsVolumesGo(t *testing.T) {
	s := openStore(t, "btrfs")
	v := create(t, s, 1<<40, 0)
	dir, done := use(t, v)
	_, err := fill(t, dir+"/all")
	done()
	if !full(err) {
		t.Fatalf("the image takes more than 1 GiB: %v", err)
	}
	if _, err := s.Create(context.Background(), Request{Bytes: 1 << 20, UID: owner, GID: owner}); dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Errorf("a create: %v, want exhausted", err)
	}
	if err := v.Remove(context.Background()); err != nil {
		t.Fatalf("removing what fills it: %v", err)
	}
	testutil.WaitFor(t, time.Minute, "space", func() error {
		next, err := s.Create(context.Background(), Request{Bytes: 1 << 20, UID: owner, GID: owner})
		if err == nil {
			err = next.Remove(context.Background())
		}
		return err
	})
}
