package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// Attach copies the output from byte number `from` on, first what the spool
// holds and then what comes, until the process ends. Closing ctx does not
// touch the process. gap, where not nil, is told of bytes that are lost. Where
// the connection breaks it goes on from there, as Cmd.Wait does.
func (p *Process) Attach(ctx context.Context, from uint64, stdout, stderr io.Writer, gap func(Gap)) (dsec.Outcome, error) {
	f := follower{p: p, stdout: stdout, stderr: stderr, gap: gap, next: from}
	o, broken, err := f.attach(ctx)
	if broken && f.told {
		return f.goOn(ctx)
	}
	return o, err
}

// follower hands the events of one process on, over one stream after the other.
type follower struct {
	p              *Process
	stdout, stderr io.Writer
	gap            func(Gap)
	own            bool   // the command is not to outlive the caller
	next           uint64 // byte that comes next
	told           bool   // the stream told something new, or that it lives
}

// How long a follower tries to get back to its process: a restart of the server
// takes seconds.
const goOnFor = time.Minute

// goOn attaches again, until the command ends, the server says why not, or it is
// away for too long.
func (f *follower) goOn(ctx context.Context) (o dsec.Outcome, err error) {
	broken, end := true, time.Now().Add(goOnFor)
	for attempt := 1; broken; attempt++ {
		if err != nil && time.Now().After(end) {
			break
		}
		if attempt > 1 {
			if perr := pause(ctx, attempt-1); perr != nil {
				err = perr
				break
			}
		}
		f.told = false
		if o, broken, err = f.attach(ctx); f.told {
			attempt, end = 0, time.Now().Add(goOnFor)
		}
	}
	if ctx.Err() != nil && f.own {
		f.kill(ctx) // an attach that was given up may not have come to the process
	}
	if de, ok := errors.AsType[*dsec.Error](err); ok {
		switch de.Code {
		case dsec.CodeUnavailable, dsec.CodeNotFound, dsec.CodeUnsupported, dsec.CodeInternal:
			return o, f.mayGoOn(err) // of the attempt, not of the command
		}
	}
	return o, err
}

// whole is the error of output that nobody took in time.
func (f *follower) whole(lost uint64) error {
	if lost == 0 {
		return nil
	}
	return dsec.Errorf(dsec.CodeOutcomeUnknown, "%d bytes of the output of process %d were lost while the server was away", lost, f.p.ID)
}

// kill ends a command whose caller leaves while no stream is there to close.
func (f *follower) kill(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = f.p.Kill(ctx) // where the server is away nothing more can be done
}

// mayGoOn is the error of a process that is out of reach.
func (f *follower) mayGoOn(err error) error {
	return &dsec.Error{
		Code: dsec.CodeOutcomeUnknown, Err: err,
		Message: fmt.Sprintf("process %[1]d of sandbox %[2]s may go on; `dsec logs -f -from %[3]d %[2]s %[1]d` attaches to it: %[4]v", f.p.ID, f.p.sandbox.id, f.next, err),
	}
}

// unfollowed is the error of a process whose stream ended with err and that is
// not attached to again. It asks whether it goes on: err may come of how it ended.
func (f *follower) unfollowed(ctx context.Context, err error) error {
	if dsec.CodeOf(err) == dsec.CodeOutcomeUnknown {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		ps, perr := f.p.sandbox.Processes(ctx)
		i := slices.IndexFunc(ps, func(p ProcessInfo) bool { return p.ID == f.p.ID && p.Fault != "" })
		if perr == nil && i >= 0 {
			return dsec.Errorf(dsec.CodeOutcomeUnknown, "%s", ps[i].Fault)
		}
	}
	return f.mayGoOn(err)
}

func (f *follower) attach(ctx context.Context) (o dsec.Outcome, broken bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.p.sandbox.c.process.Attach(ctx, connect.NewRequest(&dsecv1.AttachRequest{
		SandboxId: string(f.p.sandbox.id), ProcessId: f.p.ID, FromSeq: f.next, Own: f.own,
	}))
	if err != nil {
		broken, err = f.broken(err, dsecv1connect.ProcessServiceAttachProcedure)
		return dsec.Outcome{}, broken, err
	}
	return f.relay(stream, dsecv1connect.ProcessServiceAttachProcedure)
}

// relay hands a stream on. broken is true where it ended without a word on the
// process.
func (f *follower) relay(in *connect.ServerStreamForClient[dsecv1.ProcessEvent], procedure string) (o dsec.Outcome, broken bool, err error) {
	defer func() { _ = in.Close() }()
	for in.Receive() {
		before := f.next
		switch ev := in.Msg().GetEvent().(type) {
		case *dsecv1.ProcessEvent_Output:
			f.next = ev.Output.Seq + uint64(len(ev.Output.Data))
		case *dsecv1.ProcessEvent_Gap:
			f.next = ev.Gap.To
		case *dsecv1.ProcessEvent_Keepalive:
			f.told = true
		}
		f.told = f.told || f.next > before
		o, ended, err := event(in.Msg(), f.stdout, f.stderr, f.gap)
		if ended && err == nil {
			in.Receive() // the end of the answer, without which its connection is lost
		}
		if err != nil || ended {
			return o, false, err
		}
	}
	if err := in.Err(); err != nil {
		broken, err = f.broken(err, procedure)
		return dsec.Outcome{}, broken, err
	}
	return dsec.Outcome{}, true, dsec.Errorf(dsec.CodeOutcomeUnknown, "the stream ended before the command did")
}

// broken types the error of a stream, and tells whether another may know more:
// where the link broke, or the server stops. What an attach is told of the
// process is final.
func (f *follower) broken(err error, procedure string) (bool, error) {
	typed := f.p.sandbox.c.typed(err, procedure)
	_, told := apierr.Decode(err)
	switch dsec.CodeOf(typed) {
	case dsec.CodeUnavailable:
		return true, typed
	case dsec.CodeOutcomeUnknown:
		return !told || procedure != dsecv1connect.ProcessServiceAttachProcedure, typed
	}
	return false, typed
}

// event hands one event on. ended is true for the last one.
func event(ev *dsecv1.ProcessEvent, stdout, stderr io.Writer, gap func(Gap)) (o dsec.Outcome, ended bool, err error) {
	switch ev := ev.GetEvent().(type) {
	case *dsecv1.ProcessEvent_Output:
		w := stdout
		if ev.Output.Stream == dsecv1.Stream_STREAM_STDERR {
			w = stderr
		}
		if w != nil {
			_, err = w.Write(ev.Output.Data)
		}
	case *dsecv1.ProcessEvent_Gap:
		if gap != nil {
			gap(Gap{ev.Gap.From, ev.Gap.To})
		}
	case *dsecv1.ProcessEvent_Exited:
		var ok bool
		if o, ok = outcomeOf(ev.Exited.Outcome); !ok {
			err = dsec.Errorf(dsec.CodeOutcomeUnknown, "the server told no outcome")
		}
		ended = true
	}
	return o, ended, err
}
