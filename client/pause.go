package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// PauseOptions say what holds while a sandbox is paused.
type PauseOptions struct {
	// Wait has Pause return only once the memory was moved out, as far as that goes.
	Wait bool
	// MaxPaused kills a sandbox that has been paused for that long: 0 is the server's
	// default, Never is never.
	MaxPaused time.Duration
	// CountLifetime has its maximum lifetime run on meanwhile.
	CountLifetime bool
}

func (o PauseOptions) message() *dsecv1.PauseOptions {
	return &dsecv1.PauseOptions{Wait: o.Wait, MaxPaused: timeout(o.MaxPaused), CountLifetime: o.CountLifetime}
}

// Pause stops every process of the sandbox where it is. Calls in progress wait; one
// that comes later resumes it first. Pausing a paused sandbox is a success.
func (s *Sandbox) Pause(ctx context.Context, o PauseOptions) (*dsec.Sandbox, error) {
	res, err := call(ctx, s.c, s.c.sandbox.Pause, &dsecv1.PauseRequest{SandboxId: string(s.id), Options: o.message()}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return sandboxOf(res.Sandbox), nil
}

// Resume has a paused sandbox go on. Resuming a running one is a success; exhausted
// means that the node has no memory for it now, and it stays paused.
func (s *Sandbox) Resume(ctx context.Context) (*dsec.Sandbox, error) {
	res, err := call(ctx, s.c, s.c.sandbox.Resume, &dsecv1.ResumeRequest{SandboxId: string(s.id)}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return sandboxOf(res.Sandbox), nil
}
