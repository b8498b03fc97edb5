package chronus

import (
	"context"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// defaultPath is the PATH of a command whose environment has none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Start implements chronusapi.Handler.
func (c *Chronus) Start(ctx context.Context, req chronusapi.StartRequest, sink chronusapi.Sink) error {
	if err := req.Validate(); err != nil {
		return err
	}
	p, err := c.start(ctx, &req, nil)
	if err != nil {
		return err
	}
	if req.Detach {
		return sink(chronusapi.Event{Kind: chronusapi.EventStarted, Process: p.id, PID: p.getPID()})
	}
	err = p.stream(ctx, 0, sink, true)
	if err != nil && !req.Orphan {
		p.killTree()
	}
	p.endRead() // an orphan overwrites until the next reader comes
	return err
}

// start starts a command and returns once it has exec'd. With shell it is the
// shell of a session.
func (c *Chronus) start(ctx context.Context, req *chronusapi.StartRequest, shell *sessionFiles) (*process, error) {
	cmd := &req.Command
	who, err := lookupAccount(cmd.User, "command.user")
	if err != nil {
		return nil, err
	}
	p, err := c.newProcess(req)
	if err != nil {
		return nil, err
	}
	files, err := p.openFiles(req)
	if err != nil {
		c.abandon(p)
		return nil, err
	}
	defer files.close()
	l := launch{c: c, p: p, cmd: cmd, who: who, env: environment(cmd.Env, who, req.PTY != nil), files: &files, pty: req.PTY != nil, shell: shell}
	l.build()
	if cmd.Timeout > 0 {
		p.timer = time.AfterFunc(cmd.Timeout, func() {
			if !p.ended.Load() {
				p.timedOut.Store(true)
				p.killTree()
			}
		})
	}
	// A child that is stopped before it execs holds this call up.
	stop := func() bool { return true }
	if !req.Orphan && !req.Detach {
		stop = context.AfterFunc(ctx, p.killTree)
	}
	err = l.run()
	stop()
	if err != nil {
		if p.timer != nil {
			p.timer.Stop()
		}
		p.closeFiles()
		c.abandon(p)
		return nil, err
	}
	for _, o := range p.outputs {
		go o.pump()
	}
	if len(req.Stdin) > 0 {
		// The input of a terminal never ends by itself.
		p.stdin.feed(req.Stdin, req.OpenStdin || req.PTY != nil)
	}
	return p, nil
}

// newProcess reserves an id, a place and a group.
func (c *Chronus) newProcess(req *chronusapi.StartRequest) (*process, error) {
	p := &process{
		c:        c,
		argv:     shownArgv(&req.Command),
		limit:    uint64(req.Command.OutputLimit),
		detached: req.Detach,
		primary:  !req.Detach,
		done:     make(chan struct{}),
	}
	p.changed.L = &p.mu
	p.onOver = p.killTree
	p.spool = spool{budget: &c.budget, lossless: !req.Detach}
	for tries := 0; ; tries++ {
		err := c.reserve(p)
		if err != chronusapi.ErrNeedGroup || tries == groupTries || !c.emptying() {
			return p, err
		}
		time.Sleep(groupWait)
	}
}

// A process that was waited for leaves its group a moment later, and one that
// failed to exec is waited for a moment later, so a group may look taken by
// a command that is gone. It is looked at a few times before another is asked for.
const (
	groupTries = 10
	groupWait  = 200 * time.Microsecond
	groupFresh = 20 * time.Millisecond // since its command ended
)

// reserve takes a place and a group for p.
func (c *Chronus) reserve(p *process) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running >= chronusapi.MaxProcesses {
		return dsec.Errorf(dsec.CodeExhausted, "%d commands run, which is the most of a sandbox", c.running)
	}
	if c.setup.grouped {
		g, err := c.takeGroup(p)
		if err != nil {
			return err
		}
		p.group = g
	}
	c.running++
	return nil
}

// emptying reports whether the command of a group ended just now.
func (c *Chronus) emptying() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.groups {
		if g.owner != nil && !g.bad && g.owner.ended.Load() && time.Since(time.Unix(0, g.owner.endedAt.Load())) < groupFresh {
			return true
		}
	}
	return false
}

