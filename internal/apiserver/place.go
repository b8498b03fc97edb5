package apiserver

import (
	"context"
	"slices"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/placement"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// findAtOnce bounds the questions for request ids that one batch asks at once.
const findAtOnce = 32

// place has each item made by the first edge on its list that takes it. An
// edge that provably did not accept an item is followed by the next.
func (s *Server) place(ctx context.Context, items []*dsecv1.CreateSandboxesItem) []*dsecv1.BatchCreateItem {
	results := make([]*dsecv1.BatchCreateItem, len(items))
	s.placeIn(ctx, items, s.candidates(ctx, items, results), results)
	for i, r := range results {
		if to := r.GetError().GetDetail().GetMovedTo(); to != "" {
			results[i] = s.wasMoved(ctx, to)
		}
	}
	return results
}

// wasMoved is the result of a create whose request id leads to a sandbox that was moved.
func (s *Server) wasMoved(ctx context.Context, to string) *dsecv1.BatchCreateItem {
	res, err := unary(ctx, s, connect.NewRequest(&dsecv1.GetRequest{SandboxId: to}), edgeClient, dsecv1connect.EdgeServiceClient.GetSandbox)
	if err != nil {
		return failed(err)
	}
	return &dsecv1.BatchCreateItem{Result: &dsecv1.BatchCreateItem_Created{Created: &dsecv1.CreateResponse{Sandbox: res.Msg.Sandbox}}}
}

// placeIn has each item made by the first edge on its list that takes it.
func (s *Server) placeIn(ctx context.Context, items []*dsecv1.CreateSandboxesItem, lists [][]dsec.EdgeID, results []*dsecv1.BatchCreateItem) {
	for {
		at := map[dsec.EdgeID][]int{}
		for i, list := range lists {
			if len(list) > 0 {
				at[list[0]] = append(at[list[0]], i)
				lists[i] = list[1:]
			}
		}
		if len(at) == 0 {
			return
		}
		var g errgroup.Group
		for id, idx := range at {
			ask := func() error {
				for j, r := range s.createAt(ctx, id, items, idx) {
					results[idx[j]] = r
				}
				return nil
			}
			if len(at) == 1 { // as nearly always: the caller's stack has grown already
				_ = ask()
				break
			}
			g.Go(ask)
		}
		_ = g.Wait()
		for i := range lists {
			if !results[i].GetError().GetDetail().GetRetryable() {
				lists[i] = nil
			}
		}
	}
}

// createAt asks one edge for the items with the given indices.
func (s *Server) createAt(ctx context.Context, id dsec.EdgeID, items []*dsecv1.CreateSandboxesItem, idx []int) []*dsecv1.BatchCreateItem {
	edge, ok := s.edges.Edge(id)
	if !ok {
		return slices.Repeat([]*dsecv1.BatchCreateItem{failed(dsec.Errorf(dsec.CodeUnavailable, "the node is gone"))}, len(idx))
	}
	defer edge.Placed(len(idx))()
	results := make([]*dsecv1.BatchCreateItem, 0, len(idx))
	for len(results) < len(idx) {
		msg, size := &dsecv1.CreateSandboxesRequest{}, 0
		for _, i := range idx[len(results):] {
			if size += proto.Size(items[i]); len(msg.Items) > 0 && size > maxCreates {
				break
			}
			msg.Items = append(msg.Items, items[i])
		}
		results = append(results, s.createSome(ctx, edge, msg)...)
	}
	return results
}

// maxCreates is about the most bytes of creates in one message to an edge, which
// takes 16 MiB: a template may have much more times its count.
const maxCreates = 8 << 20

// createSome makes what msg asks for, with a result for each item.
func (s *Server) createSome(ctx context.Context, edge *watcher.Edge, msg *dsecv1.CreateSandboxesRequest) []*dsecv1.BatchCreateItem {
	res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.CreateSandboxes, msg)
	if err == nil && len(res.Msg.Items) != len(msg.Items) {
		err = dsec.Errorf(dsec.CodeOutcomeUnknown, "the node answered only in part")
	}
	if err != nil {
		if e := apierr.Safe(err); e.Code == dsec.CodeInternal {
			s.log.Error("creates failed", "count", len(msg.Items), "err", err, "cause", e.Err)
		}
		return slices.Repeat([]*dsecv1.BatchCreateItem{failed(err)}, len(msg.Items))
	}
	return res.Msg.Items
}

