package apiserver

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type processService struct{ s *Server }

func (p processService) Exec(ctx context.Context, req *connect.Request[dsecv1.ExecRequest]) (*connect.Response[dsecv1.ExecResponse], error) {
	return unary(ctx, p.s, req, processClient, dsecv1connect.ProcessServiceClient.Exec)
}

func (p processService) Start(ctx context.Context, req *connect.Request[dsecv1.StartRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	return download(ctx, p.s, req.Msg, out, processClient, dsecv1connect.ProcessServiceClient.Start)
}

func (p processService) Attach(ctx context.Context, req *connect.Request[dsecv1.AttachRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	return download(ctx, p.s, req.Msg, out, processClient, dsecv1connect.ProcessServiceClient.Attach)
}

func (p processService) ListProcesses(ctx context.Context, req *connect.Request[dsecv1.ListProcessesRequest]) (*connect.Response[dsecv1.ListProcessesResponse], error) {
	return unary(ctx, p.s, req, processClient, dsecv1connect.ProcessServiceClient.ListProcesses)
}

func (p processService) Signal(ctx context.Context, req *connect.Request[dsecv1.SignalRequest]) (*connect.Response[dsecv1.SignalResponse], error) {
	return unary(ctx, p.s, req, processClient, dsecv1connect.ProcessServiceClient.Signal)
}

func (p processService) WriteStdin(ctx context.Context, req *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	return unary(ctx, p.s, req, processClient, dsecv1connect.ProcessServiceClient.WriteStdin)
}

func (p processService) CloseStdin(ctx context.Context, req *connect.Request[dsecv1.CloseStdinRequest]) (*connect.Response[dsecv1.CloseStdinResponse], error) {
	return unary(ctx, p.s, req, processClient, dsecv1connect.ProcessServiceClient.CloseStdin)
}

func (p processService) Resize(ctx context.Context, req *connect.Request[dsecv1.ResizeRequest]) (*connect.Response[dsecv1.ResizeResponse], error) {
	return unary(ctx, p.s, req, processClient, dsecv1connect.ProcessServiceClient.Resize)
}

func (p processService) StreamStdin(ctx context.Context, in *connect.ClientStream[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	msg, err := first(in)
	if err != nil {
		return nil, err
	}
	edge, err := p.s.owner("sandbox_id", msg.GetSandboxId())
	if err != nil {
		return nil, err
	}
	return upload(ctx, in, edge.Process.StreamStdin)
}