// abandon undoes newProcess for a command that was not started.
func (c *Chronus) abandon(p *process) {
	p.setEnded() // frees the group
	p.mu.Lock()
	p.spool.free()
	p.mu.Unlock()
	c.mu.Lock()
	c.running--
	c.mu.Unlock()
}

// publish makes a process that has been started visible.
func (c *Chronus) publish(p *process) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextID++
	p.id = c.nextID
	c.processes[p.id] = p
}

// childFiles are the ends of pipes and terminals that the child gets. They are
// closed here once it has them.
type childFiles struct{ stdin, stdout, stderr *os.File }

func (f *childFiles) close() {
	for _, fl := range []*os.File{f.stdin, f.stdout, f.stderr} {
		if fl != nil {
			fl.Close()
		}
	}
}

// openFiles makes the command's pipes or terminal. On error nothing is open.
func (p *process) openFiles(req *chronusapi.StartRequest) (files childFiles, err error) {
	defer func() {
		if err != nil {
			files.close()
			p.closeFiles()
			files = childFiles{}
		}
	}()
	if req.PTY != nil {
		leader, follower, err := openPTY(*req.PTY)
		if err != nil {
			return files, err
		}
		files.stdin = follower
		p.pty = leader
		p.open = 1
		p.stdin.f, p.stdin.pty = leader, true
		return files, p.addOutput(chronusapi.PTY, leader)
	}
	if len(req.Stdin) > 0 || req.OpenStdin {
		var w *os.File
		if files.stdin, w, err = pipe(false); err != nil {
			return files, err
		}
		p.stdin.f = w
	}
	p.open = 2
	for _, o := range []struct {
		stream chronusapi.Stream
		child  **os.File
	}{{chronusapi.Stdout, &files.stdout}, {chronusapi.Stderr, &files.stderr}} {
		r, w, err := pipe(true)
		if err != nil {
			return files, err
		}
		*o.child = w
		if err := p.addOutput(o.stream, r); err != nil {
			return files, err
		}
	}
	return files, nil
}

func (p *process) addOutput(stream chronusapi.Stream, f *os.File) error {
	o, err := newOutput(p, stream, f)
	if err == nil {
		p.outputs = append(p.outputs, o)
	}
	return err
}

// closeFiles closes our ends where no child was started.
func (p *process) closeFiles() {
	for _, o := range p.outputs {
		o.f.Close()
	}
	p.stdin.close()
}

// pipe makes a pipe whose end of ours, the reading one if read, does not block.
func pipe(read bool) (r, w *os.File, err error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, nil, &dsec.Error{Code: dsec.CodeExhausted, Message: "no pipe: " + err.Error(), Err: err}
	}
	ours := fds[1]
	if read {
		ours = fds[0]
	}
	if err := syscall.SetNonblock(ours, true); err != nil {
		_ = syscall.Close(fds[0])
		_ = syscall.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// environment is env with what every program expects.
func environment(env []string, who account, pty bool) []string {
	out := append(make([]string, 0, len(env)+5), env...)
	add := func(name, value string) {
		for _, kv := range env {
			if strings.HasPrefix(kv, name) && len(kv) > len(name) && kv[len(name)] == '=' {
				return
			}
		}
		out = append(out, name+"="+value)
	}
	add("PATH", defaultPath)
	add("HOME", who.home)
	add("USER", who.name)
	add("LOGNAME", who.name)
	if pty {
		add("TERM", "xterm")
	}
	return out
}

// shownArgv is what Processes shows, cut to what is worth keeping.
func shownArgv(cmd *chronusapi.Command) []string {
	argv := cmd.Argv
	if len(argv) == 0 {
		argv = []string{"sh", "-c", cmd.Shell}
	}
	var out []string
	room := chronusapi.MaxListedArgv
	for _, a := range argv[:min(len(argv), 64)] {
		if len(a) > room {
			a = strings.Clone(a[:room])
		}
		out = append(out, a)
		if room -= len(a); room <= 0 {
			break
		}
	}
	return out
}
