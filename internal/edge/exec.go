package edge

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

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
	a, earlier, err := c.begin(dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC, req.Msg, ofCommand(&cmd, len(req.Msg.Stdin)))
	if err != nil {
		return nil, err
	}
	if earlier != nil {
		return respond(c.execResponse(earlier.Ended))
	}
	// Orphan: the death of this edge must not kill the command.
	start := chronusapi.StartRequest{Command: cmd, Stdin: req.Msg.Stdin, Orphan: true, Tag: c.tagFor(a)}
	exec := func(c *call) (*dsecv1.ExecResponse, error) { return c.exec(a, start, req.Msg.Tag) }
	if c.origin.action == "" {
		return respond(exec(c))
	}
	return respond(once(c, exec, nil))
}

// maxTag bounds what is held of each Exec call under way.
const maxTag = 64

// exec runs a command to its end.
func (c *call) exec(a *trajectory.Action, start chronusapi.StartRequest, tag string) (*dsecv1.ExecResponse, error) {
	ev, err := c.start(start)
	if err != nil {
		return nil, c.finish(a, new(dsecv1.TrajectoryEntry), c.fail(err))
	}
	defer ev.Close()
	defer c.forget(start.Tag)
	ev.action = a
	out, err := ev.collect(tag)
	if err == nil || ev.exited {
		return out, c.finish(a, &dsecv1.TrajectoryEntry{Outcome: out.GetOutcome(), ProcessId: ev.process}, err)
	}
	if c.leaves(ev.process) {
		return nil, c.failStarted(ev.process, err)
	}
	return nil, c.finish(a, &dsecv1.TrajectoryEntry{ProcessId: ev.process}, c.failStarted(ev.process, err))
}

// tagFor is the tag by which the next edge finds the command of an action that is done
// once.
func (c *call) tagFor(a *trajectory.Action) uint64 {
	if c.origin.action == "" {
		return 0
	}
	return a.Seq
}

// forget lets go of a command whose end is in the log, unless the next edge is to see to
// that.
func (c *call) forget(tag uint64) {
	if tag == 0 || c.closing() {
		return
	}
	c.e.run(func() {
		ctx, cancel := context.WithTimeout(c.e.closing, killTimeout)
		defer cancel()
		if err := c.client.ForgetTag(ctx, tag); err != nil {
			c.e.log.Debug("a command's tag is kept", "sandbox", c.s.id, "err", err) // until there is no room for it
		}
	})
}

// leaves ends a command whose stream broke, unless it is to go on: then the next edge
// sees to its action. One whose output was too much ends in any case.
func (c *call) leaves(process uint64) bool {
	if c.alone && c.closing() {
		return true
	}
	if !c.keeps() || errors.Is(context.Cause(c.ctx), errHeld) {
		c.kill(process)
	}
	return false
}

// collect reads events to the exit.
func (ev *events) collect(tag string) (*dsecv1.ExecResponse, error) {
	out := new(dsecv1.ExecResponse)
	held := &ev.c.e.output
	defer held.release(ev.c)
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
			held.add(ev.c, int64(len(e.Data)))
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

// execResponse is the answer of an Exec call that was made before.
func (c *call) execResponse(e *dsecv1.TrajectoryEntry) (*dsecv1.ExecResponse, error) {
	if err := errorOf(e); err != nil {
		return nil, err
	}
	out := &dsecv1.ExecResponse{Outcome: e.Outcome, ProcessId: e.ProcessId}
	var err error
	out.Stdout, out.Stderr, err = c.output(e)
	return out, err
}

// ofCommand says shortly what a command is.
func ofCommand(cmd *chronusapi.Command, input int) *dsecv1.TrajectoryRequest {
	out := &dsecv1.TrajectoryRequest{Shell: toText(cmd.Shell), Cwd: toText(cmd.Cwd), User: toText(cmd.User), InputBytes: int64(input)}
	for _, a := range cmd.Argv {
		out.Argv = append(out.Argv, []byte(a))
	}
	if cmd.Timeout > 0 {
		out.Timeout = durationpb.New(cmd.Timeout)
	}
	return out
}
