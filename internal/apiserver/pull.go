package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// originRegistry is the type of what comes from a registry.
const originRegistry = "registry"

// Of one server: imports from registries at once, and how long one may take.
const (
	maxPulls    = 128
	pullTimeout = time.Hour
)

// pulls are the imports from registries under way. Whoever wants what one is of
// waits for it.
type pulls struct {
	mu      sync.Mutex
	running map[pullKey]*pull
}

// pullKey is what an import is of: a project's, because what one may read of a
// registry another may not. The digest is of an image, or in its place the name that a
// create has for one.
type pullKey struct {
	project, digest, kind, at string
	strict                    bool
}

// pull is one import.
type pull struct {
	key    pullKey
	done   chan struct{} // closed when what follows is set
	began  int64         // store revision
	tag    tag
	err    error
	cancel context.CancelFunc

	// Guarded by pulls.mu.
	waiters  int
	detached bool // goes on without waiters
	progress *dsecv1.PullProgress
	news     chan struct{} // closed at the next progress
}

// PullLayer imports an image of a registry and names it.
func (l layerService) PullLayer(ctx context.Context, req *connect.Request[dsecv1.PullLayerRequest], out *connect.ServerStream[dsecv1.PullLayerResponse]) error {
	name, err := canonicalName("name", req.Msg.Name)
	if err != nil {
		return err
	}
	t, began, err := l.s.pull(ctx, req.Msg, false, func(p *dsecv1.PullProgress) error {
		return out.Send(&dsecv1.PullLayerResponse{Message: &dsecv1.PullLayerResponse_Progress{Progress: p}})
	})
	if err != nil {
		return err
	}
	project, names := principal(ctx).Project, l.s.layers
	old, _, err := names.tags.Get(project + "/" + name)
	if err != nil {
		return err
	}
	if err := l.give(ctx, project, name, t, old, began); err != nil {
		return err
	}
	return out.Send(&dsecv1.PullLayerResponse{Message: &dsecv1.PullLayerResponse_Done{
		Done: &dsecv1.ImportLayerResponse{Layer: t.message(name), Findings: t.Findings},
	}})
}

// namesHost reports whether a reference says which registry it is of. One that
// does not is no image's here: a name that nobody has yet must not become whatever
// a public registry has of it.
func namesHost(ref string) bool {
	first, _, ok := strings.Cut(ref, "/")
	return ok && (strings.ContainsAny(first, ".:") || first == "localhost")
}

// importBase imports the image that the base of a create names, once, and gives it
// that name. missing is the error where nothing is to be imported.
func (s *Server) importBase(ctx context.Context, field, ref string, missing error) (tag, error) {
	name, err := canonicalName(field, ref)
	if err != nil {
		return tag{}, err
	}
	// One for all that wait for the name: the registry is asked once what it means.
	p, err := s.pulls.join(ctx, s, pullKey{project: principal(ctx).Project, digest: name}, 0, true, func(ctx context.Context, p *pull) {
		if p.tag, p.began, p.err = s.pull(ctx, &dsecv1.PullLayerRequest{Ref: name}, true, nil); p.err == nil {
			p.err = s.layers.set(ctx, principal(ctx).Project, name, p.tag, p.began)
		}
	})
	if err != nil {
		return tag{}, err
	}
	defer s.pulls.leave(p)
	t, _, err := p.wait(ctx, &s.pulls, nil)
	e, ok := errors.AsType[*dsec.Error](err)
	switch {
	case ok && e.Code == dsec.CodeUnsupported && e.Field == "":
		return tag{}, missing // the node imports nothing
	case ok && e.Field == "ref":
		named := *e
		named.Field = field
		return tag{}, &named
	}
	return t, err
}

