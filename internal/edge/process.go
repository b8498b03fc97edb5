package edge

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// processService serves ProcessService.
type processService struct{ e *Edge }

// Attach streams the events of a process, which it does not own unless it says so.
func (p processService) Attach(ctx context.Context, req *connect.Request[dsecv1.AttachRequest], stream *connect.ServerStream[dsecv1.ProcessEvent]) error {
	c, err := p.e.enter(ctx, req.Header(), req.Msg.SandboxId)
	if err != nil {
		return err
	}
	defer c.end()
	out := newSender(ctx, stream.Send)
	defer out.close()
	// A silent process has no first event for long: the client is to know
	// that it is attached.
	out.timer.Reset(attachedAfter)
	var ev *events
	if req.Msg.Own {
		release, err := c.s.own(req.Msg.ProcessId)
		if err != nil {
			return err
		}
		defer func() {
			release()
			if ctx.Err() != nil && !c.keeps() && (ev == nil || !ev.exited) {
				c.kill(req.Msg.ProcessId)
			}
		}()
	}
	ev, err = c.attach(req.Msg.ProcessId, req.Msg.FromSeq)
	if err != nil {
		return ofProcess(c.fail(err))
	}
	defer ev.Close()
	if err = ev.forward(out); ev.exited {
		return err
	}
	err = c.fail(err)
	if c.closing() && ctx.Err() == nil {
		return errClosing // watching changes nothing: to attach again is safe
	}
	return err
}

// attachedAfter is how long an attach may take to fail.
const attachedAfter = 100 * time.Millisecond

// ListProcesses lists what runs, and what ended lately.
func (p processService) ListProcesses(ctx context.Context, req *connect.Request[dsecv1.ListProcessesRequest]) (*connect.Response[dsecv1.ListProcessesResponse], error) {
	out := new(dsecv1.ListProcessesResponse)
	err := p.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		list, err := c.client.Processes(c.ctx)
		for i := range list {
			m := processProto(&list[i])
			m.Tag = c.s.tagOf(m.ProcessId)
			if err := c.noOutcome(m.ProcessId, list[i].Outcome); err != nil {
				m.Outcome, m.Fault = nil, err.Error()
			}
			out.Processes = append(out.Processes, m)
		}
		return err
	})
	return respond(out, err)
}

// Signal sends a signal.
func (p processService) Signal(ctx context.Context, req *connect.Request[dsecv1.SignalRequest]) (*connect.Response[dsecv1.SignalResponse], error) {
	m := req.Msg
	out := new(dsecv1.SignalResponse)
	what := &dsecv1.TrajectoryRequest{ProcessId: m.ProcessId, Signal: m.Signal}
	err := p.e.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_SIGNAL, m, what, out, func() error {
			return ofProcess(c.client.Signal(c.ctx, m.ProcessId, int(m.Signal), m.Tree))
		})
	})
	return respond(out, err)
}

// WriteStdin appends to a command's input.
func (p processService) WriteStdin(ctx context.Context, req *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	m, out := req.Msg, new(dsecv1.WriteStdinResponse)
	what := &dsecv1.TrajectoryRequest{ProcessId: m.ProcessId, InputBytes: int64(len(m.Data))}
	err := p.e.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN, m, what, out, func() error {
			n, err := c.client.WriteStdin(c.ctx, m.ProcessId, m.Data, m.Eof)
			out.Written = uint64(n)
			return ofProcess(err)
		})
	})
	return respond(out, err)
}

// StreamStdin is WriteStdin for much data.
func (p processService) StreamStdin(ctx context.Context, stream *connect.ClientStream[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	if !stream.Receive() {
		return nil, firstMessage(stream.Err(), "sandbox_id", "want a first message that names the process")
	}
	out := new(dsecv1.WriteStdinResponse)
	id, process := stream.Msg().SandboxId, stream.Msg().ProcessId
	err := p.e.with(ctx, stream.RequestHeader(), id, func(c *call) error {
		for more := true; more; more = stream.Receive() {
			m := stream.Msg()
			n, err := c.client.WriteStdin(c.ctx, process, m.Data, m.Eof)
			out.Written += uint64(n)
			if err != nil || m.Eof {
				return ofProcess(err)
			}
		}
		return stream.Err()
	})
	return respond(out, err)
}

// CloseStdin ends a command's input.
func (p processService) CloseStdin(ctx context.Context, req *connect.Request[dsecv1.CloseStdinRequest]) (*connect.Response[dsecv1.CloseStdinResponse], error) {
	err := p.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		_, err := c.client.WriteStdin(c.ctx, req.Msg.ProcessId, nil, true)
		return ofProcess(err)
	})
	return respond(new(dsecv1.CloseStdinResponse), err)
}

// Resize changes a terminal's size.
func (p processService) Resize(ctx context.Context, req *connect.Request[dsecv1.ResizeRequest]) (*connect.Response[dsecv1.ResizeResponse], error) {
	err := p.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		size, err := windowSize("size", req.Msg.Size)
		if err != nil {
			return err
		}
		return ofProcess(c.client.Resize(c.ctx, req.Msg.ProcessId, size))
	})
	return respond(new(dsecv1.ResizeResponse), err)
}

// respond makes the answer of a unary call.
func respond[T any](msg *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(msg), nil
}

// firstMessage is the error of a client stream that ended before it began.
func firstMessage(err error, field, want string) error {
	if err != nil {
		return err
	}
	return dsec.Invalid(field, "%s", want)
}
