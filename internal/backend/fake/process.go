package fake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

const sigKill = 9

// ignored are the signals whose default action does not end a process, and
// those that stop one, which the fake does not do.
var ignored = []int{17, 18, 19, 20, 21, 22, 23, 28}

// chronus is the chronusapi.Handler of one machine.
type chronus struct {
	m  *machine
	fs *fileSystem

	mu       sync.Mutex
	dead     bool
	lastID   uint64
	procs    map[uint64]*process
	ended    []uint64 // oldest first
	tags     tags
	sessions map[string]*session
}

func newChronus(m *machine) *chronus {
	return &chronus{m: m, fs: newFileSystem(m.limits), procs: make(map[uint64]*process), sessions: make(map[string]*session)}
}

func (c *chronus) killAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = true
	for _, p := range c.procs {
		p.kill(sigKill, true)
	}
	for _, s := range c.sessions {
		s.close()
	}
}

func (c *chronus) running() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.procs) - len(c.ended)
}

// Info implements chronusapi.Handler.
func (c *chronus) Info(context.Context) (chronusapi.Info, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return chronusapi.Info{Version: chronusapi.Version, Processes: len(c.procs) - len(c.ended), Sessions: len(c.sessions)}, nil
}

// process is one command.
type process struct {
	id      uint64
	pid     int
	argv    []string
	started time.Time
	begun   time.Duration // how long the machine had lived
	pty     bool
	session string
	tag     uint64
	keep    bool // its tag was not forgotten; chronus.mu guards it
	spool   *spool
	in      *input
	limit   int64 // bytes of output, 0 is none
	written atomic.Int64

	mu          sync.Mutex
	signal      int
	timedOut    bool
	outputLimit bool
	size        chronusapi.WindowSize
	killed      chan struct{} // closed when a signal ends the first process
	tree        chan struct{} // closed when a signal ends all of them
	background  atomic.Int32
}

