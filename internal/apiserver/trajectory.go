package apiserver

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type trajectoryService struct{ s *Server }

// A log is that of the sandbox whose ID is given, also where another one has taken its
// place, which has one of its own: nothing here follows a move.

func (t trajectoryService) List(ctx context.Context, req *connect.Request[dsecv1.ListTrajectoryRequest]) (*connect.Response[dsecv1.ListTrajectoryResponse], error) {
	edge, err := t.s.owner("sandbox_id", req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	return forward(ctx, trajectoryClient(edge), dsecv1connect.TrajectoryServiceClient.List, req.Msg)
}

func (t trajectoryService) Follow(ctx context.Context, req *connect.Request[dsecv1.FollowTrajectoryRequest], out *connect.ServerStream[dsecv1.FollowTrajectoryResponse]) error {
	edge, err := t.s.owner("sandbox_id", req.Msg.SandboxId)
	if err != nil {
		return err
	}
	return relay(ctx, trajectoryClient(edge), dsecv1connect.TrajectoryServiceClient.Follow, req.Msg, out.Send)
}

func (t trajectoryService) ReadOutput(ctx context.Context, req *connect.Request[dsecv1.ReadTrajectoryOutputRequest], out *connect.ServerStream[dsecv1.ReadTrajectoryOutputResponse]) error {
	edge, err := t.s.owner("sandbox_id", req.Msg.SandboxId)
	if err != nil {
		return err
	}
	return relay(ctx, trajectoryClient(edge), dsecv1connect.TrajectoryServiceClient.ReadOutput, req.Msg, out.Send)
}
