package apiserver

import (
	"context"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// PrefetchLayer brings a layer to all nodes that are ready, one after the other: the
// store is not asked for the same by all of them at once.
func (l layerService) PrefetchLayer(ctx context.Context, req *connect.Request[dsecv1.PrefetchLayerRequest], out *connect.ServerStream[dsecv1.PrefetchLayerResponse]) error {
	t, err := l.s.layers.find(principal(ctx).Project, "name", req.Msg.Name)
	if err != nil {
		return err
	}
	edges := l.s.readyEdges()
	if len(edges) == 0 {
		return dsec.Errorf(dsec.CodeUnavailable, "no node is ready")
	}
	for i, edge := range edges {
		before := int64(i) * t.Size
		err := relay(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.PrefetchLayer, &dsecv1.PrefetchLayerRequest{Name: t.Digest},
			func(p *dsecv1.PrefetchLayerResponse) error {
				return out.Send(&dsecv1.PrefetchLayerResponse{Bytes: before + p.Bytes, Size: int64(len(edges)) * t.Size})
			})
		if err != nil {
			return err
		}
	}
	return nil
}

// readyEdges are the edges that take new work.
func (s *Server) readyEdges() (ready []*watcher.Edge) {
	for _, n := range s.edges.Nodes() {
		if e, ok := s.edges.Edge(n.ID); ok && n.Healthy && !n.Draining {
			ready = append(ready, e)
		}
	}
	return ready
}

// builder is any edge that answers: all share the store.
func (s *Server) builder() (*watcher.Edge, error) {
	if ready := s.readyEdges(); len(ready) > 0 {
		return ready[0], nil
	}
	return nil, dsec.Errorf(dsec.CodeUnavailable, "no node is ready")
}
