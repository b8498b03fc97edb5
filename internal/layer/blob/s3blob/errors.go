package s3blob

import (
	"context"
	"errors"
	"io"
	"net/http"
	"regexp"

	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/opendsec/dsec"
)

// intent is what a failed request was made for.
type intent int

const (
	reading intent = iota
	writing
)

// apiCode is of a code that may be shown.
var apiCode = regexp.MustCompile(`^[A-Za-z0-9.]{1,64}$`)

const noSuchUpload = "NoSuchUpload"

// storeError gives an error of the SDK its code. Its text is for the log.
func (s *Store) storeError(ctx context.Context, what intent, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok { // of the credentials
		return &dsec.Error{Code: dsec.CodeUnavailable, Message: "blob store: its credentials: " + e.Error(), Err: e}
	}
	code, message := dsec.CodeUnavailable, "it cannot be reached"
	status, answered := statusOf(err)
	switch api := apiCodeOf(err); {
	case errors.Is(err, errStalled):
		message = "it does not answer in time"
	case errors.Is(err, errTooLong):
		code, message = dsec.CodeInternal, "it answers what it must not"
	case answered:
		code, message = codeOf(what, status, api)
		if api != "" && code != dsec.CodeNotFound {
			message += " (" + api + ")"
		}
	case isMalformed(err):
		code, message = dsec.CodeInternal, "it answers what it must not"
	}
	return &dsec.Error{Code: code, Message: "blob store: " + message, Err: err}
}

// statusOf is that of an answer, which a request that could not be sent has not.
func statusOf(err error) (status int, answered bool) {
	if e, ok := errors.AsType[*answerError](err); ok {
		return e.status, true
	}
	if e, ok := errors.AsType[*smithyhttp.ResponseError](err); ok && e.Response != nil && e.Response.Response != nil {
		status = e.HTTPStatusCode()
	}
	return status, status != 0
}

// apiCodeOf is empty where the answer has none: what a proxy says in place of the
// server. The SDK makes one up of the status.
func apiCodeOf(err error) string {
	if e, ok := errors.AsType[*answerError](err); ok {
		return e.code
	}
	e, ok := errors.AsType[smithy.APIError](err)
	if !ok || !apiCode.MatchString(e.ErrorCode()) || e.ErrorCode() == notFound && hasPage(err) {
		return ""
	}
	return e.ErrorCode()
}

// notFound is what the answer to a head, which has no body, comes to.
const notFound = "NotFound"

// hasPage is of an answer that says to be a page of a site: mostly a proxy's, but
// some servers never say otherwise.
func hasPage(err error) bool {
	e, ok := errors.AsType[*smithyhttp.ResponseError](err)
	return ok && e.Response != nil && e.Response.Response != nil && isPage(e.Response.Header.Get("Content-Type"))
}

// isMalformed is of an answer that the SDK could not read, unless it was cut off.
func isMalformed(err error) bool {
	_, ok := errors.AsType[*smithy.DeserializationError](err)
	return ok && !errors.Is(err, io.ErrUnexpectedEOF)
}

// codeOf gives the code of an HTTP status, and of the error code in the answer,
// which is empty where the answer is not an object storage's.
func codeOf(what intent, status int, api string) (dsec.Code, string) {
	switch api {
	case "NoSuchKey", notFound:
		return dsec.CodeNotFound, "no such blob"
	case noSuchUpload:
		return dsec.CodeUnavailable, "the upload was ended by somebody else"
	case "NoSuchBucket":
		return dsec.CodeUnavailable, "its bucket is gone"
	case "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage":
		return dsec.CodeExhausted, "it is full"
	case "EntityTooLarge":
		return dsec.CodeUnsupported, "it has no objects of this size"
	case "NotImplemented":
		return dsec.CodeUnsupported, "it cannot do this"
	case "ConditionalRequestConflict", "OperationAborted", "SlowDown", "RequestTimeout":
		return dsec.CodeUnavailable, "it is busy"
	case "RequestTimeTooSkewed":
		return dsec.CodeUnavailable, "its clock and this host's differ"
	case "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "XAdminUserNotFound":
		return dsec.CodeUnavailable, "it refuses the credentials"
	case "AccessDenied", "MethodNotAllowed":
		if what == writing {
			return dsec.CodeUnsupported, "it is read-only to these credentials"
		}
	}
	switch {
	case status == http.StatusConflict, status == http.StatusPreconditionFailed:
		return dsec.CodeUnavailable, "another writer was in the way"
	case status == http.StatusInsufficientStorage:
		return dsec.CodeExhausted, "it is full"
	case status == http.StatusTooManyRequests, status == http.StatusRequestTimeout, status >= 500:
		return dsec.CodeUnavailable, "it fails or is busy"
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return dsec.CodeUnavailable, "it refuses the credentials"
	case status == http.StatusProxyAuthRequired:
		return dsec.CodeUnavailable, "a proxy refuses"
	}
	return dsec.CodeInternal, "it answers what it must not"
}

// bucketError is storeError of the first request, whose faults are the configuration's.
func (s *Store) bucketError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return s.storeError(ctx, reading, err)
	}
	status, answered := statusOf(err)
	if !answered {
		return s.storeError(ctx, reading, err)
	}
	e := &dsec.Error{Code: dsec.CodeInvalid, Field: storeField, Err: err}
	switch api := apiCodeOf(err); {
	case api == "NoSuchBucket":
		e.Message = "the server has no such bucket"
	case api == "InvalidAccessKeyId", api == "XAdminUserNotFound", status == http.StatusForbidden, status == http.StatusUnauthorized:
		e.Message, e.Field = "the server refuses them for this bucket", "store_credentials"
	case api == "AuthorizationHeaderMalformed", api == "PermanentRedirect":
		e.Message = "the server does not have this bucket in this region or by this endpoint"
	case api != "" && status < 500 && status != http.StatusTooManyRequests && status != http.StatusRequestTimeout:
		e.Message = "the server refuses this bucket (" + api + ")"
	default:
		return s.storeError(ctx, reading, err)
	}
	return e
}
