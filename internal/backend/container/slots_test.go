package container

import (
	"os"
	"testing"

	"github.com/opendsec/dsec"
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
	if c := s.claimed(n); c != (claim{}) {
		t.Errorf("a slot that nobody claimed is %v", c)
	}
	first, second := claim{dsec.NewSandboxID(spareEdge), "VOLUME"}, claim{dsec.NewSandboxID("aaaaa"), "VOLUME"}
	check(t, s.claim(n, first))
	if c := s.claimed(n); c != first {
		t.Errorf("%v, want %v", c, first)
	}
	if err := s.claim(n, second); err == nil {
		t.Error("a slot was claimed twice")
	}
	check(t, s.reclaim(n, second))
	if c := s.claimed(n); c != second {
		t.Errorf("%v, want %v", c, second)
	}
	for range 2 {
		check(t, s.disclaim(n))
		if c := s.claimed(n); c != (claim{}) {
			t.Errorf("after it was taken back: %v", c)
		}
	}
	// As an edge left it whose volumes were called by the sandbox's ID.
	check(t, os.Symlink(string(second.id), dir+"/slots/"+n.String()+"/id"))
	if c := s.claimed(n); c != (claim{second.id, string(second.id)}) {
		t.Errorf("a claim of an earlier edge: %v", c)
	}
	check(t, s.release(n))
	if all, err := s.list(); err != nil || len(all) > 0 {
		t.Errorf("left: %v, %v", all, err)
	}
}
