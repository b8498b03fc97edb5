package apiserver

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Limits of a create.
const (
	maxRequestID = 128 // characters
	maxBatch     = 1000
)

// Create makes one sandbox.
func (b sandboxService) Create(ctx context.Context, req *connect.Request[dsecv1.CreateRequest]) (*connect.Response[dsecv1.CreateResponse], error) {
	item, err := b.s.resolve(ctx, "", req.Msg)
	if err != nil {
		return nil, err
	}
	results := b.s.place(ctx, []*dsecv1.CreateSandboxesItem{item})
	switch r := results[0].GetResult().(type) {
	case *dsecv1.BatchCreateItem_Created:
		return connect.NewResponse(r.Created), nil
	case *dsecv1.BatchCreateItem_Error:
		return nil, apierr.FromDetail(r.Error.GetDetail(), r.Error.GetMessage())
	}
	return nil, fmt.Errorf("edge answered a create with %T", results[0].GetResult())
}

// BatchCreate makes many, each with a result of its own.
func (b sandboxService) BatchCreate(ctx context.Context, req *connect.Request[dsecv1.BatchCreateRequest]) (*connect.Response[dsecv1.BatchCreateResponse], error) {
	n := int(req.Msg.Count)
	if n < 1 || n > maxBatch {
		return nil, dsec.Invalid("count", "want 1 to %d", maxBatch)
	}
	if req.Msg.Template == nil {
		return nil, dsec.Invalid("template", "want it set")
	}
	base, err := b.s.resolve(ctx, "template.", req.Msg.Template)
	if err != nil {
		return nil, err
	}
	if id := req.Msg.Template.RequestId; id != "" {
		if longest := fmt.Sprintf("%s/%d", id, n-1); utf8.RuneCountInString(longest) > maxRequestID {
			return nil, dsec.Invalid("template.request_id", "want at most %d characters with /<index> added", maxRequestID)
		}
	}
	items := make([]*dsecv1.CreateSandboxesItem, n)
	for i := range items {
		items[i] = base
		if id := req.Msg.Template.RequestId; id != "" {
			items[i] = proto.CloneOf(base)
			items[i].Request.RequestId = fmt.Sprintf("%s/%d", id, i)
		}
	}
	return connect.NewResponse(&dsecv1.BatchCreateResponse{Items: b.s.place(ctx, items)}), nil
}

// resolve checks what only the apiserver can check of a create, and turns the
// names of its layers into digests. The defaults that layers bring are the
// edge's to add.
func (s *Server) resolve(ctx context.Context, path string, req *dsecv1.CreateRequest) (*dsecv1.CreateSandboxesItem, error) {
	for _, name := range slices.Sorted(maps.Keys(req.NetworkRules)) {
		if req.NetworkRules[name] {
			return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: path + "network_rules", Message: "network access cannot be enforced yet; want every rule false"}
		}
	}
	if err := checkRequestID(path+"request_id", req.RequestId); err != nil {
		return nil, err
	}
	if len(req.Layers) > dsec.MaxLayers {
		return nil, dsec.Invalid(path+"layers", "want at most %d", dsec.MaxLayers)
	}
	project := principal(ctx).Project
	if err := s.jobs.admit(project, path+"job", req.Job); err != nil {
		return nil, err
	}
	digest, err := bodyDigest(project, req)
	if err != nil {
		return nil, err
	}
	if len(req.LayerKinds) > len(req.Layers) {
		return nil, dsec.Invalid(path+"layer_kinds", "want one for each of the %d layers at most, got %d", len(req.Layers), len(req.LayerKinds))
	}
	item := &dsecv1.CreateSandboxesItem{Request: proto.CloneOf(req), LayerNames: req.Layers, BodyDigest: digest}
	out := item.Request
	if out.Backend == "" {
		out.Backend = string(dsec.KindContainer)
	}
	for i, ref := range req.Layers {
		field := fmt.Sprintf("%slayers[%d]", path, i)
		t, err := s.layers.find(project, field, ref)
		if err != nil && i == 0 && s.autoImport && dsec.CodeOf(err) == dsec.CodeNotFound && namesHost(ref) {
			t, err = s.importBase(ctx, field, ref, err)
		}
		if err != nil {
			return nil, err
		}
		if i < len(req.LayerKinds) {
			if err := t.isOf(dsec.LayerKind(req.LayerKinds[i]), field, ref); err != nil {
				return nil, err
			}
		}
		out.Layers[i] = t.Digest
		if i == 0 && t.Origin != nil { // a pack is a base
			item.Origin = packedFrom(t.message(ref))
		}
	}
	return item, nil
}

// isOf checks that a layer is what the caller takes it for; empty is any.
func (t tag) isOf(want dsec.LayerKind, field, ref string) error {
	kind := t.kind()
	switch {
	case want == "" || want == kind:
		return nil
	case !want.Valid():
		return dsec.Invalid(field, "of kind %.40q, want %s, %s or %s", want, dsec.LayerBase, dsec.LayerWorkspace, dsec.LayerToolkit)
	}
	return dsec.Invalid(field, "%.300q is a %s, want a %s", ref, kind, want)
}

func checkRequestID(field, id string) error {
	bad := strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r == 0x7f })
	if bad || utf8.RuneCountInString(id) > maxRequestID {
		return dsec.Invalid(field, "want at most %d characters, and no control characters", maxRequestID)
	}
	return nil
}

// bodyDigest tells a repeated create from another one with the same request
// id. It covers the request as the caller wrote it: a name that has moved
// since must not turn a retry into a conflict.
func bodyDigest(project string, req proto.Message) ([]byte, error) {
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return nil, err
	}
	h := sha256.New()
	h.Write([]byte(project + "\x00"))
	h.Write(body)
	return h.Sum(nil), nil
}

// newRand is a source of its own for each placement, so that none is shared.
func newRand() *rand.Rand { return rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) }
