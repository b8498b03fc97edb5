package apiserver

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync/atomic"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/h1"
	"github.com/opendsec/dsec/internal/watcher"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// owner finds the edge of a sandbox from its ID. Whether the sandbox is there,
// and the project's, is the edge's to say.
func (s *Server) owner(field, sandboxID string) (*watcher.Edge, error) {
	id, err := dsec.ParseSandboxID(sandboxID)
	if err != nil {
		if e := (*dsec.Error)(nil); errors.As(err, &e) {
			e.Field = field
		}
		return nil, err
	}
	e, ok := s.edges.Edge(id.Edge())
	if !ok {
		return nil, &dsec.Error{Code: dsec.CodeNotFound, Field: field, Message: "no such sandbox"}
	}
	return e, nil
}

// request is msg as a call to an edge. Nothing of the caller's own header goes along.
func request[T any](ctx context.Context, msg *T) *connect.Request[T] {
	req := connect.NewRequest(msg)
	identify(ctx, req.Header())
	return req
}

// sandboxRequest is a request that names its sandbox, as sandbox_id.
type sandboxRequest[T any] interface {
	*T
	proto.Message
	GetSandboxId() string
}

// unary forwards a call that has one request and one answer. client picks the
// edge's client of the service, and call is the method of that client.
func unary[C, Req, Res any, P sandboxRequest[Req]](
	ctx context.Context, s *Server, req *connect.Request[Req],
	client func(*watcher.Edge) C, call func(C, context.Context, *connect.Request[Req]) (*connect.Response[Res], error),
) (*connect.Response[Res], error) {
	var res *connect.Response[Res]
	err := wherever[Req, P](s, req.Msg, func(edge *watcher.Edge, msg *Req) (err error) {
		res, err = forward(ctx, client(edge), call, msg)
		return err
	})
	return res, err
}

func forward[C, Req, Res any](
	ctx context.Context, client C, call func(C, context.Context, *connect.Request[Req]) (*connect.Response[Res], error), msg *Req,
) (*connect.Response[Res], error) {
	req := request(ctx, msg)
	res, err := call(client, ctx, req)
	if err != nil {
		return nil, fromEdge(err, req.Spec().Procedure)
	}
	out := connect.NewResponse(res.Msg)
	markReplayed(out.Header(), res.Header())
	return out, nil
}

// download forwards a call that is answered by a stream to the edge of the
// sandbox that the request names.
func download[C, Req, Res any, P sandboxRequest[Req]](
	ctx context.Context, s *Server, msg *Req, out *connect.ServerStream[Res],
	client func(*watcher.Edge) C, call func(C, context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error),
) error {
	return wherever[Req, P](s, msg, func(edge *watcher.Edge, msg *Req) error {
		// An edge tells of a move before anything else.
		return relayMarked(ctx, client(edge), call, msg, out.Send, func(h http.Header) { markReplayed(out.ResponseHeader(), h) })
	})
}

// relay makes a call at an edge and sends on what it is answered by. One
// message is in memory at a time, and a slow reader slows the edge down.
// Messages that are there together go out together.
func relay[C, Req, Res any](
	ctx context.Context, client C,
	call func(C, context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error), msg *Req, send func(*Res) error,
) error {
	return relayMarked(ctx, client, call, msg, send, func(http.Header) {})
}

// relayMarked is relay that shows the header of what comes before the first message
// is sent on.
func relayMarked[C, Req, Res any](
	ctx context.Context, client C,
	call func(C, context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error), msg *Req, send func(*Res) error, mark func(http.Header),
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // where the reader is gone, so is the edge's call
	if out := daemon.AnswerOf(ctx); out != nil {
		out.Hold(true)
		defer out.Hold(false)
		ctx = h1.BeforeWait(ctx, out.Release)
	}
	req := request(ctx, msg)
	in, err := call(client, ctx, req)
	if err != nil {
		return fromEdge(err, req.Spec().Procedure)
	}
	defer func() { _ = in.Close() }()
	for first := true; in.Receive(); first = false {
		if first {
			mark(in.ResponseHeader())
		}
		if err := send(in.Msg()); err != nil {
			return gone(err)
		}
	}
	if err := in.Err(); err != nil {
		return fromEdge(err, req.Spec().Procedure)
	}
	return nil
}

