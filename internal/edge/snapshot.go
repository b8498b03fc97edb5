package edge

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/layer"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// A pack makes a layer of what a sandbox has written over its own. Its processes stand
// still while a copy of that is taken, and go on while the layer is made of the copy.

// packsAtOnce is how many packs a node makes at once: each has a copy of a disk.
const packsAtOnce = 4

// PackSandbox makes a layer of what a sandbox has written.
func (v service) PackSandbox(ctx context.Context, req *connect.Request[dsecv1.PackSandboxRequest]) (*connect.Response[dsecv1.PackSandboxResponse], error) {
	m := req.Msg
	if v.e.cfg.Layers == nil {
		return nil, errNoLayers
	}
	scrub, err := scrubOf(m.Scrub)
	if err != nil {
		return nil, err
	}
	c, err := v.e.enterAsIs(ctx, req.Header(), m.SandboxId)
	if err != nil {
		return nil, err
	}
	defer c.end()
	out := new(dsecv1.PackSandboxResponse)
	return respond(out, c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_PACK, m, nil, out, func() error { return c.pack(m, scrub, out) }))
}

// scrubOf reads what is not to be packed.
func scrubOf(m *dsecv1.Scrub) (layer.Scrub, error) {
	s := layer.Scrub{Remove: m.GetRemove(), Keep: m.GetKeep(), NoDefaults: m.GetNoDefaults(), Secrets: m.GetSecrets()}
	return s, s.Check()
}

// pack does what PackSandbox asks for. Where it fails, one that it has paused goes on.
func (c *call) pack(m *dsecv1.PackSandboxRequest, scrub layer.Scrub, out *dsecv1.PackSandboxResponse) (err error) {
	e, s := c.e, c.s
	shot, ok := c.inst.(backend.Snapshotter)
	if !ok {
		return dsec.Errorf(dsec.CodeUnsupported, "sandboxes of backend %s cannot be packed", c.spec.Kind)
	}
	if err := e.room(); err != nil {
		return err
	}
	select {
	case e.packs <- struct{}{}:
		defer func() { <-e.packs }()
	case <-c.ctx.Done():
		return context.Cause(c.ctx)
	}
	if m.Pause {
		before := s.pauseToken()
		if err := e.pause(c.ctx, s, pauseOptions{reason: reasonMigrate, caller: c.origin.caller, most: e.cfg.DefaultMaxPaused}); err != nil {
			return err
		}
		if own := s.pauseToken(); before == nil {
			defer func() {
				if err != nil && string(s.pauseToken()) == string(own) {
					e.resumeAfter(s, c.origin.caller)
				}
			}()
		}
	}
	if err := c.mayLoseActions(m); err != nil {
		return err
	}
	config, err := e.configOf(c.ctx, c.spec.Layers)
	if err != nil {
		return err
	}
	got, err := shot.Snapshot(c.ctx)
	if err != nil {
		return c.fail(err)
	}
	e.cfg.Crash("pack.copied")
	opt := layer.PackOptions{
		Parents: c.spec.Layers, Config: config, Scrub: scrub, Unnamed: m.Unnamed,
		Origin: &layer.Origin{Type: layer.OriginSandbox, Location: string(s.id), Revision: time.Now().UTC().Format(time.RFC3339Nano), Entry: c.begun},
		Read:   got.GoOn,
	}
	meta, report, err := e.buildDiff(c.ctx, got, opt)
	if err != nil {
		return err
	}
	if out.Layer, err = e.layerProto(c.ctx, meta); err != nil {
		return err
	}
	out.Layer.Origin = originProto(opt.Origin) // the layer may have been there, as another's
	out.Report = reportProto(report, got.Frozen())
	out.Create, out.PauseToken = e.createLike(s, meta.Digest), s.pauseToken()
	return nil
}

// mayLoseActions refuses what would have actions be done a second time.
func (c *call) mayLoseActions(m *dsecv1.PackSandboxRequest) error {
	if !m.RefuseActions {
		return nil
	}
	switch has, err := c.e.trajectories.HasActions(c.ctx, c.s.id); {
	case err != nil:
		return err
	case has:
		return &dsec.Error{Code: dsec.CodeConflict, Field: "lose_actions", Message: fmt.Sprintf("sandbox %s has actions in its log, which one that takes its place would do again: want true where they may be", c.s.id)}
	}
	return nil
}

// resumeAfter has a sandbox that was paused for nothing go on. Where that fails the next
// call for it does.
func (e *Edge) resumeAfter(s *sandbox, caller string) {
	if err := e.resume(e.closing, s, caller); err != nil {
		e.log.Info("a sandbox that was to be moved stays paused", "sandbox", s.id, "err", err)
	}
}

// buildDiff makes a layer of a copy of a sandbox's disk, which it frees.
func (e *Edge) buildDiff(ctx context.Context, got backend.Snapshot, opt layer.PackOptions) (layer.Meta, layer.PackReport, error) {
	defer func() {
		if err := got.Close(); err != nil {
			e.log.Warn("the copy of a sandbox's disk stays until the next start", "sandbox", opt.Origin.Location, "err", err)
		}
	}()
	return e.cfg.Layers.Pack(ctx, opt, got.Upper, got.Owner)
}

