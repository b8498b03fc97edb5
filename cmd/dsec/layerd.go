package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/lazy"
)

// lazyFiles has layerd fill the data of layers when they are read.
type lazyFiles struct {
	*lazy.Client
	log *slog.Logger
}

// openLazy starts layerd, or finds the one that serves what an earlier edge had
// opened. It is nil where the kernel reads the store by itself.
func openLazy(ctx context.Context, cfg *Config, blobs blob.Store, log *slog.Logger, stack *daemon.Stack) (*lazyFiles, error) {
	if _, direct := blobs.(blob.Opener); direct && cfg.Layers.Verify != verifyAlways {
		return nil, nil
	}
	// Made here, where its key is known.
	if err := os.MkdirAll(cfg.cacheDir(), 0o700); err != nil {
		return nil, ofDir("layers.cache_dir", cfg.cacheDir(), err)
	}
	secrets := map[string]string{secretFile: cfg.Layers.StoreCredentials}
	if cfg.Layers.StoreCredentials == "" {
		for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"} {
			if v, ok := os.LookupEnv(name); ok {
				secrets[name] = v
			}
		}
	}
	c, err := lazy.Connect(ctx, lazy.Config{
		RunDir: filepath.Join(cfg.RunDir, "layerd"), CacheDir: cfg.cacheDir(),
		Store:    lazy.Store{URL: cfg.storeURL(), Secrets: secrets, Requests: int(cfg.Layers.StoreRequests)},
		FrontEnd: lazy.FrontEnd(cfg.Layers.FrontEnd),
		Limits:   lazy.Limits{CacheBytes: cfg.Layers.CacheBytes, RetryFor: cfg.Layers.RetryFor.Duration, Trace: cfg.Layers.TraceFor.Duration > 0},
		Log:      log.With("component", "layerd"),
	})
	if err != nil {
		return nil, ofLayers(err)
	}
	// layerd goes on: sandboxes read from it.
	stack.Push(func(context.Context) error { c.Close(); return nil })
	return &lazyFiles{c, log}, nil
}

// secretFile is the name of the file of credentials among a store's secrets.
const secretFile = "file"

// runLayerd serves data of layers; openLazy starts it. What it needs of the
// configuration comes over its socket.
func runLayerd(ctx context.Context, _ *env, _ []string) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	return lazy.Serve(ctx, lazy.ServerConfig{Log: log, Crash: crash(), OpenStore: func(ctx context.Context, s lazy.Store) (blob.Store, error) {
		secret := func(name string) (string, bool) { v, ok := s.Secrets[name]; return v, ok }
		return blob.Open(ctx, blobDrivers, s.URL, blob.Credentials{File: s.Secrets[secretFile], Env: secret}, blob.Options{Requests: s.Requests})
	}})
}

// Open implements layer.Lazy.
func (l *lazyFiles) Open(ctx context.Context, f layer.LazyFile) (*os.File, error) {
	return l.Client.Open(ctx, lazy.Image(f))
}

// Prefetch implements layer.Lazy.
func (l *lazyFiles) Prefetch(ctx context.Context, f layer.LazyFile, spans []layer.Span, progress func(done, total int64)) error {
	var ranges []lazy.Range
	for _, s := range spans {
		ranges = append(ranges, lazy.Range(s))
	}
	return l.Client.Prefetch(ctx, lazy.Image(f), ranges, func(p lazy.Progress) { progress(p.Done, p.Total) })
}

// Trace implements layer.Lazy.
func (l *lazyFiles) Trace(ctx context.Context, key string) (spans []layer.Span, err error) {
	ranges, err := l.Client.Trace(ctx, key)
	for _, r := range ranges {
		spans = append(spans, layer.Span(r))
	}
	return spans, err
}

// releaseTimeout is how long layerd may take to answer.
const releaseTimeout = 10 * time.Second