func edgeClient(e *watcher.Edge) dsecv1connect.EdgeServiceClient             { return e }
func processClient(e *watcher.Edge) dsecv1connect.ProcessServiceClient       { return e.Process }
func sessionClient(e *watcher.Edge) dsecv1connect.SessionServiceClient       { return e.Session }
func fileClient(e *watcher.Edge) dsecv1connect.FileServiceClient             { return e.File }
func trajectoryClient(e *watcher.Edge) dsecv1connect.TrajectoryServiceClient { return e.Trajectory }

// upload forwards a stream of requests that is answered once. first was
// already received, and named the edge.
func upload[Req, Res any](
	ctx context.Context, in *connect.ClientStream[Req],
	open func(context.Context) *connect.ClientStreamForClient[Req, Res],
) (*connect.Response[Res], error) {
	ctx, cancel := context.WithCancel(ctx)
	// A stream that the caller broke off must not look complete to the edge:
	// canceled, it breaks off there as well.
	defer cancel()
	out := open(ctx)
	identify(ctx, out.RequestHeader())
	conn, err := out.Conn()
	if err != nil {
		return nil, fromEdge(err, out.Spec().Procedure)
	}
	answer := answerOf[Res](ctx, conn)
	sent := false
	defer func() { // from when on the body is the server's again
		cancel()
		if !sent { // else the cancellation ends it; a close would look like the end of what broke off
			_ = conn.CloseRequest()
		}
		<-answer.done
	}()
	for msg := in.Msg(); ; msg = in.Msg() {
		if err := out.Send(msg); errors.Is(err, io.EOF) {
			break // the edge has answered already; the answer tells why
		} else if err != nil {
			return nil, fromEdge(err, out.Spec().Procedure)
		}
		sent = true
		if m, ok := any(msg).(interface{ GetData() []byte }); ok {
			daemon.FreeData(m.GetData())
		}
		if !in.Receive() {
			break
		}
	}
	if err := in.Err(); err != nil && !answer.came.Load() {
		return nil, gone(err)
	}
	_ = conn.CloseRequest()
	<-answer.done
	if answer.err != nil {
		return nil, fromEdge(answer.err, out.Spec().Procedure)
	}
	res := connect.NewResponse(answer.msg)
	markReplayed(res.Header(), conn.ResponseHeader())
	return res, nil
}

// answer is what an edge answers to an upload: it is read as soon as it is there, which
// may be before the client has sent all. Then the rest is given up: he may say nothing
// for long.
type answer[Res any] struct {
	came atomic.Bool   // before the rest is given up
	done chan struct{} // closed after that, when what follows is set
	msg  *Res
	err  error
}

func answerOf[Res any](ctx context.Context, conn connect.StreamingClientConn) *answer[Res] {
	a := &answer[Res]{done: make(chan struct{})}
	body, _ := ctx.Value(bodyKey{}).(*timedBody)
	go func() {
		msg := new(Res)
		if a.err = conn.Receive(msg); a.err == nil {
			a.msg = msg
			if err := conn.Receive(new(Res)); err == nil {
				a.err = errTwoAnswers
			} else if !errors.Is(err, io.EOF) {
				a.err = err
			}
		}
		_ = conn.CloseResponse()
		if ctx.Err() == nil {
			a.came.Store(true)
			body.giveUp()
		}
		close(a.done)
	}()
	return a
}

var errTwoAnswers = connect.NewError(connect.CodeInternal, errors.New("the edge answers twice"))

// first receives the message that opens a stream.
func first[Req any](in *connect.ClientStream[Req]) (*Req, error) {
	if in.Receive() {
		return in.Msg(), nil
	}
	if err := in.Err(); err != nil {
		return nil, gone(err)
	}
	return nil, dsec.Invalid("open", "want it in the first message")
}

// gone is the caller's own stream failing: typed already where the decoder
// did, and of no interest where the caller went away.
func gone(err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the caller's stream broke off", Err: err}
}

// fromEdge types the failure of a call to an edge: what the edge said, or what
// it means that it said nothing.
func fromEdge(err error, procedure string) error {
	if e, ok := apierr.Decode(err); ok {
		return e
	}
	if errors.Is(err, watcher.ErrDial) {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the node cannot be reached", Err: err}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the call was given up before its end", Err: err}
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnimplemented:
		return &dsec.Error{Code: dsec.CodeUnsupported, Message: "the node's version does not offer this", Err: err}
	case connect.CodeInvalidArgument, connect.CodeResourceExhausted, connect.CodeInternal:
		return &dsec.Error{Code: dsec.CodeInternal, Message: "internal error", Err: err}
	}
	if apierr.Repeatable(procedure) {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the node did not answer", Err: err}
	}
	return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the node did not answer; the call may have been done", Err: err}
}
