package container

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// A claim leads from a slot to its sandbox and to that one's volume, and goes over
// to another in one step.
func TestClaims(t *testing.T) {
	dir := t.TempDir()
	s, err := openSlots(dir)
	check(t, err)
	defer s.close()
	n, err := s.acquire()
	check(t, err)
	if c, err := s.claimed(n); err != nil || c != (claim{}) {
		t.Errorf("a slot that nobody claimed is %v", c)
	}
	first, second := claim{dsec.NewSandboxID(spareEdge), "VOLUME"}, claim{dsec.NewSandboxID("aaaaa"), "VOLUME"}
	check(t, s.claim(n, first))
	if c, err := s.claimed(n); err != nil || c != first {
		t.Errorf("%v, want %v", c, first)
	}
	if err := s.claim(n, second); err == nil {
		t.Error("a slot was claimed twice")
	}
	check(t, s.reclaim(n, second))
	if c, err := s.claimed(n); err != nil || c != second {
		t.Errorf("%v, want %v", c, second)
	}
	for range 2 {
		check(t, s.disclaim(n))
		if c, err := s.claimed(n); err != nil || c != (claim{}) {
			t.Errorf("after it was taken back: %v", c)
		}
	}
	// As an edge left it whose volumes were called by the sandbox's ID.
	check(t, os.Symlink(string(second.id), dir+"/slots/"+n.String()+"/id"))
	if c, err := s.claimed(n); err != nil || c != (claim{second.id, string(second.id)}) {
		t.Errorf("a claim of an earlier edge: %v", c)
	}
	check(t, s.release(n))
	if all, err := s.list(); err != nil || len(all) > 0 {
		t.Errorf("left: %v, %v", all, err)
	}
}

// Who comes while as many wait for chronus as its socket has room for is not told
// that it is gone.
func TestDialWaitsForRoom(t *testing.T) {
	s, err := openSlots(testutil.Dir(t))
	check(t, err)
	defer s.close()
	n, err := s.acquire()
	check(t, err)
	l, err := s.listen(n)
	check(t, err)
	defer unix.Close(l)
	for full := false; !full; {
		c, err := net.Dial("unix", s.socket(n))
		if full = errors.Is(err, unix.EAGAIN); !full {
			check(t, err)
			defer c.Close()
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	waiting := make(chan error)
	go func() {
		_, err := s.dial(ctx, n)
		waiting <- err
	}()
	why := errors.New("given up")
	cancel(why)
	if err := <-waiting; !errors.Is(err, why) {
		t.Errorf("given up: %v", err)
	}
	go func() {
		c, err := s.dial(t.Context(), n)
		if err == nil {
			err = c.Close()
		}
		waiting <- err
	}()
	fd, _, err := unix.Accept(l)
	check(t, err)
	check(t, unix.Close(fd))
	check(t, <-waiting)
}
