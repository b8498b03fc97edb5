package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// What Scrub.Secrets may be.
const (
	SecretsRemove = "remove"
	SecretsKeep   = "keep"
	SecretsRefuse = "refuse"
)

// Scrub says what of a sandbox is not packed. Patterns are absolute paths whose parts are as
// of path.Match, and ** for any directories; what is below a directory that matches goes with it.
type Scrub struct {
	// Remove is left out beside what is by default: caches, histories, residue of the platform.
	Remove []string
	// Keep stays, whatever else says.
	Keep []string
	// NoDefaults leaves nothing out by default but residue of the platform.
	NoDefaults bool
	// Secrets is what is done with files in which the lint finds secrets: SecretsRemove
	// (default), SecretsKeep, or SecretsRefuse, which fails.
	Secrets string
}

func (s *Scrub) message() *dsecv1.Scrub {
	if s == nil {
		return nil
	}
	return &dsecv1.Scrub{Remove: s.Remove, Keep: s.Keep, NoDefaults: s.NoDefaults, Secrets: s.Secrets}
}

// PackReport tells of one pack.
type PackReport struct {
	Removed     []PackRemoval `json:"removed"`
	RemovedMore int64         `json:"removed_more,omitempty"` // that are not listed
	Files       int64         `json:"files"`                  // names in the layer
	Bytes       int64         `json:"bytes"`                  // of the layer
	Frozen      time.Duration `json:"frozen_ns"`              // for which processes stood still
	Collapsed   int           `json:"collapsed,omitempty"`    // packed layers below that became one with it
}

// PackRemoval is something that was not packed, with all that is below it.
type PackRemoval struct {
	Path   string `json:"path"`
	Reason string `json:"reason"` // cache, history, platform, path, secret or special
	Note   string `json:"note,omitempty"`
	Files  int64  `json:"files"`
	Bytes  int64  `json:"bytes"`
}

func packReportOf(m *dsecv1.PackReport) *PackReport {
	r := &PackReport{
		Removed: make([]PackRemoval, len(m.GetRemoved())), RemovedMore: m.GetRemovedMore(), Files: m.GetFiles(), Bytes: m.GetBytes(),
		Frozen: m.GetFrozen().AsDuration(), Collapsed: int(m.GetCollapsed()),
	}
	for i, x := range m.GetRemoved() {
		r.Removed[i] = PackRemoval{Path: x.Path, Reason: x.Reason, Note: x.Note, Files: x.Files, Bytes: x.Bytes}
	}
	return r
}

// Pack makes a layer of what the sandbox has written over its own layers, as it is at one
// moment, for which its processes stand still, and names it (name:tag, or name for
// name:latest). Sandboxes are made of the name as of any base. Memory and processes are
// not part of it. scrub may be nil.
func (s *Sandbox) Pack(ctx context.Context, name string, scrub *Scrub) (Layer, *PackReport, error) {
	res, err := call(ctx, s.c, s.c.snapshot.Pack, &dsecv1.PackRequest{SandboxId: string(s.id), Name: name, Scrub: scrub.message()}, dsec.Retryable)
	if err != nil {
		return Layer{}, nil, err
	}
	return layerOf(res.Layer), packReportOf(res.Report), nil
}

// ForkOptions say how the sandboxes of a fork differ from the one that they are made of.
type ForkOptions struct {
	// RequestID makes the fork one that can be repeated, as that of SandboxOptions; each
	// sandbox has it and its index.
	RequestID string
	// Job, where it is not nil, is theirs in place of the sandbox's.
	Job *string
	// Labels and Env are added to the sandbox's, and win.
	Labels, Env map[string]string
	// Scrub is as that of Pack; nil leaves out only residue of the platform, for a fork is
	// to find what was there.
	Scrub *Scrub
}

// Fork packs the sandbox and makes n of that, at most 1000, with its limits, environment and
// timeouts. Nothing of its memory or processes is in them.
func (s *Sandbox) Fork(ctx context.Context, n int, o ForkOptions) ([]Created, *PackReport, error) {
	res, err := call(ctx, s.c, s.c.snapshot.Fork, &dsecv1.ForkRequest{
		SandboxId: string(s.id), Count: int32(n), RequestId: o.RequestID, Job: o.Job, Labels: o.Labels, Env: o.Env, Scrub: o.Scrub.message(),
	}, repeatable(o.RequestID))
	if err != nil {
		return nil, nil, err
	}
	return s.c.created(res.Items), packReportOf(res.Report), nil
}

// MigrateOptions say what may be lost.
type MigrateOptions struct {
	// LoseMemory: its processes and their memory end. It must be true.
	LoseMemory bool
	// LoseActions: what was done by an action ID is done again where it is asked for again.
	// It must be true where the sandbox's log has any.
	LoseActions bool
}

// Migrate has a new sandbox with what is on the disk of this one take its place, on another
// node where one takes it. The old ID leads to the new one as long as the old one's record is
// kept; by it Migrate does nothing more, and gives the new one with a report that is nil.
// On error the old one goes on.
func (s *Sandbox) Migrate(ctx context.Context, o MigrateOptions) (*Sandbox, *PackReport, error) {
	res, err := call(ctx, s.c, s.c.snapshot.Migrate, &dsecv1.MigrateRequest{SandboxId: string(s.id), LoseMemory: o.LoseMemory, LoseActions: o.LoseActions}, dsec.Retryable)
	if err != nil {
		return nil, nil, err
	}
	moved := s.c.Sandbox(res.GetSandbox().GetId())
	if res.Report == nil {
		return moved, nil, nil
	}
	return moved, packReportOf(res.Report), nil
}

// repeatable is what is made again of a call that makes sandboxes with a request ID.
func repeatable(requestID string) func(error) bool {
	if requestID == "" {
		return dsec.Retryable
	}
	return func(err error) bool { return dsec.Retryable(err) || dsec.CodeOf(err) == dsec.CodeOutcomeUnknown }
}

func (c *Client) created(items []*dsecv1.BatchCreateItem) []Created {
	out := make([]Created, len(items))
	for i, item := range items {
		if e := item.GetError(); e != nil {
			out[i].Err = apierr.FromDetail(e.GetDetail(), e.GetMessage())
		} else {
			out[i].Sandbox = c.made(item.GetCreated())
		}
	}
	return out
}
