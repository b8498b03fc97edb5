// Package watcher keeps the apiserver's view of the edges: where each is
// reached, whether it answers, what it offers and how full it is. The view is
// rebuilt from the edges themselves after a restart; the store remembers only
// which edge was last seen behind which address.
package watcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/h1"
	"github.com/opendsec/dsec/internal/placement"
	"github.com/opendsec/dsec/internal/store"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// APIVersion is the version of the edge API that this build speaks; it works
// with the one before, too.
const APIVersion = 1

const (
	pollEvery   = time.Second
	pollTimeout = 2 * time.Second
	// staleAfter is how long an edge counts as healthy after its last answer.
	staleAfter = 5 * time.Second
	// idleTimeout is how long a connection to an edge is kept without a call;
	// an edge keeps it longer.
	idleTimeout = 30 * time.Second
)

// ErrDial is in the chain of every error of a call whose connection was never
// made: the edge cannot have seen the request.
var ErrDial = errors.New("edge cannot be reached")

// Endpoint is one edge's address.
type Endpoint struct {
	Name string // unique and lasting: the socket's path, host:port
	Dial func(ctx context.Context) (net.Conn, error)
	// Transport, where set, makes all calls in the place of connections.
	Transport http.RoundTripper
}

// Edge is one edge and the clients that reach it.
type Edge struct {
	dsecv1connect.EdgeServiceClient
	Process    dsecv1connect.ProcessServiceClient
	Session    dsecv1connect.SessionServiceClient
	File       dsecv1connect.FileServiceClient
	Trajectory dsecv1connect.TrajectoryServiceClient

	endpoint  string
	closeIdle func()       // nil where the endpoint has a transport of its own
	pending   atomic.Int64 // creates sent and not answered

	mu     sync.Mutex
	id     dsec.EdgeID
	info   *dsecv1.InfoResponse
	seen   time.Time
	failed string // the last failure, so that each is logged once
}

// Watcher follows the edges.
type Watcher struct {
	store  *store.Store
	log    *slog.Logger
	edges  []*Edge
	cancel context.CancelFunc
	done   chan struct{}
}

const prefix = "edges/"

// New asks every edge once and then follows them until Close.
func New(ctx context.Context, s *store.Store, endpoints []Endpoint, log *slog.Logger) (*Watcher, error) {
	known, err := store.List[dsec.EdgeID](ctx, s, prefix)
	if err != nil {
		return nil, err
	}
	w := &Watcher{store: s, log: log.With("component", "watcher"), done: make(chan struct{})}
	for _, ep := range endpoints {
		e := newEdge(ep)
		e.id = known[ep.Name]
		w.edges = append(w.edges, e)
	}
	w.poll(ctx)
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	w.cancel = cancel
	go w.run(run)
	return w, nil
}

// Close ends following and closes idle connections.
func (w *Watcher) Close() {
	w.cancel()
	<-w.done
	for _, e := range w.edges {
		if e.closeIdle != nil {
			e.closeIdle()
		}
	}
}

// newEdge makes the clients of one edge. Where it is reached by connections,
// they are of HTTP/1.1, which on kept connections costs less per call and per
// byte than HTTP/2 on one connection; no call sends both ways at once.
func newEdge(ep Endpoint) *Edge {
	e := &Edge{endpoint: ep.Name}
	edge := caller{ep.Transport}
	if ep.Transport == nil {
		dial := func(ctx context.Context) (net.Conn, error) {
			conn, err := ep.Dial(ctx)
			if err != nil {
				return nil, fmt.Errorf("%w: %w", ErrDial, err)
			}
			return conn, nil
		}
		long := &http.Transport{
			DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableCompression: true, MaxIdleConnsPerHost: 512, IdleConnTimeout: idleTimeout,
			ReadBufferSize: 16 << 10, WriteBufferSize: 16 << 10,
		}
		short := &h1.Transport{Dial: dial, IdleTimeout: idleTimeout, Other: long}
		e.closeIdle = func() { long.CloseIdleConnections(); short.CloseIdleConnections() }
		edge = caller{short}
	}
	const base = "http://edge"
	opts := connect.WithClientOptions(connect.WithReadMaxBytes(maxAnswer), connect.WithAcceptCompression("gzip", nil, nil))
	e.EdgeServiceClient = dsecv1connect.NewEdgeServiceClient(edge, base, opts)
	e.Process = dsecv1connect.NewProcessServiceClient(edge, base, opts)
	e.Session = dsecv1connect.NewSessionServiceClient(edge, base, opts)
	e.File = dsecv1connect.NewFileServiceClient(edge, base, opts)
	e.Trajectory = dsecv1connect.NewTrajectoryServiceClient(edge, base, opts)
	return e
}

