package chronus

import (
	"bytes"
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// How long the shell of a session has to come back after the processes of its
// command were killed, and how often they are looked for.
const (
	interruptEvery = 50 * time.Millisecond
	interruptTries = 20
)

// session is a shell that lives across commands. The shell runs a loop that
// reads a number from a pipe, sources the text of the command from a file in
// memory, and writes the number and the status to another pipe: nothing that a
// command prints is ever parsed.
type session struct {
	id string
	c  *Chronus
	p  *process // the shell

	files sessionFiles

	mu   sync.Mutex
	last uint64      // number of the last command
	run  *sessionRun // the one under way
}

// sessionRun is one command of a session.
type sessionRun struct {
	number   uint64
	started  time.Time
	from     uint64 // first byte of output
	primary  bool   // its reader is the one that is waited for
	oomStart int64
	before   []int // processes that ran before it
	timer    *time.Timer
	timedOut bool // guarded by session.mu
	finished bool // its end is known; guarded by session.mu

	// Guarded by process.mu, and told by its changed.
	end     uint64
	outcome *dsec.Outcome

	done chan struct{} // closed once the session is free for the next
}

// OpenSession implements chronusapi.Handler.
func (c *Chronus) OpenSession(ctx context.Context, req chronusapi.SessionRequest) (chronusapi.Session, error) {
	if err := req.Validate(); err != nil {
		return chronusapi.Session{}, err
	}
	c.mu.Lock()
	if len(c.sessions) >= chronusapi.MaxSessions {
		c.mu.Unlock()
		return chronusapi.Session{}, dsec.Errorf(dsec.CodeExhausted, "%d sessions are open, which is the most of a sandbox", chronusapi.MaxSessions)
	}
	c.nextSession++
	s := &session{id: "s" + utoa(c.nextSession), c: c}
	c.sessions[s.id] = s // holds the place
	c.mu.Unlock()
	if err := s.open(ctx, &req); err != nil {
		c.forgetSession(s)
		s.files.closeAll()
		return chronusapi.Session{}, err
	}
	go s.statuses()
	go s.watch()
	return chronusapi.Session{ID: s.id, Process: s.p.id}, nil
}

func (s *session) open(ctx context.Context, req *chronusapi.SessionRequest) error {
	if err := s.files.open(); err != nil {
		return err
	}
	start := chronusapi.StartRequest{Command: chronusapi.Command{Env: req.Env, Cwd: req.Cwd, User: req.User}}
	p, err := s.c.start(ctx, &start, &s.files)
	if err != nil {
		return sessionField(err)
	}
	s.files.closeChild()
	p.mu.Lock()
	p.session = s.id
	p.mu.Unlock()
	p.endRead() // between commands nobody waits for the output
	s.mu.Lock()
	s.p = p
	s.mu.Unlock()
	return nil
}

// sessionField makes an error of a start one of OpenSession's request.
func sessionField(err error) error {
	if de, ok := err.(*dsec.Error); ok {
		e := *de
		switch e.Field = strings.TrimPrefix(e.Field, "command."); e.Field {
		case "argv", "shell":
			e.Field = ""
		}
		return &e
	}
	return err
}

func (c *Chronus) forgetSession(s *session) {
	c.mu.Lock()
	delete(c.sessions, s.id)
	c.mu.Unlock()
}

func (c *Chronus) lookupSession(id string) (*session, error) {
	c.mu.Lock()
	s := c.sessions[id]
	c.mu.Unlock()
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.p != nil {
			return s, nil
		}
	}
	return nil, noSession(id)
}

func noSession(id string) error {
	return &dsec.Error{Code: dsec.CodeNotFound, Field: "session_id",
		Message: "no session " + strconv.Quote(id[:min(len(id), 64)]) + "; it may have ended with its shell"}
}

