package lazy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// CrashSteps lists the points at which the crash suite kills layerd: each is
// passed to ServerConfig.Crash just before what its name says is used.
var CrashSteps = []string{
	"fill.claimed",    // a chunk is about to be fetched
	"fill.fetched",    // its bytes are in memory, unchecked
	"fill.verified",   // checked, nothing is written
	"fill.written",    // in the data file, the map does not know
	"fill.mapped",     // in the map, its readers wait
	"event.taken",     // an event is in the log, it is not known of which image
	"event.named",     // it is known
	"event.filled",    // what it wants is there, it is not answered
	"event.answered",  // it is answered, the log does not know
	"fuse.taken",      // a request was read, nothing is done
	"fuse.filled",     // what it wants is there, it is not answered
	"fuse.answered",   // it is answered
	"open.cached",     // an image has its files, nobody was told
	"open.recorded",   // the record says that it is served
	"open.held",       // the client has its descriptor, there is no mark
	"open.armed",      // there is, the client has no file
	"image.unmarked",  // complete; the record says that it is served
	"evict.begin",     // chunks are about to go
	"evict.forgotten", // the map says absent, the chunk is there
	"evict.punched",   // it is gone
}

// Store says where the bytes of images are.
type Store struct {
	URL      string
	Secrets  map[string]string `json:",omitempty"` // its keys, by the names that blob.Credentials looks up
	Requests int               `json:",omitempty"` // most at once; 0: the store's default
}

// ServerConfig is what layerd has of the program that it is part of.
type ServerConfig struct {
	Log *slog.Logger
	// OpenStore opens the store of images.
	OpenStore func(ctx context.Context, store Store) (blob.Store, error)
	// Crash, where set, is called at each of CrashSteps, for tests that kill there.
	Crash func(step string)
}

// The descriptors that layerd is started with.
const (
	runDirFD   = 3
	cacheDirFD = 4
	readyFD    = 5 // closed once it listens
)

const (
	socketName = "layerd.sock"
	lockName   = "layerd.lock"
)

// Serve is layerd: it serves until ctx ends or a client stops it. It returns at
// once, without an error, where another one has the run directory.
func Serve(ctx context.Context, cfg ServerConfig) error {
	for fd := runDirFD; fd <= readyFD; fd++ {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return &dsec.Error{Code: dsec.CodeInvalid, Message: "layerd is started by `dsec edge`, with the descriptors that it needs", Err: err}
		}
	}
	run, cacheDir, ready := os.NewFile(runDirFD, "run"), os.NewFile(cacheDirFD, "cache"), os.NewFile(readyFD, "ready")
	defer closeFiles([]*os.File{run, cacheDir})
	defer ready.Close()
	lock, err := hostos.Lock(below(run, lockName))
	if errors.Is(err, hostos.ErrLocked) {
		return nil
	} else if err != nil {
		return err
	}
	defer lock.Close()
	s, err := newServer(cfg, run, cacheDir)
	if err != nil {
		return err
	}
	defer s.close()
	l, err := listen(directory{run})
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	s.stop = func() { _ = l.Close() }
	if err := confine(run, cacheDir); err != nil {
		return err
	}
	_ = ready.Close()
	return s.serve(l)
}

// below is a path to a name in a directory that is known by its descriptor, for
// calls that take nothing else.
func below(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

func listen(run directory) (*net.UnixListener, error) {
	if err := run.remove(socketName); err != nil { // of one that died: we have the lock
		return nil, err
	}
	old := unix.Umask(0o177) // the socket is never there with more rights
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: below(run.f, socketName), Net: "unixpacket"})
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("layerd: listen: %w", err)
	}
	l.SetUnlinkOnClose(false) // the path is of this process only; Serve's successor removes it
	return l, nil
}

// server is layerd. It serves one client at a time, and the kernel all the time.
type server struct {
	cfg    ServerConfig
	log    *slog.Logger
	cache  *cache
	served *served
	stop   func()

	mu     sync.Mutex
	loaded bool
	store  Store
	group  *os.File // and the other descriptors; nil where there are none
	events *os.File
	dev    *os.File
	mnt    *os.File
	fan    *fanotify
	fuse   *fuseServer
	calls  *calls          // of the client; nil where there is none
	lost   map[string]bool // keys

	released chan struct{} // wakes tidy
	janitor  sync.WaitGroup
	end      context.CancelFunc
}

func newServer(cfg ServerConfig, run, cacheDir *os.File) (*server, error) {
	if cfg.Crash == nil {
		cfg.Crash = func(string) {}
	}
	s := &server{cfg: cfg, log: cfg.Log, lost: map[string]bool{}, stop: func() {}, released: make(chan struct{}, 1)}
	var err error
	if s.cache, err = newCache(cacheDir, cfg.Log, cfg.Crash, s.notify); err != nil {
		return nil, err
	}
	if s.served, err = openServed(directory{run}, s.cache.boot); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	s.janitor.Go(func() { s.tidy(ctx) })
	return s, nil
}

