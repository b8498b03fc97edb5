package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/opendsec/dsec"
)

// statusError is an answer that is not the one that was asked for.
type statusError struct {
	status int
	after  time.Duration // how long the registry wants to be left alone; 0 is not said
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d", e.status) }

// status makes an error of an answer, whose text is not looked at.
func status(res *http.Response) error {
	e := &statusError{status: res.StatusCode}
	if s, err := strconv.Atoi(res.Header.Get("Retry-After")); err == nil && s > 0 {
		e.after = time.Duration(min(s, 3600)) * time.Second
	}
	return e
}

// statusOf is the status that an error is of; 0 is none.
func statusOf(err error) int {
	if e, ok := errors.AsType[*statusError](err); ok {
		return e.status
	}
	if e, ok := errors.AsType[*transport.Error](err); ok {
		return e.StatusCode
	}
	return 0
}

// bare takes URLs, which can hold what opens them, and answers' texts out of an
// error.
func bare(err error) error {
	// The library tries some hosts without TLS after it: this says more than that it
	// may not.
	if e, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return e
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	if e, ok := errors.AsType[*transport.Error](err); ok {
		return &statusError{status: e.StatusCode}
	}
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}

// passing reports whether the same request may go well a moment later.
func passing(err error) bool {
	if _, ok := errors.AsType[*dsec.Error](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return false
	}
	if e, ok := errors.AsType[*net.DNSError](err); ok && e.IsNotFound {
		return false
	}
	switch s := statusOf(err); s {
	case 0, http.StatusRequestTimeout, http.StatusTooManyRequests:
		return true
	default:
		return s >= 500
	}
}

// again does f until it goes well, fails for good, or was tried often enough.
func (c *Client) again(ctx context.Context, f func() error) error {
	wait := c.cfg.times.backoff
	for try := 1; ; try++ {
		err := bareOf(f())
		if err == nil || try == attempts || !passing(err) {
			return err
		}
		d := wait/2 + rand.N(wait) // many importers shall not come back at once
		if e, ok := errors.AsType[*statusError](err); ok {
			d = max(d, e.after)
		}
		if d > c.cfg.times.longest {
			return err // the registry wants more patience than a caller has
		}
		if !sleep(ctx, d) {
			return context.Cause(ctx)
		}
		wait = min(2*wait, c.cfg.times.longest/2)
	}
}

func bareOf(err error) error {
	if err == nil {
		return nil
	}
	return bare(err)
}

// sleep reports whether it got to its end.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// typed says of an error what a caller may know, in the field ref.
func typed(host, what string, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		named := *e
		if named.Field == "" {
			named.Field = "ref"
		}
		return &named
	}
	fail := func(code dsec.Code, format string, args ...any) error {
		return &dsec.Error{Code: code, Field: "ref", Message: fmt.Sprintf("registry %.200s: ", host) + fmt.Sprintf(format, args...), Err: err}
	}
	switch s := statusOf(err); {
	case s == http.StatusUnauthorized:
		return fail(dsec.CodeUnauthenticated, "wants credentials for %s, or others; or there is no such image", what)
	case s == http.StatusForbidden:
		return fail(dsec.CodeDenied, "%s is not to be read with these credentials", what)
	case s == http.StatusNotFound || s == http.StatusGone:
		return fail(dsec.CodeNotFound, "has no %s", what)
	case s == http.StatusTooManyRequests:
		return fail(dsec.CodeExhausted, "takes no more requests now")
	case s != 0:
		return fail(dsec.CodeUnavailable, "answered status %d for %s", s, what)
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fail(dsec.CodeUnavailable, "the import was given up")
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return fail(dsec.CodeUnavailable, "its certificate is not to be trusted")
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return fail(dsec.CodeUnavailable, "its name cannot be resolved")
	}
	return fail(dsec.CodeUnavailable, "did not answer for %s", what)
}
