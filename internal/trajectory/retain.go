package trajectory

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// Forget has the log know nothing of a sandbox any more, and removes what it
// sealed of it. One that it does not know is no error, so that a call that failed
// is repeated.
func (l *Log) Forget(ctx context.Context, id dsec.SandboxID) error {
	l.mu.Lock()
	sb := l.sandboxes[id]
	l.mu.Unlock()
	if sb == nil {
		return nil
	}
	sb.sealing.Lock()
	defer sb.sealing.Unlock()
	if l.opts.Store != nil {
		var keys []string
		err := l.opts.Store.List(ctx, sb.prefix(), func(i blob.Info) error {
			keys = append(keys, i.Key)
			return nil
		})
		if err != nil {
			return err
		}
		for _, key := range keys {
			if err := l.opts.Store.Delete(ctx, key); err != nil {
				return err
			}
		}
	}
	if err := l.forget(sb); err != nil {
		return err
	}
	notify(l.wake)
	return l.outputs.drop(id, all)
}

func (l *Log) forget(sb *sandbox) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sb.forgotten {
		return nil
	}
	before := sb.state
	sb.state = state{project: sb.project, seq: sb.seq, forgotten: true}
	if err := l.putState(sb, 0); err != nil {
		sb.state = before
		return err
	}
	l.reserved -= endRoom * int64(len(before.unfinished))
	l.indexes.drop(sb)
	if sb.changed != nil {
		close(sb.changed)
		sb.changed = nil
	}
	return nil
}

// maintain looks after segments until the log is closed.
func (l *Log) maintain() {
	again := time.NewTimer(0)
	defer again.Stop()
	for {
		select {
		case <-l.wake:
		case <-again.C:
		case <-l.ctx.Done():
			return
		}
		l.makeAheadAside()
		err := l.shrink(l.ctx)
		l.removeGone()
		if err != nil && l.ctx.Err() == nil {
			l.opts.Logger.Warn("trajectory: over its bound", "err", err)
			again.Reset(10 * time.Second)
		}
	}
}

// shrink removes segments that nobody needs, and those that are too much.
func (l *Log) shrink(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil
	}
	for i := 0; i < len(l.segments); {
		if !l.segments[i].free() {
			i++
		} else if err := l.remove(i); err != nil {
			return err
		}
	}
	if l.cur.objects > l.opts.MaxBytes/8 && l.spare() > l.reserved+l.slack()+endRoom {
		if err := l.rotate(); err != nil {
			return l.failed(err)
		}
	}
	for l.bytes() > l.opts.MaxBytes && len(l.segments) > 0 {
		s := l.segments[0]
		if l.opts.Store != nil && !s.free() {
			l.mu.Unlock()
			err := l.sealAll(ctx, s)
			l.mu.Lock()
			if err != nil {
				return err
			}
		}
		if len(l.segments) == 0 || l.segments[0] != s {
			continue
		}
		if err := l.remove(0); err != nil {
			return err
		}
	}
	return nil
}

// free reports whether nothing in a segment is only there.
func (s *segment) free() bool {
	return !slices.ContainsFunc(s.members, func(m member) bool { return !m.sb.forgotten && m.sb.sealed < m.last })
}

// sealAll seals the sandboxes of a full segment.
func (l *Log) sealAll(ctx context.Context, s *segment) error {
	for _, m := range s.members {
		if err := l.Seal(ctx, m.sb.id); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
			return err
		}
	}
	return nil
}

// remove takes the i-th full segment out of the log, for removeGone. What is known of its sandboxes and
// stands nowhere later is noted again before. The caller holds mu.
func (l *Log) remove(i int) error {
	s := l.segments[i]
	for _, m := range s.members {
		sb := m.sb
		if sb.head.segment != s.number || sb.forgotten && sb.segments == 1 {
			continue // of a forgotten one nothing need be known once no segment has records of it
		}
		if err := l.putState(sb, 0); err != nil {
			return err
		}
	}
	l.segments = slices.Delete(l.segments, i, i+1)
	l.finished -= s.size
	l.gone = append(l.gone, s)
	for _, m := range s.members {
		if m.sb.segments--; m.sb.forgotten && m.sb.segments == 0 {
			delete(l.sandboxes, m.sb.id)
		}
	}
	return nil
}

// removeGone removes the files of segments that are not of the log any more,
// which takes long, and the outputs of what was dropped with them. One that a
// crash leaves holds nothing that the others do not know.
func (l *Log) removeGone() {
	l.mu.Lock()
	gone := l.gone
	l.gone = nil
	dropped := make(map[dsec.SandboxID]uint64)
	for _, s := range gone {
		for _, m := range s.members {
			if !m.sb.forgotten && m.sb.sealed < m.last {
				dropped[m.sb.id] = max(dropped[m.sb.id], m.last)
			}
		}
	}
	l.mu.Unlock()
	for _, s := range gone {
		if err := errors.Join(s.f.Close(), os.Remove(filepath.Join(l.opts.Dir, segmentName(s.number)))); err != nil {
			l.opts.Logger.Warn("trajectory: segment not removed", "segment", s.number, "err", err)
		}
	}
	for id, last := range dropped {
		if err := l.outputs.drop(id, func(seq uint64, _ string) bool { return seq <= last }); err != nil {
			l.opts.Logger.Warn("trajectory: outputs not removed", "sandbox", id, "err", err)
		}
	}
}
