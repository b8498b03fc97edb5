package chronus

import (
	"context"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// process is one command.
type process struct {
	c       *Chronus
	id      uint64
	pid     int32 // of the started process; set by clone, read by sync/atomic until started
	argv    []string
	session string
	group   *group // nil where commands have none
	pty     *os.File
	started time.Time // with the monotonic clock

	ended    atomic.Bool  // the status is known
	endedAt  atomic.Int64 // when, by the host's clock
	timedOut atomic.Bool
	timer    *time.Timer

	outputs []*output // closed by their pumps
	stdin   stdin

	mu       sync.Mutex
	changed  sync.Cond // of spool, outcome
	spool    spool
	limit    uint64        // number of the first byte that is not kept, 0 is none
	outcome  *dsec.Outcome // set once all that was written before the exit is in the spool
	endSeq   uint64        // spool.next then
	primary  bool          // the reader that a lossless process waits for is there
	readers  int           // streams under way
	detached bool          // nobody is ever waited for
	over     bool          // the output limit was reached
	onOver   func()        // called then
	open     int           // outputs that may still bring bytes
	done     chan struct{} // closed with outcome
	finished time.Time     // when outcome was set
	told     time.Time     // when the exit was delivered first
}

func (p *process) getPID() int { return int(atomic.LoadInt32(&p.pid)) }

// lookup finds a process that has been started.
func (c *Chronus) lookup(id uint64) (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.processes[id]
	if p == nil {
		return nil, dsec.Errorf(dsec.CodeNotFound, "no process %d", id)
	}
	return p, nil
}

// childEnded is called by the reaper.
func (p *process) childEnded(e exit) {
	elapsed := time.Since(p.started)
	p.setEnded()
	go p.finish(e, elapsed)
}

func (p *process) setEnded() {
	p.endedAt.Store(time.Now().UnixNano())
	p.ended.Store(true)
}

// finish completes a process whose status is known: what its pipes hold now
// belongs to its output, and then the exit is told.
func (p *process) finish(e exit, elapsed time.Duration) {
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, o := range p.outputs {
		o.drain()
	}
	o := &dsec.Outcome{
		TimedOut: p.timedOut.Load(),
		Started:  p.started,
		Duration: elapsed,
		CPU:      e.cpu,
		MaxRSS:   e.maxRSS,
	}
	if e.status.Signaled() {
		o.Signal = int(e.status.Signal())
	} else {
		o.Code = e.status.ExitStatus()
	}
	if p.group != nil {
		if n, ok := p.group.oomKills(); ok {
			o.OOM = n > p.group.oom
			p.group.oom = n
		}
	}
	p.mu.Lock()
	o.OutputLimit = p.over
	p.outcome = o
	p.endSeq = p.spool.next
	p.finished = time.Now()
	close(p.done)
	p.changed.Broadcast()
	p.mu.Unlock()
	p.stdin.close()

	p.c.mu.Lock()
	p.c.running--
	p.c.forgetOldest()
	p.c.sweepLater()
	p.c.mu.Unlock()
}

// lingering reports whether descendants of an ended process run. Without a
// group that is known only of those that hold its output.
func (p *process) lingering() bool {
	if p.group != nil {
		p.c.mu.Lock()
		defer p.c.mu.Unlock()
		return p.group.owner == p && p.group.populated()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open > 0
}

// stream sends the process's events to sink: started, output from number from
// on, and the exit.
func (p *process) stream(ctx context.Context, from uint64, sink chronusapi.Sink, primary bool) error {
	p.addReader(1)
	defer p.addReader(-1)
	if err := sink(chronusapi.Event{Kind: chronusapi.EventStarted, Process: p.id, PID: p.getPID()}); err != nil {
		return err
	}
	outcome, err := p.follow(ctx, from, sink, primary, func() (uint64, bool) { return p.spool.next, p.outcome != nil })
	if err != nil {
		return err
	}
	if outcome {
		err = sink(chronusapi.Event{Kind: chronusapi.EventExited, Outcome: *p.outcome})
		if err == nil {
			p.mu.Lock()
			if p.told.IsZero() {
				p.told = time.Now()
			}
			p.mu.Unlock()
		}
	}
	return err
}

func (p *process) addReader(n int) {
	p.mu.Lock()
	p.readers += n
	p.mu.Unlock()
}

// follow sends output from number seq on until end, called with the lock held,
// tells the last number. It reports whether that was reached.
func (p *process) follow(ctx context.Context, seq uint64, sink chronusapi.Sink, primary bool, end func() (uint64, bool)) (bool, error) {
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		p.changed.Broadcast()
		p.mu.Unlock()
	})
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		stream, data, gap := p.spool.at(seq)
		last, known := end()
		switch {
		case gap > seq:
			ev := chronusapi.Event{Kind: chronusapi.EventGap, Seq: seq, To: gap}
			if err := p.unlocked(sink, ev); err != nil {
				return false, err
			}
			seq = gap
		case len(data) > 0 && (!known || seq < last):
			ev := chronusapi.Event{Kind: chronusapi.EventOutput, Stream: stream, Seq: seq, Data: data}
			if err := p.unlocked(sink, ev); err != nil {
				return false, err
			}
			seq += uint64(len(data))
			if primary && seq > p.spool.consumed {
				p.spool.consumed = seq
				p.changed.Broadcast()
			}
		case known && seq >= last:
			return true, nil
		default:
			p.changed.Wait()
		}
	}
}

