package edge_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// layers is a layer store in memory.
type layers struct {
	mu     sync.Mutex
	metas  map[string]layer.Meta
	holds  map[string]int
	lost   []string
	served []string
	mends  bool   // whatever is built was damaged before, in the lowest of its layers
	bad    string // the layer that is damaged
	full   bool   // nothing can be packed
}

func digest(c byte) string { return "sha256:" + strings.Repeat(string(c), 64) }

func newLayers(metas ...layer.Meta) *layers {
	l := &layers{metas: make(map[string]layer.Meta), holds: make(map[string]int)}
	for _, m := range metas {
		l.metas[m.Digest] = m
	}
	return l
}

func (l *layers) Get(_ context.Context, digest string) (layer.Meta, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, ok := l.metas[digest]
	if !ok {
		return m, dsec.Errorf(dsec.CodeNotFound, "no layer %s", digest)
	}
	return m, nil
}

func (l *layers) Hold(ctx context.Context, digest string) (func(), error) {
	if _, err := l.Get(ctx, digest); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if digest == l.bad {
		return nil, &dsec.Error{Code: dsec.CodeInternal, Field: "layers", Message: "layer " + digest + " is damaged"}
	}
	l.holds[digest]++
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.holds[digest]--
	}), nil
}

func (l *layers) Open(context.Context, string) ([]*os.File, bool, error) {
	return nil, false, errors.New("not to be opened")
}

func (l *layers) OpenFS(context.Context, string) (fs.FS, io.Closer, error) {
	return nil, nil, dsec.Errorf(dsec.CodeUnsupported, "the layers of this store have no files")
}

func (l *layers) Build(_ context.Context, opt layer.BuildOptions, r io.Reader) (layer.Meta, []string, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return layer.Meta{}, nil, err
	}
	m := layer.Meta{Digest: digest('e'), Manifest: layer.Manifest{Kind: dsec.LayerBase, Size: int64(len(b))}}
	l.mu.Lock()
	defer l.mu.Unlock()
	m.Parents = l.metas[m.Digest].Parents
	l.metas[m.Digest] = m
	if l.mends {
		l.lost = m.Chain()[:1]
	}
	return m, []string{"selected " + opt.Select}, nil
}

func (l *layers) Prefetch(ctx context.Context, digest string, progress func(done, total int64)) error {
	m, err := l.Get(ctx, digest)
	if err == nil {
		progress(m.Size, m.Size)
	}
	return err
}

func (l *layers) Release(digest string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.served = slices.DeleteFunc(l.served, func(d string) bool { return d == digest })
}

func (l *layers) Served() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.served)
}

func (l *layers) Lost() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.lost)
}

// Settle has the lost layers be none of a sandbox.
func (l *layers) Settle(_ context.Context, digest string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds[digest] > 0 {
		return dsec.Errorf(dsec.CodeConflict, "layer is used")
	}
	l.lost = slices.DeleteFunc(l.lost, func(d string) bool { return d == digest })
	return nil
}

func (l *layers) Claim(context.Context, string) error { return nil }

func (l *layers) CheckOwner(context.Context, string) error { return nil }

func (l *layers) Check(ctx context.Context, digest string, _ bool) error {
	_, err := l.Get(ctx, digest)
	return err
}

func (l *layers) Sweep(context.Context, time.Duration) ([]layer.Stored, error) { return nil, nil }

func (l *layers) Forget(digest string) error {
	if l.held(digest) > 0 {
		return dsec.Errorf(dsec.CodeConflict, "layer is used")
	}
	return nil
}

func (l *layers) Remove(ctx context.Context, digest string) error {
	if _, err := l.Get(ctx, digest); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holds[digest] > 0 {
		return dsec.Errorf(dsec.CodeConflict, "layer is used")
	}
	delete(l.metas, digest)
	return nil
}

func (l *layers) held(digest string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holds[digest]
}

