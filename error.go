package dsec

import (
	"errors"
	"fmt"
)

// Code says whose fault an error is and what a caller may do about it. The
// list is closed; codes are on the wire and never renamed.
type Code string

// The codes. See the table in this file for what each maps to.
const (
	CodeInvalid         Code = "invalid"         // the request can never work as written
	CodeUnauthenticated Code = "unauthenticated" // no key, or not a known one
	CodeDenied          Code = "denied"          // known, but not allowed
	CodeNotFound        Code = "not_found"       // no such thing, or not yours
	CodeConflict        Code = "conflict"        // the thing exists differently, or its state forbids it
	CodeDiverged        Code = "diverged"        // same action id, different request
	CodeOutcomeUnknown  Code = "outcome_unknown" // it may have run; the platform lost the result
	CodeUnsupported     Code = "unsupported"     // this backend, node or version cannot
	CodeExhausted       Code = "exhausted"       // a limit is reached now; nothing was done
	CodeUnavailable     Code = "unavailable"     // the platform cannot now; nothing was done
	CodeLost            Code = "lost"            // the sandbox is gone through no act of the caller
	CodeInternal        Code = "internal"        // our bug
)

// Platform reports whether an error of this code is the platform's own fault, so
// that an attempt that met it says nothing and must not be scored. The others are
// about the request, or about a sandbox as what runs in it left it.
func (c Code) Platform() bool {
	switch c {
	case CodeOutcomeUnknown, CodeUnavailable, CodeLost, CodeInternal:
		return true
	}
	return false
}

// CodeInfo is one row of the error table.
type CodeInfo struct {
	HTTP    int    // HTTP status; what the Connect protocol gives to Connect below
	Connect string // code of the Connect protocol
	Python  string // exception class in libdsec
	Exit    int    // exit status of the CLI
	// Retry is true where the request was provably not accepted, so that an
	// SDK may send it again.
	Retry bool
}

// Codes is the one table from which every mapping is read.
var Codes = map[Code]CodeInfo{
	CodeInvalid:         {400, "invalid_argument", "InvalidError", 2, false},
	CodeUnauthenticated: {401, "unauthenticated", "UnauthenticatedError", 77, false},
	CodeDenied:          {403, "permission_denied", "DeniedError", 77, false},
	CodeNotFound:        {404, "not_found", "NotFoundError", 66, false},
	CodeConflict:        {409, "already_exists", "ConflictError", 73, false},
	CodeDiverged:        {409, "aborted", "DivergedError", 73, false},
	CodeOutcomeUnknown:  {500, "unknown", "OutcomeUnknownError", 70, false},
	CodeUnsupported:     {501, "unimplemented", "UnsupportedError", 69, false},
	CodeExhausted:       {429, "resource_exhausted", "ExhaustedError", 75, true},
	CodeUnavailable:     {503, "unavailable", "UnavailableError", 75, true},
	CodeLost:            {500, "data_loss", "SandboxLost", 74, false},
	CodeInternal:        {500, "internal", "InternalError", 70, false},
}

// Error is every error that the platform shows to a user. Message names the
// field or thing at fault and what was expected; it never holds a host path,
// a secret or another caller's name. Err, where set, is for the log only.
type Error struct {
	Code    Code
	Field   string // field of the request at fault, dotted; empty if none is
	Message string
	// MovedTo is the sandbox that has taken the place of the one that was named.
	MovedTo SandboxID
	// Restarting says that the server, or the node, is being restarted. Where the code is
	// unavailable the request was not accepted: any may be made again once it is back.
	Restarting bool
	Err        error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Field != "" {
		return fmt.Sprintf("%s: %s", e.Field, e.Message)
	}
	return e.Message
}

// Unwrap returns the cause, for logs and errors.Is.
func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an Error with the given code. A %w operand becomes Err and its
// text part of the message, so wrap only causes that a user may read.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Err: errors.Unwrap(err)}
}

// Restarting makes an unavailable error of a server or node that is being restarted.
func Restarting(message string) *Error {
	return &Error{Code: CodeUnavailable, Message: message, Restarting: true}
}

// Invalid makes an invalid error about one field of the request.
func Invalid(field, format string, args ...any) *Error {
	return &Error{Code: CodeInvalid, Field: field, Message: fmt.Sprintf(format, args...)}
}

// CodeOf returns the code of the first Error in err's chain, and internal for
// any other error. It panics on nil, which has no code.
func CodeOf(err error) Code {
	if err == nil {
		panic("dsec: CodeOf(nil)")
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return CodeInternal
}

// Retryable reports whether err says that the request was provably not
// accepted, so that sending it again cannot do it twice.
func Retryable(err error) bool { return Codes[CodeOf(err)].Retry }
