package apiserver

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type trajectoryService struct{ s *Server }

func (t trajectoryService) List(ctx context.Context, req *connect.Request[dsecv1.ListTrajectoryRequest]) (*connect.Response[dsecv1.ListTrajectoryResponse], error) {
	return unary(ctx, t.s, req, trajectoryClient, dsecv1connect.TrajectoryServiceClient.List)
}

func (t trajectoryService) Follow(ctx context.Context, req *connect.Request[dsecv1.FollowTrajectoryRequest], out *connect.ServerStream[dsecv1.FollowTrajectoryResponse]) error {
	return download(ctx, t.s, req.Msg, out, trajectoryClient, dsecv1connect.TrajectoryServiceClient.Follow)
}

func (t trajectoryService) ReadOutput(ctx context.Context, req *connect.Request[dsecv1.ReadTrajectoryOutputRequest], out *connect.ServerStream[dsecv1.ReadTrajectoryOutputResponse]) error {
	return download(ctx, t.s, req.Msg, out, trajectoryClient, dsecv1connect.TrajectoryServiceClient.ReadOutput)
}
