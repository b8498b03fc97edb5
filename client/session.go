package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// SessionOptions are the start state of a session's shell.
type SessionOptions struct {
	Env  map[string]string
	Dir  string
	User string
}

// Session is a shell that remembers its directory, environment and functions
// from one command to the next. One command runs at a time. The status of its
// commands is told by the shell itself: their outcome is Claimed, and not fit
// for rewards.
type Session struct {
	sandbox *Sandbox
	id      string

	mu     sync.Mutex
	stream *connect.BidiStreamForClient[dsecv1.RunCommandRequest, dsecv1.ProcessEvent]
	cancel context.CancelFunc
}

// OpenSession starts a session.
func (s *Sandbox) OpenSession(ctx context.Context, o SessionOptions) (*Session, error) {
	res, err := call(ctx, s.c, s.c.session.OpenSession, &dsecv1.OpenSessionRequest{
		SandboxId: string(s.id), Env: o.Env, Cwd: o.Dir, User: o.User,
	}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	return s.Session(res.SessionId), nil
}

// Session is a session that was opened earlier. It makes no call.
func (s *Sandbox) Session(id string) *Session { return &Session{sandbox: s, id: id} }

// Sessions lists the IDs of the open sessions.
func (s *Sandbox) Sessions(ctx context.Context) ([]string, error) {
	res, err := call(ctx, s.c, s.c.session.ListSessions, &dsecv1.ListSessionsRequest{SandboxId: string(s.id)}, dsec.Retryable)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, m := range res.Sessions {
		ids = append(ids, m.SessionId)
	}
	return ids, nil
}

// ID is the session's.
func (n *Session) ID() string { return n.id }

// Run runs one command in the session and copies its output. A timeout of 0 is
// none. All commands of a Session go over one open stream. Where the server is
// restarted the session goes on, but how a command ended that was under way then is
// not known: the error's code is outcome_unknown, and the next command runs after
// it. Canceling ctx interrupts the command, as Interrupt does, or takes it out of
// those that wait for their turn; the session keeps its directory, environment and functions.
func (n *Session) Run(ctx context.Context, command string, timeout time.Duration, stdout, stderr io.Writer) (o dsec.Outcome, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return dsec.Outcome{}, err
	}
	accepted := false
	err = overRestart(ctx, func() bool { return !accepted }, func() error {
		for {
			reused := n.stream != nil
			if o, accepted, err = n.runOn(ctx, command, timeout, stdout, stderr); err == nil {
				return nil
			}
			n.drop()
			if cerr := ctx.Err(); cerr != nil {
				o = dsec.Outcome{}
				return cerr
			}
			if !reused || accepted {
				return err
			}
			// The server has ended the stream since the last command, as by a restart.
		}
	})
	return o, err
}

// runOn runs a command on the session's stream, or on a new one. accepted is false
// where the server provably has not begun it.
func (n *Session) runOn(ctx context.Context, command string, timeout time.Duration, stdout, stderr io.Writer) (o dsec.Outcome, accepted bool, err error) {
	if n.stream == nil {
		life, cancel := context.WithCancel(context.WithoutCancel(ctx))
		n.stream, n.cancel = n.sandbox.c.session.RunCommands(life), cancel
	}
	stream, cancel := n.stream, n.cancel
	defer context.AfterFunc(ctx, func() {
		cancel()
		// HTTP/2 of net/http sees the cancel once it does not wait for a body.
		_ = stream.CloseRequest()
	})()
	req := &dsecv1.RunCommandRequest{SandboxId: string(n.sandbox.id), SessionId: n.id, Command: command}
	if timeout != 0 {
		req.Timeout = durationpb.New(timeout)
	}
	typed := func(err error) error {
		return n.sandbox.c.typed(err, dsecv1connect.SessionServiceRunCommandsProcedure)
	}
	unsent := stream.Send(req)
	if unsent != nil && !errors.Is(unsent, io.EOF) {
		return o, false, typed(unsent)
	}
	// Where Send fails with EOF the server has ended the stream; Receive tells why.
	for first := true; ; first = false {
		ev, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			err = dsec.Errorf(dsec.CodeOutcomeUnknown, "the stream ended before the command did")
		} else if err != nil {
			err = typed(err)
		}
		if err != nil {
			return o, unsent == nil && (!first || dsec.CodeOf(err) != dsec.CodeUnavailable), err
		}
		o, ended, err := event(ev, stdout, stderr, nil)
		if err != nil || ended {
			return o, true, err
		}
	}
}

// drop gives the stream up. It is called with mu held.
func (n *Session) drop() {
	if n.stream == nil {
		return
	}
	n.cancel()
	_ = n.stream.CloseRequest()
	_ = n.stream.CloseResponse()
	n.stream, n.cancel = nil, nil
}

// Interrupt kills what the command under way in the session has started, whoever
// runs it, as its timeout does; a shell that then does not come back ends with
// its session. It does not wait: that command's Run returns its outcome, which is
// signal 9 or what the shell makes of that, mostly code 137. The error's code is
// conflict where no command runs.
func (n *Session) Interrupt(ctx context.Context) error {
	_, err := call(ctx, n.sandbox.c, n.sandbox.c.session.InterruptCommand, &dsecv1.InterruptCommandRequest{
		SandboxId: string(n.sandbox.id), SessionId: n.id,
	}, dsec.Retryable)
	return err
}

// Close ends the shell and every process that it started.
func (n *Session) Close(ctx context.Context) error {
	n.mu.Lock()
	n.drop()
	n.mu.Unlock()
	_, err := call(ctx, n.sandbox.c, n.sandbox.c.session.CloseSession, &dsecv1.CloseSessionRequest{
		SandboxId: string(n.sandbox.id), SessionId: n.id,
	}, dsec.Retryable)
	return err
}
