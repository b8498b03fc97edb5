package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/trajectory"
)

// runEdge owns this machine's sandboxes and serves the edge API on a socket
// that only this user may connect to.
func runEdge(ctx context.Context, e *env, args []string) error {
	_, load := serverFlags(e, "edge")
	cfg, err := load(args)
	if err != nil {
		return err
	}
	log, err := daemon.Logger(e.stderr, cfg.LogLevel)
	if err != nil {
		return err
	}
	socket, err := daemon.ListenUnix(cfg.edgeSocket())
	if err != nil {
		return ofRoot(err)
	}
	defer func() { _ = socket.Close() }()
	var stack daemon.Stack
	failed := make(chan error, 4)
	reg := daemon.Registry()
	node, err := startEdge(ctx, cfg, log, reg, &stack)
	if err == nil {
		stack.Serve(daemon.HTTPServer(node.Handler(), log), socket, failed)
		err = serveStatus(cfg, log, reg, node.Ready, &stack, failed)
	}
	if err != nil {
		return errors.Join(err, stop(log, &stack, node))
	}
	_, _ = fmt.Fprintf(e.stdout, "ready %s\n", cfg.edgeSocket())
	return wait(ctx, log, &stack, node, failed)
}

func serveStatus(cfg *Config, log *slog.Logger, reg *prometheus.Registry, ready func() error, stack *daemon.Stack, failed chan<- error) error {
	if cfg.Edge.MetricsListen == "" {
		return nil
	}
	l, err := daemon.ListenTCP(cfg.Edge.MetricsListen)
	if err != nil {
		return err
	}
	stack.Serve(daemon.HTTPServer(daemon.WithStatus(daemon.WithProfiles(http.NotFoundHandler(), daemon.Loopback), reg, ready, daemon.Loopback), log), l, failed)
	return nil
}

// startEdge starts the node side: it returns once the sandboxes of an earlier
// run are taken over. The caller closes the edge; the stack has the rest.
func startEdge(ctx context.Context, cfg *Config, log *slog.Logger, reg *prometheus.Registry, stack *daemon.Stack) (*edge.Edge, error) {
	state := filepath.Join(cfg.DataDir, "edge")
	for _, own := range []struct{ dir, key string }{
		{state, "data_dir (--data-dir)"}, {filepath.Join(cfg.RunDir, "edge"), "run_dir (--run-dir)"},
	} {
		lock, err := daemon.Lock(own.dir, own.key)
		if err != nil {
			return nil, ofRoot(err)
		}
		stack.Push(func(context.Context) error { return lock.Close() })
	}
	blobs, err := openBlobs(ctx, cfg, reg)
	if err != nil {
		return nil, ofRoot(err)
	}
	stack.Push(func(context.Context) error { return blobs.(io.Closer).Close() })
	fill, err := openLazy(ctx, cfg, blobs, log, stack)
	if err != nil {
		return nil, ofRoot(err)
	}
	options := layer.Options{Blobs: blobs, Own: cfg.Layers.Store == "", Verify: cfg.Layers.Verify == verifyAlways, TraceFor: cfg.Layers.TraceFor.Duration,
		CollapseBytes: cfg.Layers.CollapseBytes, Logger: log}
	if fill != nil {
		options.Lazy = fill
	}
	layers, err := layer.Open(filepath.Join(cfg.DataDir, "layers"), options)
	if err != nil {
		return nil, err
	}
	stack.Push(func(context.Context) error { return layers.Close() })
	images, err := openRegistry(cfg, log)
	if err != nil {
		return nil, err
	}
	var kinds []backend.Backend
	for _, name := range cfg.Edge.Backends {
		kind, _ := findBackend(name) // Validate has looked it up
		b, err := kind.open(cfg, log)
		if err != nil {
			return nil, ofRoot(fmt.Errorf("backend %s: %w", name, err))
		}
		kinds = append(kinds, b) // the edge closes it
	}
	ec := cfg.Edge
	node, err := edge.New(edge.Config{
		StateDir: state, RunDir: filepath.Join(cfg.RunDir, "edge"), Backends: kinds, Layers: layers, Registry: images,
		DefaultLimits: dsec.Limits(ec.DefaultLimits), MaxLimits: dsec.Limits(ec.MaxLimits),
		DefaultIdleTimeout: orNever(ec.DefaultIdleTimeout), DefaultMaxLifetime: orNever(ec.DefaultMaxLifetime),
		DefaultMaxPaused: orNever(ec.DefaultMaxPaused),
		MaxSandboxes:     int(ec.MaxSandboxes), MaxCalls: int(ec.MaxCalls), CreateConcurrency: int(ec.CreateConcurrency),
		Retention: ec.Retention.Duration, MinFreeBytes: ec.MinFreeBytes, MinFreeInodes: ec.MinFreeInodes,
		Trajectories: trajectories(cfg, blobs), Version: version, Logger: log, Metrics: reg, Crash: crash(),
	})
	if err != nil {
		return nil, err
	}
	if err := node.Recover(ctx); err != nil {
		return node, err
	}
	if fill == nil && cfg.Layers.Scrub > 0 {
		startScrub(ctx, cfg, layers, node, log, reg, stack)
	}
	if fill != nil {
		telling, stop := context.WithCancel(context.WithoutCancel(ctx))
		told := make(chan struct{})
		go func() { defer close(told); fill.tell(telling, node) }()
		stack.Push(func(context.Context) error { stop(); <-told; return nil })
	}
	return node, nil
}

// ofRoot says what else would do where the server's user may not use a directory.
func ofRoot(err error) error {
	if !errors.Is(err, fs.ErrPermission) || os.Geteuid() == 0 {
		return err
	}
	return fmt.Errorf("%w; run it as root, or without root by --backend fake --data-dir DIR --run-dir DIR with directories of your own", err)
}

// trajectories bounds the trajectory log. It is sealed to the store of layers, where
// that is not on this node itself.
func trajectories(cfg *Config, blobs blob.Store) trajectory.Options {
	t := cfg.Edge.Trajectory
	out := trajectory.Options{
		MaxBytes: t.MaxBytes, MaxOutput: t.MaxOutputBytes, MaxSandboxOutput: t.MaxSandboxOutputBytes,
		MaxInput: t.MaxInputBytes, MaxSandboxInput: t.MaxSandboxInputBytes,
	}
	if cfg.Layers.Store != "" {
		out.Store = blobs
	}
	return out
}

// orNever: 0 is never in the file, and the default in the edge's own words.
func orNever(d duration) time.Duration {
	if d.Duration == 0 {
		return -1
	}
	return d.Duration
}

// crash is the hook of the crash suite: DSEC_CRASH names the step before which
// the process kills itself, as a power cut would.
func crash() func(step string) {
	want := os.Getenv("DSEC_CRASH")
	if want == "" {
		return nil
	}
	return func(step string) {
		if step == want {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // the signal is on its way; nothing more may happen
		}
	}
}
