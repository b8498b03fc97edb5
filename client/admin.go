package client

import (
	"context"
	"io"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Layer describes an immutable layer that sandboxes are made of.
type Layer struct {
	Name         string         `json:"name,omitempty"`    // empty where only the digest is known
	Digest       string         `json:"digest"`            // sha256:<hex>
	Parents      []string       `json:"parents,omitempty"` // digests of the layers that it goes on, lowest first, where an image became several
	Kind         dsec.LayerKind `json:"kind"`
	At           string         `json:"at,omitempty"` // directory that the import's root was put at
	Size         int64          `json:"size"`         // with those that it goes on
	Files        int64          `json:"files"`
	Created      time.Time      `json:"created"`
	Source       string         `json:"source"` // rootfs, oci-layout, docker-archive, registry, git or pack
	SourceDigest string         `json:"source_digest"`
	Origin       *LayerOrigin   `json:"origin,omitempty"` // of what came from a registry or a repository
	// Env, User, Workdir, Entrypoint and Cmd are from the image's
	// configuration; the first three are defaults of sandboxes made of it.
	Env        []string `json:"env,omitempty"`
	User       string   `json:"user,omitempty"`
	Workdir    string   `json:"workdir,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
}

func layerOf(m *dsecv1.Layer) Layer {
	c := m.GetConfig()
	return Layer{
		Name: m.GetName(), Digest: m.GetDigest(), Parents: m.GetParents(), Kind: dsec.LayerKind(m.GetKind()), At: m.GetAt(), Size: m.GetSize(), Files: m.GetFiles(), Created: timeOf(m.GetCreated()),
		Source: m.GetSource(), SourceDigest: m.GetSourceDigest(), Origin: originOf(m.GetOrigin()),
		Env: c.GetEnv(), User: c.GetUser(), Workdir: c.GetWorkdir(), Entrypoint: c.GetEntrypoint(), Cmd: c.GetCmd(),
	}
}

// ImportOptions say what is to be made of an archive.
type ImportOptions struct {
	// Select is the image wanted from an archive that holds several: a tag or a digest.
	Select string
	// Kind of the layer; empty is base. A workspace or a toolkit may hide what is
	// below it, by whiteouts in the form of OCI or of overlayfs.
	Kind dsec.LayerKind
	// At is the directory of a sandbox that the archive's root becomes, of a
	// workspace or a toolkit; empty is the root.
	At string
	// Strict makes what the lint finds an error.
	Strict bool
	// Origin of a checkout, whose type is git.
	Origin *LayerOrigin
}

// ImportLayer makes a layer of an archive (a tar of a root file system, plain
// or compressed with gzip or zstd, an OCI layout or a docker-archive) and
// names it. findings are remarks on what looked like a secret or an answer.
func (c *Client) ImportLayer(ctx context.Context, name string, o ImportOptions, archive io.Reader) (l Layer, findings []string, err error) {
	first := &dsecv1.ImportLayerOpen{Name: name, Select: o.Select, Kind: string(o.Kind), At: o.At, Strict: o.Strict}
	if from := o.Origin; from != nil {
		first.Origin = &dsecv1.LayerOrigin{Type: from.Type, Location: from.Location, Revision: from.Revision}
	}
	open := &dsecv1.ImportLayerRequest{Message: &dsecv1.ImportLayerRequest_Open{Open: first}}
	res, err := send(ctx, c, c.layer.ImportLayer, open, archive, "archive", func(b []byte) *dsecv1.ImportLayerRequest {
		return &dsecv1.ImportLayerRequest{Message: &dsecv1.ImportLayerRequest_Data{Data: b}}
	})
	if err != nil {
		return Layer{}, nil, err
	}
	return layerOf(res.Layer), res.Findings, nil
}

// InspectLayer tells all that is known of a layer, what the lint found in it
// included, and the project's names of it.
func (c *Client) InspectLayer(ctx context.Context, nameOrDigest string) (l Layer, names, findings []string, err error) {
	res, err := call(ctx, c, c.layer.InspectLayer, &dsecv1.InspectLayerRequest{Name: nameOrDigest}, dsec.Retryable)
	if err != nil {
		return Layer{}, nil, nil, err
	}
	return layerOf(res.Layer), res.Names, res.Layer.GetFindings(), nil
}

// TagLayer gives a layer one more name. The error's code is conflict where another
// layer has it, unless replace is set.
func (c *Client) TagLayer(ctx context.Context, nameOrDigest, newName string, replace bool) (Layer, error) {
	res, err := call(ctx, c, c.layer.TagLayer, &dsecv1.TagLayerRequest{Name: nameOrDigest, NewName: newName, Replace: replace}, dsec.Retryable)
	if err != nil {
		return Layer{}, err
	}
	return layerOf(res.Layer), nil
}

// Layers lists the project's names of layers.
func (c *Client) Layers(ctx context.Context) ([]Layer, error) {
	res, err := call(ctx, c, c.layer.ListLayers, &dsecv1.ListLayersRequest{}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	out := make([]Layer, len(res.Layers))
	for i, l := range res.Layers {
		out[i] = layerOf(l)
	}
	return out, nil
}

// RemoveLayer removes a name, or all names of a digest; the layer goes once no
// name and no sandbox uses it.
func (c *Client) RemoveLayer(ctx context.Context, nameOrDigest string) error {
	_, err := call(ctx, c, c.layer.RemoveLayer, &dsecv1.RemoveLayerRequest{Name: nameOrDigest}, dsec.Retryable)
	return err
}

// Key is an API key without its secret.
type Key struct {
	ID      string    `json:"id"`
	Project string    `json:"project"`
	Admin   bool      `json:"admin"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
}

func keyOf(m *dsecv1.Key) Key {
	return Key{ID: m.GetId(), Project: m.GetProject(), Admin: m.GetAdmin(), Created: timeOf(m.GetCreated()), Expires: timeOf(m.GetExpires())}
}

// CreateKey makes a key for a project, which is made if new. The secret is
// shown only here. It needs an admin key.
func (c *Client) CreateKey(ctx context.Context, project string, expires time.Time) (k Key, secret string, err error) {
	req := &dsecv1.CreateKeyRequest{Project: project}
	if !expires.IsZero() {
		req.Expires = timestamppb.New(expires)
	}
	res, err := call(ctx, c, c.admin.CreateKey, req, dsec.Retryable)
	if err != nil {
		return Key{}, "", err
	}
	return keyOf(res.Key), res.Secret, nil
}

// Keys lists all keys. It needs an admin key.
func (c *Client) Keys(ctx context.Context) ([]Key, error) {
	res, err := call(ctx, c, c.admin.ListKeys, &dsecv1.ListKeysRequest{}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	out := make([]Key, len(res.Keys))
	for i, k := range res.Keys {
		out[i] = keyOf(k)
	}
	return out, nil
}

// RevokeKey ends a key. It needs an admin key, and not this one.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	_, err := call(ctx, c, c.admin.RevokeKey, &dsecv1.RevokeKeyRequest{Id: id}, dsec.Retryable)
	return err
}

// StoredLayer is a layer as the store has it.
type StoredLayer struct {
	Digest  string    `json:"digest"`
	Size    int64     `json:"size"` // bytes that it takes in the store
	Created time.Time `json:"created"`
}

// DefaultCollectAge is the age below which layers without a name stay.
const DefaultCollectAge = time.Hour

// CollectLayers removes the layers from the store that were stored more than age
// ago and that no name of any project and no sandbox refers to; the server does so
// by itself every few hours. kept counts those that stay. With dryRun nothing is
// removed. It needs an admin key.
func (c *Client) CollectLayers(ctx context.Context, age time.Duration, dryRun bool) (removed []StoredLayer, kept int64, err error) {
	res, err := call(ctx, c, c.admin.CollectLayers, &dsecv1.CollectLayersRequest{MinAge: durationpb.New(age), DryRun: dryRun}, dsec.Retryable)
	if err != nil {
		return nil, 0, err
	}
	removed = make([]StoredLayer, len(res.Removed))
	for i, l := range res.Removed {
		removed[i] = StoredLayer{Digest: l.Digest, Size: l.Size, Created: timeOf(l.Created)}
	}
	return removed, res.Kept, nil
}
