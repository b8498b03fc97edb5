package edge

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/export"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// ExportLayer gives layers as an image. They are held until all is sent.
func (v service) ExportLayer(ctx context.Context, req *connect.Request[dsecv1.ExportLayerRequest], stream *connect.ServerStream[dsecv1.ExportLayerResponse]) error {
	if err := v.enter(req.Header().Get(projectHeader)); err != nil {
		return err
	}
	defer v.e.end()
	if v.e.cfg.Layers == nil {
		return errNoLayers
	}
	var layers []export.Layer
	for i, asked := range req.Msg.Layers {
		meta, err := v.e.cfg.Layers.Get(ctx, asked)
		if err != nil {
			return at(err, fmt.Sprintf("layers[%d]", i))
		}
		for _, digest := range meta.Chain() {
			if len(layers) == dsec.MaxLayers {
				return dsec.Invalid("layers", "want 1 to %d with those that they go on", dsec.MaxLayers)
			}
			l, done, err := v.e.openLayer(ctx, digest)
			if err != nil {
				return at(err, fmt.Sprintf("layers[%d]", i))
			}
			defer done()
			layers = append(layers, l)
		}
	}
	if len(layers) == 0 {
		return dsec.Invalid("layers", "want 1 to %d", dsec.MaxLayers)
	}
	img, err := export.Plan(ctx, layers)
	if err != nil {
		return err
	}
	if err := stream.Send(&dsecv1.ExportLayerResponse{Message: &dsecv1.ExportLayerResponse_Open{
		Open: &dsecv1.ExportLayerOpen{Size: img.Size, Digest: img.Digest},
	}}); err != nil {
		return err
	}
	out := &pieces{send: func(b []byte) error {
		return stream.Send(&dsecv1.ExportLayerResponse{Message: &dsecv1.ExportLayerResponse_Data{Data: b}})
	}}
	if err := img.Write(ctx, out); err != nil {
		return err
	}
	return out.flush()
}

// openLayer holds a layer and opens its files, until done is called.
func (e *Edge) openLayer(ctx context.Context, digest string) (l export.Layer, done func(), err error) {
	release, err := e.cfg.Layers.Hold(ctx, digest)
	if err != nil {
		return l, nil, err
	}
	meta, err := e.cfg.Layers.Get(ctx, digest)
	if err != nil {
		release()
		return l, nil, err
	}
	files, closer, err := e.cfg.Layers.OpenFS(ctx, digest)
	if err != nil {
		release()
		return l, nil, err
	}
	return export.Layer{Digest: digest, FS: files, Config: meta.Config}, func() { _ = closer.Close(); release() }, nil
}

// pieces makes messages of a stream of bytes.
type pieces struct {
	send func([]byte) error
	buf  []byte
}

const pieceSize = 256 << 10

func (p *pieces) Write(b []byte) (int, error) {
	for n := 0; n < len(b); {
		take := min(pieceSize-len(p.buf), len(b)-n)
		p.buf = append(p.buf, b[n:n+take]...)
		if n += take; len(p.buf) == pieceSize {
			if err := p.flush(); err != nil {
				return n, err
			}
		}
	}
	return len(b), nil
}

func (p *pieces) flush() error {
	if len(p.buf) == 0 {
		return nil
	}
	err := p.send(p.buf)
	p.buf = p.buf[:0]
	return err
}
