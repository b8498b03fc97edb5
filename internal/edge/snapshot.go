package edge

import (
	"context"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var errNoSnapshot = dsec.Errorf(dsec.CodeUnsupported, "sandboxes cannot be packed yet")

func (v service) PackSandbox(context.Context, *connect.Request[dsecv1.PackSandboxRequest]) (*connect.Response[dsecv1.PackSandboxResponse], error) {
	return nil, errNoSnapshot
}

func (v service) RedirectSandbox(context.Context, *connect.Request[dsecv1.RedirectSandboxRequest]) (*connect.Response[dsecv1.RedirectSandboxResponse], error) {
	return nil, errNoSnapshot
}