// A sandbox has one base, which is the first of its layers, and at most one workspace.
func TestKindsOfLayersHaveTheirPlaces(t *testing.T) {
	base, other := layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase}}, layer.Meta{Digest: digest('b'), Manifest: layer.Manifest{Kind: dsec.LayerBase}}
	work, work2 := layer.Meta{Digest: digest('c'), Manifest: layer.Manifest{Kind: dsec.LayerWorkspace}}, layer.Meta{Digest: digest('d'), Manifest: layer.Manifest{Kind: dsec.LayerWorkspace}}
	tool, tool2 := layer.Meta{Digest: digest('e'), Manifest: layer.Manifest{Kind: dsec.LayerToolkit}}, layer.Meta{Digest: digest('f'), Manifest: layer.Manifest{Kind: dsec.LayerToolkit}}
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.Layers = newLayers(base, other, work, work2, tool, tool2) })
	for _, tt := range []struct {
		layers []layer.Meta
		field  string
	}{
		{[]layer.Meta{base}, ""},
		{[]layer.Meta{base, work, tool, tool2}, ""},
		{[]layer.Meta{base, tool, work}, ""},
		{[]layer.Meta{work}, "layers[0]"},
		{[]layer.Meta{tool, base}, "layers[0]"},
		{[]layer.Meta{base, tool, other}, "layers[2]"},
		{[]layer.Meta{base, work, tool, work2}, "layers[3]"},
	} {
		req := new(dsecv1.CreateRequest)
		for _, m := range tt.layers {
			req.Layers = append(req.Layers, m.Digest)
		}
		id, err := n.tryCreate(req)
		if tt.field != "" {
			wantError(t, err, dsec.CodeInvalid, tt.field)
		} else if err != nil {
			t.Errorf("%v: %v", tt.layers, err)
		} else {
			n.kill(id.Id)
		}
	}
}

// A layer comes with those that it goes on: a sandbox has them all, and holds them.
func TestLayersComeWithThoseBelow(t *testing.T) {
	meta := func(c byte, kind dsec.LayerKind, parents ...string) layer.Meta {
		return layer.Meta{Digest: digest(c), Manifest: layer.Manifest{Kind: kind, Size: 1000, Files: 2, Parents: parents}}
	}
	many := meta('8', dsec.LayerToolkit)
	for i := range dsec.MaxLayers - 2 {
		many.Parents = append(many.Parents, fmt.Sprintf("sha256:%064x", i))
	}
	store := newLayers(meta('a', dsec.LayerBase), meta('b', dsec.LayerBase, digest('a')), meta('c', dsec.LayerBase, digest('a'), digest('b')),
		meta('1', dsec.LayerToolkit), meta('2', dsec.LayerToolkit, digest('1')), meta('3', dsec.LayerToolkit, digest('1')), many)
	var got []string
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		c.Layers = store
		o.OnCreate = func(_ context.Context, req backend.CreateRequest) error {
			got = nil
			for _, l := range req.Layers {
				got = append(got, l.Digest)
			}
			return nil
		}
	})
	id := n.create(&dsecv1.CreateRequest{Layers: []string{digest('c'), digest('2')}})
	want := []string{digest('a'), digest('b'), digest('c'), digest('1'), digest('2')}
	if res, err := n.GetSandbox(t.Context(), connect.NewRequest(&dsecv1.GetRequest{SandboxId: id})); err != nil || !slices.Equal(got, want) || !slices.Equal(res.Msg.Sandbox.Layers, want) {
		t.Errorf("the backend has %v, want %v: %v, %v", got, want, res, err)
	}
	n.restart()
	for _, d := range want {
		_, err := n.DropLayer(t.Context(), connect.NewRequest(&dsecv1.DropLayerRequest{Digest: d}))
		wantError(t, err, dsec.CodeConflict, "")
		_, err = n.ForgetLayer(t.Context(), connect.NewRequest(&dsecv1.ForgetLayerRequest{Digest: d}))
		wantError(t, err, dsec.CodeConflict, "")
	}
	n.kill(id)
	for i, tt := range []struct {
		layers []string
		code   dsec.Code
		field  string
	}{
		{[]string{digest('c'), digest('2'), digest('3')}, dsec.CodeInvalid, "layers[2]"}, // both go on 1
		{[]string{digest('c'), digest('2'), digest('1')}, dsec.CodeInvalid, "layers[2]"},
		{[]string{digest('c'), digest('8')}, dsec.CodeInvalid, "layers"}, // too many
		{[]string{digest('a'), digest('b')}, dsec.CodeInvalid, "layers[1]"},
		{[]string{digest('a'), digest('8')}, dsec.CodeNotFound, "layers[1]"}, // those that it goes on are not there
	} {
		_, err := n.tryCreate(&dsecv1.CreateRequest{Layers: tt.layers})
		if wantError(t, err, tt.code, tt.field); t.Failed() {
			t.Fatal(i)
		}
	}
	var last *dsecv1.PrefetchLayerResponse
	fetch, err := n.PrefetchLayer(t.Context(), connect.NewRequest(&dsecv1.PrefetchLayerRequest{Name: digest('c')}))
	if err != nil {
		t.Fatal(err)
	}
	for fetch.Receive() {
		last = fetch.Msg()
	}
	if err := fetch.Err(); err != nil || last.GetBytes() != 3000 || last.GetSize() != 3000 {
		t.Errorf("fetched %v, %v", last, err)
	}
}