// unlocked calls sink without the lock. The bytes of a block that was written
// are never changed, and a block that is dropped meanwhile stays readable.
func (p *process) unlocked(sink chronusapi.Sink, ev chronusapi.Event) error {
	p.mu.Unlock()
	defer p.mu.Lock()
	return sink(ev)
}

// beginRead makes the caller, who wants bytes from number from on, the reader
// that the process waits for, if it waits for one and there is none.
func (p *process) beginRead(from uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.detached || p.primary {
		return false
	}
	p.primary = true
	p.spool.lossless = true
	p.spool.consumed = max(p.spool.consumed, min(from, p.spool.next))
	return true
}

// endRead undoes beginRead: from now on output overwrites the oldest.
func (p *process) endRead() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.primary = false
	p.spool.lossless = false
	p.changed.Broadcast()
}

// Attach implements chronusapi.Handler.
func (c *Chronus) Attach(ctx context.Context, id, from uint64, sink chronusapi.Sink) error {
	p, err := c.lookup(id)
	if err != nil {
		return err
	}
	primary := p.beginRead(from)
	if primary {
		defer p.endRead()
	}
	return p.stream(ctx, from, sink, primary)
}

// Processes implements chronusapi.Handler.
func (c *Chronus) Processes(context.Context) ([]chronusapi.Process, error) {
	c.mu.Lock()
	all := make([]*process, 0, len(c.processes))
	for _, id := range slices.Sorted(maps.Keys(c.processes)) {
		all = append(all, c.processes[id])
	}
	c.mu.Unlock()
	list := make([]chronusapi.Process, 0, len(all))
	for _, p := range all {
		lingering := p.ended.Load() && p.lingering()
		p.mu.Lock()
		list = append(list, chronusapi.Process{
			ID: p.id, PID: p.getPID(), Argv: p.argv, Started: p.started, Outcome: p.outcome,
			NextSeq: p.spool.next, FirstSeq: p.spool.first(), PTY: p.pty != nil,
			Lingering: lingering && p.outcome != nil, Session: p.session,
		})
		p.mu.Unlock()
	}
	return list, nil
}

// Signal implements chronusapi.Handler.
func (c *Chronus) Signal(_ context.Context, id uint64, signal int, tree bool) error {
	p, err := c.lookup(id)
	if err != nil {
		return err
	}
	if signal < 1 || signal > 64 {
		return dsec.Invalid("signal", "want 1 to 64, got %d", signal)
	}
	if tree {
		if p.ended.Load() && !p.lingering() {
			return dsec.Errorf(dsec.CodeConflict, "process %d has ended", id)
		}
		if signal == int(syscall.SIGKILL) {
			p.killTree()
		} else {
			p.signalTree(syscall.Signal(signal))
		}
		return nil
	}
	switch err := c.reaper.signal(p.getPID(), syscall.Signal(signal)); err {
	case nil:
		return nil
	case syscall.ESRCH:
		return dsec.Errorf(dsec.CodeConflict, "process %d has ended", id)
	default:
		return &dsec.Error{Code: dsec.CodeInternal, Field: "signal", Message: "signal not sent: " + err.Error(), Err: err}
	}
}
