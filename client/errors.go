package client

import (
	"context"
	"errors"
	"net"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
)

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
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "cannot find the host of " + c.url, Err: err}
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnauthenticated:
		return &dsec.Error{Code: dsec.CodeUnauthenticated, Message: "the server wants another API key", Err: err}
	case connect.CodeUnimplemented, connect.CodeNotFound:
		return &dsec.Error{Code: dsec.CodeUnsupported, Message: c.url + " does not offer this call; is it a DSec server of this version?", Err: err}
	}
	if apierr.Repeatable(procedure) {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the connection to " + c.url + " broke", Err: err}
	}
	return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the connection to " + c.url + " broke; the call may have been done", Err: err}
}
