package edge

import (
	"context"
	"errors"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// A command lives no longer than its caller, and all that tells of a caller is
// its connection. Where that broke and the caller comes back (Attach with own),
// either it is in time and the command goes on, or the command was killed: by the
// platform then, so that its outcome is not told as the command's own: not after a
// restart of the edge either, so that it is journaled before the kill.

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

// cutOff reports whether a process whose caller is gone is to be killed now, and
// remembers that it was, over a restart of the edge too.
func (e *Edge) cutOff(s *sandbox, process uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owners[process] > 0 {
		return false
	}
	if s.cut = append(s.cut, process); len(s.cut) > maxCut {
		s.cut = slices.Delete(s.cut, 0, 1)
	}
	e.writeCut(s)
	return !s.killLater()
}

// killLater has the commands that were cut off killed when the sandbox resumes, where it
// is paused: it can be told nothing now. The caller holds s.mu.
func (s *sandbox) killLater() bool {
	if s.paused == nil {
		return false
	}
	s.paused.cut = true
	return true
}

// cutSoFar are the processes that were cut off.
func (s *sandbox) cutSoFar() []uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.cut)
}

// spared forgets that: there was no such process to kill.
func (e *Edge) spared(s *sandbox, process uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cut = slices.DeleteFunc(s.cut, func(n uint64) bool { return n == process })
	e.writeCut(s)
}

// writeCut journals what was cut off of a sandbox that runs. What a full disk keeps
// for the ends of sandboxes is not spent on that: who breaks calls off could use it up.
// The caller holds s.mu.
func (e *Edge) writeCut(s *sandbox) {
	switch {
	case s.state != dsec.StateRunning && s.state != dsec.StatePaused:
	case e.journal.Reserved():
		e.writeAnyway(s)
	default:
		e.log.Warn("the disk is full: a restart forgets which commands were cut off", "sandbox", s.id)
	}
}

// killCut kills what an earlier edge had on record as cut off, and did not live to
// kill. Numbers are never used twice.
func (e *Edge) killCut(s *sandbox, inst backend.Instance, cut []uint64) {
	ctx, cancel := context.WithTimeout(e.closing, killTimeout)
	defer cancel()
	client := chronusapi.NewClient(inst.Dial)
	defer client.Close()
	list, err := client.Processes(ctx)
	for _, p := range list {
		if p.Outcome == nil && slices.Contains(cut, p.ID) {
			err = errors.Join(err, client.Signal(ctx, p.ID, 9, true))
		}
	}
	if err != nil {
		e.log.Warn("command of a client that went away before the restart may go on", "sandbox", s.id, "err", err)
	}
}

func (s *sandbox) wasCutOff(process uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.cut, process)
}

func errCutOff(process uint64) error {
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "process %d was killed, because the connection of its caller broke: how it ended must not be scored", process)
}
