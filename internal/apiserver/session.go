package apiserver

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type sessionService struct{ s *Server }

func (s sessionService) OpenSession(ctx context.Context, req *connect.Request[dsecv1.OpenSessionRequest]) (*connect.Response[dsecv1.OpenSessionResponse], error) {
	return unary(ctx, s.s, req, sessionClient, dsecv1connect.SessionServiceClient.OpenSession)
}

func (s sessionService) ListSessions(ctx context.Context, req *connect.Request[dsecv1.ListSessionsRequest]) (*connect.Response[dsecv1.ListSessionsResponse], error) {
	return unary(ctx, s.s, req, sessionClient, dsecv1connect.SessionServiceClient.ListSessions)
}

func (s sessionService) InterruptCommand(ctx context.Context, req *connect.Request[dsecv1.InterruptCommandRequest]) (*connect.Response[dsecv1.InterruptCommandResponse], error) {
	return unary(ctx, s.s, req, sessionClient, dsecv1connect.SessionServiceClient.InterruptCommand)
}

func (s sessionService) CloseSession(ctx context.Context, req *connect.Request[dsecv1.CloseSessionRequest]) (*connect.Response[dsecv1.CloseSessionResponse], error) {
	return unary(ctx, s.s, req, sessionClient, dsecv1connect.SessionServiceClient.CloseSession)
}

func (s sessionService) RunCommand(ctx context.Context, req *connect.Request[dsecv1.RunCommandRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	return download(ctx, s.s, req.Msg, out, sessionClient, dsecv1connect.SessionServiceClient.RunCommand)
}

// RunCommands runs the commands one after the other, each by a call of its own
// at the edge: a session runs one at a time, so that a stream to the edge would
// only be one more to keep. All go to the sandbox that the first one names.
func (s sessionService) RunCommands(ctx context.Context, in *connect.BidiStream[dsecv1.RunCommandRequest, dsecv1.ProcessEvent]) error {
	if out := daemon.AnswerOf(ctx); out != nil {
		conn := http.NewResponseController(out)
		defer context.AfterFunc(s.s.stopping, func() { _ = conn.SetReadDeadline(time.Now()) })()
	}
	var edge *watcher.Edge
	id := ""
	for {
		msg, err := in.Receive()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && s.s.stopping.Err() != nil:
			return dsec.Restarting("the server stops; the session goes on")
		case err != nil:
			return gone(err)
		}
		if edge == nil {
			id = msg.GetSandboxId()
			if edge, err = s.s.owner("sandbox_id", id); err != nil {
				return err
			}
		}
		if msg.GetSandboxId() != id {
			return dsec.Invalid("sandbox_id", "want the sandbox of the stream's first command")
		}
		if err := relay(withAction(ctx, msg.GetActionId(), ""), edge.Session, dsecv1connect.SessionServiceClient.RunCommand, msg, in.Send); err != nil {
			return err
		}
		daemon.AnswerOf(ctx).Release()
	}
}
