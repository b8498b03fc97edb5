package disk

import (
	"bytes"
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

func (n *node) volume(bytes int64) (v *Volume, upper string) {
	n.t.Helper()
	v, err := n.Create(context.Background(), Request{Bytes: bytes})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = v.Remove(context.Background()) })
	return v, filepath.Join(n.path(mountName), v.name, upperName)
}

func snapshotNode(t *testing.T) *node {
	return openNode(t, Options{Driver: "btrfs", ImageBytes: 1 << 30, MaxImageBytes: 1 << 30, Share: noShare})
}

// quiet is a freeze of nothing.
func quiet() (func() error, error) { return func() error { return nil }, nil }

// TestSnapshot: it has what the volume had, and the volume may be written as before, all
// of it, though each byte is there twice then.
func TestSnapshot(t *testing.T) {
	n := snapshotNode(t)
	v, upper := n.volume(100 << 20)
	file := filepath.Join(upper, "f")
	a, b := bytes.Repeat([]byte("a"), 70<<20), bytes.Repeat([]byte("b"), 70<<20)
	if err := os.WriteFile(file, a, 0o644); err != nil {
		t.Fatal(err)
	}
	snap, err := v.Snapshot(quiet)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Errorf("in place of what was there: %v", err)
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", snap.Upper.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := root.ReadFile("f"); err != nil || !bytes.Equal(got, a) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := errors.Join(root.Close(), snap.Close()); err != nil {
		t.Error(err)
	}
	d := n.driver.(*btrfs)
	limit := func() int64 {
		d.free.mu.Lock()
		defer d.free.mu.Unlock()
		return d.free.known[v.name].limit
	}
	testutil.WaitFor(t, time.Minute, "its own limit again", func() error {
		if l := limit(); l != 100<<20 {
			return fmt.Errorf("it is %d", l)
		}
		return nil
	})
	if names, err := d.list(); err != nil || len(names) != 1 {
		t.Errorf("volumes %v, %v", names, err)
	}
	if err := os.WriteFile(filepath.Join(upper, "more"), b, 0o644); err == nil {
		t.Error("it has more than its limit")
	}
}

// TestSnapshotThatFails leaves nothing, and tells why.
func TestSnapshotThatFails(t *testing.T) {
	n := snapshotNode(t)
	v, _ := n.volume(100 << 20)
	if _, err := v.Snapshot(func() (func() error, error) { return nil, dsec.Errorf(dsec.CodeConflict, "it moves") }); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Error(err)
	}
	if names, err := n.driver.list(); err != nil || len(names) != 1 {
		t.Errorf("volumes %v, %v", names, err)
	}
	if err := v.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Snapshot(quiet); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Error(err)
	}
}

// TestSnapshotOfAnEdgeThatDied is swept, and the volume has its own limit.
func TestSnapshotOfAnEdgeThatDied(t *testing.T) {
	n := snapshotNode(t)
	v, upper := n.volume(100 << 20)
	if err := os.WriteFile(filepath.Join(upper, "f"), bytes.Repeat([]byte("a"), 70<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	snap, err := v.Snapshot(quiet)
	if err != nil {
		t.Fatal(err)
	}
	if err := snap.Upper.Close(); err != nil { // as the end of a process does
		t.Fatal(err)
	}
	n.restart(nil)
	again, err := n.Recover(v.name, 100<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Remove(context.Background()) }()
	if err := n.Sweep(t.Context(), map[string]bool{v.name: true}); err != nil {
		t.Fatal(err)
	}
	if names, err := n.driver.list(); err != nil || len(names) != 1 {
		t.Errorf("volumes %v, %v", names, err)
	}
	if err := os.WriteFile(filepath.Join(upper, "more"), bytes.Repeat([]byte("b"), 70<<20), 0o644); err == nil {
		t.Error("it has more than its limit")
	}
}

// TestSnapshotWithoutRoom: on a disk that is full to its last byte a copy, which takes none,
// is there or is not, as it says; what was written stays.
func TestSnapshotWithoutRoom(t *testing.T) {
	n := openNode(t, Options{Driver: "btrfs", ImageBytes: minImage, MaxImageBytes: minImage, Share: noShare})
	v, upper := n.volume(1 << 30)
	f, err := os.Create(filepath.Join(upper, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size >= 1; {
		_, err := f.Write(bytes.Repeat([]byte("a"), size))
		if err == nil {
			err = f.Sync()
		}
		if err != nil {
			size /= 16
		}
	}
	for range 3 {
		snap, err := v.Snapshot(quiet)
		if err == nil {
			err = snap.Close()
		} else if dsec.CodeOf(err) == dsec.CodeExhausted {
			err = nil
		}
		if err != nil {
			t.Error(err)
		}
	}
	if names, err := n.driver.list(); err != nil || len(names) != 1 {
		t.Errorf("volumes %v, %v", names, err)
	}
}
