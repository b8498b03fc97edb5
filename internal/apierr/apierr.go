// Package apierr carries a *dsec.Error over Connect and back: the code of the
// Connect protocol is derived from the platform's own, which travels with the
// field at fault in an ErrorDetail.
package apierr

import (
	"context"
	"errors"
	"strings"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

var connectCodes = func() map[dsec.Code]connect.Code {
	m := make(map[dsec.Code]connect.Code, len(dsec.Codes))
	for code, info := range dsec.Codes {
		var c connect.Code
		if err := c.UnmarshalText([]byte(info.Connect)); err != nil {
			panic(err) // a row of the table is wrong; a test reads them all
		}
		m[code] = c
	}
	return m
}()

// Detail is the ErrorDetail of e.
func Detail(e *dsec.Error) *dsecv1.ErrorDetail {
	return &dsecv1.ErrorDetail{Code: string(e.Code), Field: e.Field, Retryable: dsec.Codes[e.Code].Retry, MovedTo: string(e.MovedTo), Restarting: e.Restarting}
}

// Encode turns any error into what may leave the process: a *dsec.Error with
// its detail; anything else as an internal error without a word of its text.
func Encode(err error) *connect.Error {
	e := Safe(err)
	out := connect.NewError(connectCodes[e.Code], errors.New(e.Error()))
	if d, derr := connect.NewErrorDetail(Detail(e)); derr == nil {
		out.AddDetail(d)
	}
	return out
}

// Safe is the first *dsec.Error in err's chain, or an internal one that wraps err.
func Safe(err error) *dsec.Error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		if _, ok := dsec.Codes[e.Code]; ok {
			return e
		}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return &dsec.Error{Code: dsec.CodeOutcomeUnknown, Message: "the call was given up before its end", Err: err}
	}
	return &dsec.Error{Code: dsec.CodeInternal, Message: "internal error", Err: err}
}

// Decode returns the *dsec.Error that err carries as a detail. ok is false
// where it carries none: then it did not come from a handler, and says nothing
// about whether the request was accepted.
func Decode(err error) (e *dsec.Error, ok bool) {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return nil, false
	}
	for _, d := range ce.Details() {
		msg, err := d.Value()
		if err != nil {
			continue
		}
		if detail, isDetail := msg.(*dsecv1.ErrorDetail); isDetail {
			return FromDetail(detail, ce.Message()), true
		}
	}
	return nil, false
}

// FromDetail makes an Error of a detail and the message beside it. A code of a
// newer version counts as internal.
func FromDetail(d *dsecv1.ErrorDetail, message string) *dsec.Error {
	e := &dsec.Error{Code: dsec.Code(d.GetCode()), Field: d.GetField(), Message: message, MovedTo: dsec.SandboxID(d.GetMovedTo()), Restarting: d.GetRestarting()}
	if _, ok := dsec.Codes[e.Code]; !ok {
		e.Code = dsec.CodeInternal
	}
	if e.Field != "" {
		e.Message = strings.TrimPrefix(message, e.Field+": ")
	}
	return e
}