// configOf is what the images of a sandbox's layers say of its processes: nothing of
// what its creator said goes on in what is packed.
func (e *Edge) configOf(ctx context.Context, digests []string) (c layer.Config, err error) {
	for _, digest := range digests {
		meta, err := e.cfg.Layers.Get(ctx, digest)
		if err != nil {
			return c, err
		}
		c = c.Under(meta.Config)
	}
	return c, nil
}

func reportProto(r layer.PackReport, frozen time.Duration) *dsecv1.PackReport {
	out := &dsecv1.PackReport{
		RemovedMore: r.RemovedMore, Files: r.Files, Bytes: r.Bytes, Frozen: durationpb.New(frozen), Collapsed: int32(r.Collapsed),
	}
	for _, x := range r.Removed {
		out.Removed = append(out.Removed, &dsecv1.PackRemoval{
			Path: toText(x.Path), Reason: x.Reason, Files: x.Files, Bytes: x.Bytes, Note: x.Note,
		})
	}
	return out
}

// createLike is a create of a sandbox like s, of one layer.
func (e *Edge) createLike(s *sandbox, digest string) *dsecv1.CreateRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	spec := s.spec
	out := &dsecv1.CreateRequest{
		Backend: string(spec.Kind), Layers: []string{digest}, Limits: limitsProto(spec.Limits), Env: map[string]string{},
		User: spec.User, Workdir: spec.Workdir, Labels: spec.Labels, Job: spec.Job, IdleAction: string(spec.IdleAction),
		IdleTimeout: durationpb.New(s.idle), MaxLifetime: durationpb.New(0),
	}
	for _, kv := range spec.Env {
		name, value, _ := strings.Cut(kv, "=")
		out.Env[name] = value
	}
	if s.deadline > 0 {
		now := e.clock()
		if s.paused != nil && !s.paused.countLifetime {
			now = s.paused.at
		}
		out.MaxLifetime = durationpb.New(max(s.deadline-now, time.Second))
	}
	return out
}

// pauseToken names the pause that a sandbox is in; nil where it is in none.
func (s *sandbox) pauseToken() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paused == nil {
		return nil
	}
	return binary.BigEndian.AppendUint64(nil, uint64(s.paused.since.UnixNano()))
}

// RedirectSandbox ends a sandbox whose place another one has taken.
func (v service) RedirectSandbox(ctx context.Context, req *connect.Request[dsecv1.RedirectSandboxRequest]) (*connect.Response[dsecv1.RedirectSandboxResponse], error) {
	m := req.Msg
	s, err := v.findAny(req.Header().Get(projectHeader), m.SandboxId)
	if err != nil {
		return nil, err
	}
	to, err := dsec.ParseSandboxID(m.MovedTo)
	if err != nil || to == s.id {
		return nil, dsec.Invalid("moved_to", "want the ID of another sandbox")
	}
	if err := v.e.beginEnd(); err != nil {
		return nil, err
	}
	defer v.e.end()
	if err := v.e.redirect(ctx, s, to, m.PauseToken, req.Header().Get(callerHeader)); err != nil {
		return nil, err
	}
	return connect.NewResponse(new(dsecv1.RedirectSandboxResponse)), nil
}

func (e *Edge) redirect(ctx context.Context, s *sandbox, to dsec.SandboxID, token []byte, caller string) error {
	s.mu.Lock()
	if s.movedTo == to {
		s.mu.Unlock()
		return nil // repeated
	}
	s.mu.Unlock()
	over, err := s.takeTurn(ctx, dsec.StateRunning) // no resume comes in between
	if err != nil {
		return err
	}
	if over {
		return errUsedMeanwhile(s)
	}
	err = e.publishRedirect(s, to, token, caller)
	s.giveTurn()
	if err != nil {
		return err
	}
	e.cfg.Crash("redirect.intent")
	e.metrics.killed(s.reason)
	e.reap(s)
	s.waitReaped(ctx)
	return nil
}

func (e *Edge) publishRedirect(s *sandbox, to dsec.SandboxID, token []byte, caller string) error {
	now := s.pauseToken()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.paused == nil || string(now) != string(token) {
		return errUsedMeanwhile(s)
	}
	if err := s.notLive(); err != nil {
		return err
	}
	reason := s.reason
	s.movedTo, s.endedBy = to, caller
	if err := s.move(dsec.StateStopping, "moved to "+string(to)); err != nil {
		s.movedTo, s.endedBy = "", ""
		return err
	}
	if err := e.write(s); err != nil {
		// Nobody has seen the other state: s.mu was held.
		s.movedTo, s.endedBy, s.state, s.reason = "", "", dsec.StatePaused, reason
		return err
	}
	return nil
}

func errUsedMeanwhile(s *sandbox) error {
	return dsec.Errorf(dsec.CodeConflict, "sandbox %s was used while it was to be moved, and stays where it is", s.id)
}

// moved is the error of a call for a sandbox that another one has taken the place of.
// The caller holds s.mu.
func (s *sandbox) moved() error {
	if s.movedTo == "" {
		return nil
	}
	return &dsec.Error{Code: dsec.CodeConflict, Field: "sandbox_id", Message: fmt.Sprintf("sandbox %s was moved: it is %s now", s.id, s.movedTo), MovedTo: s.movedTo}
}
