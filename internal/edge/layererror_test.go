package edge_test

import (
	"context"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// A layer that cannot be held or mounted is told by its place in the request and by what
// its creator calls it, also where it is one that this goes on.
func TestErrorsOfACreateNameTheLayer(t *testing.T) {
	meta := func(c byte, kind dsec.LayerKind, parents ...string) layer.Meta {
		return layer.Meta{Digest: digest(c), Manifest: layer.Manifest{Kind: kind, Parents: parents}}
	}
	store := newLayers(meta('a', dsec.LayerBase), meta('b', dsec.LayerBase, digest('a')), meta('1', dsec.LayerToolkit), meta('2', dsec.LayerToolkit, digest('1')))
	var mount error
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		c.Layers = store
		o.OnCreate = func(context.Context, backend.CreateRequest) error { return mount }
	})
	for _, tt := range []struct {
		bad   string // cannot be held
		mount error
		field string
		names []string // in the message
	}{
		{digest('a'), nil, "layers[0]", []string{`"base:v1"`, digest('a')}},
		{digest('1'), nil, "layers[1]", []string{`"tools:v2"`, digest('1')}},
		{digest('2'), nil, "layers[1]", []string{`"tools:v2"`, digest('2')}},
		{"", &dsec.Error{Code: dsec.CodeInternal, Field: "layers[2]", Message: "cannot be mounted"}, "layers[1]", []string{`"tools:v2"`}},
		{"", &dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "cannot be mounted"}, "layers", nil},
		{"", &dsec.Error{Code: dsec.CodeInternal, Field: "layers[7]", Message: "cannot be mounted"}, "layers[7]", nil},
	} {
		store.bad, mount = tt.bad, tt.mount
		res, err := n.CreateSandboxes(t.Context(), connect.NewRequest(&dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{{
			Request: &dsecv1.CreateRequest{Backend: "fake", Layers: []string{digest('b'), digest('2')}}, LayerNames: []string{"base:v1", "tools:v2"},
		}}}))
		if err != nil {
			t.Fatal(err)
		}
		failed := res.Msg.Items[0].GetError()
		if failed == nil {
			t.Fatalf("%+v: created", tt)
		}
		e := wantError(t, apierr.FromDetail(failed.Detail, failed.Message), dsec.CodeInternal, tt.field)
		for _, name := range tt.names {
			if !strings.Contains(e.Message, name) {
				t.Errorf("%q does not name %s", e.Message, name)
			}
		}
	}
}
