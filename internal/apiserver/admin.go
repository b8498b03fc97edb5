package apiserver

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/iam"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// adminService is behind the gate's own check that the key is an admin's.
type adminService struct{ s *Server }

func (a adminService) CreateKey(ctx context.Context, req *connect.Request[dsecv1.CreateKeyRequest]) (*connect.Response[dsecv1.CreateKeyResponse], error) {
	var expires time.Time
	if t := req.Msg.Expires; t != nil {
		if !t.IsValid() {
			return nil, dsec.Invalid("expires", "want a time of the years 1 to 9999")
		}
		expires = t.AsTime()
	}
	k, secret, err := a.s.iam.Create(ctx, req.Msg.Project, expires)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.CreateKeyResponse{Key: keyMessage(k), Secret: secret}), nil
}

func (a adminService) ListKeys(context.Context, *connect.Request[dsecv1.ListKeysRequest]) (*connect.Response[dsecv1.ListKeysResponse], error) {
	res := &dsecv1.ListKeysResponse{}
	for _, k := range a.s.iam.List() {
		res.Keys = append(res.Keys, keyMessage(k))
	}
	return connect.NewResponse(res), nil
}

func (a adminService) RevokeKey(ctx context.Context, req *connect.Request[dsecv1.RevokeKeyRequest]) (*connect.Response[dsecv1.RevokeKeyResponse], error) {
	if err := a.s.iam.Revoke(ctx, req.Msg.Id, principal(ctx)); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.RevokeKeyResponse{}), nil
}

func keyMessage(k iam.Key) *dsecv1.Key {
	m := &dsecv1.Key{Id: k.ID, Project: k.Project, Admin: k.Admin, Created: timestamppb.New(k.Created)}
	if !k.Expires.IsZero() {
		m.Expires = timestamppb.New(k.Expires)
	}
	return m
}
