package edge

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/registry"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var errNoRegistry = dsec.Errorf(dsec.CodeUnsupported, "this edge imports nothing from registries")

// progressEvery is how often a caller is told how far an import or an export is.
const progressEvery = 250 * time.Millisecond

// image asks a registry for what a request names.
func (v service) image(ctx context.Context, project string, m *dsecv1.PullLayerRequest) (*registry.Image, error) {
	if v.e.cfg.Layers == nil || v.e.cfg.Registry == nil {
		return nil, errNoRegistry
	}
	req := registry.Request{Ref: m.Ref, Platform: m.Platform, Scope: project}
	if c := m.Credentials; c != nil {
		req.Credentials = &registry.Credentials{Username: c.Username, Password: c.Password, Token: c.Token}
	}
	return v.e.cfg.Registry.Resolve(ctx, req)
}

// originOf is where an image comes from, whose reference says no digest that was
// not asked for.
func originOf(img *registry.Image) *layer.Origin {
	return &layer.Origin{Type: layer.OriginRegistry, Location: img.Ref.String(), Revision: img.Digest}
}

// ResolveImage asks a registry what a reference is.
func (v service) ResolveImage(ctx context.Context, req *connect.Request[dsecv1.PullLayerRequest]) (*connect.Response[dsecv1.ResolveImageResponse], error) {
	project := req.Header().Get(projectHeader)
	if err := v.enter(project); err != nil {
		return nil, err
	}
	defer v.e.end()
	img, err := v.image(ctx, project, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ResolveImageResponse{Origin: originProto(originOf(img))}), nil
}

// built is what an import came to.
type built struct {
	meta     layer.Meta
	findings []string
	err      error
}

// PullLayer makes a layer of an image of a registry.
func (v service) PullLayer(ctx context.Context, req *connect.Request[dsecv1.PullLayerRequest], stream *connect.ServerStream[dsecv1.PullLayerResponse]) error {
	project := req.Header().Get(projectHeader)
	if err := v.enter(project); err != nil {
		return err
	}
	defer v.e.end()
	if err := v.e.room(); err != nil {
		return err
	}
	img, err := v.image(ctx, project, req.Msg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	layout := img.Open(ctx)
	defer func() { _ = layout.Close() }()
	done := make(chan built, 1)
	go func() {
		var b built
		b.meta, b.findings, b.err = v.e.buildLayer(ctx, layer.BuildOptions{
			Kind: dsec.LayerKind(req.Msg.Kind), At: req.Msg.At, Strict: req.Msg.Strict, Origin: originOf(img), Project: project, SourceDigest: img.Digest,
		}, layout)
		done <- b
	}()
	b, err := follow(layout, done, stream)
	if err != nil {
		cancel() // whoever asked is gone
		<-done
		return err
	}
	if b.err != nil {
		return ofImage(b.err)
	}
	out, err := v.e.layerProto(ctx, b.meta)
	if err != nil {
		return err
	}
	// The layer may be there from elsewhere; what is told is where this came from.
	out.Origin, out.Source, out.SourceDigest = originProto(originOf(img)), layer.OriginRegistry, img.Digest
	return stream.Send(&dsecv1.PullLayerResponse{Message: &dsecv1.PullLayerResponse_Done{
		Done: &dsecv1.ImportLayerResponse{Layer: out, Findings: b.findings},
	}})
}

// follow tells how far an import is, until it is done.
func follow(layout *registry.Layout, done <-chan built, stream *connect.ServerStream[dsecv1.PullLayerResponse]) (built, error) {
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for told := int64(-1); ; {
		if sent, size := layout.Progress(); sent != told {
			told = sent
			msg := &dsecv1.PullLayerResponse{Message: &dsecv1.PullLayerResponse_Progress{Progress: &dsecv1.PullProgress{Bytes: sent, Size: size}}}
			if err := stream.Send(msg); err != nil {
				return built{}, err
			}
		}
		select {
		case b := <-done:
			return b, nil
		case <-tick.C:
		}
	}
}

// ofImage names the caller's own argument in what the import says of its data.
func ofImage(err error) error {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Field != "" && e.Field != "data" || e.Code.Platform() {
		return err
	}
	named := *e
	named.Field = "ref"
	return &named
}
