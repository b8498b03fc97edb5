package apiserver

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

type fileService struct{ s *Server }

func (f fileService) Stat(ctx context.Context, req *connect.Request[dsecv1.StatRequest]) (*connect.Response[dsecv1.StatResponse], error) {
	return unary(ctx, f.s, req, fileClient, dsecv1connect.FileServiceClient.Stat)
}

func (f fileService) ListDir(ctx context.Context, req *connect.Request[dsecv1.ListDirRequest]) (*connect.Response[dsecv1.ListDirResponse], error) {
	return unary(ctx, f.s, req, fileClient, dsecv1connect.FileServiceClient.ListDir)
}

func (f fileService) Mkdir(ctx context.Context, req *connect.Request[dsecv1.MkdirRequest]) (*connect.Response[dsecv1.MkdirResponse], error) {
	return unary(ctx, f.s, req, fileClient, dsecv1connect.FileServiceClient.Mkdir)
}

func (f fileService) Rename(ctx context.Context, req *connect.Request[dsecv1.RenameRequest]) (*connect.Response[dsecv1.RenameResponse], error) {
	return unary(ctx, f.s, req, fileClient, dsecv1connect.FileServiceClient.Rename)
}

func (f fileService) Remove(ctx context.Context, req *connect.Request[dsecv1.RemoveRequest]) (*connect.Response[dsecv1.RemoveResponse], error) {
	return unary(ctx, f.s, req, fileClient, dsecv1connect.FileServiceClient.Remove)
}

func (f fileService) Read(ctx context.Context, req *connect.Request[dsecv1.ReadRequest], out *connect.ServerStream[dsecv1.FileChunk]) error {
	return download(ctx, f.s, req.Msg, out, fileClient, dsecv1connect.FileServiceClient.Read)
}

func (f fileService) Download(ctx context.Context, req *connect.Request[dsecv1.DownloadRequest], out *connect.ServerStream[dsecv1.FileChunk]) error {
	return download(ctx, f.s, req.Msg, out, fileClient, dsecv1connect.FileServiceClient.Download)
}

func (f fileService) Write(ctx context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	msg, err := first(in)
	if err != nil {
		return nil, err
	}
	edge, err := f.s.owner("open.sandbox_id", msg.GetOpen().GetSandboxId())
	if err != nil {
		return nil, err
	}
	return upload(ctx, in, edge.File.Write)
}

func (f fileService) Upload(ctx context.Context, in *connect.ClientStream[dsecv1.UploadRequest]) (*connect.Response[dsecv1.UploadResponse], error) {
	msg, err := first(in)
	if err != nil {
		return nil, err
	}
	edge, err := f.s.owner("open.sandbox_id", msg.GetOpen().GetSandboxId())
	if err != nil {
		return nil, err
	}
	return upload(ctx, in, edge.File.Upload)
}
