package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

// S71: lives by the hundred hold no descriptor, thread, goroutine or memory more
// at the end than early on, and leave no cgroups that the kernel still keeps.
func TestLivesLeaveNothing(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Warm = 2 })
	life := func() {
		t.Helper()
		req := h.request()
		i, err := h.b.Create(t.Context(), req)
		check(t, err)
		s := &sandbox{host: h, id: req.ID}
		s.use(i)
		if o := s.sh("echo $$ > /tmp/x; sleep 1000 & echo ok"); o.out != "ok\n" {
			t.Fatalf("%q, %+v", o.out, o.Outcome)
		}
		_ = s.client.Close()
		check(t, i.Destroy(t.Context()))
	}
	for range 50 { // what grows with use has grown
		life()
	}
	before := h.held()
	const lives = 300
	for range lives {
		life()
	}
	testutil.WaitFor(t, time.Minute, "it holds what it held", func() error {
		now := h.held()
		for name, limit := range map[string]int{"descriptors": 20, "goroutines": 30, "threads": 20, "KiB of heap": 4 << 10, "dying cgroups": lives} {
			if n := now[name] - before[name]; n > limit {
				return fmt.Errorf("%d %s more after %d lives", n, name, lives)
			}
		}
		return nil
	})
	t.Logf("before %v, after %v", before, h.held())
}

// held counts what the backend's process holds.
func (h *host) held() map[string]int {
	h.Helper()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, err := os.ReadDir("/proc/self/fd")
	check(h, err)
	all := map[string]int{"descriptors": len(fds), "goroutines": runtime.NumGoroutine(), "threads": len(tasks(h, os.Getpid())), "KiB of heap": int(m.HeapAlloc >> 10)}
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/unified/cgroup.procs"); err == nil {
		root += "/unified"
	}
	text, err := os.ReadFile(filepath.Join(root, h.config.Cgroup, "cgroup.stat"))
	check(h, err)
	for line := range strings.Lines(string(text)) {
		var n int
		if _, err := fmt.Sscanf(line, "nr_dying_descendants %d", &n); err == nil {
			all["dying cgroups"] = n
		}
	}
	return all
}

// lines keeps what is logged.
type lines struct {
	slog.Handler
	mu  sync.Mutex
	all []slog.Record
}

func (l *lines) Handle(ctx context.Context, r slog.Record) error {
	l.mu.Lock()
	l.all = append(l.all, r.Clone())
	l.mu.Unlock()
	return l.Handler.Handle(ctx, r)
}

func (l *lines) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *lines) WithGroup(string) slog.Handler      { return l }

// U14: a pool whose members never become ready says so, tries one at a time
// and ever more seldom, and keeps nothing of what failed; a create fails in
// time with a typed error.
func TestPoolThatMakesNothing(t *testing.T) {
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	dir, err := programs()
	check(t, err)
	busybox, err := os.ReadFile(busyboxPath(t))
	check(t, err)
	for name, program := range map[string][]byte{"no program": []byte("\x7fELF, and no more"), "one that ends": busybox} {
		t.Run(name, func(t *testing.T) {
			broken := filepath.Join(t.TempDir(), "chronus")
			check(t, os.WriteFile(broken, program, 0o755))
			copyTo(t, filepath.Join(dir, "chronus-files"), broken+"-files")
			poolMakesNothing(t, broken)
		})
	}
}

func poolMakesNothing(t *testing.T, broken string) {
	log := &lines{Handler: testutil.Logger(t).Handler()}
	h := newHost(t, func(c *Config) {
		c.Warm, c.Chronus, c.Logger = 4, broken, slog.New(log)
	})
	pauses := func() (all []time.Duration) {
		log.mu.Lock()
		defer log.mu.Unlock()
		for _, r := range log.all {
			if strings.Contains(r.Message, "no progress") {
				r.Attrs(func(a slog.Attr) bool {
					if a.Key == "next" {
						all = append(all, a.Value.Duration())
					}
					return true
				})
			}
		}
		return all
	}
	testutil.WaitFor(t, time.Minute, "the pool says that it makes no progress", func() error {
		if n := len(pauses()); n < 4 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	for n, p := range pauses() {
		if n > 0 && p <= pauses()[n-1] && p < maxPause {
			t.Errorf("pauses of %v, want each longer than the one before", pauses())
		}
	}
	if n := h.b.Warm(); n != 0 {
		t.Errorf("%d shells are ready", n)
	}
	_, err := h.b.Create(t.Context(), h.request())
	var e *dsec.Error
	if !errors.As(err, &e) || strings.Contains(e.Message, broken) {
		t.Errorf("create: %v, want a typed error without paths of the host", err)
	}
	// What is tried at a time is one shell at most; the ledger counts what is left.
	entries, err := filepath.Glob(filepath.Join(h.config.RunDir, "state", "slots", "*"))
	check(t, err)
	if len(entries) > 2 {
		t.Errorf("slots of failed shells are left: %v", entries)
	}
}
