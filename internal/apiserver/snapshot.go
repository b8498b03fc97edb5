package apiserver

import (
	"context"
	"fmt"
	"maps"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type snapshotService struct{ s *Server }

// pack packs a sandbox on its node, to whose store of layers this control plane may
// write.
func (s *Server) pack(ctx context.Context, msg *dsecv1.PackSandboxRequest) (at *watcher.Edge, res *connect.Response[dsecv1.PackSandboxResponse], err error) {
	err = wherever(s, msg, func(edge *watcher.Edge, msg *dsecv1.PackSandboxRequest) error {
		if err := s.claim(ctx, edge); err != nil {
			return err
		}
		at = edge
		res, err = forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.PackSandbox, msg)
		return err
	})
	return at, res, err
}

// Pack makes a layer of what a sandbox has written, and names it.
func (p snapshotService) Pack(ctx context.Context, req *connect.Request[dsecv1.PackRequest]) (*connect.Response[dsecv1.PackResponse], error) {
	m, names, project := req.Msg, p.s.layers, principal(ctx).Project
	name, err := canonicalName("name", m.Name)
	if err != nil {
		return nil, err
	}
	began, err := names.store.Revision(ctx)
	if err != nil {
		return nil, err
	}
	edge, res, err := p.s.pack(ctx, &dsecv1.PackSandboxRequest{SandboxId: m.SandboxId, Scrub: m.Scrub})
	if err != nil {
		return nil, err
	}
	t, err := tagOf(res.Msg.GetLayer(), nil)
	if err != nil {
		return nil, err
	}
	if res.Header().Get(replayedHeader) != "" { // it was made long ago
		if err := p.s.stillThere(ctx, edge, t); err != nil {
			return nil, err
		}
	}
	old, _, err := names.tags.Get(project + "/" + name)
	if err != nil {
		return nil, err
	}
	if err := layerService(p).give(ctx, project, name, t, old, began); err != nil {
		return nil, err
	}
	out := connect.NewResponse(&dsecv1.PackResponse{Layer: t.message(name), Report: res.Msg.Report})
	markReplayed(out.Header(), res.Header())
	return out, nil
}

// stillThere is an error where a layer, or one that it goes on, was removed.
func (s *Server) stillThere(ctx context.Context, edge *watcher.Edge, t tag) error {
	res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.CheckLayers, &dsecv1.CheckLayersRequest{Digests: t.chain()})
	if err == nil && res.Msg.Damage != "" {
		err = dsec.Errorf(dsec.CodeNotFound, "layer %s, which this pack made, is not there any more", t.Digest)
	}
	return err
}

// Fork makes sandboxes of what another one has written.
func (p snapshotService) Fork(ctx context.Context, req *connect.Request[dsecv1.ForkRequest]) (*connect.Response[dsecv1.ForkResponse], error) {
	m := req.Msg
	if err := p.checkFork(ctx, m); err != nil {
		return nil, err
	}
	scrub := m.Scrub
	if scrub == nil {
		scrub = wholeScrub
	}
	_, packed, err := p.s.pack(ctx, &dsecv1.PackSandboxRequest{SandboxId: m.SandboxId, Scrub: scrub, Unnamed: true})
	if err != nil {
		return nil, err
	}
	// What is asked for is the fork: a retry finds the sandboxes that were made, though
	// what it packed is another layer.
	digest, err := bodyDigest(principal(ctx).Project, m)
	if err != nil {
		return nil, err
	}
	template := packed.Msg.Create
	if m.Job != nil {
		template.Job = *m.Job
	}
	if err := p.s.jobs.admit(principal(ctx).Project, "job", template.Job); err != nil {
		return nil, err
	}
	add(&template.Labels, m.Labels)
	add(&template.Env, m.Env)
	items := make([]*dsecv1.CreateSandboxesItem, m.Count)
	for i := range items {
		create := proto.CloneOf(template)
		if m.RequestId != "" {
			create.RequestId = fmt.Sprintf("%s/%d", m.RequestId, i)
		}
		items[i] = &dsecv1.CreateSandboxesItem{Request: create, BodyDigest: digest, Origin: packedFrom(packed.Msg.Layer)}
	}
	out := connect.NewResponse(&dsecv1.ForkResponse{
		Items: p.s.place(ctx, items), Digest: packed.Msg.GetLayer().GetDigest(), Report: packed.Msg.Report,
	})
	markReplayed(out.Header(), packed.Header())
	return out, nil
}

// wholeScrub leaves all in but residue of the platform.
var wholeScrub = &dsecv1.Scrub{NoDefaults: true, Secrets: "keep"}

// checkFork checks what can be before anything is packed.
func (p snapshotService) checkFork(ctx context.Context, m *dsecv1.ForkRequest) error {
	if m.Count < 1 || m.Count > maxBatch {
		return dsec.Invalid("count", "want 1 to %d, got %d", maxBatch, m.Count)
	}
	if err := checkRequestID("request_id", m.RequestId); err != nil {
		return err
	}
	if m.RequestId != "" {
		if longest := fmt.Sprintf("%s/%d", m.RequestId, m.Count-1); utf8.RuneCountInString(longest) > maxRequestID {
			return dsec.Invalid("request_id", "want at most %d characters with /<index> added", maxRequestID)
		}
	}
	if m.Job != nil {
		return p.s.jobs.admit(principal(ctx).Project, "job", *m.Job)
	}
	return nil
}

// add puts the pairs of more into a map, over what is there.
func add(to *map[string]string, more map[string]string) {
	if *to == nil {
		*to = map[string]string{}
	}
	maps.Copy(*to, more)
}