func TestLayersGiveDefaultsAndAreHeld(t *testing.T) {
	store := newLayers(
		layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase, Config: layer.Config{Env: []string{"A=base", "B=base"}, User: "nobody", Workdir: "/tmp"}}},
		layer.Meta{Digest: digest('b'), Manifest: layer.Manifest{Kind: dsec.LayerWorkspace, Config: layer.Config{Env: []string{"B=top", "C=top"}}}},
	)
	var got backend.CreateRequest
	n := newNode(t, func(c *edge.Config, o *fake.Options) {
		c.Layers = store
		o.OnCreate = func(_ context.Context, req backend.CreateRequest) error { got = req; return nil }
	})
	id := n.create(&dsecv1.CreateRequest{Layers: []string{digest('a'), digest('b')}, Env: map[string]string{"C": "request"}})
	if env := strings.Join(got.Spec.Env, " "); env != "A=base B=top C=request" {
		t.Errorf("environment %q", env)
	}
	if got.Spec.User != "nobody" || got.Spec.Workdir != "/tmp" || len(got.Layers) != 2 || got.Layers[1].Digest != digest('b') || got.Layers[1].Open == nil {
		t.Errorf("the backend was asked for %+v", got)
	}
	if res := n.shell(id, "echo $A $B $C; pwd"); string(res.Stdout) != "base top request\n/tmp\n" {
		t.Errorf("a command sees %q", res.Stdout)
	}
	_, err := n.tryCreate(&dsecv1.CreateRequest{Layers: []string{digest('a'), digest('f')}})
	wantError(t, err, dsec.CodeNotFound, "layers[1]")
	_, err = n.tryCreate(&dsecv1.CreateRequest{Layers: []string{digest('a'), digest('b'), digest('a')}})
	wantError(t, err, dsec.CodeInvalid, "layers[2]")
	drop := func(d string) error {
		_, err := n.DropLayer(t.Context(), connect.NewRequest(&dsecv1.DropLayerRequest{Digest: d}))
		return err
	}
	n.restart()
	if a, b := store.held(digest('a')), store.held(digest('b')); a < 1 || b < 1 {
		t.Errorf("after a restart held %d and %d times", a, b)
	}
	wantError(t, drop(digest('a')), dsec.CodeConflict, "")
	before := store.held(digest('a'))
	n.kill(id)
	if after := store.held(digest('a')); after != before-1 {
		t.Errorf("held %d times before and %d after the kill", before, after)
	}
	up := n.BuildLayer(t.Context())
	if err := up.Send(&dsecv1.ImportLayerRequest{Message: &dsecv1.ImportLayerRequest_Open{Open: &dsecv1.ImportLayerOpen{Select: "x"}}}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := up.Send(&dsecv1.ImportLayerRequest{Message: &dsecv1.ImportLayerRequest_Data{Data: make([]byte, 1000)}}); err != nil {
			t.Fatal(err)
		}
	}
	res, err := up.CloseAndReceive()
	if err != nil || res.Msg.Layer.Size != 3000 || fmt.Sprint(res.Msg.Findings) != "[selected x]" {
		t.Errorf("built %v, %v", res, err)
	}
	if err := drop(digest('e')); err != nil {
		t.Error(err)
	}
	wantError(t, drop(digest('e')), dsec.CodeNotFound, "")
}

