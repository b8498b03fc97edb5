package client

import (
	"context"
	"errors"
	"net"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// repeatable routes change nothing more when called again, so that a call
// without an answer counts as not done.
var repeatable = map[string]bool{
	dsecv1connect.SandboxServiceGetProcedure:           true,
	dsecv1connect.SandboxServiceListProcedure:          true,
	dsecv1connect.SandboxServiceKillProcedure:          true,
	dsecv1connect.SandboxServiceExtendProcedure:        true,
	dsecv1connect.SandboxServiceUsageProcedure:         true,
	dsecv1connect.ProcessServiceAttachProcedure:        true,
	dsecv1connect.ProcessServiceListProcessesProcedure: true,
	dsecv1connect.ProcessServiceResizeProcedure:        true,
	dsecv1connect.ProcessServiceCloseStdinProcedure:    true,
	dsecv1connect.SessionServiceListSessionsProcedure:  true,
	dsecv1connect.SessionServiceCloseSessionProcedure:  true,
	dsecv1connect.FileServiceStatProcedure:             true,
	dsecv1connect.FileServiceListDirProcedure:          true,
	dsecv1connect.FileServiceReadProcedure:             true,
	dsecv1connect.FileServiceDownloadProcedure:         true,
	dsecv1connect.LayerServiceListLayersProcedure:      true,
	dsecv1connect.LayerServiceImportLayerProcedure:     true,
	dsecv1connect.AdminServiceListKeysProcedure:        true,
}

// typed makes a *dsec.Error of what a call failed with. The caller's own
// cancellation stays what it is.
func (c *Client) typed(err error, procedure string) error {
	if e, ok := apierr.Decode(err); ok {
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "cannot reach " + c.url + "; is `dsec up` running?", Err: err}
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "cannot find the host of " + c.url, Err: err}
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnauthenticated:
		return &dsec.Error{Code: dsec.CodeUnauthenticated, Message: "the server wants another API key", Err: err}
	case connect.CodeUnimplemented, connect.CodeNotFound:
		return &dsec.Error{Code: dsec.CodeUnsupported, Message: c.url + " does not offer this call; is it a DSec server of this version?", Err: err}
	}
	if repeatable[procedure] {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the connection to " + c.url + " broke", Err: err}
	}
	return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the connection to " + c.url + " broke; the call may have been done", Err: err}
}
