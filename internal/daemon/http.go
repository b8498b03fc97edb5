package daemon

import (
	"log/slog"
	"net/http"
	"time"
)

// maxHeader is the most bytes of a request's header.
const maxHeader = 32 << 10

// HTTPServer is an http.Server for h with the limits that keep a slow or
// oversized client, or one of very many connections, from holding the apiserver:
// HTTP/1.1 and HTTP/2, the latter also without TLS.
func HTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    maxHeader,
		ConnState:         boundConns().state,
		Protocols:         new(http.Protocols),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 4096, SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetHTTP2(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	return srv
}
