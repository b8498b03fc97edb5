package edge

import "github.com/opendsec/dsec"

// A command lives no longer than its caller, and all that tells of a caller is
// its connection. Where that broke and the caller comes back (Attach with own),
// either it is in time and the command goes on, or the command was killed: by the
// platform then, so that its outcome is not told as the command's own.

// maxCut bounds what is remembered of one sandbox.
const maxCut = 1024

// own has a process live as long as its new caller, until release is called.
func (s *sandbox) own(process uint64) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.cut[process]; ok {
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

// cutOff reports whether a process whose caller is gone is to be killed, and
// remembers that it was.
func (s *sandbox) cutOff(process uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners[process] > 0 {
		return false
	}
	if s.cut == nil || len(s.cut) >= maxCut {
		s.cut = make(map[uint64]struct{})
	}
	s.cut[process] = struct{}{}
	return true
}

func (s *sandbox) wasCutOff(process uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.cut[process]
	return ok
}

func errCutOff(process uint64) error {
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "process %d was killed, because the connection of its caller broke: how it ended must not be scored", process)
}
