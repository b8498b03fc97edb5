package edge

import (
	"context"
	"errors"
	"io"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// processService serves ProcessService.
type processService struct{ e *Edge }

// Exec runs a command and collects its output.
func (p processService) Exec(ctx context.Context, req *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	c, err := p.e.enter(ctx, req.Header(), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	defer c.end()
	cmd, err := command(c.spec, req.Msg.Command, defaultExecOutput, maxExecOutput)
	if err != nil {
		return nil, err
	}
	if len(req.Msg.Tag) > maxTag {
		return nil, dsec.Invalid("tag", "want at most %d bytes, got %d", maxTag, len(req.Msg.Tag))
	}
	// Orphan: the death of this edge must not kill the command.
	ev, err := c.start(chronusapi.StartRequest{Command: cmd, Stdin: req.Msg.Stdin, Orphan: true})
	if err != nil {
		return nil, c.fail(err)
	}
	defer ev.Close()
	out, err := p.collect(ev, req.Msg.Tag)
	switch {
	case err != nil && ev.exited:
		return nil, err
	case err != nil:
		if !c.keeps() {
			c.kill(ev.process)
		}
		return nil, c.failStarted(ev.process, err)
	}
	return connect.NewResponse(out), nil
}

// maxTag bounds what is held of each Exec call under way.
const maxTag = 64

// collect reads events to the exit.
func (p processService) collect(ev *events, tag string) (*dsecv1.ExecResponse, error) {
	out := new(dsecv1.ExecResponse)
	defer p.e.output.release(ev.c)
	for {
		e, err := ev.Next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = dsec.Errorf(dsec.CodeOutcomeUnknown, "the command's end was not told")
			}
			return nil, err
		}
		switch e.Kind {
		case chronusapi.EventStarted:
			out.ProcessId = e.Process
			if tag != "" {
				defer ev.c.s.tagged(e.Process, tag)()
			}
		case chronusapi.EventOutput:
			p.e.output.add(ev.c, int64(len(e.Data)))
			if e.Stream == chronusapi.Stderr {
				out.Stderr = append(out.Stderr, e.Data...)
			} else {
				out.Stdout = append(out.Stdout, e.Data...)
			}
		case chronusapi.EventGap:
			return nil, dsec.Errorf(dsec.CodeOutcomeUnknown, "%d bytes of output were lost", e.To-e.Seq)
		case chronusapi.EventExited:
			if err := ev.c.ended(ev.process, &e.Outcome); err != nil {
				return nil, err
			}
			out.Outcome = outcomeProto(&e.Outcome)
			return out, nil
		}
	}
}

// Start runs a command and streams its events.
func (p processService) Start(ctx context.Context, req *connect.Request[dsecv1.StartRequest], stream *connect.ServerStream[dsecv1.ProcessEvent]) error {
	c, err := p.e.enter(ctx, req.Header(), req.Msg.SandboxId)
	if err != nil {
		return err
	}
	defer c.end()
	m := req.Msg
	start := chronusapi.StartRequest{Stdin: m.Stdin, OpenStdin: m.OpenStdin, Detach: m.Detach, Orphan: true}
	if start.Command, err = command(c.spec, m.Command, 0, maxStartOutput); err != nil {
		return err
	}
	if m.Pty != nil {
		size, err := windowSize("pty", m.Pty)
		if err != nil {
			return err
		}
		start.PTY = &size
	}
	if len(m.Stdin) > chronusapi.MaxStdin {
		return dsec.Invalid("stdin", "want at most %d bytes, got %d: set open_stdin and write the rest", chronusapi.MaxStdin, len(m.Stdin))
	}
	ev, err := c.start(start)
	if err != nil {
		return c.fail(err)
	}
	defer ev.Close()
	err = p.stream(ctx, ev, stream)
	if ev.exited {
		return err
	}
	if err != nil && !m.Detach && !c.keeps() {
		c.kill(ev.process)
	}
	return c.failStarted(ev.process, err)
}

func (p processService) stream(ctx context.Context, ev *events, stream *connect.ServerStream[dsecv1.ProcessEvent]) error {
	out := newSender(ctx, stream.Send)
	defer out.close()
	return ev.forward(out)
}

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
	err := p.e.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		return ofProcess(c.client.Signal(c.ctx, m.ProcessId, int(m.Signal), m.Tree))
	})
	return respond(new(dsecv1.SignalResponse), err)
}

// WriteStdin appends to a command's input.
func (p processService) WriteStdin(ctx context.Context, req *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	m, out := req.Msg, new(dsecv1.WriteStdinResponse)
	err := p.e.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		n, err := c.client.WriteStdin(c.ctx, m.ProcessId, m.Data, m.Eof)
		out.Written = uint64(n)
		return ofProcess(err)
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
