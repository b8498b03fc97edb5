package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// launcher is the backend's side of its launcher process: small, so that a
// fork of it is cheap, and in a mount namespace that holds only what a
// container needs. It ends when its socket does, so it never outlives the
// backend; what it started does. Where it dies first, the next call starts
// another.
type launcher struct {
	argv    []string
	hello   helloRequest
	chronus string
	log     *slog.Logger

	mu     sync.Mutex
	run    *launcherRun // nil: not started, or dead
	closed bool
}

// launcherRun is one launcher process.
type launcherRun struct {
	conn *packetConn
	cmd  *exec.Cmd
	dead chan struct{} // closed with err set

	mu      sync.Mutex
	nextID  uint64
	waiting map[uint64]chan answer
	err     error
}

type answer struct {
	reply
	fds []int
}

var errLauncherGone = &dsec.Error{Code: dsec.CodeUnavailable, Message: "the container launcher ended; nothing was started"}

// get returns the running launcher, started if need be.
func (l *launcher) get(ctx context.Context) (*launcherRun, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, dsec.Errorf(dsec.CodeUnavailable, "the container backend is closed")
	}
	if l.run != nil {
		select {
		case <-l.run.dead:
			l.log.Warn("launcher ended, starting another", "err", l.run.err)
		default:
			return l.run, nil
		}
	}
	run, err := l.start(ctx)
	l.run = run
	return run, err
}

func (l *launcher) start(ctx context.Context) (*launcherRun, error) {
	sp, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("launcher: %w", err)
	}
	theirs := os.NewFile(uintptr(sp[1]), "launcher")
	defer theirs.Close()
	conn, err := newPacketConn(sp[0])
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(l.argv[0], l.argv[1:]...)
	cmd.ExtraFiles = []*os.File{theirs} // descriptor 3
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), launcherEnv+"=1")
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = conn.c.Close()
		return nil, fmt.Errorf("launcher: %w", err)
	}
	run := &launcherRun{conn: conn, cmd: cmd, dead: make(chan struct{}), waiting: map[uint64]chan answer{}}
	go run.receive()
	// Whoever asked first may give up; the launcher is for all.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	if err := l.sayHello(ctx, run); err != nil {
		run.close()
		return nil, err
	}
	return run, nil
}

// sayHello hands the programs of a container to the launcher.
func (l *launcher) sayHello(ctx context.Context, run *launcherRun) error {
	chronus, err := os.Open(l.chronus)
	if err != nil {
		return err
	}
	defer chronus.Close()
	files, err := os.Open(l.chronus + "-files")
	if err != nil {
		return err
	}
	defer files.Close()
	_, err = run.call(ctx, request{Hello: &l.hello}, int(chronus.Fd()), int(files.Fd()))
	return err
}

// receive hands answers to their callers until the launcher ends.
func (r *launcherRun) receive() {
	for {
		var a answer
		fds, err := r.conn.recv(&a.reply)
		if err != nil {
			r.end(err)
			return
		}
		a.fds = fds
		r.mu.Lock()
		ch := r.waiting[a.ID]
		delete(r.waiting, a.ID)
		r.mu.Unlock()
		if ch == nil { // its caller gave up: what was started is killed by the sweep of its cgroup
			closeAll(fds)
			continue
		}
		ch <- a
	}
}

func (r *launcherRun) end(err error) {
	_ = r.conn.c.Close()
	werr := r.cmd.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = errors.Join(err, werr)
	close(r.dead)
}

// close ends the launcher and waits for it.
func (r *launcherRun) close() {
	_ = r.conn.c.Close()
	select {
	case <-r.dead:
	case <-time.After(10 * time.Second):
		_ = r.cmd.Process.Kill()
		<-r.dead
	}
}

// call sends a request and waits for its answer. The descriptors of the answer
// are the caller's. Where ctx ends first the request goes on, and its
// descriptors are closed when they come.
func (r *launcherRun) call(ctx context.Context, req request, fds ...int) (answer, error) {
	s, err := r.send(req, fds...)
	if err != nil {
		return answer{}, err
	}
	a, err := s.answer(ctx)
	if err != nil && ctx.Err() != nil {
		s.abandon()
	}
	return a, err
}

// starting is a request that waits for its answer. It is for one goroutine at a
// time.
type starting struct {
	run      *launcherRun
	id       uint64
	ch       chan answer
	answered bool // the answer was taken from ch
}

func (r *launcherRun) send(req request, fds ...int) (*starting, error) {
	s := &starting{run: r, ch: make(chan answer, 1)}
	r.mu.Lock()
	r.nextID++
	s.id = r.nextID
	r.waiting[s.id] = s.ch
	r.mu.Unlock()
	req.ID = s.id
	if err := r.conn.send(req, fds...); err != nil {
		r.forget(s.id)
		return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: errLauncherGone.Message, Err: err}
	}
	return s, nil
}

// answer waits for the answer. Where ctx ends first it may be called again, or
// else abandon is.
func (s *starting) answer(ctx context.Context) (a answer, err error) {
	select {
	case a = <-s.ch:
	case <-s.run.dead:
		select {
		case a = <-s.ch: // it came before the end
		default:
			return answer{}, errLauncherGone
		}
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	}
	s.answered = true
	if a.Error != nil {
		closeAll(a.fds)
		return answer{}, a.Error.err()
	}
	return a, nil
}

// abandon lets the descriptors of the answer be closed when they come. It does
// nothing where answer has returned them, or the error in their place.
func (s *starting) abandon() {
	if !s.answered && !s.run.forget(s.id) { // the answer is on its way to ch
		closeAll((<-s.ch).fds)
	}
}

// wait returns PID 1 of a container and its user namespace.
func (s *starting) wait(ctx context.Context) (p *process, userns int, err error) {
	a, err := s.answer(ctx)
	if err != nil {
		return nil, -1, err
	}
	if len(a.fds) != 2 {
		closeAll(a.fds)
		return nil, -1, fmt.Errorf("launcher: start answered with %d descriptors", len(a.fds))
	}
	p, err = newProcess(a.PID, a.fds[0])
	if err != nil {
		_ = unix.Close(a.fds[1])
		return nil, -1, err
	}
	return p, a.fds[1], nil
}

// forget reports whether the request was still waiting.
func (r *launcherRun) forget(id uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.waiting[id]
	delete(r.waiting, id)
	return ok
}

// startShell has a container started up to the point where chronus waits for
// Setup. The descriptors stay the caller's.
func (l *launcher) startShell(ctx context.Context, base uint32, listener, cgroup int) (*starting, error) {
	run, err := l.get(ctx)
	if err != nil {
		return nil, err
	}
	return run.send(request{Start: &startRequest{Base: base}}, listener, cgroup)
}

// close ends the launcher.
func (l *launcher) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.run != nil {
		l.run.close()
		l.run = nil
	}
}
