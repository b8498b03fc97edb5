package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apiserver"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/watcher"
)

// runAPIServer serves the public API alone, and reaches edges by their sockets.
func runAPIServer(ctx context.Context, e *env, args []string) error {
	_, load := serverFlags(e, "apiserver")
	cfg, err := load(args)
	if err != nil {
		return err
	}
	log, err := daemon.Logger(e.stderr, cfg.LogLevel)
	if err != nil {
		return err
	}
	public, err := daemon.ListenTCP(cfg.API.Listen)
	if err != nil {
		return err
	}
	defer func() { _ = public.Close() }()
	paths := cfg.API.Edges
	if len(paths) == 0 {
		paths = []string{cfg.edgeSocket()}
	}
	var endpoints []watcher.Endpoint
	for _, path := range paths {
		endpoints = append(endpoints, watcher.Endpoint{Name: path, Dial: func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}})
	}
	var stack daemon.Stack
	failed := make(chan error, 4)
	if err := startAPI(ctx, cfg, log, daemon.Registry(), endpoints, public, &stack, failed); err != nil {
		return errors.Join(err, stop(log, &stack, nil))
	}
	_, _ = fmt.Fprintf(e.stdout, "ready %s\n", cfg.readyURL(public))
	return wait(ctx, log, &stack, nil, failed)
}

// startAPI starts the control side on public and pushes its parts' stops.
func startAPI(
	ctx context.Context, cfg *Config, log *slog.Logger, reg *prometheus.Registry,
	endpoints []watcher.Endpoint, public net.Listener, stack *daemon.Stack, failed chan<- error,
) error {
	lock, err := daemon.Lock(filepath.Join(cfg.DataDir, "api"), "data_dir (--data-dir)")
	if err != nil {
		return err
	}
	stack.Push(func(context.Context) error { return lock.Close() })
	st, err := store.Open(ctx, store.Config{Dir: cfg.etcdDir(), Endpoints: cfg.Etcd.Endpoints, Log: log})
	if err != nil {
		return err
	}
	stack.Push(func(context.Context) error { return st.Close() })
	keys, err := iam.Open(ctx, st, log)
	if err != nil {
		return err
	}
	stack.Push(func(context.Context) error { keys.Close(); return nil })
	if err := keys.EnsureAdmin(ctx, cfg.adminKey()); err != nil {
		return err
	}
	edges, err := watcher.New(ctx, st, endpoints, log)
	if err != nil {
		return err
	}
	stack.Push(func(context.Context) error { edges.Close(); return nil })
	api, err := apiserver.New(ctx, apiserver.Config{
		Store: st, IAM: keys, Edges: edges, Log: log, Metrics: reg, AutoImport: cfg.Registry.Enabled && cfg.Registry.AutoImport,
		WebhookAllow: cfg.webhookAllow(), WebhookGiveUp: cfg.API.WebhookGiveUp.Duration,
	})
	if err != nil {
		return err
	}
	stack.Push(func(context.Context) error { api.Close(); return nil })
	allow := func(r *http.Request) bool { return daemon.Loopback(r) || api.Admin(r) }
	srv := daemon.HTTPServer(daemon.WithStatus(daemon.WithProfiles(api.Handler(), api.Admin), reg, api.Ready, allow), log)
	srv.RegisterOnShutdown(api.Stopping)
	if cfg.API.TLSCert != "" {
		cert, err := tls.LoadX509KeyPair(cfg.API.TLSCert, cfg.API.TLSKey)
		if err != nil {
			return dsec.Invalid("api.tls_cert", "%v", err)
		}
		srv.TLSConfig = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	}
	stack.Serve(srv, public, failed)
	stack.TurnAway(srv)
	return nil
}
