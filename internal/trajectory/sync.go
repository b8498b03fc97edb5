package trajectory

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hostos"
)

// group brings what was written to the disk, many records by one sync.
type group struct {
	every  time.Duration
	logger *slog.Logger
	dirty  chan struct{} // something was written
	hurry  chan struct{} // somebody waits

	mu      sync.Mutex
	files   []*os.File          // written since the last sync; the current segment is the last
	closing []*os.File          // of files, those that nobody else has open
	names   map[string]struct{} // directories in which files were made
	waiting []chan error        // for the next sync
	under   bool                // a sync is under way
	failed  error               // sticky: what was written before may be lost

	syncing sync.Mutex // one sync at a time
}

func (g *group) init(opts Options) {
	g.every, g.logger, g.names = opts.SyncEvery, opts.Logger, make(map[string]struct{})
	g.dirty, g.hurry = make(chan struct{}, 1), make(chan struct{}, 1)
}

// written has f be part of the next sync.
func (g *group) written(f *os.File) {
	g.mu.Lock()
	first := len(g.files) == 0
	if first || g.files[len(g.files)-1] != f {
		g.files = append(g.files, f)
	}
	g.mu.Unlock()
	if first {
		notify(g.dirty)
	}
}

// created is written for a file whose names in these directories are new.
func (g *group) created(f *os.File, dirs ...string) {
	g.mu.Lock()
	for _, dir := range dirs {
		g.names[dir] = struct{}{}
	}
	g.mu.Unlock()
	g.written(f)
}

// handOver is created for a file that is closed once it is synced.
func (g *group) handOver(f *os.File, dirs ...string) {
	g.mu.Lock()
	g.closing = append(g.closing, f)
	g.mu.Unlock()
	g.created(f, dirs...)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (g *group) run(ctx context.Context) {
	timer := time.NewTimer(g.every)
	defer timer.Stop()
	for {
		select {
		case <-g.dirty:
			timer.Reset(g.every)
			select {
			case <-timer.C:
			case <-g.hurry:
			case <-ctx.Done():
				return
			}
		case <-g.hurry:
		case <-ctx.Done():
			return
		}
		if err := g.sync(); err != nil {
			g.logger.Error("trajectory: not synced", "err", err)
		}
	}
}

// sync syncs what was written before it was called.
func (g *group) sync() error {
	g.syncing.Lock()
	defer g.syncing.Unlock()
	g.mu.Lock()
	files, closing, names, waiting := g.files, g.closing, g.names, g.waiting
	g.files, g.closing, g.names, g.waiting = nil, nil, make(map[string]struct{}), nil
	g.under = true
	g.mu.Unlock()
	var err error
	for _, f := range files {
		if serr := f.Sync(); serr != nil && !errors.Is(serr, fs.ErrClosed) { // removed meanwhile
			err = errors.Join(err, serr)
		}
	}
	for _, f := range closing {
		_ = f.Close()
	}
	for dir := range names {
		if serr := hostos.SyncDir(dir); serr != nil && !errors.Is(serr, fs.ErrNotExist) {
			err = errors.Join(err, serr)
		}
	}
	g.mu.Lock()
	if g.failed == nil && err != nil {
		// A later sync succeeds though it has nothing of what this one lost.
		g.failed = &dsec.Error{Code: dsec.CodeUnavailable, Message: "the trajectory log of the node could not be synced", Err: err}
	}
	err, g.under = g.failed, false
	g.mu.Unlock()
	for _, w := range waiting {
		w <- err
	}
	return err
}

// Sync returns once everything noted so far survives a loss of power. Calls at
// the same time share one sync.
func (l *Log) Sync(ctx context.Context) error {
	g := &l.group
	done := make(chan error, 1)
	g.mu.Lock()
	if len(g.files) == 0 && !g.under {
		err := g.failed
		g.mu.Unlock()
		return err
	}
	g.waiting = append(g.waiting, done)
	g.mu.Unlock()
	notify(g.hurry)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-l.ctx.Done():
		return l.closed()
	}
}