// pull imports an image, or finds the project's layer of it, or waits for the
// import that is under way. tell, where set, is called with how far it is; began is
// the store's revision from which on the layer must not have been dropped.
func (s *Server) pull(ctx context.Context, req *dsecv1.PullLayerRequest, detached bool, tell func(*dsecv1.PullProgress) error) (t tag, began int64, err error) {
	edge, err := s.builder()
	if err != nil {
		return tag{}, 0, err
	}
	if began, err = s.layers.store.Revision(ctx); err != nil {
		return tag{}, 0, err
	}
	res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.ResolveImage, req)
	if err != nil {
		return tag{}, 0, err
	}
	from := res.Msg.GetOrigin()
	project := principal(ctx).Project
	if !req.Strict {
		seen := s.layers.tags.Revision() // what was removed since may still be found
		t, ok := s.layers.ofImage(project, from.GetRevision(), req)
		if ok {
			if ok, err = s.isWhole(ctx, edge, t, req.Verify); err != nil {
				return tag{}, 0, err
			}
		}
		if ok {
			t.Origin = &origin{Type: originRegistry, Location: from.GetLocation(), Revision: from.GetRevision(), At: req.At}
			t.At = req.At
			return t, seen, nil
		}
	}
	pinned := proto.CloneOf(req)
	pinned.Ref = pinnedRef(from.GetLocation(), from.GetRevision())
	p, err := s.pulls.join(ctx, s, pullKey{project, from.GetRevision(), req.Kind, req.At, req.Strict}, began, detached, func(ctx context.Context, p *pull) {
		p.tag, p.err = s.fetch(ctx, p, pinned, from)
	})
	if err != nil {
		return tag{}, 0, err
	}
	defer s.pulls.leave(p)
	return p.wait(ctx, &s.pulls, tell)
}

// pinnedRef is a reference of one manifest: what a tag means may change meanwhile.
func pinnedRef(ref, digest string) string {
	ref, _, _ = strings.Cut(ref, "@")
	return ref + "@" + digest
}

// ofImage finds a layer that the project imported of the same image in the same
// way.
func (l *layerNames) ofImage(project, digest string, req *dsecv1.PullLayerRequest) (found tag, ok bool) {
	kind := req.Kind
	if kind == "" {
		kind = string(dsec.LayerBase)
	}
	l.tags.Range(project+"/", func(_ string, t tag) bool {
		o := t.Origin
		ok = o != nil && o.Type == originRegistry && o.Revision == digest && o.At == req.At && (t.Kind == kind || t.Kind == "" && kind == string(dsec.LayerBase))
		if ok {
			found = t
		}
		return !ok
	})
	return found, ok
}

// isWhole looks whether the store has a layer, and what it goes on, as it should be;
// with data, whether it has all of their bytes. An import mends what is not.
func (s *Server) isWhole(ctx context.Context, edge *watcher.Edge, t tag, data bool) (bool, error) {
	res, err := forward(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.CheckLayers, &dsecv1.CheckLayersRequest{Digests: t.chain(), Data: data})
	if err != nil {
		return false, err
	}
	if res.Msg.Damage != "" {
		s.log.Warn("an image is imported again: its layer is damaged", "digest", t.Digest, "damage", res.Msg.Damage)
	}
	return res.Msg.Damage == "", nil
}

// fetch has an edge import the image.
func (s *Server) fetch(ctx context.Context, p *pull, req *dsecv1.PullLayerRequest, from *dsecv1.LayerOrigin) (t tag, err error) {
	edge, err := s.importer(ctx)
	if err != nil {
		return tag{}, err
	}
	err = relay(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.PullLayer, req, func(m *dsecv1.PullLayerResponse) (err error) {
		if progress := m.GetProgress(); progress != nil {
			s.pulls.tell(p, progress)
		} else if done := m.GetDone(); done != nil {
			t, err = tagOf(done.GetLayer(), done.Findings)
		}
		return err
	})
	if err == nil && t.Digest == "" {
		err = dsec.Errorf(dsec.CodeUnavailable, "the node did not end the import")
	}
	t.Origin = &origin{Type: originRegistry, Location: from.GetLocation(), Revision: from.GetRevision(), At: req.At}
	t.At = req.At
	return t, err
}

