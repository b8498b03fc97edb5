package main

import (
	"context"
	"log/slog"

	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/lazy"
)

// runLayerd is the process that serves layers on demand, started by the edge. What
// it needs of the configuration comes over its socket: it reads no file of ours,
// and has neither arguments nor an environment.
func runLayerd(ctx context.Context, e *env, _ []string) error {
	return lazy.Serve(ctx, lazy.ServerConfig{
		Log: slog.New(slog.NewTextHandler(e.stderr, nil)),
		OpenStore: func(ctx context.Context, s lazy.Store) (blob.Store, error) {
			secret := func(name string) (string, bool) {
				v, ok := s.Secrets[name]
				return v, ok
			}
			return blob.Open(ctx, blobDrivers, s.URL, blob.Credentials{Env: secret}, blob.Options{Requests: s.Requests})
		},
	})
}
