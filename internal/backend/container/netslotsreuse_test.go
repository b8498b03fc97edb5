package container

import "testing"

// The number of a PID 1 whose slot was forgotten comes again: its next owner
// keeps its slot for as long as it lives.
func TestNetSlotOfAReusedPID(t *testing.T) {
	s := &netSlots{early: map[int]struct{}{}, lost: map[int]struct{}{}}
	for pid := range maxUsedSlots + 1 { // the slot of the first is forgotten
		s.began(netSlot{fd: -1}, 100+pid)
	}
	s.ended(100)
	s.began(netSlot{fd: -1}, 100)
	if len(s.dead) != 0 || len(s.early) != 0 || len(s.lost) != 1 {
		t.Errorf("dead %v, early %v, lost %v; want all but one known", s.dead, s.early, s.lost)
	}
	s.ended(100)
	if len(s.dead) != 1 {
		t.Errorf("dead %v, want the slot of the one that ended", s.dead)
	}
}
