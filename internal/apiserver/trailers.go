package apiserver

import (
	"net/http"
	"net/url"
	"strconv"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec/internal/apierr"
)

// Where gRPC has an error: in trailers, or, of gRPC-Web, in the header.
const (
	grpcStatus  = "Grpc-Status"
	grpcMessage = "Grpc-Message"
	grpcDetails = "Grpc-Status-Details-Bin"
)

// typeTrailers types the error of a gRPC answer that has no detail: what the protocol
// library found wrong with a request before a handler ran.
func typeTrailers(h http.Header) {
	for _, prefix := range []string{"", http.TrailerPrefix} {
		status, message := h[prefix+grpcStatus], h[prefix+grpcMessage]
		if len(status) != 1 || len(message) != 1 || len(h[prefix+grpcDetails]) > 0 {
			continue
		}
		code, err := strconv.ParseUint(status[0], 10, 32)
		if err != nil || code == 0 {
			continue
		}
		text, err := url.PathUnescape(message[0])
		if err != nil {
			text = message[0]
		}
		web := &http.Request{Method: http.MethodPost, Header: http.Header{"Content-Type": {"application/grpc-web"}}}
		typed := headerWriter{}
		_ = connect.NewErrorWriter().Write(typed, web, apierr.Encode(fromDecoder(connect.Code(code), text)))
		for _, key := range []string{grpcStatus, grpcMessage, grpcDetails} {
			h[prefix+key] = typed[key]
		}
	}
}

// headerWriter is an answer of which only the header is wanted.
type headerWriter http.Header

// Header implements http.ResponseWriter.
func (w headerWriter) Header() http.Header { return http.Header(w) }

// Write implements http.ResponseWriter.
func (w headerWriter) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements http.ResponseWriter.
func (w headerWriter) WriteHeader(int) {}
