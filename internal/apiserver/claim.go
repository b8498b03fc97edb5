package apiserver

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// claimTimeout bounds how long a start waits for the store of layers.
const claimTimeout = 30 * time.Second

// claim has an edge's store of layers belong to this control plane.
func (s *Server) claim(ctx context.Context, edge *watcher.Edge) error {
	_, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.ClaimLayers, &dsecv1.ClaimLayersRequest{Unit: s.unit})
	return err
}

// claimAtStart claims the stores of the edges that answer. Only that one belongs to
// another control plane ends the start: of what else is wrong imports tell, which
// claim the store anew.
func (s *Server) claimAtStart() error {
	ctx, cancel := context.WithTimeout(s.stopping, claimTimeout)
	defer cancel()
	for _, edge := range s.readyEdges() {
		err := s.claim(ctx, edge)
		switch {
		case err == nil:
		case dsec.CodeOf(err) == dsec.CodeConflict:
			return err
		default:
			s.log.Info("the store of layers is not claimed yet", "edge", edge.ID(), "err", err)
		}
	}
	return nil
}

// importer is an edge whose store of layers may be written to.
func (s *Server) importer(ctx context.Context) (*watcher.Edge, error) {
	edge, err := s.builder()
	if err != nil {
		return nil, err
	}
	return edge, s.claim(ctx, edge)
}
