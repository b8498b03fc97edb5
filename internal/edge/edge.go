// Package edge owns every sandbox of one node: it admits, journals, makes,
// commands, expires, recovers and frees them. It knows backends by their
// contract alone and serves EdgeService, ProcessService, SessionService and
// FileService of proto/dsec/v1.
//
// The words: a call is one request that works in a sandbox; a record is what
// the journal holds of one sandbox, enough to take it over after the edge
// died at any instruction; an ended sandbox is one in a terminal state, whose
// record is kept for a while to answer for it and for its request id.
package edge

import (
	"context"
	"errors"
	"net/http"
)

// Edge is the node agent.
type Edge struct {
	cfg Config
}

// New makes an edge on cfg.StateDir and opens its journal. It serves nothing
// before Recover.
func New(cfg Config) (*Edge, error) {
	return &Edge{cfg: cfg}, nil
}

// Recover takes over the sandboxes that the journal knows, and sweeps what no
// record claims. It is called once, before the first request; until it
// returns, requests are refused as unavailable.
func (e *Edge) Recover(ctx context.Context) error { return errors.New("edge: not there yet") }

// Handler serves the edge API, /healthz apart from /metrics, which belongs to
// the process.
func (e *Edge) Handler() http.Handler { return http.NotFoundHandler() }

// Drain refuses new work as unavailable and waits until the calls in progress
// have ended, or ctx has. Sandboxes go on.
func (e *Edge) Drain(ctx context.Context) error { return errors.New("edge: not there yet") }

// Close ends what the edge runs for itself and closes the journal. Sandboxes
// go on, for the next edge to take over.
func (e *Edge) Close() error { return nil }
