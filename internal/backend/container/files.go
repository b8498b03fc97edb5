package container

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

var _ backend.FileServer = (*instance)(nil)

// A filesServer is the process that serves an instance's files, while there is
// one: it is started when a connection is asked for, and ends when it had none for
// a while, or this process ends.
type filesServer struct {
	mu       sync.Mutex
	run      *filesRun     // the last one; nil: there was none
	starting *filesStart   // under way; nil: there is none
	paused   chan struct{} // closed when the sandbox goes on; nil: it is not paused
	closed   bool          // none is started any more
	starved  time.Time     // when one was last killed for want of memory
}

// filesStart is the start of one, which nobody's context ends: what the launcher was
// asked for it does, and must not do to a frozen sandbox, in which its child, and so
// itself, would wait.
type filesStart struct {
	over chan struct{} // closed once the rest is set
	run  *filesRun
	err  error
}

// filesRun is one such process.
type filesRun struct {
	control *net.UnixConn
	handing sync.Mutex // of control: one connection is handed over at a time
	proc    *process
	killed  int64         // of its group for want of memory, when it started
	over    chan struct{} // closed when it has ended and that is noted
	ended   bool          // it takes no connections any more; its filesServer's mu guards it
}

// filesTries is how often a connection is handed over: one who has had nothing to
// do for a while ends at any moment.
const filesTries = 3

// DialFiles implements backend.FileServer.
func (i *instance) DialFiles(ctx context.Context) (net.Conn, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer unix.Close(theirs)
	for range filesTries {
		var run *filesRun
		if run, err = i.filesRun(ctx); err != nil {
			break
		}
		if err = run.hand(theirs); err == nil {
			return ours, nil
		}
		if !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, net.ErrClosed) {
			break
		}
		i.files.forget(run)
	}
	_ = ours.Close()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return nil, err
	}
	return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: "what serves the sandbox's files cannot be started", Err: err}
}

// socketPair is a connection: one end of it in the runtime's poller.
func socketPair() (ours net.Conn, theirs int, err error) {
	sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socket pair: %w", err)
	}
	f := os.NewFile(uintptr(sp[0]), "files")
	defer f.Close() // FileConn has a copy
	if ours, err = net.FileConn(f); err != nil {
		_ = unix.Close(sp[1])
		return nil, -1, err
	}
	return ours, sp[1], nil
}

// handTimeout is how long the process may take to have room for one more
// connection. It is nobody's context: the socket is that of all callers.
const handTimeout = 5 * time.Second

// hand hands a connection over.
func (r *filesRun) hand(fd int) error {
	r.handing.Lock()
	defer r.handing.Unlock()
	if err := r.control.SetWriteDeadline(time.Now().Add(handTimeout)); err != nil {
		return err
	}
	_, _, err := r.control.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil)
	return err
}

// forget lets go of a process that takes no connections any more. What it has it
// still serves.
func (s *filesServer) forget(r *filesRun) {
	_ = r.control.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	r.ended = true
}

