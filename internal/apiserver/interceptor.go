package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
)

// interceptor stands around every route: what leaves it is an answer or a
// typed error, whatever happened inside.
type interceptor struct{ s *Server }

// WrapUnary implements connect.Interceptor.
func (i *interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		defer i.finish(req.Spec().Procedure, time.Now(), &err)
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (i *interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (i *interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		defer i.finish(conn.Spec().Procedure, time.Now(), &err)
		return next(ctx, typedConn{conn})
	}
}

func (i *interceptor) finish(procedure string, start time.Time, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
	}
	i.s.metrics.done(procedure, start, *err)
	if *err == nil {
		return
	}
	if e := apierr.Safe(*err); e.Code == dsec.CodeInternal {
		i.s.log.Error("call failed", "procedure", procedure, "err", *err, "cause", e.Err)
	}
	*err = apierr.Encode(*err)
}

// typedConn types the errors of a stream's decoder.
type typedConn struct{ connect.StreamingHandlerConn }

func (c typedConn) Receive(msg any) error {
	err := c.StreamingHandlerConn.Receive(msg)
	var ce *connect.Error
	if err == nil || errors.Is(err, io.EOF) || !errors.As(err, &ce) {
		return err
	}
	return fromDecoder(ce.Code(), ce.Message())
}

var _ connect.Interceptor = (*interceptor)(nil)
