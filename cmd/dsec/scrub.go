package main

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer"
)

// startScrub has the data of layers that the kernel reads by itself be checked
// until the stack stops.
func startScrub(ctx context.Context, cfg *Config, layers *layer.Store, node *edge.Edge, log *slog.Logger, reg prometheus.Registerer, stack *daemon.Stack) {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		opt := layer.ScrubOptions{Rate: cfg.Layers.Scrub, Lost: node.LoseLayers, Metrics: reg}
		if err := layers.Scrub(running, opt); err != nil {
			log.Error("layers are not scrubbed", "err", err)
		}
	}()
	stack.Push(func(ctx context.Context) error {
		stop()
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
}