// join finds the import with the key, or starts one with do.
func (ps *pulls) join(ctx context.Context, s *Server, key pullKey, began int64, detached bool, do func(context.Context, *pull)) (*pull, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.running[key]
	if p == nil {
		if len(ps.running) >= maxPulls {
			return nil, dsec.Errorf(dsec.CodeExhausted, "%d imports from registries are under way, which is the most", maxPulls)
		}
		// It is nobody's call: whoever came first may leave before the others.
		run, cancel := context.WithTimeout(context.WithValue(s.stopping, principalKey{}, principal(ctx)), pullTimeout)
		p = &pull{key: key, began: began, done: make(chan struct{}), news: make(chan struct{}), cancel: cancel}
		ps.running[key] = p
		go func() {
			defer cancel()
			do(run, p)
			ps.mu.Lock()
			ps.forget(p)
			ps.mu.Unlock()
			close(p.done)
		}()
	}
	p.waiters++
	p.detached = p.detached || detached
	return p, nil
}

// leave gives up waiting. An import that nobody waits for ends, but for one that a
// create asked for: the create that is tried again finds it further on.
func (ps *pulls) leave(p *pull) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p.waiters--; p.waiters == 0 && !p.detached {
		ps.forget(p) // whoever comes next begins another
		p.cancel()
	}
}

// forget has nobody find an import. The caller holds mu.
func (ps *pulls) forget(p *pull) {
	if ps.running[p.key] == p {
		delete(ps.running, p.key)
	}
}

// tell says how far an import is.
func (ps *pulls) tell(p *pull, progress *dsecv1.PullProgress) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p.progress = proto.CloneOf(progress)
	close(p.news)
	p.news = make(chan struct{})
}

// wait waits for the import's end.
func (p *pull) wait(ctx context.Context, ps *pulls, tell func(*dsecv1.PullProgress) error) (tag, int64, error) {
	var told *dsecv1.PullProgress
	for {
		ps.mu.Lock()
		progress, news := p.progress, p.news
		ps.mu.Unlock()
		if tell != nil && progress != told {
			told = progress
			if err := tell(proto.CloneOf(progress)); err != nil {
				return tag{}, 0, gone(err)
			}
		}
		select {
		case <-p.done:
			return p.tag, p.began, p.err
		case <-news:
		case <-ctx.Done():
			return tag{}, 0, &dsec.Error{Code: dsec.CodeUnavailable, Field: "ref", Message: "the image is still being imported", Err: context.Cause(ctx)}
		}
	}
}

// ExportLayer gives layers of the project as an image.
func (l layerService) ExportLayer(ctx context.Context, req *connect.Request[dsecv1.ExportLayerRequest], out *connect.ServerStream[dsecv1.ExportLayerResponse]) error {
	if n := len(req.Msg.Layers); n < 1 || n > dsec.MaxLayers {
		return dsec.Invalid("layers", "want 1 to %d, got %d", dsec.MaxLayers, n)
	}
	msg := &dsecv1.ExportLayerRequest{}
	var stack dsec.Stack
	for i, ref := range req.Msg.Layers {
		t, err := l.s.layers.find(principal(ctx).Project, fmt.Sprintf("layers[%d]", i), ref)
		if err != nil {
			return err
		}
		if slices.Contains(msg.Layers, t.Digest) {
			return dsec.Invalid(fmt.Sprintf("layers[%d]", i), "%.300q is there already, want each layer once", ref)
		}
		// One alone may be of any kind: it can be imported again as that.
		if err := stack.Add(ref, t.kind()); err != nil && len(req.Msg.Layers) > 1 {
			return err
		}
		msg.Layers = append(msg.Layers, t.Digest)
	}
	edge, err := l.s.builder()
	if err != nil {
		return err
	}
	return relay(ctx, edgeClient(edge), dsecv1connect.EdgeServiceClient.ExportLayer, msg, out.Send)
}