// candidates lists the edges to try for each item, best first. An item without
// any has its error in results.
func (s *Server) candidates(ctx context.Context, items []*dsecv1.CreateSandboxesItem, results []*dsecv1.BatchCreateItem) [][]dsec.EdgeID {
	lists := make([][]dsec.EdgeID, len(items))
	view, rng := s.edges.Nodes(), newRand()
	var g errgroup.Group
	g.SetLimit(findAtOnce)
	for i, item := range items {
		kind := dsec.Kind(item.Request.Backend)
		if item.Request.RequestId != "" {
			g.Go(func() error {
				list, err := s.holders(ctx, item.Request.RequestId, kind)
				if err != nil {
					results[i] = failed(err)
				}
				lists[i] = list
				return nil
			})
			continue
		}
		list, err := placement.Pick(view, kind, rng)
		if err != nil {
			results[i] = failed(err)
			continue
		}
		lists[i] = list
		for j := range view {
			if view[j].ID == list[0] {
				view[j].Sandboxes++
			}
		}
	}
	_ = g.Wait()
	return lists
}

// holders lists the edges that may answer for a request id: the one that holds
// it, or those that may make the sandbox. Every edge that may hold the key is
// asked before any makes anything; where one cannot be asked there is no
// second create, and the caller may try again.
func (s *Server) holders(ctx context.Context, requestID string, kind dsec.Kind) ([]dsec.EdgeID, error) {
	var all []dsec.EdgeID
	for _, e := range s.edges.Edges() {
		all = append(all, e.ID())
	}
	order := placement.Rendezvous(principal(ctx).Project, requestID, all)
	order = order[:min(len(order), placement.KeyEdges)]
	switch len(order) {
	case 0:
		return nil, dsec.Errorf(dsec.CodeUnavailable, "no node is ready")
	case 1:
		return order, nil // which looks for the key itself
	}
	for _, id := range order {
		held, err := s.holds(ctx, id, requestID)
		if err != nil {
			return nil, &dsec.Error{Code: dsec.CodeUnavailable, Message: "a node that may hold the request id does not answer", Err: err}
		}
		if held {
			return []dsec.EdgeID{id}, nil
		}
	}
	nodes := s.edges.Nodes()
	fit := slices.DeleteFunc(slices.Clone(order), func(id dsec.EdgeID) bool {
		i := slices.IndexFunc(nodes, func(n placement.Node) bool { return n.ID == id })
		return i < 0 || !nodes[i].Kinds[kind]
	})
	if len(fit) == 0 {
		return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "backend", Message: "none of the nodes for this request id offers it"}
	}
	return fit, nil
}

func (s *Server) holds(ctx context.Context, id dsec.EdgeID, requestID string) (bool, error) {
	edge, ok := s.edges.Edge(id)
	if !ok {
		return false, watcher.ErrDial
	}
	res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.FindRequest, &dsecv1.FindRequestRequest{RequestId: requestID})
	if err != nil {
		return false, err
	}
	return res.Msg.SandboxId != "", nil
}

// failed is err as the result of one item.
func failed(err error) *dsecv1.BatchCreateItem {
	ce := apierr.Encode(err)
	return &dsecv1.BatchCreateItem{Result: &dsecv1.BatchCreateItem_Error{Error: &dsecv1.ItemError{
		Detail: apierr.Detail(apierr.Safe(err)), Message: ce.Message(),
	}}}
}
