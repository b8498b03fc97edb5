package apiserver

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// pipes is a listener whose connections are in memory.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error { close(p.closed); return nil }

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{} }

func (p *pipes) dial(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours, nil
}

// A client has so much time for the next piece of an upload while that is waited for.
// Whoever takes the pieces may take his time: an import waits for its turn.
func TestAnUploadThatIsTakenSlowly(t *testing.T) {
	h1, h2 := new(http.Protocols), new(http.Protocols)
	h1.SetHTTP1(true)
	h2.SetUnencryptedHTTP2(true)
	for name, protocols := range map[string]*http.Protocols{"HTTP/1.1": h1, "HTTP/2": h2} {
		for _, procedure := range []string{dsecv1connect.LayerServiceImportLayerProcedure, dsecv1connect.FileServiceUploadProcedure} {
			t.Run(name+procedure, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l := &pipes{conns: make(chan net.Conn, 1), closed: make(chan struct{})}
					srv := &http.Server{Protocols: protocols, Handler: bodyDeadlines(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						for range 3 {
							if _, err := io.ReadFull(r.Body, make([]byte, 1)); err != nil {
								t.Error(err)
							}
							time.Sleep(2 * uploadReadTimeout) //nolint:forbidigo // of the bubble's clock
						}
						if _, err := r.Body.Read(make([]byte, 1)); err == nil || err == io.EOF { // control
							t.Errorf("nothing came for long: %v", err)
						}
					}))}
					go func() { _ = srv.Serve(l) }()
					defer srv.Close()
					tr := &http.Transport{Protocols: protocols, DialContext: l.dial}
					defer tr.CloseIdleConnections()
					body, say := io.Pipe()
					defer say.Close()
					go func() {
						for range 3 {
							_, _ = say.Write([]byte("x"))
							time.Sleep(2 * uploadReadTimeout) //nolint:forbidigo // of the bubble's clock
						}
					}()
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://x"+procedure, body)
					check(t, err)
					res, err := tr.RoundTrip(req)
					check(t, err)
					_ = res.Body.Close()
				})
			})
		}
	}
}