// Reads of a layer that fail are told with the sandboxes that have it, as long as
// they do.
func TestDegradedLayer(t *testing.T) {
	n := newNode(t, func(c *edge.Config, _ *fake.Options) {
		c.Layers = newLayers(layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase}}, layer.Meta{Digest: digest('b'), Manifest: layer.Manifest{Kind: dsec.LayerBase}},
			layer.Meta{Digest: digest('w'), Manifest: layer.Manifest{Kind: dsec.LayerWorkspace}})
	})
	has := n.create(&dsecv1.CreateRequest{Layers: []string{digest('a')}})
	other := n.create(&dsecv1.CreateRequest{Layers: []string{digest('b')}})
	want := func(id, reason string, conditions ...string) {
		t.Helper()
		s := n.get(id)
		if s.State != string(dsec.StateRunning) || s.Reason != reason || !slices.Equal(s.Conditions, conditions) {
			t.Errorf("%s is %s, %q, %q; want %q, %q", id, s.State, s.Reason, s.Conditions, reason, conditions)
		}
	}
	n.edge.DegradeLayer(digest('a'), "the store does not answer")
	n.edge.DegradeLayer(digest('a'), "the store has gone")
	want(has, "layer "+digest('a')+" cannot be read: the store has gone", "degraded")
	want(other, "")
	// What is made of it meanwhile is told too, and of the end as well.
	late := n.create(&dsecv1.CreateRequest{Layers: []string{digest('a'), digest('w')}})
	want(late, "layer "+digest('a')+" cannot be read: the store has gone", "degraded")
	n.edge.DegradeLayer(digest('w'), "this too")
	n.edge.DegradeLayer(digest('b'), "")
	n.edge.DegradeLayer(digest('a'), "")
	want(has, "")
	want(late, "layer "+digest('w')+" cannot be read: this too", "degraded")
	n.edge.DegradeLayer(digest('w'), "")
	want(late, "")
	n.edge.DegradeLayer(digest('a'), "once more")
	n.restart()
	want(has, "")
	n.edge.DegradeLayer(digest('a'), "again")
	n.edge.DegradeLayer(digest('a'), "")
	want(has, "")
}

// What cannot be settled at once is settled later, without another word of it.
func TestALostLayerIsSettledLater(t *testing.T) {
	store := newLayers(layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase}})
	n := newNode(t, func(c *edge.Config, _ *fake.Options) {
		c.Layers = store
		*c = edge.WithSettling(*c, time.Millisecond)
	})
	release, err := store.Hold(t.Context(), digest('a')) // a create that is under way
	if err != nil {
		t.Fatal(err)
	}
	store.mu.Lock()
	store.lost = []string{digest('a')}
	store.mu.Unlock()
	if err := n.edge.LoseLayers(t.Context()); dsec.CodeOf(err) != dsec.CodeConflict {
		t.Fatalf("settled: %v", err)
	}
	id := n.create(&dsecv1.CreateRequest{Layers: []string{digest('a')}})
	release()
	testutil.WaitFor(t, 10*time.Second, "a settled layer", func() error {
		if lost := store.Lost(); len(lost) > 0 {
			return errors.New("it is lost")
		}
		return nil
	})
	if s := n.get(id); s.State != string(dsec.StateLost) {
		t.Errorf("its sandbox is %s", s.State)
	}
}

