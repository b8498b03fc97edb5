package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/watcher"
)

// stopGrace is how long a stop waits for calls in progress.
const stopGrace = 10 * time.Second

// serverFlags are the flags of up, apiserver and edge: those of the
// configuration's values that are changed most.
func serverFlags(e *env, name string) (*flags, func(args []string) (*Config, error)) {
	f := newFlags(e, name)
	listen := f.String("listen", "", "`address` of the public API; port 0 takes a free one")
	dataDir := f.String("data-dir", "", "`directory` for what must last")
	runDir := f.String("run-dir", "", "`directory` for sockets and mounts")
	level := f.String("log-level", "", "debug, info, warn or error")
	var kinds []string
	f.Func("backend", "`kind` of sandbox to offer; may be repeated", func(s string) error {
		kinds = append(kinds, splitList(s)...)
		return nil
	})
	return f, func(args []string) (*Config, error) {
		if _, err := f.parse(args, 0, 0, 0); err != nil {
			return nil, err
		}
		cfg, err := loadConfig(f.config, true)
		if err != nil {
			return nil, err
		}
		for value, field := range map[*string]*string{
			listen: &cfg.API.Listen, dataDir: &cfg.DataDir, runDir: &cfg.RunDir, level: &cfg.LogLevel,
		} {
			if *value != "" {
				*field = *value
			}
		}
		if kinds != nil {
			cfg.Edge.Backends = kinds
		}
		cfg.complete()
		return cfg, cfg.Validate()
	}
}

// runUp serves the whole of DSec on one machine. Its halves share nothing but
// a transport: the apiserver half reaches the edge half by the edge API alone.
func runUp(ctx context.Context, e *env, args []string) error {
	_, load := serverFlags(e, "up")
	cfg, err := load(args)
	if err != nil {
		return err
	}
	log, err := daemon.Logger(e.stderr, cfg.LogLevel)
	if err != nil {
		return err
	}
	if err := checkStore(ctx, cfg); err != nil {
		return ofRoot(err)
	}
	public, err := daemon.ListenTCP(cfg.API.Listen)
	if err != nil {
		return err
	}
	defer func() { _ = public.Close() }()
	var stack daemon.Stack
	failed := make(chan error, 4)
	reg := daemon.Registry()
	node, err := startEdge(ctx, cfg, log, reg, &stack)
	if err == nil {
		local := watcher.Endpoint{Name: "memory", Transport: &daemon.Local{Handler: node.Handler()}}
		err = startAPI(ctx, cfg, log, reg, []watcher.Endpoint{local}, public, &stack, failed)
	}
	if err != nil {
		return errors.Join(err, stop(log, &stack, node))
	}
	sayReady(e.stdout, cfg, public)
	return wait(ctx, log, &stack, node, failed)
}

// wait serves until ctx ends or a server fails, and then stops.
func wait(ctx context.Context, log *slog.Logger, stack *daemon.Stack, node *edge.Edge, failed <-chan error) error {
	daemon.Notify("READY=1")
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	daemon.Notify("STOPPING=1")
	return errors.Join(err, stop(log, stack, node))
}

// stop turns new callers away, ends the calls in progress and then the servers. The
// edge goes first: a call that it ends by itself leaves its command running, one whose
// connection breaks kills it. Sandboxes go on in any case.
func stop(log *slog.Logger, stack *daemon.Stack, node *edge.Edge) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopGrace)
	defer cancel()
	stack.TurnAll()
	var err error
	if node != nil {
		log.Info("stopping; sandboxes go on", "grace", stopGrace)
		if derr := node.Drain(ctx); derr != nil {
			log.Info("calls were cut off", "err", derr)
		}
		err = node.Close()
	}
	ctx, cancel = context.WithTimeout(context.Background(), stopGrace)
	defer cancel()
	return errors.Join(err, stack.Stop(ctx))
}

// readyURL is where l is reached.
func (c *Config) readyURL(l net.Listener) string { return c.API.urlOf(l.Addr().String()) }

// sayReady prints a first line for scripts, and what to try for people.
func sayReady(w io.Writer, cfg *Config, l net.Listener) {
	url := cfg.readyURL(l)
	_, _ = fmt.Fprintf(w, `ready %s
serving %s sandboxes; the admin key is in %s
try in another terminal:
`, url, strings.Join(cfg.Edge.Backends, ", "), cfg.adminKey())
	if url != "http://127.0.0.1:7321" {
		_, _ = fmt.Fprintf(w, "  export DSEC_URL=%s\n", url)
	}
	if cfg.DataDir != defaultDataDir {
		_, _ = fmt.Fprintf(w, "  export DSEC_KEY_FILE=%s\n", cfg.adminKey())
	}
	if cfg.Edge.Backends[0] == "fake" {
		_, _ = fmt.Fprintln(w, "  ID=$(dsec sandbox create --backend fake)")
	} else {
		_, _ = fmt.Fprintln(w, "  dsec layer import base rootfs.tar   # of any root file system or image")
		_, _ = fmt.Fprintln(w, "  ID=$(dsec sandbox create base)")
	}
	_, _ = fmt.Fprintln(w, "  dsec exec $ID echo hello")
}
