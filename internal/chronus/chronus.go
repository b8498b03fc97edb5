//go:build linux

// Package chronus is what PID 1 of a sandbox does: it starts commands and
// tells how they ended, keeps shell sessions, and reads and writes files.
//
// A Chronus implements chronusapi.Handler with the machine it runs on. In a
// container that is the sandbox: the process is alone with the agent's
// processes, and nothing of the host is reachable by a path. Everything that
// it reads was made by the agent and may be hostile; everything that it tells
// about a command's end came from wait(2).
//
// Memory is what a sandbox costs while it does nothing, so buffers belong to
// running commands and are given back after them.
package chronus

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// Config is what may differ between the places a Chronus runs in.
type Config struct {
	// Warm makes it wait for a Setup call. Until then every other call but
	// Info is refused.
	Warm bool
}

// Chronus serves one sandbox. It is safe for concurrent use.
type Chronus struct {
	*Files
	reaper *reaper
	null   *os.File // /dev/null, opened before the agent could change /dev
	shells []string // tests: paths that sessions use in place of bash and sh

	budget budget // of all spools

	mu          sync.Mutex
	ready       bool
	setup       setup // what Setup left for the commands
	groups      []*group
	processes   map[uint64]*process
	nextID      uint64
	sessions    map[string]*session
	nextSession uint64
	running     int
	sweeper     *time.Timer // nil while nothing is left to sweep
}

// New returns a Chronus. It becomes the one that reaps this process's
// children, and sets the process's umask to 0: modes are those of the requests.
func New(cfg Config) (*Chronus, error) {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	c := &Chronus{
		Files:     NewFiles(),
		reaper:    theReaper(),
		null:      null,
		ready:     !cfg.Warm,
		processes: make(map[uint64]*process),
		sessions:  make(map[string]*session),
	}
	c.budget.reclaim = c.reclaim
	return c, nil
}

// Info implements chronusapi.Handler. It touches no file.
func (c *Chronus) Info(context.Context) (chronusapi.Info, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return chronusapi.Info{Version: chronusapi.Version, Processes: c.running, Sessions: len(c.sessions)}, nil
}

// Ready implements chronusapi.SetupHandler.
func (c *Chronus) Ready() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ready {
		return dsec.Errorf(dsec.CodeConflict, "this sandbox has not been set up yet")
	}
	return nil
}

var (
	_ chronusapi.SetupHandler = (*Chronus)(nil)
	_ chronusapi.FileHandler  = (*Chronus)(nil)
)
