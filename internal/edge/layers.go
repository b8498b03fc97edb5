package edge

import (
	"context"
	"errors"
	"net/url"
	"regexp"
	"strings"
	"unicode"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var errNoLayers = dsec.Errorf(dsec.CodeUnsupported, "this edge has no layer store")

// BuildLayer makes a layer of an archive.
func (v service) BuildLayer(ctx context.Context, stream *connect.ClientStream[dsecv1.ImportLayerRequest]) (*connect.Response[dsecv1.ImportLayerResponse], error) {
	project := stream.RequestHeader().Get(projectHeader)
	if err := v.enter(project); err != nil {
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
	origin, err := checkoutOf(open.Origin)
	if err != nil {
		return nil, err
	}
	meta, findings, err := v.e.buildLayer(ctx, layer.BuildOptions{
		Select: open.Select, Kind: dsec.LayerKind(open.Kind), At: open.At, Strict: open.Strict, Origin: origin, Project: project,
	}, &content[dsecv1.ImportLayerRequest, *dsecv1.ImportLayerRequest]{stream: stream})
	if err != nil {
		return nil, err
	}
	out, err := v.e.layerProto(ctx, meta)
	if err != nil {
		return nil, err
	}
	if out.Origin = originProto(origin); origin != nil {
		out.Source = origin.Type
	}
	return connect.NewResponse(&dsecv1.ImportLayerResponse{Layer: out, Findings: findings}), nil
}

var commitForm = regexp.MustCompile(`^(?:[0-9a-f]{40}|[0-9a-f]{64})$`)

// checkoutOf checks what a caller says of a checkout that it sends: a URL with a
// secret in it would be shown to all of the project.
func checkoutOf(o *dsecv1.LayerOrigin) (*layer.Origin, error) {
	if o == nil {
		return nil, nil
	}
	const most = 2048
	u, err := url.Parse(o.Location)
	switch {
	case o.Type != layer.OriginGit:
		return nil, dsec.Invalid("open.origin.type", "want %s", layer.OriginGit)
	case o.Location == "" || len(o.Location) > most || strings.ContainsFunc(o.Location, func(r rune) bool { return !unicode.IsGraphic(r) }):
		return nil, dsec.Invalid("open.origin.location", "want a URL or a path of at most %d characters", most)
	case err == nil && u.User != nil && (u.Scheme != "ssh" || u.User.String() != u.User.Username()):
		return nil, dsec.Invalid("open.origin.location", "want it without credentials")
	case !commitForm.MatchString(o.Revision):
		return nil, dsec.Invalid("open.origin.revision", "want a commit of 40 or 64 hex digits")
	}
	return &layer.Origin{Type: o.Type, Location: o.Location, Revision: o.Revision}, nil
}

// CheckLayers tells what is wrong with layers in the store.
func (v service) CheckLayers(ctx context.Context, req *connect.Request[dsecv1.CheckLayersRequest]) (*connect.Response[dsecv1.CheckLayersResponse], error) {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return nil, err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return nil, errNoLayers
	}
	for _, digest := range req.Msg.Digests {
		err := v.e.cfg.Layers.Check(ctx, digest, req.Msg.Data)
		if e, ok := errors.AsType[*dsec.Error](err); ok && e.Code == dsec.CodeInternal {
			return connect.NewResponse(&dsecv1.CheckLayersResponse{Damage: e.Message}), nil
		} else if err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&dsecv1.CheckLayersResponse{}), nil
}

// ClaimLayers has the store belong to a control plane.
func (v service) ClaimLayers(ctx context.Context, req *connect.Request[dsecv1.ClaimLayersRequest]) (*connect.Response[dsecv1.ClaimLayersResponse], error) {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return nil, err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return nil, errNoLayers
	}
	return respond(new(dsecv1.ClaimLayersResponse), v.e.cfg.Layers.Claim(ctx, req.Msg.Unit))
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
	if err := v.e.cfg.Layers.CheckOwner(ctx, req.Msg.Unit); err != nil {
		return nil, err
	}
	return respond(new(dsecv1.DropLayerResponse), v.e.cfg.Layers.Remove(ctx, req.Msg.Digest))
}

// ForgetLayer removes what this node has of a layer that no sandbox of it uses. The store
// keeps it.
func (v service) ForgetLayer(_ context.Context, req *connect.Request[dsecv1.ForgetLayerRequest]) (*connect.Response[dsecv1.ForgetLayerResponse], error) {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return nil, err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return connect.NewResponse(new(dsecv1.ForgetLayerResponse)), nil
	}
	return respond(new(dsecv1.ForgetLayerResponse), v.e.cfg.Layers.Forget(req.Msg.Digest))
}

// SweepLayers lists what the store has, and removes from it what is of no layer.
func (v service) SweepLayers(ctx context.Context, req *connect.Request[dsecv1.SweepLayersRequest]) (*connect.Response[dsecv1.SweepLayersResponse], error) {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return nil, err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return nil, errNoLayers
	}
	age := req.Msg.Age.AsDuration()
	if !req.Msg.Age.IsValid() || age < 0 {
		return nil, dsec.Invalid("age", "want 0s or more")
	}
	if err := v.e.cfg.Layers.CheckOwner(ctx, req.Msg.Unit); err != nil {
		return nil, err
	}
	stored, err := v.e.cfg.Layers.Sweep(ctx, age)
	if err != nil {
		return nil, err
	}
	res := new(dsecv1.SweepLayersResponse)
	for _, l := range stored {
		res.Layers = append(res.Layers, &dsecv1.StoredLayer{Digest: l.Digest, Size: l.Size, Created: timestamppb.New(l.Created)})
	}
	return connect.NewResponse(res), nil
}
