package apiserver

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
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

func (s sessionService) CloseSession(ctx context.Context, req *connect.Request[dsecv1.CloseSessionRequest]) (*connect.Response[dsecv1.CloseSessionResponse], error) {
	return unary(ctx, s.s, req, sessionClient, dsecv1connect.SessionServiceClient.CloseSession)
}

func (s sessionService) RunCommand(ctx context.Context, req *connect.Request[dsecv1.RunCommandRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	return download(ctx, s.s, req.Msg, out, sessionClient, dsecv1connect.SessionServiceClient.RunCommand)
}

// RunCommands forwards both directions at once. All commands go to the sandbox
// that the first one names.
func (s sessionService) RunCommands(ctx context.Context, in *connect.BidiStream[dsecv1.RunCommandRequest, dsecv1.ProcessEvent]) error {
	msg, err := in.Receive()
	if errors.Is(err, io.EOF) {
		return nil
	} else if err != nil {
		return gone(err)
	}
	id := msg.GetSandboxId()
	edge, err := s.s.owner("sandbox_id", id)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out := edge.Session.RunCommands(ctx)
	out.RequestHeader().Set(projectHeader, principal(ctx).Project)
	// The writer ends with the caller's stream, which ends with this call.
	failed := make(chan error, 1)
	go func() {
		failed <- sendCommands(in, out, msg, id)
	}()
	return s.relayEvents(in, out, cancel, failed)
}

// sendCommands forwards the commands. Its error is the caller's fault, or nil.
func sendCommands(
	in *connect.BidiStream[dsecv1.RunCommandRequest, dsecv1.ProcessEvent],
	out *connect.BidiStreamForClient[dsecv1.RunCommandRequest, dsecv1.ProcessEvent],
	msg *dsecv1.RunCommandRequest, id string,
) error {
	for {
		if msg.GetSandboxId() != id {
			return dsec.Invalid("sandbox_id", "want the sandbox of the stream's first command")
		}
		if err := out.Send(msg); err != nil {
			return nil // the other direction tells why
		}
		var err error
		if msg, err = in.Receive(); errors.Is(err, io.EOF) {
			_ = out.CloseRequest()
			return nil
		} else if err != nil {
			return gone(err)
		}
	}
}

func (s sessionService) relayEvents(
	in *connect.BidiStream[dsecv1.RunCommandRequest, dsecv1.ProcessEvent],
	out *connect.BidiStreamForClient[dsecv1.RunCommandRequest, dsecv1.ProcessEvent],
	cancel context.CancelFunc, failed <-chan error,
) error {
	events := make(chan error, 1)
	go func() {
		for {
			ev, err := out.Receive()
			if errors.Is(err, io.EOF) {
				events <- nil
				return
			} else if err != nil {
				events <- fromEdge(err, dsecv1connect.SessionServiceRunCommandsProcedure)
				return
			}
			if err := in.Send(ev); err != nil {
				events <- gone(err)
				return
			}
		}
	}()
	for {
		select {
		case err := <-events:
			return err
		case err := <-failed:
			if err != nil {
				cancel() // the stream of events ends, and is waited for
				<-events
				return err
			}
			failed = nil
		}
	}
}
