package apiserver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// stubImages is what a stub edge has of registries: an import says how far it is once,
// and ends when it is let.
type stubImages struct {
	*stubEdge
	resolved chan string // references
	pulling  chan *dsecv1.PullLayerRequest
	let      chan error    // ends an import
	gone     chan struct{} // an import that was given up
	missing  error         // what ResolveImage answers
}

const stubDigest = "sha256:1111111111111111111111111111111111111111111111111111111111111111"

func newStubImages() *stubImages {
	e := newStub("fake")
	s := &stubImages{
		stubEdge: e, resolved: make(chan string, 64), pulling: make(chan *dsecv1.PullLayerRequest, 64), let: make(chan error), gone: make(chan struct{}, 8),
	}
	e.images = s
	e.digest = "sha256:" + strings.Repeat("2", 64)
	return s
}

func (e *stubImages) resolve(m *dsecv1.PullLayerRequest) (*dsecv1.ResolveImageResponse, error) {
	e.resolved <- m.Ref
	if e.missing != nil {
		return nil, e.missing
	}
	return &dsecv1.ResolveImageResponse{Origin: &dsecv1.LayerOrigin{Type: "registry", Location: m.Ref, Revision: stubDigest}}, nil
}

func (e *stubImages) pull(ctx context.Context, m *dsecv1.PullLayerRequest, out *connect.ServerStream[dsecv1.PullLayerResponse]) error {
	if err := out.Send(&dsecv1.PullLayerResponse{Message: &dsecv1.PullLayerResponse_Progress{Progress: &dsecv1.PullProgress{Bytes: 1, Size: 2}}}); err != nil {
		return err
	}
	e.pulling <- m
	select {
	case err := <-e.let:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		e.gone <- struct{}{}
		return ctx.Err()
	}
	return out.Send(&dsecv1.PullLayerResponse{Message: &dsecv1.PullLayerResponse_Done{Done: &dsecv1.ImportLayerResponse{Layer: &dsecv1.Layer{
		Digest: e.digest, Parents: e.parents, Kind: "base", Source: "registry", SourceDigest: stubDigest, Origin: &dsecv1.LayerOrigin{Type: "registry", Location: m.Ref, Revision: stubDigest},
	}}}})
}

// imported is what a call of ImportImage or CreateSandbox came to.
type imported struct {
	name string
	err  error
}

// Whoever wants an image that is being imported waits for that import, and sees how
// far it is; each gives it a name of its own. The reference that goes to the node is
// the one of the digest that was resolved.
func TestImportsOfOneImageAreOne(t *testing.T) {
	e := newStubImages()
	r := newRig(t, e.stubEdge)
	c := r.client(r.secret)
	done, told := make(chan imported), make(chan int64, 8)
	start := func(name string) {
		go func() {
			l, _, err := c.ImportImage(t.Context(), name, "host.example/app:v1", client.ImageOptions{Progress: func(n, _ int64) { told <- n }})
			done <- imported{l.Name, err}
		}()
	}
	start("one")
	if m := <-e.pulling; m.Ref != "host.example/app:v1@"+stubDigest {
		t.Errorf("the node was asked for %s", m.Ref)
	}
	<-told
	start("two")
	<-told
	e.let <- nil
	names := map[string]bool{}
	for range 2 {
		got := <-done
		check(t, got.err)
		names[got.name] = true
	}
	if !names["one:latest"] || !names["two:latest"] || len(e.pulling) > 0 {
		t.Errorf("names %v, %d imports more", names, len(e.pulling))
	}
	// What the project has is not imported again, by another project it is.
	l, _, err := c.ImportImage(t.Context(), "three", "host.example/other:v1", client.ImageOptions{})
	if err != nil || l.Origin == nil || l.Origin.Location != "host.example/other:v1" || len(e.pulling) > 0 {
		t.Errorf("%+v, %v, %d imports more", l, err, len(e.pulling))
	}
	go func() {
		_, _, err := r.client(r.other).ImportImage(t.Context(), "one", "host.example/app:v1", client.ImageOptions{})
		done <- imported{"", err}
	}()
	<-e.pulling
	e.let <- errors.New("the node broke")
	if got := <-done; got.err == nil {
		t.Error("an import that failed is a success")
	}
	// As another kind, elsewhere or strictly it is another layer.
	for _, o := range []client.ImageOptions{{Kind: dsec.LayerToolkit}, {Kind: dsec.LayerToolkit, At: "/x"}, {Strict: true}} {
		go func() {
			_, _, err := c.ImportImage(t.Context(), "one", "host.example/app:v1", o)
			done <- imported{"", err}
		}()
		if m := <-e.pulling; m.Kind != string(o.Kind) || m.At != o.At || m.Strict != o.Strict {
			t.Errorf("%+v: the node was asked for %v", o, m)
		}
		e.let <- nil
		check(t, (<-done).err)
	}
}

