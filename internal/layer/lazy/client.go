package lazy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Config says where layerd works, and how.
type Config struct {
	RunDir   string // for its socket; empty after a reboot or not
	CacheDir string // for the chunks, on a local disk; layerd's alone
	Store    Store
	FrontEnd FrontEnd // empty: FUSE, or fanotify where there is none
	Limits   Limits
	Command  []string // what starts layerd; default this program with the argument "layerd"
	Log      *slog.Logger

	ticks    <-chan time.Time // each pingEvery; tests have their own
	greetFor time.Duration
}

// Client is the node agent's side. Its methods may be called from any goroutine.
// A call that layerd's death cut off is done again with its successor.
//
// Errors are *dsec.Error where the caller can do something about them; those of a
// call's context as such.
type Client struct {
	cfg      Config
	log      *slog.Logger
	run      *os.File
	cacheDir *os.File
	events   chan Event
	emitting sync.Mutex
	queue    *eventQueue // events that have no room in the channel

	mu      sync.Mutex
	conn    *connection // nil while there is none
	up      chan struct{}
	group   *os.File // and the other descriptors; nil where there are none
	slots   *os.File
	dev     *os.File
	mnt     *os.File
	fresh   bool // no layerd ever had them
	held    map[string]*held
	lost    []string
	failing map[string]string // why reads of an image fail, by its key
	silent  []string          // keys of images that were told to be degraded because layerd is silent
	// releases are those that failed, by key.
	releases map[string]bool
	next     uint64
	pending  map[uint64]*pending

	stopping atomic.Bool
	end      context.CancelFunc
	done     chan struct{}
	telling  sync.WaitGroup
}

// held is an image that layerd serves, as the client will tell the next layerd.
type held struct {
	hold
	data *os.File // where fanotify serves it
}

// pending is a call that waits.
type pending struct {
	answer   chan answer
	progress func(Progress)
}

type answer struct {
	r    reply
	file *os.File
	err  error
}

// Connect finds layerd, or starts it. Before it is used for anything else, what
// Lost names must be dealt with.
func Connect(ctx context.Context, cfg Config) (*Client, error) {
	if cfg.Command == nil {
		cfg.Command = []string{"/proc/self/exe", Verb}
	}
	if cfg.FrontEnd != "" && cfg.FrontEnd != Fanotify && cfg.FrontEnd != FUSE {
		return nil, dsec.Invalid("front_end", "%q, want %q, %q, or nothing", cfg.FrontEnd, Fanotify, FUSE)
	}
	cfg.greetFor = cmp.Or(cfg.greetFor, greetFor)
	c := &Client{cfg: cfg, failing: map[string]string{}, releases: map[string]bool{}, log: cfg.Log, queue: newEventQueue(), events: make(chan Event, mostEvents), up: make(chan struct{}),
		held: map[string]*held{}, pending: map[uint64]*pending{}, done: make(chan struct{})}
	if err := c.openDirs(); err != nil {
		return nil, err
	}
	if err := c.choose(); err != nil {
		c.closeFiles()
		return nil, err
	}
	if err := c.connect(ctx); err != nil {
		c.closeFiles()
		return nil, err
	}
	life, end := context.WithCancel(context.Background())
	c.end = end
	go c.live(life)
	c.telling.Go(func() { c.tell(life) })
	return c, nil
}

// Verb is the argument by which a program that Config.Command does not name is
// asked to be layerd.
const Verb = "layerd"

func (c *Client) openDirs() (err error) {
	for _, d := range []struct {
		path string
		f    **os.File
	}{{c.cfg.RunDir, &c.run}, {c.cfg.CacheDir, &c.cacheDir}} {
		if err := os.MkdirAll(d.path, 0o700); err != nil {
			return err
		}
		if *d.f, err = os.Open(d.path); err != nil {
			c.closeFiles()
			return err
		}
	}
	return nil
}

func (c *Client) closeFiles() {
	closeFiles(some(c.run, c.cacheDir, c.group, c.slots, c.dev, c.mnt))
	for _, h := range c.held {
		closeFiles(some(h.data))
	}
}

// FrontEnd returns how files are offered.
func (c *Client) FrontEnd() FrontEnd { return c.cfg.FrontEnd }

// Lost returns the keys of images that were served and incomplete when layerd and
// its client died. What reads them may have got zeros: it must be ended, and
// their files closed and unmounted, and then Settle called. Until then they
// cannot be opened. Where only layerd died and could not be succeeded, keys come
// to be lost later; that is an EventLost.
func (c *Client) Lost() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.lost)
}

// Events returns the channel of events. Where they are taken too slowly, those are left
// out that later ones of the same image make void, and corrupt ones.
func (c *Client) Events() <-chan Event { return c.events }

func (c *Client) emit(e Event) {
	c.emitting.Lock()
	defer c.emitting.Unlock()
	if c.queue.empty() {
		select {
		case c.events <- e:
			return
		default:
		}
	}
	if !c.queue.put(e) {
		c.log.Warn("layer events are left out", "kind", e.Kind, "key", e.Key, "reason", e.Reason)
	}
}

// tell hands on what emit found no room for, until the client is closed.
func (c *Client) tell(ctx context.Context) {
	for {
		e, ok := c.queue.next(ctx)
		if !ok {
			return
		}
		select {
		case c.events <- e:
			c.queue.take(e)
		case <-ctx.Done():
			return
		}
	}
}

