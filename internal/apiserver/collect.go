package apiserver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

const (
	// collectAge is how old a layer without a name is before it is collected: an
	// import names it within half an hour, or never.
	collectAge = time.Hour
	// collectEvery is how often the server collects by itself.
	collectEvery = 6 * time.Hour
	// leftoverAge is that of parts that are of no layer. The clocks of nodes and of
	// the store may differ.
	leftoverAge = 24 * time.Hour
	dropTimeout = 30 * time.Second
	// dropPause is between attempts to remove a layer until it is known what came of it.
	dropPause = 5 * time.Second
)

// CollectLayers removes layers that nothing refers to.
func (a adminService) CollectLayers(ctx context.Context, req *connect.Request[dsecv1.CollectLayersRequest]) (*connect.Response[dsecv1.CollectLayersResponse], error) {
	age := collectAge
	if d := req.Msg.MinAge; d != nil {
		if age = d.AsDuration(); !d.IsValid() || age < 0 {
			return nil, dsec.Invalid("min_age", "want 0s or more")
		}
	}
	res, err := a.s.collect(ctx, age, req.Msg.DryRun)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(res), nil
}

// collect removes the layers that are older than age and have no name. One that a
// sandbox uses stays.
func (s *Server) collect(ctx context.Context, age time.Duration, dry bool) (*dsecv1.CollectLayersResponse, error) {
	edge, err := s.builder()
	if err != nil {
		return nil, err
	}
	stored, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.SweepLayers, &dsecv1.SweepLayersRequest{Age: durationpb.New(leftoverAge), Unit: s.unit})
	if err != nil {
		return nil, err
	}
	res := new(dsecv1.CollectLayersResponse)
	before, referred := time.Now().Add(-age), s.layers.referred()
	for _, l := range stored.Msg.Layers {
		gone := l.Created.AsTime().Before(before) && !referred[l.Digest]
		if gone && !dry {
			if gone, err = s.dropUnnamed(ctx, l.Digest); err != nil && ctx.Err() != nil {
				return nil, err
			} else if err != nil {
				s.log.Info("layer without a name stays", "digest", l.Digest, "err", err)
			}
		}
		if gone {
			res.Removed = append(res.Removed, l)
		} else {
			res.Kept++
		}
	}
	return res, nil
}

// dropUnnamed removes a layer that no project has a name for, nor for one that goes on it.
// Where it is not known whether an edge did, or still does, the layer gets no name until
// it is.
func (s *Server) dropUnnamed(ctx context.Context, digest string) (dropped bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	r := newRemoval(digest)
	dropped, asked, err := s.tryDrop(ctx, r)
	if !asked || isKnown(err) || s.stopping.Err() != nil {
		return dropped, err
	}
	if _, more := s.removals.LoadOrStore(digest, r); !more {
		s.work.Go(func() {
			defer s.removals.Delete(digest)
			s.dropUntilKnown(r)
		})
	}
	return false, err
}

// tryDrop removes a layer if it has no name, and reports whether an edge was asked for
// that. Unless it is known what came of it the mark of the removal stays for its time.
func (s *Server) tryDrop(ctx context.Context, r removal) (dropped, asked bool, err error) {
	edge, err := s.builder()
	if err != nil {
		return false, false, err
	}
	unnamed, done, err := s.layers.dropping(ctx, r)
	if err != nil || !unnamed {
		return false, false, err
	}
	if err := s.forgetBut(ctx, edge, r.digest); err != nil {
		done() // it is all there
		return false, false, err
	}
	_, err = forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.DropLayer, &dsecv1.DropLayerRequest{Digest: r.digest, Unit: s.unit})
	if isKnown(err) {
		done()
	}
	return err == nil, true, err
}

// forgetBut has all edges but one, which is about to remove a layer from the store, forget
// it. The error is conflict where a sandbox of one of them uses it.
func (s *Server) forgetBut(ctx context.Context, edge *watcher.Edge, digest string) error {
	for _, other := range s.edges.Edges() {
		if other == edge {
			continue
		}
		if _, err := forward(ctx, edgeClient(other), dsecv1connect.EdgeServiceClient.ForgetLayer, &dsecv1.ForgetLayerRequest{Digest: digest}); err != nil {
			return fmt.Errorf("at edge %s: %w", other.ID(), err)
		}
	}
	return nil
}

// isKnown reports whether the error of a removal, or that there is none, tells what came
// of it.
func isKnown(err error) bool {
	if err == nil {
		return true
	}
	switch dsec.CodeOf(err) {
	case dsec.CodeConflict, dsec.CodeNotFound, dsec.CodeUnsupported, dsec.CodeInvalid:
		return true
	}
	return false
}

// dropUntilKnown goes on with a removal, and renews its mark, until it is known what came
// of it.
func (s *Server) dropUntilKnown(r removal) {
	for {
		select {
		case <-time.After(s.dropPause):
		case <-s.stopping.Done():
			return
		}
		ctx, cancel := context.WithTimeout(s.stopping, dropTimeout)
		_, _, err := s.tryDrop(ctx, r)
		cancel()
		if isKnown(err) {
			return
		}
	}
}

// collectAtTimes collects until ctx ends.
func (s *Server) collectAtTimes(ctx context.Context) {
	for {
		// Apart from other apiservers of the same store.
		wait := time.NewTimer(collectEvery/2 + rand.N(collectEvery))
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return
		}
		res, err := s.collect(ctx, collectAge, false)
		if err != nil {
			s.log.Warn("layers cannot be collected", "err", err)
		} else if len(res.Removed) > 0 {
			s.log.Info("layers without a name are removed", "count", len(res.Removed), "kept", res.Kept)
		}
	}
}