// RunCommand implements chronusapi.Handler. It waits for the command before. A
// command whose reader goes away runs on, so that the edge may be restarted.
func (c *Chronus) RunCommand(ctx context.Context, cmd chronusapi.SessionCommand, sink chronusapi.Sink) error {
	if err := cmd.Validate(); err != nil {
		return err
	}
	s, err := c.lookupSession(cmd.Session)
	if err != nil {
		return err
	}
	p := s.p
	var r *sessionRun
	for r == nil {
		var before *sessionRun
		if r, before, err = s.begin(&cmd); err != nil {
			return err
		}
		if before != nil {
			select {
			case <-before.done:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	if r.primary {
		defer p.endRead()
	}
	p.addReader(1)
	defer p.addReader(-1)
	if err := sink(chronusapi.Event{Kind: chronusapi.EventStarted, Process: p.id, PID: p.getPID()}); err != nil {
		return err
	}
	done, err := p.follow(ctx, r.from, sink, r.primary, func() (uint64, bool) { return r.end, r.outcome != nil })
	if err != nil || !done {
		return err
	}
	return sink(chronusapi.Event{Kind: chronusapi.EventExited, Outcome: *r.outcome})
}

// begin hands a command to the shell, or returns the one that it is busy with.
func (s *session) begin(cmd *chronusapi.SessionCommand) (r, busy *sessionRun, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run != nil {
		return nil, s.run, nil
	}
	p := s.p
	r = &sessionRun{number: s.last + 1, started: time.Now(), done: make(chan struct{})}
	r.before = p.descendants()
	if p.group != nil {
		r.oomStart, _ = p.group.oomKills()
	}
	if err := s.files.setText(cmd.Command); err != nil {
		if p.ended.Load() {
			return nil, nil, noSession(s.id)
		}
		return nil, nil, &dsec.Error{Code: dsec.CodeExhausted, Message: "no memory for the command: " + err.Error(), Err: err}
	}
	p.mu.Lock()
	r.from = p.spool.next
	if cmd.OutputLimit > 0 {
		p.limit = r.from + uint64(cmd.OutputLimit)
		p.onOver = func() { s.interrupt(r) }
	}
	p.mu.Unlock()
	s.run = r
	s.last = r.number
	if cmd.Timeout > 0 {
		r.timer = time.AfterFunc(cmd.Timeout, func() {
			s.mu.Lock()
			r.timedOut = s.run == r && !r.finished
			s.mu.Unlock()
			s.interrupt(r)
		})
	}
	r.primary = p.beginRead(r.from) // before there is output
	// A shell that is gone is told by its exit, which ends the run.
	_, _ = s.files.control.Write(append(strconv.AppendUint(nil, r.number, 10), '\n'))
	return r, nil, nil
}

// finish ends the command under way, if it has this number; 0 is any.
func (s *session) finish(number uint64, status int, shell *dsec.Outcome) {
	s.mu.Lock()
	r := s.run
	if r == nil || r.finished || number != 0 && r.number != number {
		s.mu.Unlock()
		return
	}
	timedOut := r.timedOut
	r.finished = true
	s.mu.Unlock()

	if r.timer != nil {
		r.timer.Stop()
	}
	p := s.p
	o := &dsec.Outcome{Code: status}
	if shell != nil {
		*o = *shell
	} else {
		for _, out := range p.outputs {
			out.drain()
		}
	}
	o.Claimed = true
	o.TimedOut = o.TimedOut || timedOut
	o.Started = r.started
	o.Duration = time.Since(r.started)
	if p.group != nil && shell == nil {
		n, ok := p.group.oomKills()
		o.OOM = ok && n > r.oomStart
	}
	s.files.clearText()
	p.mu.Lock()
	o.OutputLimit = p.over
	p.over = false
	p.limit = 0
	r.end = p.spool.next
	r.outcome = o
	p.changed.Broadcast()
	p.mu.Unlock()
	// Last, so that the next command finds nothing of this one.
	s.mu.Lock()
	s.run = nil
	s.mu.Unlock()
	close(r.done)
}

// statuses reads what the shell tells, until it closes its end: a command may
// do that, too, and then nothing but the shell's own end is told any more.
func (s *session) statuses() {
	buf := make([]byte, 64)
	for {
		// The shell writes each line at once, and a pipe keeps it whole.
		n, err := s.files.status.Read(buf)
		if err != nil {
			return
		}
		for line := range bytes.Lines(buf[:n]) {
			if number, status, ok := parseStatus(line); ok {
				s.finish(number, status, nil)
			}
		}
	}
}

// watch ends the session with its shell.
func (s *session) watch() {
	<-s.p.done
	s.p.mu.Lock()
	o := *s.p.outcome
	s.p.mu.Unlock()
	s.c.forgetSession(s)
	s.finish(0, 0, &o)
	s.files.closeAll() // wakes statuses
}

// parseStatus reads "<number> <status>\n". Any process of the session can
// write there, which is one reason why the status is only claimed.
func parseStatus(line []byte) (number uint64, status int, ok bool) {
	a, b, ok := bytes.Cut(bytes.TrimSuffix(line, []byte{'\n'}), []byte{' '})
	if !ok {
		return 0, 0, false
	}
	number, err1 := strconv.ParseUint(string(a), 10, 64)
	v, err2 := strconv.ParseUint(string(b), 10, 8)
	return number, int(v), err1 == nil && err2 == nil && number > 0
}

// interrupt kills what the command under way started, again and again, until
// the shell comes back. A shell that does not is killed with the rest.
func (s *session) interrupt(r *sessionRun) {
	p := s.p
	tick := time.NewTicker(interruptEvery)
	defer tick.Stop()
	for range interruptTries {
		select {
		case <-r.done:
			return
		default:
		}
		for _, pid := range p.descendants() {
			if pid != p.getPID() && !slices.Contains(r.before, pid) {
				killPID(pid)
			}
		}
		select {
		case <-r.done:
			return
		case <-tick.C:
		}
	}
	p.killTree()
}

// Sessions implements chronusapi.Handler.
func (c *Chronus) Sessions(context.Context) ([]chronusapi.Session, error) {
	c.mu.Lock()
	all := make([]*session, 0, len(c.sessions))
	for _, s := range c.sessions {
		all = append(all, s)
	}
	c.mu.Unlock()
	list := make([]chronusapi.Session, 0, len(all))
	for _, s := range all {
		s.mu.Lock()
		if s.p != nil {
			list = append(list, chronusapi.Session{ID: s.id, Process: s.p.id, Busy: s.run != nil})
		}
		s.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b chronusapi.Session) int { return int(int64(a.Process) - int64(b.Process)) })
	return list, nil
}

// Interrupt implements chronusapi.Handler.
func (c *Chronus) Interrupt(_ context.Context, id string) error {
	s, err := c.lookupSession(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	r := s.run
	if r != nil && r.finished {
		r = nil
	}
	s.mu.Unlock()
	if r == nil {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "session_id", Message: "session " + strconv.Quote(id) + " runs no command"}
	}
	go s.interrupt(r)
	return nil
}

// CloseSession implements chronusapi.Handler. It returns once the shell is gone.
func (c *Chronus) CloseSession(ctx context.Context, id string) error {
	s, err := c.lookupSession(id)
	if err != nil {
		return err
	}
	c.forgetSession(s)
	s.p.killTree()
	select {
	case <-s.p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// closeFile closes a file that may not have been opened.
func closeFile(f **os.File) {
	if *f != nil {
		(*f).Close()
		*f = nil
	}
}