// Close ends the client. layerd, and what it serves, go on; where it serves nothing,
// it ends.
func (c *Client) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	c.leave(ctx) // nobody else can tell that what FUSE serves is not open any more
	cancel()
	c.end()
	c.mu.Lock()
	if c.conn != nil {
		c.conn.close()
	}
	c.mu.Unlock()
	<-c.done
	c.telling.Wait()
	c.closeFiles()
}

// live keeps a connection until the client is closed.
func (c *Client) live(ctx context.Context) {
	defer close(c.done)
	for {
		c.mu.Lock()
		conn := c.conn
		c.mu.Unlock()
		var watching sync.WaitGroup
		connected, end := context.WithCancel(ctx)
		watching.Go(func() { c.watch(connected, conn) })
		err := c.receive(conn)
		c.disconnected(err)
		end()
		watching.Wait()
		if ctx.Err() != nil || c.stopping.Load() {
			return
		}
		c.log.Warn("layerd is gone", "error", err)
		for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
			if err = c.connect(ctx); err == nil {
				break
			}
			if ctx.Err() != nil {
				return
			}
			c.log.Error("layerd is not there", "error", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
		c.begun()
	}
}

// receive takes what layerd sends until the connection ends.
func (c *Client) receive(conn *connection) error {
	for {
		m, files, err := conn.receive()
		if err != nil {
			return err
		}
		switch {
		case m.Hold != nil:
			c.hold(*m.Hold, files)
		case m.Event != nil && m.Event.Kind == eventIdle:
			c.drop(m.Event.Key)
		case m.Event != nil:
			c.told(*m.Event)
		case m.Progress != nil:
			c.mu.Lock()
			p := c.pending[m.ID]
			c.mu.Unlock()
			if p != nil && p.progress != nil {
				p.progress(*m.Progress)
			}
		case m.Reply != nil:
			c.answered(m, files)
		default:
			closeFiles(files)
		}
	}
}

func (c *Client) answered(m *message, files []*os.File) {
	c.mu.Lock()
	p := c.pending[m.ID]
	delete(c.pending, m.ID)
	c.mu.Unlock()
	if p == nil {
		closeFiles(files)
		return
	}
	a := answer{r: *m.Reply}
	if len(files) > 0 {
		a.file = files[0]
		closeFiles(files[1:])
	}
	p.answer <- a
}

// hold keeps what the next layerd needs.
func (c *Client) hold(h hold, files []*os.File) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.held[h.Key]; old != nil {
		closeFiles(some(old.data))
	}
	n := &held{hold: h}
	if len(files) > 0 {
		n.data = files[0]
		closeFiles(files[1:])
	}
	c.held[h.Key] = n
}

func (c *Client) drop(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h := c.held[key]; h != nil {
		closeFiles(some(h.data))
		delete(c.held, key)
	}
}

var errCut = errors.New("layerd died meanwhile")

// disconnected ends what waits for an answer of the connection.
func (c *Client) disconnected(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn.close()
	c.conn = nil
	c.up = make(chan struct{})
	for id, p := range c.pending {
		delete(c.pending, id)
		p.answer <- answer{err: fmt.Errorf("%w: %w", errCut, err)}
	}
}

// connect makes a connection: with the layerd that is there, or one that it starts.
func (c *Client) connect(ctx context.Context) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		conn, err := c.dial()
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
			if err = c.start(ctx); err != nil {
				return err
			}
			conn, err = c.dial()
		}
		if err == nil {
			err = c.greet(ctx, conn)
			if err == nil {
				return nil
			}
			conn.close()
			if e, ok := errors.AsType[*dsec.Error](err); ok && e.Code != dsec.CodeConflict {
				return err
			}
		}
		// Another client is about to end, or another layerd to begin.
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

// call asks layerd, once more where it died meanwhile. The files stay the caller's.
func (c *Client) call(ctx context.Context, m message, progress func(Progress), files ...*os.File) (answer, error) {
	for {
		a, err := c.callOnce(ctx, m, progress, files)
		if !errors.Is(err, errCut) {
			return a, err
		}
	}
}

func (c *Client) callOnce(ctx context.Context, m message, progress func(Progress), files []*os.File) (answer, error) {
	if ctx.Err() != nil {
		return answer{}, context.Cause(ctx)
	}
	p := &pending{answer: make(chan answer, 1), progress: progress}
	conn, err := c.register(ctx, &m, p)
	if err != nil {
		return answer{}, err
	}
	if err := conn.send(&m, files...); err != nil {
		conn.close() // receive will find that, and end p
	}
	select {
	case a := <-p.answer:
		if a.err == nil {
			a.err = a.r.Error.err()
		}
		if a.err != nil && a.file != nil {
			_ = a.file.Close()
		}
		return a, a.err
	case <-ctx.Done():
		_ = conn.send(&message{ID: m.ID, Cancel: true})
		c.mu.Lock()
		delete(c.pending, m.ID)
		c.mu.Unlock()
		select { // it came at the last moment
		case a := <-p.answer:
			closeFiles(some(a.file))
		default:
		}
		return answer{}, context.Cause(ctx)
	}
}

// register waits for a connection and makes p wait for an answer of it.
func (c *Client) register(ctx context.Context, m *message, p *pending) (*connection, error) {
	for {
		c.mu.Lock()
		if c.conn != nil {
			c.next++
			m.ID = c.next
			c.pending[m.ID] = p
			conn := c.conn
			c.mu.Unlock()
			return conn, nil
		}
		up := c.up
		c.mu.Unlock()
		select {
		case <-up:
		case <-c.done:
			return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: "the node is stopping"}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