func (s *server) close() {
	s.end()
	s.janitor.Wait()
	s.mu.Lock()
	fan, fuse := s.fan, s.fuse
	s.mu.Unlock()
	s.cache.end()
	if fan != nil {
		fan.close()
	}
	if fuse != nil {
		fuse.close()
	}
	s.cache.close()
}

// notify tells the client of an event, if there is one. It never waits: a client
// that does not read must not hold up who answers the kernel.
func (s *server) notify(e Event) {
	s.log.Info("layer event", "kind", e.Kind, "key", e.Key, "chunk", e.Chunk, "reason", e.Reason)
	s.mu.Lock()
	k := s.calls
	s.mu.Unlock()
	if k == nil {
		return
	}
	if !k.events.put(e) {
		s.log.Warn("events are left out: the client does not read", "kind", e.Kind, "key", e.Key)
	}
}

// serve accepts clients until the listener is closed.
func (s *server) serve(l *net.UnixListener) error {
	var clients sync.WaitGroup
	defer clients.Wait()
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			s.mu.Lock()
			if s.calls != nil {
				s.calls.c.close()
			}
			s.mu.Unlock()
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		clients.Go(func() {
			c := newConnection(conn)
			defer c.close()
			if err := s.talk(c, conn); err != nil {
				s.log.Info("client is gone", "error", err)
			}
		})
	}
}

// talk serves one client to its end.
func (s *server) talk(c *connection, conn *net.UnixConn) error {
	if err := samePeer(conn); err != nil {
		return err
	}
	m, files, err := c.receive()
	if err != nil {
		return err
	}
	if m.Hello == nil {
		closeFiles(files)
		return errors.New("layerd protocol: no greeting")
	}
	calls, err := s.greet(c, m.Hello, files)
	if err != nil {
		return errors.Join(err, c.send(&message{Hello: &hello{Version: protocolVersion, Refused: toWire(err)}}))
	}
	defer func() {
		calls.close()
		s.mu.Lock()
		s.calls = nil
		s.mu.Unlock()
		if s.mayStop() == nil { // the next client starts one, if it comes
			s.stop()
		}
	}()
	for {
		m, files, err := c.receive()
		if err != nil {
			return err
		}
		calls.handle(m, files)
	}
}

// samePeer refuses a peer of another user than this process.
func samePeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if cerr != nil {
		return cerr
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("a client of user %d", cred.Uid)
	}
	return nil
}

// tidy looks again at released images that somebody had open, until nobody has: a
// file system that was unmounted closes its files a little later. It waits longer
// each time, up to a second, and without such an image until Release wakes it.
func (s *server) tidy(ctx context.Context) {
	pause := time.Duration(0)
	for {
		var again <-chan time.Time
		if pause > 0 {
			again = time.After(pause)
		}
		select {
		case <-again:
		case <-s.released:
			pause = time.Millisecond
		case <-ctx.Done():
			return
		}
		waiting := false
		for _, im := range s.cache.all() {
			im.mu.Lock()
			candidate := im.armed && !im.inUse && !im.lost
			im.mu.Unlock()
			waiting = candidate && !s.tryDisarm(im) || waiting
		}
		if pause = min(2*pause, time.Second); !waiting {
			pause = 0
		}
	}
}

// wake lets tidy look.
func (s *server) wake() {
	select {
	case s.released <- struct{}{}:
	default:
	}
}

// tryDisarm makes a released image one whose chunks may go, if nobody has it open,
// and tells the client, which need not hold it any more.
func (s *server) tryDisarm(im *image) bool {
	im.ops.Lock()
	defer im.ops.Unlock()
	im.mu.Lock()
	candidate := im.armed && !im.inUse && !im.lost
	im.mu.Unlock()
	s.mu.Lock()
	fan, k := s.fan, s.calls
	s.mu.Unlock()
	if !candidate || fan == nil || !fan.disarm(im) {
		return false
	}
	if err := s.served.remove(im); err != nil {
		s.log.Warn("record of a released image stays", "key", im.Key, "error", err)
	}
	s.cache.makeRoom(0, false) // its chunks may have been too many before
	s.cache.rest(im)
	if k == nil && s.mayStop() == nil {
		s.stop() // as it would have when its client went
	}
	if k != nil { // here, so that it is told before it is told that the image is held again
		_ = k.c.send(&message{Event: &Event{Kind: eventIdle, Key: im.Key}})
	}
	return true
}