// kill delivers a signal.
func (p *process) kill(signal int, tree bool) {
	if slices.Contains(ignored, signal) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.signal == 0 {
		p.signal = signal
		close(p.killed)
	}
	if tree && !closed(p.tree) {
		close(p.tree)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// output writes to the spool of a command until its killed channel is closed
// or the command's output limit is reached.
type output struct {
	m      *machine
	p      *process
	stream chronusapi.Stream
	done   <-chan struct{}
}

var errKilled = errors.New("killed")

// Write implements io.Writer.
func (o output) Write(b []byte) (int, error) {
	if closed(o.done) || !o.m.pass(o.done) {
		return 0, errKilled
	}
	n, over := len(b), false
	if o.p.limit > 0 {
		if room := o.p.limit - (o.p.written.Add(int64(n)) - int64(n)); int64(n) > room {
			n, over = int(max(room, 0)), true
		}
	}
	ok := o.p.spool.write(o.stream, b[:n], o.done)
	if over {
		o.p.mu.Lock()
		o.p.outputLimit = true
		o.p.mu.Unlock()
		o.p.kill(sigKill, true)
		return n, errKilled
	}
	if !ok {
		return n, errKilled
	}
	return n, nil
}

// inputReader reads an input until done is closed.
type inputReader struct {
	in   *input
	done <-chan struct{}
}

// Read implements io.Reader.
func (r inputReader) Read(b []byte) (int, error) {
	for {
		r.in.mu.Lock()
		if n := copy(b, r.in.buf); n > 0 {
			r.in.buf = r.in.buf[n:]
			r.in.signal()
			r.in.mu.Unlock()
			return n, nil
		}
		eof, wait := r.in.eof, r.in.waiter()
		r.in.mu.Unlock()
		if eof {
			return 0, io.EOF
		}
		select {
		case <-wait:
		case <-r.done:
			return 0, errKilled
		}
	}
}

// newProcess registers a command. It takes a group where the machine needs them.
func (c *chronus) newProcess(argv []string, tag uint64) (*process, error) {
	if err := c.takeGroup(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		return nil, dsec.Errorf(dsec.CodeUnavailable, "the sandbox has ended")
	}
	if len(c.procs)-len(c.ended) >= chronusapi.MaxProcesses {
		c.giveGroup()
		return nil, dsec.Errorf(dsec.CodeExhausted, "%d commands run in this sandbox, which is the most at once", chronusapi.MaxProcesses)
	}
	if err := c.claim(tag); err != nil {
		c.giveGroup()
		return nil, err
	}
	c.lastID++
	p := &process{
		id: c.lastID, pid: int(c.lastID) + 1, argv: argv, started: time.Now(), begun: c.m.live(), tag: tag, keep: tag != 0,
		spool: &spool{}, in: &input{}, killed: make(chan struct{}), tree: make(chan struct{}),
	}
	c.procs[p.id] = p
	return p, nil
}

func (c *chronus) takeGroup() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if !c.m.limited {
		return nil
	}
	if c.m.groups == 0 {
		return chronusapi.ErrNeedGroup
	}
	c.m.groups--
	return nil
}

func (c *chronus) giveGroup() {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.m.limited {
		c.m.groups++
	}
}

// finish records how p ended.
func (c *chronus) finish(p *process, code int) {
	p.in.close()
	p.mu.Lock()
	o := dsec.Outcome{
		Code: code, Signal: p.signal, TimedOut: p.timedOut, OutputLimit: p.outputLimit,
		Started: p.started, Duration: c.m.live() - p.begun, MaxRSS: 1 << 20,
	}
	p.mu.Unlock()
	if o.Signal != 0 {
		o.Code = 0
	}
	c.giveGroup()
	c.mu.Lock()
	c.ended = append(c.ended, p.id)
	c.forgetOldest()
	dead := c.dead
	c.mu.Unlock()
	if dead {
		return // with PID 1 gone nobody waited for it, and nobody tells
	}
	p.spool.end(o)
}

func (c *chronus) find(id uint64) (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.procs[id]
	if p == nil {
		return nil, &dsec.Error{Code: dsec.CodeNotFound, Field: "process_id", Message: fmt.Sprintf("no process %d", id)}
	}
	return p, nil
}

// Start implements chronusapi.Handler.
func (c *chronus) Start(ctx context.Context, req chronusapi.StartRequest, sink chronusapi.Sink) error {
	cmd := &req.Command
	argv := cmd.Argv
	if cmd.Shell != "" {
		argv = []string{"sh", "-c", cmd.Shell}
	}
	if programs[path.Base(argv[0])] == nil {
		return &dsec.Error{Code: dsec.CodeNotFound, Field: "command.argv", Message: fmt.Sprintf("no program %q", argv[0])}
	}
	if err := c.check(cmd.Cwd, cmd.User, "command."); err != nil {
		return err
	}
	p, err := c.newProcess(argv, req.Tag)
	if err != nil {
		return err
	}
	p.spool.lossless = !req.Detach
	p.limit = cmd.OutputLimit
	p.in.buf = append([]byte(nil), req.Stdin...)
	p.in.eof = !req.OpenStdin && req.PTY == nil
	if req.PTY != nil {
		p.pty, p.size = true, *req.PTY
	}
	stop := func() {}
	if cmd.Timeout > 0 {
		stop = c.m.after(cmd.Timeout, p.expire)
	}
	go func() {
		code := c.run(p, argv, cmd.Env, cmd.Cwd)
		stop()
		c.finish(p, code)
	}()
	err = sink(chronusapi.Event{Kind: chronusapi.EventStarted, Process: p.id, PID: p.pid})
	if err == nil && !req.Detach {
		err = p.spool.follow(ctx, 0, true, sink)
	}
	if err != nil && !req.Detach {
		p.spool.release()
		if !req.Orphan {
			p.kill(sigKill, true)
		}
	}
	return err
}

func (p *process) expire() {
	if p.spool.done() {
		return
	}
	p.mu.Lock()
	p.timedOut = p.signal == 0
	p.mu.Unlock()
	p.kill(sigKill, true)
}

func (s *spool) done() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.outcome != nil
}

