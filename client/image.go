package client

import (
	"context"
	"io"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// LayerOrigin is where an image, a checkout or a pack came from.
type LayerOrigin struct {
	Type     string `json:"type"`     // registry, git or sandbox
	Location string `json:"location"` // the image's reference in full, the repository's URL, or the sandbox's ID
	Revision string `json:"revision"` // digest of the image's manifest, the commit, or the time
	// Entry is the one of the sandbox's trajectory with which the pack began.
	Entry uint64 `json:"entry,omitempty"`
}

func originOf(m *dsecv1.LayerOrigin) *LayerOrigin {
	if m == nil {
		return nil
	}
	return &LayerOrigin{Type: m.Type, Location: m.Location, Revision: m.Revision, Entry: m.Entry}
}

// RegistryCredentials are sent to the registry of the image and to no other host;
// the server does not keep them.
type RegistryCredentials struct {
	Username, Password string
	Token              string // an identity token, in place of a password
}

// ImageOptions say what is to be made of an image.
type ImageOptions struct {
	// Platform is os/architecture[/variant]; empty is the server's.
	Platform string
	// Credentials for the registry. Nil: those that the server has, if any.
	Credentials *RegistryCredentials
	// Verify reads all that the store has of an image that the project has already, and
	// imports it again where anything differs. Without it the data are not read.
	Verify bool
	// Kind, At and Strict are as in ImportOptions.
	Kind   dsec.LayerKind
	At     string
	Strict bool
	// Progress, where set, is called now and then with how many of the image's bytes
	// came, of how many. Where both are equal it is being converted.
	Progress func(bytes, size int64)
}

// ImportImage has the server import an image from an OCI registry, and names it.
// ref is [host[:port]/]repository[:tag][@digest]. An image that the project has
// already is not fetched again, unless its layer is damaged. findings are as of ImportLayer.
func (c *Client) ImportImage(ctx context.Context, name, ref string, o ImageOptions) (l Layer, findings []string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	req := &dsecv1.PullLayerRequest{Name: name, Ref: ref, Platform: o.Platform, Kind: string(o.Kind), At: o.At, Strict: o.Strict, Verify: o.Verify}
	if k := o.Credentials; k != nil {
		req.Credentials = &dsecv1.RegistryCredentials{Username: k.Username, Password: k.Password, Token: k.Token}
	}
	const procedure = dsecv1connect.LayerServicePullLayerProcedure
	stream, err := c.layer.PullLayer(ctx, connect.NewRequest(req))
	if err != nil {
		return Layer{}, nil, c.typed(err, procedure)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if done := stream.Msg().GetDone(); done != nil {
			return layerOf(done.Layer), done.Findings, nil
		}
		if p := stream.Msg().GetProgress(); p != nil && o.Progress != nil {
			o.Progress(p.Bytes, p.Size)
		}
	}
	return Layer{}, nil, c.ended(stream.Err(), procedure)
}

// ended is the error of a stream that ended before what it is for came.
func (c *Client) ended(err error, procedure string) error {
	if err == nil {
		return dsec.Errorf(dsec.CodeUnavailable, "the server's answer broke off")
	}
	return c.typed(err, procedure)
}

// ExportLayers writes layers, by name or digest, lowest first, to w as an image: the
// tar stream of an OCI layout. It returns the digest of the image's manifest; the
// same layers give the same. progress, where set, is called with how many bytes were
// written, of how many.
func (c *Client) ExportLayers(ctx context.Context, namesOrDigests []string, w io.Writer, progress func(bytes, size int64)) (digest string, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const procedure = dsecv1connect.LayerServiceExportLayerProcedure
	stream, err := c.layer.ExportLayer(ctx, connect.NewRequest(&dsecv1.ExportLayerRequest{Layers: namesOrDigests}))
	if err != nil {
		return "", c.typed(err, procedure)
	}
	defer func() { _ = stream.Close() }()
	var sent, size int64
	for stream.Receive() {
		if open := stream.Msg().GetOpen(); open != nil {
			digest, size = open.Digest, open.Size
		}
		n, err := w.Write(stream.Msg().GetData())
		if err != nil {
			return "", err
		}
		sent += int64(n)
		if progress != nil {
			progress(sent, size)
		}
	}
	if err := stream.Err(); err != nil || sent != size || digest == "" {
		return "", c.ended(err, procedure)
	}
	return digest, nil
}

// PrefetchLayer brings a layer, by name or digest, to every node that is ready, so
// that the first reads in a sandbox wait for nothing. progress, where set, is called
// now and then with how many bytes are there, of how many on all nodes together.
func (c *Client) PrefetchLayer(ctx context.Context, name string, progress func(bytes, size int64)) error {
	const procedure = dsecv1connect.LayerServicePrefetchLayerProcedure
	stream, err := c.layer.PrefetchLayer(ctx, connect.NewRequest(&dsecv1.PrefetchLayerRequest{Name: name}))
	if err != nil {
		return c.typed(err, procedure)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if progress != nil {
			progress(stream.Msg().Bytes, stream.Msg().Size)
		}
	}
	if err := stream.Err(); err != nil {
		return c.typed(err, procedure)
	}
	return nil
}