// Sandboxes whose reads may have given other bytes are lost: while the edge runs,
// and where it was away when that happened.
func TestLostLayer(t *testing.T) {
	store := newLayers(layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase}}, layer.Meta{Digest: digest('b'), Manifest: layer.Manifest{Kind: dsec.LayerBase}})
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.Layers = store })
	for _, away := range []bool{false, true} {
		has := n.create(&dsecv1.CreateRequest{Layers: []string{digest('a')}})
		other := n.create(&dsecv1.CreateRequest{Layers: []string{digest('b')}})
		lose := func() {
			store.mu.Lock()
			defer store.mu.Unlock()
			store.lost = []string{digest('a')}
		}
		if away {
			n.close()
			store.mu.Lock()
			clear(store.holds) // they were that process's
			store.mu.Unlock()
			lose()
			n.start()
		} else {
			lose()
			if err := n.edge.LoseLayers(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if s := n.get(has); s.State != string(dsec.StateLost) || !strings.Contains(s.Reason, digest('a')) {
			t.Errorf("away %v: %s, %q", away, s.State, s.Reason)
		}
		if s := n.get(other); s.State != string(dsec.StateRunning) {
			t.Errorf("away %v: a sandbox without the layer is %s", away, s.State)
		}
		if lost := store.Lost(); len(lost) > 0 || store.held(digest('a')) > 0 {
			t.Errorf("away %v: %v stays lost, held %d times", away, lost, store.held(digest('a')))
		}
	}
}

// build imports an archive of no bytes.
func (n *node) build() (*dsecv1.Layer, error) {
	n.t.Helper()
	up := n.BuildLayer(n.t.Context())
	if err := up.Send(&dsecv1.ImportLayerRequest{Message: &dsecv1.ImportLayerRequest_Open{Open: &dsecv1.ImportLayerOpen{}}}); err != nil {
		n.t.Fatal(err)
	}
	res, err := up.CloseAndReceive()
	if err != nil {
		return nil, err
	}
	return res.Msg.Layer, nil
}

// An import that mends a layer, or one that it goes on, ends what has the damaged one.
func TestAnImportThatMends(t *testing.T) {
	for name, parents := range map[string][]string{"the layer": nil, "one that it goes on": {digest('a')}} {
		t.Run(name, func(t *testing.T) {
			store := newLayers(layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase}},
				layer.Meta{Digest: digest('e'), Manifest: layer.Manifest{Kind: dsec.LayerBase, Parents: parents}})
			store.mends = true
			n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.Layers = store })
			id := n.create(&dsecv1.CreateRequest{Layers: []string{digest('e')}})
			if _, err := n.build(); err != nil {
				t.Fatal(err)
			}
			if s := n.get(id); s.State != string(dsec.StateLost) {
				t.Errorf("its sandbox is %s", s.State)
			}
			if lost := store.Lost(); len(lost) > 0 {
				t.Errorf("lost: %v", lost)
			}
		})
	}
}

// An import that found a layer there which was removed then is to be repeated.
func TestAnImportWhoseLayerBelowIsRemoved(t *testing.T) {
	store := newLayers(layer.Meta{Digest: digest('e'), Manifest: layer.Manifest{Kind: dsec.LayerBase, Parents: []string{digest('a')}}})
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.Layers = store })
	_, err := n.build()
	wantError(t, err, dsec.CodeUnavailable, "")
}

// An edge that ends lets go of the layers that no sandbox has, and of no other.
func TestAnEdgeThatEndsLetsGoOfLayers(t *testing.T) {
	store := newLayers(layer.Meta{Digest: digest('a'), Manifest: layer.Manifest{Kind: dsec.LayerBase}}, layer.Meta{Digest: digest('b'), Manifest: layer.Manifest{Kind: dsec.LayerBase}})
	store.served = []string{digest('a'), digest('b'), digest('c')}
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.Layers = store })
	n.create(&dsecv1.CreateRequest{Layers: []string{digest('b')}})
	n.restart()
	if got := store.Served(); !slices.Equal(got, []string{digest('b')}) {
		t.Errorf("served: %v, want that of the sandbox", got)
	}
}
