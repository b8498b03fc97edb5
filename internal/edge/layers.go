package edge

import (
	"context"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var errNoLayers = dsec.Errorf(dsec.CodeUnsupported, "this edge has no layer store")

// BuildLayer makes a layer of an archive.
func (v service) BuildLayer(ctx context.Context, stream *connect.ClientStream[dsecv1.ImportLayerRequest]) (*connect.Response[dsecv1.ImportLayerResponse], error) {
	if err := v.enter(stream.RequestHeader().Get(projectHeader)); err != nil {
		return nil, err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return nil, errNoLayers
	}
	if !stream.Receive() {
		return nil, firstMessage(stream.Err(), "open", "want a first message that opens the import")
	}
	open := stream.Msg().GetOpen()
	if open == nil {
		return nil, dsec.Invalid("open", "want a first message that opens the import")
	}
	if err := v.e.room(); err != nil {
		return nil, err
	}
	meta, findings, err := v.e.cfg.Layers.Build(ctx, layer.BuildOptions{
		Select: open.Select, Kind: dsec.LayerKind(open.Kind), At: open.At, Strict: open.Strict,
	}, &content[dsecv1.ImportLayerRequest, *dsecv1.ImportLayerRequest]{stream: stream})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ImportLayerResponse{Layer: layerProto(meta), Findings: findings}), nil
}

// DropLayer removes a layer that no sandbox uses.
func (v service) DropLayer(ctx context.Context, req *connect.Request[dsecv1.DropLayerRequest]) (*connect.Response[dsecv1.DropLayerResponse], error) {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return nil, err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return nil, errNoLayers
	}
	return respond(new(dsecv1.DropLayerResponse), v.e.cfg.Layers.Remove(ctx, req.Msg.Digest))
}
