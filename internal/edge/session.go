package edge

import (
	"context"
	"io"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// sessionService serves SessionService, but for RunCommands: apiservers make a
// call of its own for each command that a client sends so.
type sessionService struct {
	dsecv1connect.UnimplementedSessionServiceHandler
	e *Edge
}

// OpenSession opens a session.
func (x sessionService) OpenSession(ctx context.Context, req *connect.Request[dsecv1.OpenSessionRequest]) (*connect.Response[dsecv1.OpenSessionResponse], error) {
	m, out := req.Msg, new(dsecv1.OpenSessionResponse)
	err := x.e.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		env, err := environment("env", m.Env)
		if err != nil {
			return err
		}
		open := chronusapi.SessionRequest{Env: convert.MergeEnv(c.spec.Env, env), Cwd: inside(c.spec.Workdir, m.Cwd), User: m.User}
		if open.User == "" {
			open.User = c.spec.User
		}
		what := &dsecv1.TrajectoryRequest{Cwd: toText(open.Cwd), User: toText(open.User)}
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_OPEN, m, what, out, func() error {
			return c.grouped(func() error {
				s, err := c.client.OpenSession(c.ctx, open)
				out.SessionId = toText(s.ID)
				return err
			})
		})
	})
	return respond(out, err)
}

// sessionCommand checks one command of a session.
func sessionCommand(m *dsecv1.RunCommandRequest) (chronusapi.SessionCommand, error) {
	cmd := chronusapi.SessionCommand{Session: m.SessionId, Command: m.Command, OutputLimit: m.OutputLimitBytes}
	var err error
	if cmd.Timeout, err = timeout("timeout", m.Timeout); err != nil {
		return cmd, err
	}
	if cmd.OutputLimit < 0 || cmd.OutputLimit > maxStartOutput {
		return cmd, dsec.Invalid("output_limit_bytes", "want 1 to %d, or 0 for %d; got %d", int64(maxStartOutput), defaultSessionOutput, cmd.OutputLimit)
	}
	if cmd.OutputLimit == 0 {
		cmd.OutputLimit = defaultSessionOutput
	}
	return cmd, cmd.Validate()
}

// RunCommand runs one command in a session. Where the client goes away the
// command is interrupted; where this edge is restarted it runs on.
func (x sessionService) RunCommand(ctx context.Context, req *connect.Request[dsecv1.RunCommandRequest], stream *connect.ServerStream[dsecv1.ProcessEvent]) error {
	return x.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		cmd, err := sessionCommand(req.Msg)
		if err != nil {
			return err
		}
		what := &dsecv1.TrajectoryRequest{SessionId: req.Msg.SessionId, Shell: toText(cmd.Command)}
		a, earlier, err := c.beginAside(dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_COMMAND, req.Msg, what)
		if err != nil {
			return err
		}
		out := newSender(ctx, stream.Send)
		defer out.close()
		if earlier != nil {
			return c.startAgain(out, earlier, false)
		}
		if c.origin.action == "" {
			return c.runCommand(a, cmd, out)
		}
		_, err = once(c, func(own *call) (struct{}, error) { return struct{}{}, own.runCommand(a, cmd, out) }, nil)
		return err
	})
}

// runCommand runs a command of a session to its end, and notes that.
func (c *call) runCommand(a *trajectory.Action, cmd chronusapi.SessionCommand, out *sender) error {
	entry := &dsecv1.TrajectoryEntry{SessionId: cmd.Session}
	began, noted := time.Now(), false
	note := func(err error) error {
		noted = true
		return c.finish(a, entry, err)
	}
	err := c.sessionEvents(cmd, func(process uint64, e *chronusapi.Event) error {
		entry.ProcessId = process
		switch e.Kind {
		case chronusapi.EventOutput:
			a.Output(dsecv1.Stream(e.Stream), e.Data)
		case chronusapi.EventExited:
			err := c.ended(process, &e.Outcome)
			if err == nil {
				entry.Outcome = outcomeProto(&e.Outcome)
			}
			return note(err)
		}
		return nil
	}, out)
	if !noted {
		return note(c.told(began, err))
	}
	return err
}

// sessionEvents runs a command of a session, and forwards what look has seen.
func (c *call) sessionEvents(cmd chronusapi.SessionCommand, look func(process uint64, e *chronusapi.Event) error, out *sender) error {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(c.ctx))
	giveUp := func() {
		if c.keeps() {
			cancel(nil)
		} else {
			cancel(chronusapi.ErrInterrupt)
		}
	}
	defer giveUp() // of a stream that has ended it changes nothing
	defer context.AfterFunc(c.ctx, giveUp)()
	var stream *chronusapi.Events
	err := c.grouped(func() (err error) {
		stream, err = c.client.RunCommand(ctx, cmd)
		return err
	})
	if err != nil {
		return missing(err, "session_id")
	}
	var process uint64
	for last := chronusapi.EventKind(0); ; {
		if last != chronusapi.EventExited && !stream.Ready() { // the exit goes out with the end, which follows it
			out.flush()
		}
		e, err := stream.Next()
		if err == io.EOF { // wrapped it would be a broken stream
			return nil
		}
		if err != nil {
			return c.failStarted(process, err)
		}
		process = max(process, e.Process)
		if err := look(process, &e); err != nil {
			_, _ = stream.Next() // its end: the command is not to be interrupted
			return err
		}
		if err := out.put(&e); err != nil && !c.alone {
			return err
		}
		last = e.Kind
	}
}

// InterruptCommand kills what a session's command has started.
func (x sessionService) InterruptCommand(ctx context.Context, req *connect.Request[dsecv1.InterruptCommandRequest]) (*connect.Response[dsecv1.InterruptCommandResponse], error) {
	out := new(dsecv1.InterruptCommandResponse)
	err := x.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_INTERRUPT, req.Msg, ofSession(req.Msg.SessionId), out, func() error {
			return missing(c.client.Interrupt(c.ctx, req.Msg.SessionId), "session_id")
		})
	})
	return respond(out, err)
}

// ListSessions lists the open sessions.
func (x sessionService) ListSessions(ctx context.Context, req *connect.Request[dsecv1.ListSessionsRequest]) (*connect.Response[dsecv1.ListSessionsResponse], error) {
	out := new(dsecv1.ListSessionsResponse)
	err := x.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		list, err := c.client.Sessions(c.ctx)
		for _, s := range list {
			out.Sessions = append(out.Sessions, &dsecv1.Session{SessionId: toText(s.ID), ProcessId: s.Process, Busy: s.Busy})
		}
		return err
	})
	return respond(out, err)
}

// CloseSession ends a session and all that it started.
func (x sessionService) CloseSession(ctx context.Context, req *connect.Request[dsecv1.CloseSessionRequest]) (*connect.Response[dsecv1.CloseSessionResponse], error) {
	out := new(dsecv1.CloseSessionResponse)
	err := x.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_SESSION_CLOSE, req.Msg, ofSession(req.Msg.SessionId), out, func() error {
			return missing(c.client.CloseSession(c.ctx, req.Msg.SessionId), "session_id")
		})
	})
	return respond(out, err)
}

func ofSession(id string) *dsecv1.TrajectoryRequest { return &dsecv1.TrajectoryRequest{SessionId: id} }
