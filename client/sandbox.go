package client

import (
	"context"
	"iter"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Never is no limit, as an IdleTimeout or MaxLifetime.
const Never time.Duration = -1

// SandboxOptions describe a sandbox to make. Zero values are the server's defaults.
type SandboxOptions struct {
	Backend dsec.Kind
	// Layers are names or digests, lowest first.
	Layers []string
	Limits dsec.Limits
	Env    map[string]string
	// User runs the commands that name none. A name is looked up in the sandbox's
	// /etc/passwd when a command starts: one that is not there yet may be made first.
	User    string
	Workdir string
	// IdleTimeout is how long it may be without activity until IdleAction; MaxLifetime
	// kills that long after the create.
	IdleTimeout time.Duration
	MaxLifetime time.Duration
	// IdleAction is what is done after IdleTimeout; empty is dsec.IdleKill.
	IdleAction dsec.IdleAction
	Labels     map[string]string
	Job        string
	// RequestID makes the create one that can be repeated: the same ID and
	// options give the same sandbox. The client then repeats by itself a
	// create whose answer was lost.
	RequestID string
}

// Sandbox is one sandbox, known by its ID.
type Sandbox struct {
	c  *Client
	id dsec.SandboxID
	// Warm tells that the create was served from a pool.
	Warm bool
}

// Sandbox is a sandbox that is there already. It makes no call.
func (c *Client) Sandbox(id string) *Sandbox { return &Sandbox{c: c, id: dsec.SandboxID(id)} }

// ID is the sandbox's.
func (s *Sandbox) ID() dsec.SandboxID { return s.id }

// CreateSandbox makes a sandbox and returns when it takes commands.
func (c *Client) CreateSandbox(ctx context.Context, o SandboxOptions) (*Sandbox, error) {
	res, err := call(ctx, c, c.sandbox.Create, o.message(), repeatable(o.RequestID))
	if err != nil {
		return nil, err
	}
	return c.made(res), nil
}

func (c *Client) made(res *dsecv1.CreateResponse) *Sandbox {
	return &Sandbox{c: c, id: dsec.SandboxID(res.GetSandbox().GetId()), Warm: res.GetLaunch() == "warm"}
}

// Created is one result of CreateSandboxes: a sandbox, or the error.
type Created struct {
	Sandbox *Sandbox
	Err     error
}

// CreateSandboxes makes n sandboxes alike, at most 1000. Where RequestID is
// set, each has that and its index.
func (c *Client) CreateSandboxes(ctx context.Context, n int, o SandboxOptions) ([]Created, error) {
	res, err := call(ctx, c, c.sandbox.BatchCreate, &dsecv1.BatchCreateRequest{Template: o.message(), Count: int32(n)}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return c.created(res.Items), nil
}

func (o SandboxOptions) message() *dsecv1.CreateRequest {
	return &dsecv1.CreateRequest{
		Backend: string(o.Backend), Layers: o.Layers, Limits: limitsMessage(o.Limits), Env: o.Env, User: o.User, Workdir: o.Workdir,
		IdleTimeout: timeout(o.IdleTimeout), MaxLifetime: timeout(o.MaxLifetime),
		Labels: o.Labels, Job: o.Job, RequestId: o.RequestID, IdleAction: string(o.IdleAction),
	}
}

// timeout: 0 is the server's default on this side, and never on the wire.
func timeout(d time.Duration) *durationpb.Duration {
	switch {
	case d == 0:
		return nil
	case d < 0:
		return durationpb.New(0)
	}
	return durationpb.New(d)
}

// Info asks what state the sandbox is in.
func (s *Sandbox) Info(ctx context.Context) (*dsec.Sandbox, error) {
	res, err := call(ctx, s.c, s.c.sandbox.Get, &dsecv1.GetRequest{SandboxId: string(s.id)}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return sandboxOf(res.Sandbox), nil
}

// Kill ends the sandbox and frees all it held. It is a success where it has
// ended already.
func (s *Sandbox) Kill(ctx context.Context) error {
	_, err := call(ctx, s.c, s.c.sandbox.Kill, &dsecv1.KillRequest{SandboxId: string(s.id)}, dsec.Retryable)
	return err
}

// Extend sets new deadlines, counted from now: 0 leaves one as it is, Never removes it.
func (s *Sandbox) Extend(ctx context.Context, idle, lifetime time.Duration) (*dsec.Sandbox, error) {
	res, err := call(ctx, s.c, s.c.sandbox.Extend, &dsecv1.ExtendRequest{
		SandboxId: string(s.id), IdleTimeout: timeout(idle), MaxLifetime: timeout(lifetime),
	}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return sandboxOf(res.Sandbox), nil
}

// Usage tells what the sandbox uses.
func (s *Sandbox) Usage(ctx context.Context) (dsec.Usage, error) {
	res, err := call(ctx, s.c, s.c.sandbox.Usage, &dsecv1.UsageRequest{SandboxId: string(s.id)}, dsec.Retryable)
	if err != nil {
		return dsec.Usage{}, err
	}
	return usageOf(res.Usage), nil
}

// ListOptions filter a list. Zero values do not filter, but States: none is
// all that have not ended.
type ListOptions struct {
	Job    string
	Labels map[string]string
	States []dsec.State
	// PageSize is how many are fetched at once at the most: 1 to 1000; 0 is 100.
	PageSize int
}

// Sandboxes lists the project's sandboxes, by ID. An error ends the list.
func (c *Client) Sandboxes(ctx context.Context, o ListOptions) iter.Seq2[*dsec.Sandbox, error] {
	return func(yield func(*dsec.Sandbox, error) bool) {
		req := &dsecv1.ListRequest{Job: o.Job, Labels: o.Labels, PageSize: int32(o.PageSize)}
		for _, s := range o.States {
			req.States = append(req.States, string(s))
		}
		for {
			res, err := call(ctx, c, c.sandbox.List, req, dsec.Retryable)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, sb := range res.Sandboxes {
				if !yield(sandboxOf(sb), nil) {
					return
				}
			}
			if res.NextPageToken == "" {
				return
			}
			req.PageToken = res.NextPageToken
		}
	}
}