// Release implements layer.Lazy.
func (l *lazyFiles) Release(key string) {
	ctx, cancel := context.WithTimeout(context.Background(), releaseTimeout)
	defer cancel()
	if err := l.Client.Release(ctx, key); err != nil {
		l.log.Warn("layer stays in the cache of layers", "key", key, "err", err)
	}
}

// tell has the edge know what becomes of reads, until ctx ends.
func (l *lazyFiles) tell(ctx context.Context, node *edge.Edge) {
	l.since(ctx, node)
	for {
		select {
		case <-ctx.Done():
			return
		case ev, ok := <-l.Events():
			if !ok {
				return
			}
			l.one(ctx, node, ev)
		}
	}
}

// since has the edge know of reads that failed before it began.
func (l *lazyFiles) since(ctx context.Context, node *edge.Edge) {
	stats, err := l.Stats(ctx)
	if err != nil && ctx.Err() == nil {
		l.log.Warn("whether reads of layers fail is not known", "err", err)
	}
	for _, s := range stats {
		if digest, ok := layer.DigestOf(s.Key); ok && s.Degraded != "" {
			node.DegradeLayer(digest, s.Degraded)
		}
	}
}

func (l *lazyFiles) one(ctx context.Context, node *edge.Edge, ev lazy.Event) {
	digest, _ := layer.DigestOf(ev.Key)
	log := l.log.With("event", string(ev.Kind), "layer", digest)
	switch ev.Kind {
	case lazy.EventCorrupt:
		log.Error("the layer store gave bytes that are not the layer's; readers got an error", "chunk", ev.Chunk, "reason", ev.Reason)
	case lazy.EventDegraded:
		log.Warn("reads of a layer fail", "reason", ev.Reason)
		node.DegradeLayer(digest, ev.Reason)
	case lazy.EventRecovered:
		log.Info("reads of a layer succeed again")
		node.DegradeLayer(digest, "")
	case lazy.EventRestarted:
		log.Warn("layerd was started again", "reason", ev.Reason)
	case lazy.EventLost:
		if err := node.LoseLayers(ctx); err != nil {
			log.Error("layer stays lost", "err", err)
		}
	}
}

var _ layer.Lazy = (*lazyFiles)(nil)

// What layers.verify may be.
const (
	verifyAuto   = "auto"
	verifyAlways = "always"
)

func (l *LayersConfig) validateReads() error {
	switch {
	case l.Verify != verifyAuto && l.Verify != verifyAlways:
		return dsec.Invalid("layers.verify", "is %.40q, want %s or %s", l.Verify, verifyAuto, verifyAlways)
	case l.FrontEnd != "" && l.FrontEnd != string(lazy.Fanotify) && l.FrontEnd != string(lazy.FUSE):
		return dsec.Invalid("layers.front_end", "is %.40q, want %s, %s or nothing", l.FrontEnd, lazy.Fanotify, lazy.FUSE)
	case l.CacheBytes < 64<<20:
		return dsec.Invalid("layers.cache_bytes", "is %d, want at least %d", l.CacheBytes, 64<<20)
	case l.RetryFor.Duration < time.Second || l.RetryFor.Duration > time.Hour:
		return dsec.Invalid("layers.retry_for", "is %s, want 1s to 1h", l.RetryFor)
	case l.TraceFor.Duration != 0 && (l.TraceFor.Duration < time.Second || l.TraceFor.Duration > time.Hour):
		return dsec.Invalid("layers.trace_for", "is %s, want 0s, or 1s to 1h", l.TraceFor)
	case l.Scrub < 0 || l.Scrub > 1<<40:
		return dsec.Invalid("layers.scrub_bytes_per_second", "is %d, want 0 to %d", l.Scrub, int64(1<<40))
	case l.CacheDir != "" && !filepath.IsAbs(l.CacheDir):
		return dsec.Invalid("layers.cache_dir", "want an absolute path")
	}
	return nil
}
