package edge

import (
	"slices"

	"github.com/opendsec/dsec"
)

// A command lives no longer than its caller, and all that tells of a caller is
// its connection. Where that broke and the caller comes back (Attach with own),
// either it is in time and the command goes on, or the command was killed: by the
// platform then, so that its outcome is not told as the command's own.

// maxCut bounds what is remembered of one sandbox: the last ones, and more than
// chronus lists of those that ended.
const maxCut = 1024

// own has a process live as long as its new caller, until release is called.
func (s *sandbox) own(process uint64) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.cut, process) {
		return nil, errCutOff(process)
	}
	if s.owners == nil {
		s.owners = make(map[uint64]int)
	}
	s.owners[process]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.owners[process]--; s.owners[process] <= 0 {
			delete(s.owners, process)
		}
	}, nil
}

// tagged has a process listed with its caller's tag, until release is called.
func (s *sandbox) tagged(process uint64, tag string) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tags == nil {
		s.tags = make(map[uint64]string)
	}
	s.tags[process] = tag
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.tags, process)
	}
}

func (s *sandbox) tagOf(process uint64) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tags[process]
}

// cutOff reports whether a process whose caller is gone is to be killed, and
// remembers that it was.
func (s *sandbox) cutOff(process uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners[process] > 0 {
		return false
	}
	if s.cut = append(s.cut, process); len(s.cut) > maxCut {
		s.cut = slices.Delete(s.cut, 0, 1)
	}
	return true
}

// spared forgets that: there was no such process to kill.
func (s *sandbox) spared(process uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cut = slices.DeleteFunc(s.cut, func(n uint64) bool { return n == process })
}

func (s *sandbox) wasCutOff(process uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.cut, process)
}

func errCutOff(process uint64) error {
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "process %d was killed, because the connection of its caller broke: how it ended must not be scored", process)
}
