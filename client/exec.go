package client

import (
	"bytes"
	"context"
	"slices"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// numberAfter is how long an Exec call lasts before it is asked for the number of
// its command, by which it is found again should the call break off. Most
// commands end before, and cost nothing more.
const numberAfter = 250 * time.Millisecond

// listTimeout bounds a call that many may wait for.
const listTimeout = 10 * time.Second

// numberTries bounds how often a server is asked that may not know.
const numberTries = 10

// exec runs the command in one round trip.
func (c *Cmd) exec(ctx context.Context) (out []byte, o dsec.Outcome, err error) {
	run := c.execTagged
	if c.ActionID != "" {
		run = c.execOnce
	}
	err = overRestart(ctx, nil, func() error {
		out, o, err = run(ctx)
		return err
	})
	return out, o, err
}

// execTagged runs the command by a tag of its own.
func (c *Cmd) execTagged(ctx context.Context) ([]byte, dsec.Outcome, error) {
	tag := c.sandbox.c.tag()
	number := make(chan uint64, 1)
	ask, answered := context.WithCancel(ctx)
	defer answered()
	again, broke := context.WithCancel(ask)
	timer := time.AfterFunc(numberAfter, func() { number <- c.number(ask, again, tag) })
	res, err := c.sandbox.c.process.Exec(ctx, connect.NewRequest(&dsecv1.ExecRequest{
		SandboxId: string(c.sandbox.id), Command: c.message(), Tag: tag,
	}))
	broke()
	if err != nil {
		process := uint64(0)
		if !timer.Stop() {
			process = <-number // which may be on its way: without it the outcome is unknown
		}
		return c.execBroke(ctx, process, err)
	}
	timer.Stop()
	return c.answer(res.Msg)
}

// execOnce runs the command under its action ID: sent again where the answer was lost,
// it is not run again.
func (c *Cmd) execOnce(ctx context.Context) ([]byte, dsec.Outcome, error) {
	for attempt := 1; ; attempt++ {
		res, err := c.sandbox.c.process.Exec(ctx, acting(c, &dsecv1.ExecRequest{SandboxId: string(c.sandbox.id), Command: c.message()}))
		if err == nil {
			c.Replayed = res.Header().Get(replayedHeader) == "1"
			return c.answer(res.Msg)
		}
		err = c.sandbox.c.typed(err, dsecv1connect.ProcessServiceExecProcedure)
		if attempt >= c.sandbox.c.attempts || restarting(err) || !dsec.Retryable(err) && !brokeOff(err) || pause(ctx, attempt) != nil {
			return nil, dsec.Outcome{}, err
		}
	}
}

// answer is what an Exec call was answered.
func (c *Cmd) answer(res *dsecv1.ExecResponse) ([]byte, dsec.Outcome, error) {
	o, ok := outcomeOf(res.Outcome)
	if !ok {
		return nil, dsec.Outcome{}, dsec.Errorf(dsec.CodeOutcomeUnknown, "the server told no outcome")
	}
	if c.Stderr != nil {
		if _, err := c.Stderr.Write(res.Stderr); err != nil {
			return res.Stdout, o, err
		}
	}
	return res.Stdout, o, nil
}

// tag is a name for a call that no other call has.
func (c *Client) tag() string { return c.name + strconv.FormatUint(c.tags.Add(1), 36) }

// number asks for the number of the command that the Exec call with that tag
// runs; it is 0 where ask ends before the answer. Once again has ended it is not asked
// for another time.
func (c *Cmd) number(ask, again context.Context, tag string) uint64 {
	for attempt := 1; attempt <= numberTries; attempt++ {
		list, err := c.sandbox.listShared(ask)
		if err == nil {
			if i := slices.IndexFunc(list, func(p *dsecv1.Process) bool { return p.Tag == tag }); i >= 0 {
				return list[i].ProcessId
			}
		}
		if pause(again, attempt) != nil {
			return 0
		}
	}
	return 0
}

// listShared lists the sandbox's processes, in one call for all that ask while it
// is made: a thousand commands at once ask together.
func (s *Sandbox) listShared(ctx context.Context) ([]*dsecv1.Process, error) {
	ch := s.c.lists.DoChan(string(s.id), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), listTimeout)
		defer cancel()
		// Not call, which would wait for a server that refuses it.
		res, err := s.c.process.ListProcesses(ctx, connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: string(s.id)}))
		if err != nil {
			return nil, err
		}
		return res.Msg.Processes, nil
	})
	select {
	case r := <-ch:
		list, _ := r.Val.([]*dsecv1.Process)
		return list, r.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// execBroke goes on with a command whose Exec call ended in err, if it may run and
// its number is known.
func (c *Cmd) execBroke(ctx context.Context, process uint64, err error) ([]byte, dsec.Outcome, error) {
	var out bytes.Buffer
	var lost uint64
	f := follower{
		p: &Process{sandbox: c.sandbox, ID: process}, stdout: &out, stderr: c.Stderr, own: true,
		gap: func(g Gap) { lost += g.To - g.From },
	}
	_, err = f.broken(err, dsecv1connect.ProcessServiceExecProcedure)
	if ctx.Err() != nil || dsec.CodeOf(err) != dsec.CodeOutcomeUnknown {
		return nil, dsec.Outcome{}, err
	}
	if process == 0 {
		return nil, dsec.Outcome{}, &dsec.Error{
			Code: dsec.CodeOutcomeUnknown, Err: err,
			Message: err.Error() + " (Processes lists the command if it was started)",
		}
	}
	o, err := f.goOn(ctx)
	if err == nil {
		err = f.whole(lost)
	}
	return out.Bytes(), o, err
}