// An image that the project has is imported again where the store has not all of its
// layers as they should be; that is looked for each time, and their data are read where
// the caller wants that.
func TestAnImportOfADamagedImage(t *testing.T) {
	e := newStubImages()
	e.parents = []string{"sha256:" + strings.Repeat("3", 64)}
	r := newRig(t, e.stubEdge)
	c := r.client(r.secret)
	done := make(chan imported)
	start := func(name string, o client.ImageOptions) {
		go func() {
			l, _, err := c.ImportImage(t.Context(), name, "host.example/app:v1", o)
			done <- imported{l.Name, err}
		}()
	}
	start("one", client.ImageOptions{})
	<-e.pulling
	e.let <- nil
	check(t, (<-done).err)
	for _, verify := range []bool{false, true} {
		e.set(func() { e.checked, e.damage = nil, "" })
		start("one", client.ImageOptions{Verify: verify})
		check(t, (<-done).err)
		want := &dsecv1.CheckLayersRequest{Digests: append(slices.Clone(e.parents), e.digest), Data: verify}
		e.set(func() {
			if !proto.Equal(e.checked, want) || len(e.pulling) > 0 {
				t.Errorf("looked for %v, want %v; %d imports more", e.checked, want, len(e.pulling))
			}
			e.damage = "its data"
		})
		start("one", client.ImageOptions{Verify: verify})
		<-e.pulling
		e.let <- nil
		if got := <-done; got.err != nil || got.name != "one:latest" {
			t.Errorf("%+v", got)
		}
	}
}

// An import ends with the last who waits for it; one that a create asked for goes on,
// and the create that is tried again waits for it.
func TestAnImportEndsWithWhoWantsIt(t *testing.T) {
	e := newStubImages()
	r := newRig(t, e.stubEdge)
	c := r.client(r.secret)
	done := make(chan imported)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _, err := c.ImportImage(ctx, "one", "host.example/app:v1", client.ImageOptions{})
		done <- imported{"", err}
	}()
	<-e.pulling
	cancel()
	if got := <-done; got.err == nil {
		t.Error("a call that was given up succeeds")
	}
	<-e.gone

	create := func(ctx context.Context) {
		o := options()
		o.Layers = []string{"host.example/app:v1"}
		go func() {
			_, err := c.CreateSandbox(ctx, o)
			done <- imported{"", err}
		}()
	}
	ctx, cancel = context.WithCancel(t.Context())
	create(ctx)
	<-e.pulling
	for range len(e.resolved) {
		<-e.resolved
	}
	cancel()
	<-done
	create(t.Context())
	create(t.Context())
	e.let <- nil
	for range 2 {
		check(t, (<-done).err)
	}
	if len(e.gone)+len(e.pulling)+len(e.resolved) > 0 {
		t.Errorf("%d imports were given up, %d began, %d times the registry was asked", len(e.gone), len(e.pulling), len(e.resolved))
	}
	layers, err := c.Layers(t.Context())
	if err != nil || len(layers) != 1 || layers[0].Name != "host.example/app:v1" || layers[0].Digest != e.digest {
		t.Errorf("layers %+v, %v", layers, err)
	}
}

// What the registry says of a create's image is an error of the layer that names it.
func TestErrorsOfACreatesImage(t *testing.T) {
	e := newStubImages()
	r := newRig(t, e.stubEdge)
	c := r.client(r.secret)
	o := options()
	o.Layers = []string{"host.example/app:v1"}
	for missing, want := range map[*dsec.Error]dsec.Code{
		{Code: dsec.CodeDenied, Field: "ref", Message: "x"}:                dsec.CodeDenied,
		{Code: dsec.CodeUnsupported, Message: "no registry"}:               dsec.CodeNotFound,
		{Code: dsec.CodeUnsupported, Field: "ref", Message: "no platform"}: dsec.CodeUnsupported,
	} {
		e.missing = apierr.Encode(missing)
		_, err := c.CreateSandbox(t.Context(), o)
		if de, ok := errors.AsType[*dsec.Error](err); !ok || de.Code != want || de.Field != "layers[0]" {
			t.Errorf("%v: %v, want %s of layers[0]", missing, err, want)
		}
	}
	asked := len(e.resolved)
	for _, short := range []string{"app", "app:v1", "team/app:v1"} {
		o.Layers = []string{short}
		if _, err := c.CreateSandbox(t.Context(), o); codeOf(err) != dsec.CodeNotFound {
			t.Errorf("%s: %v", short, err)
		}
	}
	if len(e.resolved) != asked {
		t.Error("a name without a host was looked up in a registry")
	}
}