// check refuses a cwd or a user that the sandbox does not have.
func (c *chronus) check(cwd, user, prefix string) error {
	if cwd != "" {
		n, err := c.fs.lookup(cwd, true)
		if err != nil || n.kind != kindDir {
			return &dsec.Error{Code: dsec.CodeNotFound, Field: prefix + "cwd", Message: fmt.Sprintf("no directory %q", cwd)}
		}
	}
	name, _, _ := strings.Cut(user, ":")
	if name != "" && name != "root" && name != "nobody" && strings.Trim(name, "0123456789") != "" {
		return &dsec.Error{Code: dsec.CodeNotFound, Field: prefix + "user", Message: fmt.Sprintf("no user %q", user)}
	}
	return nil
}

// run runs the program of p to its end.
func (c *chronus) run(p *process, argv, env []string, cwd string) int {
	if cwd == "" {
		cwd = "/"
	}
	t := &task{c: c, p: p, args: argv, env: newEnviron(env), cwd: cwd, done: p.killed, stdin: inputReader{p.in, p.killed}}
	t.stdout, t.stderr = output{c.m, p, chronusapi.Stdout, p.killed}, output{c.m, p, chronusapi.Stderr, p.killed}
	if p.pty {
		t.stdout = output{c.m, p, chronusapi.PTY, p.killed}
		t.stderr = t.stdout
	}
	return programs[path.Base(argv[0])](t)
}

// Attach implements chronusapi.Handler.
func (c *chronus) Attach(ctx context.Context, id, from uint64, sink chronusapi.Sink) error {
	p, err := c.find(id)
	if err != nil {
		return err
	}
	return p.spool.follow(ctx, from, false, sink)
}

// Processes implements chronusapi.Handler.
func (c *chronus) Processes(context.Context) ([]chronusapi.Process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := make([]chronusapi.Process, 0, len(c.procs))
	for _, p := range c.procs {
		p.spool.mu.Lock()
		list = append(list, chronusapi.Process{
			ID: p.id, PID: p.pid, Argv: p.argv, Started: p.started, Outcome: p.spool.outcome,
			NextSeq: p.spool.next, FirstSeq: p.spool.first, PTY: p.pty, Session: p.session,
			Lingering: p.spool.outcome != nil && p.background.Load() > 0,
		})
		p.spool.mu.Unlock()
	}
	sort.Slice(list, func(i, j int) bool { return list[i].ID < list[j].ID })
	return list, nil
}

// Signal implements chronusapi.Handler.
func (c *chronus) Signal(_ context.Context, id uint64, signal int, tree bool) error {
	p, err := c.find(id)
	if err != nil {
		return err
	}
	if p.spool.done() && !tree {
		return dsec.Errorf(dsec.CodeConflict, "process %d has ended", id)
	}
	p.kill(signal, tree)
	return nil
}

// WriteStdin implements chronusapi.Handler. A terminal echoes what is typed.
func (c *chronus) WriteStdin(ctx context.Context, id uint64, data []byte, eof bool) (int, error) {
	p, err := c.find(id)
	if err != nil {
		return 0, err
	}
	if p.pty {
		if slices.Contains(data, 3) { // ^C
			p.kill(2, true)
			return len(data), nil
		}
		_, _ = output{c.m, p, chronusapi.PTY, p.killed}.Write([]byte(strings.ReplaceAll(string(data), "\n", "\r\n")))
		if i := slices.Index(data, 4); i >= 0 { // ^D
			n, err := p.in.write(ctx, data[:i], true)
			return n + len(data) - i, err
		}
	}
	return p.in.write(ctx, data, eof)
}

// Resize implements chronusapi.Handler.
func (c *chronus) Resize(_ context.Context, id uint64, size chronusapi.WindowSize) error {
	p, err := c.find(id)
	if err != nil {
		return err
	}
	if !p.pty {
		return dsec.Errorf(dsec.CodeConflict, "process %d has no terminal", id)
	}
	p.mu.Lock()
	p.size = size
	p.mu.Unlock()
	return nil
}