// filesRun returns the process, which it starts where there is none. Who comes
// while it is started, or while the sandbox is paused, waits for as long as his
// context lasts.
func (i *instance) filesRun(ctx context.Context) (*filesRun, error) {
	for {
		run, start, paused, err := i.filesNow()
		if run != nil || err != nil {
			return run, err
		}
		if start != nil {
			return start.wait(ctx)
		}
		select {
		case <-paused:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (s *filesStart) wait(ctx context.Context) (*filesRun, error) {
	ctx, cancel := stepContext(ctx)
	defer cancel()
	select {
	case <-s.over:
		return s.run, s.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// runFiles starts the process.
func (i *instance) runFiles(start *filesStart) {
	run, err := i.startFiles(context.Background())
	s := &i.files
	s.mu.Lock()
	defer s.mu.Unlock()
	s.starting = nil
	if err == nil {
		s.run = run
		run.proc.onEnd(func() { i.filesEnded(run) })
		if s.closed {
			_ = run.control.Close() // which ends it
			run, err = nil, errGone
		}
	}
	start.run, start.err = run, err
	close(start.over)
}

var errGone = dsec.Errorf(dsec.CodeLost, "the sandbox is gone")

// filesNow returns the process, or the start of one, or what is closed when the
// sandbox is not paused any more.
func (i *instance) filesNow() (*filesRun, *filesStart, <-chan struct{}, error) {
	s := &i.files
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, nil, errGone
	}
	if s.paused != nil {
		return nil, nil, s.paused, nil
	}
	if s.run != nil && !s.run.ended {
		select {
		case <-s.run.proc.done:
		default:
			return s.run, nil, nil, nil
		}
	}
	if s.starting == nil {
		s.starting = &filesStart{over: make(chan struct{})}
		go i.runFiles(s.starting)
	}
	return nil, s.starting, nil, nil
}

// pause has nothing started any more, and returns when nothing is.
func (s *filesServer) pause(ctx context.Context) error {
	s.mu.Lock()
	if s.paused == nil && !s.closed {
		s.paused = make(chan struct{})
	}
	start := s.starting
	s.mu.Unlock()
	if start == nil {
		return nil
	}
	select {
	case <-start.over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// goOn undoes pause.
func (s *filesServer) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paused != nil {
		close(s.paused)
		s.paused = nil
	}
}

// startFiles has a process started.
func (i *instance) startFiles(ctx context.Context) (_ *filesRun, err error) {
	sh := i.shell()
	if sh == nil {
		return nil, errGone
	}
	sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket pair: %w", err)
	}
	control, err := newPacketConn(sp[0])
	if err != nil {
		_ = unix.Close(sp[1])
		return nil, err
	}
	fds := []int{-1, sp[1]}
	defer func() {
		closeAll(fds)
		if err != nil {
			_ = control.c.Close()
		}
	}()
	if fds[0], err = sh.proc.dup(); err != nil {
		return nil, err
	}
	places, err := sh.group.OpenFiles()
	if err != nil {
		return nil, err
	}
	fds = append(fds, places...)
	r := &filesRun{control: control.c, over: make(chan struct{})}
	if r.killed, err = sh.group.FilesOOMKills(); err != nil {
		return nil, err
	}
	launcher, err := i.b.launcher.get(ctx)
	if err != nil {
		return nil, err
	}
	a, err := launcher.call(ctx, request{Files: true}, fds...)
	if err != nil {
		return nil, err
	}
	if len(a.fds) != 1 {
		closeAll(a.fds)
		return nil, fmt.Errorf("launcher: files answered with %d descriptors", len(a.fds))
	}
	if r.proc, err = newProcess(a.PID, a.fds[0]); err != nil {
		return nil, err
	}
	return r, nil
}

// filesEnded notes why a process ended.
func (i *instance) filesEnded(r *filesRun) {
	defer close(r.over)
	_ = r.control.Close()
	status, known := r.proc.status()
	r.proc.close()
	sh := i.shell()
	i.files.mu.Lock()
	defer i.files.mu.Unlock()
	if i.files.closed || sh == nil || known && status.Signal() != unix.SIGKILL {
		return // closed: nobody asks any more, and what could be asked may be closed too
	}
	if n, err := sh.group.FilesOOMKills(); err == nil && n > r.killed {
		i.files.starved = time.Now()
	}
}

// starvedGrace is how long after a connection broke the end of what served it may
// come to be known.
const starvedGrace = 100 * time.Millisecond

// FilesStarved implements backend.FileServer.
func (i *instance) FilesStarved(since time.Time) bool {
	s := &i.files
	s.mu.Lock()
	run := s.run
	s.mu.Unlock()
	if run != nil {
		grace := time.NewTimer(starvedGrace)
		defer grace.Stop()
		select {
		case <-run.over:
		case <-grace.C:
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.starved.Before(since)
}

// close has the process take no connections any more. It is killed with the
// instance's group.
func (s *filesServer) close() {
	s.goOn() // who waits for that sees the end
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.run != nil {
		_ = s.run.control.Close()
	}
}

// abandon lets go of the process, which ends by itself once it has served what it
// was asked for.
func (s *filesServer) abandon() {
	s.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run != nil {
		s.run.proc.close()
	}
}
