package client

import (
	"context"
	"crypto/tls"
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
	unavailable := func(message string) error {
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: message, Err: err}
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return unavailable("cannot find the host of " + c.url)
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return unavailable(c.url + " does not speak TLS; is it an http:// one?")
	}
	if e, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return unavailable("the certificate of " + c.url + " is not trusted: " + e.Err.Error())
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return unavailable("cannot reach " + c.url + "; is `dsec up` running?")
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
