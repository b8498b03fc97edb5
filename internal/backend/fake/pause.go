package fake

import (
	"context"
	"net"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// A paused machine stands still where a real one would be seen to: nothing is read
// from or written to its connections, no output and no program begins, and no
// timeout is over.

var _ backend.Pauser = (*Instance)(nil)

// standstill is the state of a machine's pauses. Its mu guards it.
type standstill struct {
	over      chan struct{} // closed when it goes on; nil: it is not paused
	since     time.Time
	skipped   time.Duration // how long it was paused, before
	deadlines map[*deadline]struct{}
}

// deadline calls f when the machine has lived until at.
type deadline struct {
	m     *machine
	at    time.Duration
	f     func()
	timer *time.Timer
}

// epoch is when machines begin to count how long they live.
var epoch = time.Now()

// live is the time that the machine was not paused. The caller holds mu.
func (s *standstill) live() time.Duration {
	now := time.Now()
	if s.over != nil {
		now = s.since
	}
	return now.Sub(epoch) - s.skipped
}

func (m *machine) live() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pause.live()
}

// after has f called once the machine has lived for d, unless what it returns is
// called before.
func (m *machine) after(d time.Duration, f func()) (stop func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &deadline{m: m, at: m.pause.live() + d, f: f}
	l.timer = time.AfterFunc(d, l.reached)
	if m.pause.over != nil {
		l.timer.Stop()
	}
	if m.pause.deadlines == nil {
		m.pause.deadlines = map[*deadline]struct{}{}
	}
	m.pause.deadlines[l] = struct{}{}
	return l.stop
}

func (l *deadline) stop() {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.timer.Stop()
	delete(l.m.pause.deadlines, l)
}

func (l *deadline) reached() {
	l.m.mu.Lock()
	_, waits := l.m.pause.deadlines[l]
	due := waits && l.m.pause.over == nil
	if due {
		delete(l.m.pause.deadlines, l)
	}
	l.m.mu.Unlock()
	if due {
		l.f()
	}
}

// pass waits while the machine is paused. It reports false once done is closed: that
// of a program, which ends after its machine, or the machine's.
func (m *machine) pass(done <-chan struct{}) bool {
	for {
		m.mu.Lock()
		over := m.pause.over
		m.mu.Unlock()
		if over == nil {
			return true
		}
		select {
		case <-over:
		case <-done:
			return false
		}
	}
}

// standingConn is a connection of a machine, which stands still with it.
type standingConn struct {
	net.Conn
	m *machine
}

// Read implements io.Reader.
func (c standingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.m.pass(c.m.done)
	return n, err
}

// Write implements io.Writer.
func (c standingConn) Write(b []byte) (int, error) {
	c.m.pass(c.m.done)
	return c.Conn.Write(b)
}

// Paused implements backend.Pauser.
func (i *Instance) Paused() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.pause.over != nil
}

// Pause implements backend.Pauser.
func (i *Instance) Pause(ctx context.Context) error {
	if i.b.opts.OnPause != nil {
		if err := i.b.opts.OnPause(ctx, i.id); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.dead() {
		return errGone
	}
	if i.pause.over != nil {
		return nil
	}
	i.pause.since, i.pause.over = time.Now(), make(chan struct{})
	for l := range i.pause.deadlines {
		l.timer.Stop()
	}
	return nil
}

var errGone = dsec.Errorf(dsec.CodeLost, "the sandbox is gone")

// CameBack implements backend.Pauser.
func (i *Instance) CameBack() <-chan struct{} {
	if i.b.opts.CameBack != nil {
		return i.b.opts.CameBack(i.id)
	}
	back := make(chan struct{})
	close(back)
	return back
}

// PageOut implements backend.Pauser.
func (i *Instance) PageOut(ctx context.Context) (backend.PagedOut, error) {
	if i.b.opts.OnPageOut != nil {
		return i.b.opts.OnPageOut(ctx, i.id)
	}
	switch {
	case i.dead():
		return backend.PagedOut{}, errGone
	case !i.Paused():
		return backend.PagedOut{}, dsec.Errorf(dsec.CodeConflict, "sandbox %s is not paused", i.id)
	}
	return backend.PagedOut{Reason: "a sandbox in memory has none of its own"}, ctx.Err()
}

// Resume implements backend.Pauser.
func (i *Instance) Resume(ctx context.Context) error {
	if i.b.opts.OnResume != nil {
		if err := i.b.opts.OnResume(ctx, i.id); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.dead() {
		return errGone
	}
	if i.pause.over == nil {
		return nil
	}
	i.pause.skipped += time.Since(i.pause.since)
	close(i.pause.over)
	i.pause.over = nil
	for l := range i.pause.deadlines {
		l.timer.Reset(l.at - i.pause.live())
	}
	return nil
}
