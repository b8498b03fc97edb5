package edge

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
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
	err := p.e.with(ctx, req.Header(), m.SandboxId, func(c *call) error {
		what := c.toProcess(m.ProcessId)
		what.Signal = m.Signal
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_SIGNAL, m, what, out, func() error {
			return ofProcess(c.client.Signal(c.ctx, m.ProcessId, int(m.Signal), m.Tree))
		})
	})
	return respond(out, err)
}

// WriteStdin appends to a command's input.
func (p processService) WriteStdin(ctx context.Context, req *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	out := new(dsecv1.WriteStdinResponse)
	err := p.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error { return c.writeStdin(req.Msg, out) })
	return respond(out, err)
}

func (c *call) writeStdin(m *dsecv1.WriteStdinRequest, out *dsecv1.WriteStdinResponse) error {
	what := c.toProcess(m.ProcessId)
	what.InputBytes = int64(len(m.Data))
	return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN, m, what, out, func() error {
		n, err := c.client.WriteStdin(c.ctx, m.ProcessId, m.Data, m.Eof)
		out.Written = uint64(n)
		return ofProcess(err)
	})
}

// toProcess says shortly to what command something is done, and when: what was typed once
// it had asked for it is to be typed then again.
func (c *call) toProcess(process uint64) *dsecv1.TrajectoryRequest {
	return &dsecv1.TrajectoryRequest{ProcessId: process, OutputBytes: c.s.wrote(process)}
}

// StreamStdin is WriteStdin for much data.
func (p processService) StreamStdin(ctx context.Context, stream *connect.ClientStream[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	if !stream.Receive() {
		return nil, firstMessage(stream.Err(), "sandbox_id", "want a first message that names the process")
	}
	out, first := new(dsecv1.WriteStdinResponse), stream.Msg()
	err := p.e.with(ctx, stream.RequestHeader(), first.SandboxId, func(c *call) error {
		if first.Eof {
			return c.writeStdin(first, out)
		}
		open := &dsecv1.WriteStdinRequest{ProcessId: first.ProcessId}
		in := &stdin{stream: stream, rest: first.Data}
		err := c.doWrite(dsecv1.TrajectoryKind_TRAJECTORY_KIND_STDIN, open, c.toProcess(first.ProcessId), false, in, out, func(data io.Reader) error {
			return c.copyStdin(first.ProcessId, data, out)
		})
		if err == nil && in.eof {
			// In the log the end of the input is an action of its own: whether a stream
			// ends so is not known when it begins.
			c.origin.action = ""
			err = c.writeStdin(&dsecv1.WriteStdinRequest{ProcessId: first.ProcessId, Eof: true}, new(dsecv1.WriteStdinResponse))
		}
		return err
	})
	return respond(out, err)
}

// copyStdin writes data to a command's input.
func (c *call) copyStdin(process uint64, data io.Reader, out *dsecv1.WriteStdinResponse) error {
	buf, began := make([]byte, chronusapi.MaxChunk), time.Now()
	for {
		n, err := data.Read(buf)
		if n > 0 {
			c.mark(process, int64(out.Written), began)
			taken, werr := c.client.WriteStdin(c.ctx, process, buf[:n], false)
			out.Written += uint64(taken)
			if werr != nil {
				return ofProcess(werr)
			}
		}
		if err == io.EOF { // wrapped it would be a broken stream
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// maxMarks bounds the marks of one stream of input.
const maxMarks = 256

// mark notes how much a command had written before a byte of its input came.
func (c *call) mark(process uint64, input int64, began time.Time) {
	last := &dsecv1.TrajectoryMark{}
	if n := len(c.marks); n > 0 {
		last = c.marks[n-1]
	}
	if wrote := c.s.wrote(process); wrote > last.OutputBytes && len(c.marks) < maxMarks {
		c.marks = append(c.marks, &dsecv1.TrajectoryMark{InputBytes: input, OutputBytes: wrote, Milliseconds: time.Since(began).Milliseconds()})
	}
}

// stdin reads the data messages of a stream, up to one that ends the input.
type stdin struct {
	stream *connect.ClientStream[dsecv1.WriteStdinRequest]
	rest   []byte
	eof    bool
}

// Read implements io.Reader.
func (s *stdin) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		if s.eof || !s.stream.Receive() {
			return 0, cmp.Or(s.stream.Err(), io.EOF)
		}
		s.rest, s.eof = s.stream.Msg().Data, s.stream.Msg().Eof
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// CloseStdin ends a command's input.
func (p processService) CloseStdin(ctx context.Context, req *connect.Request[dsecv1.CloseStdinRequest]) (*connect.Response[dsecv1.CloseStdinResponse], error) {
	err := p.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		return c.writeStdin(&dsecv1.WriteStdinRequest{ProcessId: req.Msg.ProcessId, Eof: true}, new(dsecv1.WriteStdinResponse))
	})
	return respond(new(dsecv1.CloseStdinResponse), err)
}

// Resize changes a terminal's size.
func (p processService) Resize(ctx context.Context, req *connect.Request[dsecv1.ResizeRequest]) (*connect.Response[dsecv1.ResizeResponse], error) {
	out := new(dsecv1.ResizeResponse)
	err := p.e.with(ctx, req.Header(), req.Msg.SandboxId, func(c *call) error {
		size, err := windowSize("size", req.Msg.Size)
		if err != nil {
			return err
		}
		what := c.toProcess(req.Msg.ProcessId)
		what.Note = fmt.Sprintf("%d rows, %d columns", size.Rows, size.Cols)
		return c.do(dsecv1.TrajectoryKind_TRAJECTORY_KIND_RESIZE, req.Msg, what, out, func() error {
			return ofProcess(c.client.Resize(c.ctx, req.Msg.ProcessId, size))
		})
	})
	return respond(out, err)
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
