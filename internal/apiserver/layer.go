package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/store"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

type layerService struct{ s *Server }

// ImportLayer has one edge build the layer into the store that all share, and
// then names it.
func (l layerService) ImportLayer(ctx context.Context, in *connect.ClientStream[dsecv1.ImportLayerRequest]) (*connect.Response[dsecv1.ImportLayerResponse], error) {
	msg, err := first(in)
	if err != nil {
		return nil, err
	}
	open := msg.GetOpen()
	if open == nil {
		return nil, dsec.Invalid("open", "want it in the first message")
	}
	name, err := canonicalName("open.name", open.Name)
	if err != nil {
		return nil, err
	}
	edge, err := l.s.importer(ctx)
	if err != nil {
		return nil, err
	}
	names := l.s.layers
	began, err := names.store.Revision(ctx)
	if err != nil {
		return nil, err
	}
	res, err := upload(ctx, in, edge.BuildLayer)
	if err != nil {
		return nil, err
	}
	t, err := tagOf(res.Msg.GetLayer(), res.Msg.Findings)
	if err != nil {
		return nil, err
	}
	t.At = open.At
	project := principal(ctx).Project
	old, _, err := names.tags.Get(project + "/" + name)
	if err != nil {
		return nil, err
	}
	if err := l.give(ctx, project, name, t, old, began); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ImportLayerResponse{Layer: t.message(name), Findings: res.Msg.Findings}), nil
}

// give gives a layer a name, which old had if it is not zero, and drops what then
// has no name any more.
func (l layerService) give(ctx context.Context, project, name string, t, old tag, began int64, conds ...store.Cond) error {
	if err := l.s.layers.set(ctx, project, name, t, began, conds...); err != nil {
		return err
	}
	if old.Digest != "" && old.Digest != t.Digest {
		l.drop(ctx, old)
	}
	return nil
}

func (l layerService) ListLayers(ctx context.Context, _ *connect.Request[dsecv1.ListLayersRequest]) (*connect.Response[dsecv1.ListLayersResponse], error) {
	res := &dsecv1.ListLayersResponse{}
	prefix := principal(ctx).Project + "/"
	l.s.layers.tags.Range(prefix, func(key string, t tag) bool {
		res.Layers = append(res.Layers, t.message(strings.TrimPrefix(key, prefix)))
		return true
	})
	return connect.NewResponse(res), nil
}

// InspectLayer tells all that is known of a layer.
func (l layerService) InspectLayer(ctx context.Context, req *connect.Request[dsecv1.InspectLayerRequest]) (*connect.Response[dsecv1.InspectLayerResponse], error) {
	project := principal(ctx).Project
	t, err := l.s.layers.find(project, "name", req.Msg.Name)
	if err != nil {
		return nil, err
	}
	layer := t.message("")
	layer.Findings = t.Findings
	return connect.NewResponse(&dsecv1.InspectLayerResponse{Layer: layer, Names: l.s.layers.names(project, t.Digest)}), nil
}

// TagLayer gives a layer one more name.
func (l layerService) TagLayer(ctx context.Context, req *connect.Request[dsecv1.TagLayerRequest]) (*connect.Response[dsecv1.TagLayerResponse], error) {
	project, names := principal(ctx).Project, l.s.layers
	name, err := canonicalName("new_name", req.Msg.NewName)
	if err != nil {
		return nil, err
	}
	// Not the store's revision: of what was removed before that the cache may not know.
	seen := names.tags.Revision()
	t, err := names.find(project, "name", req.Msg.Name)
	if err != nil {
		return nil, err
	}
	old, had, err := names.tags.Get(project + "/" + name)
	if err != nil {
		return nil, err
	}
	if had && old.Digest != t.Digest && !req.Msg.Replace {
		return nil, &dsec.Error{Code: dsec.CodeConflict, Field: "new_name", Message: fmt.Sprintf("%s names another layer, %s; want replace to take it from there", name, old.Digest)}
	}
	var conds []store.Cond
	if !req.Msg.Replace {
		conds = append(conds, unchanged(project, name, seen))
	}
	if err := l.give(ctx, project, name, t, old, seen, conds...); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.TagLayerResponse{Layer: t.message(name)}), nil
}

// RemoveLayer removes a name, or all of the project's names of a digest.
func (l layerService) RemoveLayer(ctx context.Context, req *connect.Request[dsecv1.RemoveLayerRequest]) (*connect.Response[dsecv1.RemoveLayerResponse], error) {
	project, names := principal(ctx).Project, l.s.layers
	seen := names.tags.Revision()
	t, err := names.find(project, "name", req.Msg.Name)
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(req.Msg.Name, "sha256:") {
		for _, name := range names.names(project, t.Digest) {
			// One that has another layer since is none of its names.
			if err := names.remove(ctx, project, name, unchanged(project, name, seen)); err != nil && dsec.CodeOf(err) != dsec.CodeConflict {
				return nil, err
			}
		}
	} else if name, err := canonicalName("name", req.Msg.Name); err == nil {
		if err := names.remove(ctx, project, name); err != nil {
			return nil, err
		}
	}
	l.drop(ctx, t)
	return connect.NewResponse(&dsecv1.RemoveLayerResponse{}), nil
}

// drop removes a layer that has no name left, and from the topmost on those that it
// went on. Where a sandbox still uses one, or no edge answers, it stays, to be
// collected, and so do all that it goes on.
func (l layerService) drop(ctx context.Context, t tag) {
	for _, digest := range slices.Backward(t.chain()) {
		dropped, err := l.s.dropUnnamed(ctx, digest)
		if err != nil {
			l.s.log.Info("layer without a name stays", "digest", digest, "err", err)
		}
		if !dropped {
			return
		}
	}
}
