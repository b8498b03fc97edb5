package fake

import (
	"context"
	"fmt"
	"sort"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// session is a shell that keeps its state from one command to the next.
type session struct {
	id    string
	proc  *process // the shell, as Processes lists it
	shell *shell
	turn  chan struct{} // holds one token while no command runs

	mu      sync.Mutex
	current *process // the last command, to which its background jobs belong
	over    chan struct{}
}

func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !closed(s.over) {
		close(s.over)
	}
	if s.current != nil {
		s.current.kill(sigKill, true)
	}
}

// OpenSession implements chronusapi.Handler.
func (c *chronus) OpenSession(_ context.Context, req chronusapi.SessionRequest) (chronusapi.Session, error) {
	if err := c.check(req.Cwd, req.User, ""); err != nil {
		return chronusapi.Session{}, err
	}
	c.mu.Lock()
	n := len(c.sessions)
	c.mu.Unlock()
	if n >= chronusapi.MaxSessions {
		return chronusapi.Session{}, dsec.Errorf(dsec.CodeExhausted, "%d sessions are open, which is the most at once", n)
	}
	p, err := c.newProcess([]string{"sh"}, 0)
	if err != nil {
		return chronusapi.Session{}, err
	}
	cwd := req.Cwd
	if cwd == "" {
		cwd = "/"
	}
	s := &session{id: fmt.Sprintf("s%d", p.id), proc: p, turn: make(chan struct{}, 1), over: make(chan struct{})}
	s.shell = &shell{task: task{c: c, p: p, env: newEnviron(req.Env), cwd: cwd}}
	s.turn <- struct{}{}
	p.session = s.id
	c.mu.Lock()
	c.sessions[s.id] = s
	c.mu.Unlock()
	go c.watch(s)
	return chronusapi.Session{ID: s.id, Process: p.id}, nil
}

// watch ends the session when its shell is killed or it is closed.
func (c *chronus) watch(s *session) {
	select {
	case <-s.over:
		s.proc.kill(sigKill, true)
	case <-s.proc.killed:
		s.close()
	}
	c.mu.Lock()
	delete(c.sessions, s.id)
	c.mu.Unlock()
	c.finish(s.proc, 0)
}

func (c *chronus) session(id string) (*session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.sessions[id]
	if s == nil {
		return nil, &dsec.Error{Code: dsec.CodeNotFound, Field: "session_id", Message: fmt.Sprintf("no session %q", id)}
	}
	return s, nil
}

// RunCommand implements chronusapi.Handler.
func (c *chronus) RunCommand(ctx context.Context, cmd chronusapi.SessionCommand, sink chronusapi.Sink) error {
	s, err := c.session(cmd.Session)
	if err != nil {
		return err
	}
	select {
	case <-s.turn:
	case <-s.over:
		return dsec.Errorf(dsec.CodeConflict, "session %s has ended", s.id)
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { s.turn <- struct{}{} }()
	if closed(s.over) {
		return dsec.Errorf(dsec.CodeConflict, "session %s has ended", s.id)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	p := &process{
		id: s.proc.id, pid: s.proc.pid, started: time.Now(), begun: c.m.live(), limit: cmd.OutputLimit,
		spool: &spool{lossless: true}, in: &input{eof: true}, killed: make(chan struct{}), tree: make(chan struct{}),
	}
	s.mu.Lock()
	s.current = p
	s.mu.Unlock()
	if cmd.Timeout > 0 {
		defer c.m.after(cmd.Timeout, p.expire)()
	}
	defer context.AfterFunc(ctx, func() {
		if context.Cause(ctx) == chronusapi.ErrInterrupt { // it is never wrapped
			p.kill(sigKill, true)
		}
	})()
	go s.run(p, cmd.Command)
	err = sink(chronusapi.Event{Kind: chronusapi.EventStarted, Process: p.id, PID: p.pid})
	if err == nil {
		err = p.spool.follow(ctx, 0, true, sink)
	}
	if err != nil {
		p.spool.release()
		// The next command must not find this one still at work.
		_, _ = p.spool.wait(context.WithoutCancel(ctx))
	}
	return err
}

func (s *session) run(p *process, script string) {
	s.shell.p, s.shell.done = p, p.killed
	s.shell.stdin = inputReader{p.in, p.killed}
	s.shell.stdout, s.shell.stderr = output{s.shell.c.m, p, chronusapi.Stdout, p.killed}, output{s.shell.c.m, p, chronusapi.Stderr, p.killed}
	code := s.shell.run(script)
	exited := s.shell.exited
	p.mu.Lock()
	o := dsec.Outcome{
		Code: code, Signal: p.signal, TimedOut: p.timedOut, OutputLimit: p.outputLimit, Claimed: true,
		Started: p.started, Duration: s.shell.c.m.live() - p.begun,
	}
	p.mu.Unlock()
	if o.Signal != 0 {
		o.Code = 0
	}
	if exited {
		s.close()
	}
	p.spool.end(o)
}

// Sessions implements chronusapi.Handler.
func (c *chronus) Sessions(context.Context) ([]chronusapi.Session, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]chronusapi.Session, 0, len(c.sessions))
	for _, s := range c.sessions {
		list = append(list, chronusapi.Session{ID: s.id, Process: s.proc.id, Busy: len(s.turn) == 0})
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Process < list[j].Process })
	return list, nil
}

// Interrupt implements chronusapi.Handler.
func (c *chronus) Interrupt(_ context.Context, id string) error {
	s, err := c.session(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil || len(s.turn) > 0 {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "session_id", Message: fmt.Sprintf("session %q runs no command", id)}
	}
	s.current.kill(sigKill, true)
	return nil
}

// CloseSession implements chronusapi.Handler.
func (c *chronus) CloseSession(_ context.Context, id string) error {
	s, err := c.session(id)
	if err != nil {
		return err
	}
	s.close()
	c.mu.Lock()
	delete(c.sessions, id)
	c.mu.Unlock()
	return nil
}
