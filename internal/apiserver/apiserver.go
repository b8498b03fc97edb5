// Package apiserver is the only way in: it authenticates every call, decides
// which edge it belongs to, forwards it there over the edge API and streams
// the answer back. It keeps no record of any sandbox, so any apiserver serves
// any call and a restart loses nothing.
//
// The words: a route is one procedure of the public API; to forward is to make
// the same call at an edge, in the name of the project that the key acts for.
package apiserver

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/iam"
	"github.com/opendsec/dsec/internal/store"
	"github.com/opendsec/dsec/internal/watcher"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// MaxMessage is the most bytes of one request message, or of one message of a
// stream, after decompression.
const MaxMessage = 4 << 20

// Config is what an apiserver is made of.
type Config struct {
	Store *store.Store
	IAM   *iam.IAM
	// Edges are the edges that it forwards to.
	Edges *watcher.Watcher
	// AutoImport has a create import the image that its base names, where that is a
	// reference with a host and no name of the project.
	AutoImport bool
	// WebhookAllow are networks that webhooks may lead to though they are not public, and
	// WebhookGiveUp is for how long an event is tried to be delivered; 0 is a day.
	WebhookAllow  []netip.Prefix
	WebhookGiveUp time.Duration

	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Server serves the public API.
type Server struct {
	iam     *iam.IAM
	edges   *watcher.Watcher
	layers  *layerNames
	jobs    *jobs
	hooks   *hooks
	log     *slog.Logger
	metrics *metrics
	pulls   pulls

	autoImport bool
	unit       string // ID of this control plane, which the store of layers belongs to

	moves     moves
	removals  sync.Map      // of which it is not known what came of them, by the layer's digest
	dropPause time.Duration // between attempts of one
	unsettled sync.Map      // migrations of which it is not known what came of them, by request ID

	stopping context.Context // ended by Stopping; acts for no project
	stop     context.CancelFunc
	work     sync.WaitGroup // what runs until stopping ends
}

// self is whom the server's own calls to edges act for: no project has that name.
var self = iam.Principal{Project: "-"}

// New makes a Server. Close it before what it was made of. The error is conflict where
// the store of layers belongs to another control plane.
func New(ctx context.Context, cfg Config) (*Server, error) {
	unit, err := cfg.Store.Unit(ctx)
	if err != nil {
		return nil, err
	}
	layers, err := openLayerNames(ctx, cfg.Store)
	if err != nil {
		return nil, err
	}
	jobs, err := openJobs(ctx, cfg.Store)
	if err != nil {
		layers.close()
		return nil, err
	}
	hooks, err := openHooks(ctx, cfg)
	if err != nil {
		layers.close()
		jobs.close()
		return nil, err
	}
	stopping, stop := context.WithCancel(context.WithValue(context.WithoutCancel(ctx), principalKey{}, self))
	s := &Server{
		stopping: stopping, stop: stop,
		iam:     cfg.IAM,
		edges:   cfg.Edges,
		layers:  layers,
		jobs:    jobs,
		hooks:   hooks,
		log:     cfg.Log.With("component", "apiserver"),
		metrics: newMetrics(cfg.Metrics),
		pulls:   pulls{running: map[pullKey]*pull{}},

		autoImport: cfg.AutoImport,
		unit:       unit,
		dropPause:  dropPause,
	}
	if err := s.claimAtStart(); err != nil {
		s.Close()
		return nil, err
	}
	s.work.Go(func() { s.collectAtTimes(stopping) })
	s.work.Go(func() { s.keepJobs(stopping) })
	s.work.Go(func() { s.keepHooks(stopping) })
	s.work.Go(func() { s.keepMigrations(stopping) })
	return s, nil
}

// Stopping ends the streams that wait for their client's next request, so that
// a stop does not wait for them. Requests under way go on.
func (s *Server) Stopping() { s.stop() }

// Ready is nil where sandboxes can be made, and tells the operator why where not.
func (s *Server) Ready() error { return s.edges.Ready() }

// Close ends what the server runs for itself.
func (s *Server) Close() {
	s.stop()
	s.work.Wait()
	s.layers.close()
	s.jobs.close()
	s.hooks.docs.Close()
}

// Handler serves every route of the public API.
func (s *Server) Handler() http.Handler {
	opts := []connect.HandlerOption{
		strictCodecs(),
		daemon.DataCodec(),
		connect.WithRequestGate(s.gate),
		connect.WithInterceptors(&interceptor{s}),
		connect.WithReadMaxBytes(MaxMessage),
		connect.WithCompressMinBytes(64 << 10),
	}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(sandboxService{s}, opts...))
	mux.Handle(dsecv1connect.NewProcessServiceHandler(processService{s}, opts...))
	mux.Handle(dsecv1connect.NewSessionServiceHandler(sessionService{s}, opts...))
	mux.Handle(dsecv1connect.NewFileServiceHandler(fileService{s}, opts...))
	mux.Handle(dsecv1connect.NewTrajectoryServiceHandler(trajectoryService{s}, opts...))
	mux.Handle(dsecv1connect.NewSnapshotServiceHandler(snapshotService{s}, opts...))
	mux.Handle(dsecv1connect.NewEventServiceHandler(eventService{s}, opts...))
	mux.Handle(dsecv1connect.NewWebhookServiceHandler(webhookService{s}, opts...))
	mux.Handle(dsecv1connect.NewJobServiceHandler(jobService{s}, opts...))
	mux.Handle(dsecv1connect.NewLayerServiceHandler(layerService{s}, opts...))
	mux.Handle(dsecv1connect.NewAdminServiceHandler(adminService{s}, opts...))
	return bodyDeadlines(typedErrors(daemon.HoldAnswers(mux)))
}