// maxAnswer bounds one message of an edge: the longest output of an Exec, 64
// MiB, and what stands beside it.
const maxAnswer = 65 << 20

// caller makes calls by a transport alone: an edge sends no redirects, sets no
// cookies, and has no proxy before it.
type caller struct{ http.RoundTripper }

// Do implements connect.HTTPClient.
func (c caller) Do(req *http.Request) (*http.Response, error) { return c.RoundTrip(req) }

// ID is the edge's, empty as long as it never answered.
func (e *Edge) ID() dsec.EdgeID {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.id
}

// Placed counts n creates as pending until the returned func is called.
func (e *Edge) Placed(n int) (done func()) {
	e.pending.Add(int64(n))
	return func() { e.pending.Add(-int64(n)) }
}

func (e *Edge) node() placement.Node {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := placement.Node{ID: e.id, Healthy: e.info != nil && time.Since(e.seen) < staleAfter, Kinds: map[dsec.Kind]bool{}}
	if e.info == nil {
		return n
	}
	n.Draining = e.info.Draining
	n.Sandboxes, n.Max = e.info.Sandboxes+e.pending.Load(), e.info.MaxSandboxes
	for _, b := range e.info.Backends {
		n.Kinds[dsec.Kind(b.Kind)] = b.Available
	}
	return n
}

// Nodes is the view that placement decides on.
func (w *Watcher) Nodes() []placement.Node {
	nodes := make([]placement.Node, 0, len(w.edges))
	for _, e := range w.edges {
		if n := e.node(); n.ID != "" {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// Ready is nil where some edge can make sandboxes of some kind, and tells why, to
// the operator, where none can.
func (w *Watcher) Ready() error {
	var why []string
	for _, e := range w.edges {
		e.mu.Lock()
		fresh, info := e.info != nil && time.Since(e.seen) < staleAfter, e.info
		e.mu.Unlock()
		switch {
		case !fresh:
			why = append(why, "the edge at "+e.endpoint+" does not answer")
			continue
		case info.Draining:
			why = append(why, "the edge at "+e.endpoint+" shuts down")
			continue
		}
		for _, b := range info.Backends {
			if b.Available {
				return nil
			}
			why = append(why, fmt.Sprintf("%s: %s", b.Kind, strings.Join(b.Notes, ", ")))
		}
	}
	return dsec.Errorf(dsec.CodeUnavailable, "no sandbox can be made: %s; `dsec doctor` tells what is missing", strings.Join(why, "; "))
}

// Edges are those that are known, by ID.
func (w *Watcher) Edges() []*Edge {
	edges := slices.DeleteFunc(slices.Clone(w.edges), func(e *Edge) bool { return e.ID() == "" })
	slices.SortFunc(edges, func(a, b *Edge) int { return cmp.Compare(a.ID(), b.ID()) })
	return edges
}

// Edge finds an edge. ok is false where no such edge is known.
func (w *Watcher) Edge(id dsec.EdgeID) (*Edge, bool) {
	for _, e := range w.edges {
		if e.ID() == id {
			return e, true
		}
	}
	return nil, false
}

func (w *Watcher) run(ctx context.Context) {
	defer close(w.done)
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.poll(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (w *Watcher) poll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	var g errgroup.Group
	for _, e := range w.edges {
		g.Go(func() error {
			if err := w.ask(ctx, e); err != nil && ctx.Err() == nil {
				w.lost(e, err)
			}
			return nil
		})
	}
	_ = g.Wait()
}

func (w *Watcher) ask(ctx context.Context, e *Edge) error {
	res, err := e.Info(ctx, connect.NewRequest(&dsecv1.InfoRequest{}))
	if err != nil {
		return err
	}
	info := res.Msg
	if info.ApiVersion < APIVersion-1 || info.ApiVersion > APIVersion+1 {
		return fmt.Errorf("speaks version %d of the edge API, want %d", info.ApiVersion, APIVersion)
	}
	id, err := dsec.ParseEdgeID(info.EdgeId)
	if err != nil {
		return err
	}
	e.mu.Lock()
	known := e.id
	e.mu.Unlock()
	if known != id {
		// Remembered before it is used, so that a key it holds is looked for
		// there even after a restart that finds it unreachable.
		if _, err := store.Put(ctx, w.store, prefix+e.endpoint, id); err != nil {
			return err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failed != "" || e.id != id {
		w.log.Info("edge answers", "edge", id, "endpoint", e.endpoint)
	}
	e.id, e.info, e.seen, e.failed = id, info, time.Now(), ""
	return nil
}

func (w *Watcher) lost(e *Edge, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failed != err.Error() {
		w.log.Warn("edge does not answer", "edge", e.id, "endpoint", e.endpoint, "err", err)
	}
	e.failed = err.Error()
}
