package edge

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec/internal/apierr"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// apiVersion is the version of the edge API.
const apiVersion = 1

// maxMessage bounds one message from an apiserver: argv and env of a command,
// or a batch of creates, with room to spare.
const maxMessage = 16 << 20

// Handler serves the edge API and /healthz. No call sends both ways at once, so
// that HTTP/1.1 does. /metrics belongs to the process.
func (e *Edge) Handler() http.Handler {
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{
		connect.WithInterceptors(errorInterceptor{e}),
		daemon.DataCodec(),
		connect.WithReadMaxBytes(maxMessage),
		// Compression between two processes of one site costs more than it saves.
		connect.WithCompression("gzip", nil, nil),
	}
	mux.Handle(dsecv1connect.NewEdgeServiceHandler(service{e}, opts...))
	mux.Handle(dsecv1connect.NewProcessServiceHandler(processService{e}, opts...))
	mux.Handle(dsecv1connect.NewSessionServiceHandler(sessionService{e: e}, opts...))
	mux.Handle(dsecv1connect.NewFileServiceHandler(fileService{e}, opts...))
	mux.Handle(dsecv1connect.NewTrajectoryServiceHandler(trajectoryService{e}, opts...))
	mux.HandleFunc("GET /healthz", e.health)
	return daemon.HoldAnswers(answersUploads(mux))
}

// uploads are the calls with a stream of requests.
var uploads = map[string]bool{
	dsecv1connect.EdgeServiceBuildLayerProcedure:     true,
	dsecv1connect.FileServiceWriteProcedure:          true,
	dsecv1connect.FileServiceUploadProcedure:         true,
	dsecv1connect.ProcessServiceStreamStdinProcedure: true,
}

// answersUploads has an upload be answered as soon as it failed: over HTTP/1.1 the
// server, and the protocol library, would wait for more of it before that.
func answersUploads(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 && uploads[r.URL.Path] && http.NewResponseController(w).EnableFullDuplex() == nil {
			r.Body = leftOpen{r.Body}
		}
		next.ServeHTTP(w, r)
	})
}

// leftOpen is a body that the server closes, once the answer is sent.
type leftOpen struct{ io.ReadCloser }

// Close implements io.Closer.
func (leftOpen) Close() error { return nil }

func (e *Edge) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	if err := e.Ready(); err != nil {
		http.Error(w, "not ready: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = w.Write([]byte("ok\n"))
}

// errorInterceptor turns every error of a handler into what may leave the
// process, counts it, and logs those that are our fault.
type errorInterceptor struct{ e *Edge }

func (i errorInterceptor) encode(procedure string, err error) error {
	if err == nil {
		return nil
	}
	safe := apierr.Safe(err)
	i.e.metrics.errors.WithLabelValues(string(safe.Code)).Inc()
	if safe.Err != nil || asError(err) == nil {
		level := slog.LevelWarn
		if errors.Is(err, context.Canceled) {
			level = slog.LevelDebug // its caller has left: mostly input that an ended command did not want
		}
		i.e.log.Log(context.Background(), level, "request failed", "procedure", procedure, "code", safe.Code, "err", err, "cause", safe.Err)
	}
	return apierr.Encode(err)
}

// WrapUnary implements connect.Interceptor.
func (i errorInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		ctx, mark := markable(ctx, req.Header())
		res, err := next(ctx, req)
		if err != nil {
			return nil, i.encode(req.Spec().Procedure, err)
		}
		if mark != nil && mark.yes {
			res.Header().Set(replayedHeader, "1")
		}
		return res, nil
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (i errorInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		ctx, mark := markable(ctx, conn.RequestHeader())
		if mark != nil {
			mark.header = conn.ResponseHeader()
		}
		return i.encode(conn.Spec().Procedure, next(ctx, conn))
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (i errorInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}
