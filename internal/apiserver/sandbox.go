package apiserver

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type sandboxService struct{ s *Server }

func (b sandboxService) Get(ctx context.Context, req *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	return unary(ctx, b.s, req, edgeClient, dsecv1connect.EdgeServiceClient.GetSandbox)
}

func (b sandboxService) Kill(ctx context.Context, req *connect.Request[dsecv1.KillRequest]) (*connect.Response[dsecv1.KillResponse], error) {
	return unary(ctx, b.s, req, edgeClient, dsecv1connect.EdgeServiceClient.KillSandbox)
}

func (b sandboxService) Extend(ctx context.Context, req *connect.Request[dsecv1.ExtendRequest]) (*connect.Response[dsecv1.ExtendResponse], error) {
	return unary(ctx, b.s, req, edgeClient, dsecv1connect.EdgeServiceClient.ExtendSandbox)
}

func (b sandboxService) Pause(ctx context.Context, req *connect.Request[dsecv1.PauseRequest]) (*connect.Response[dsecv1.PauseResponse], error) {
	return unary(ctx, b.s, req, edgeClient, dsecv1connect.EdgeServiceClient.PauseSandbox)
}

func (b sandboxService) Resume(ctx context.Context, req *connect.Request[dsecv1.ResumeRequest]) (*connect.Response[dsecv1.ResumeResponse], error) {
	return unary(ctx, b.s, req, edgeClient, dsecv1connect.EdgeServiceClient.ResumeSandbox)
}

func (b sandboxService) Usage(ctx context.Context, req *connect.Request[dsecv1.UsageRequest]) (*connect.Response[dsecv1.UsageResponse], error) {
	return unary(ctx, b.s, req, edgeClient, dsecv1connect.EdgeServiceClient.GetUsage)
}
