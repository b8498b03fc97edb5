package edge_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/chronusapi"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// BenchmarkExecChronus is a command by chronusapi alone: what the edge adds is
// the difference to BenchmarkExecEdge.
func BenchmarkExecChronus(b *testing.B) {
	inst, err := fake.New(fake.Options{}).Create(b.Context(), backend.CreateRequest{ID: dsec.NewSandboxID("aaaaa")})
	if err != nil {
		b.Fatal(err)
	}
	c := chronusapi.NewClient(inst.Dial)
	for b.Loop() {
		s, err := c.Start(b.Context(), chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"true"}}, Orphan: true})
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = s.Next()
		}
		if !errors.Is(err, io.EOF) {
			b.Fatal(err)
		}
	}
	_ = c.Close()
	_ = inst.Destroy(b.Context())
}

// BenchmarkExecEdge is the same through the edge API over a Unix socket.
func BenchmarkExecEdge(b *testing.B) {
	n := newNode(b, nil)
	id := n.create(&dsecv1.CreateRequest{})
	l, err := net.Listen("unix", filepath.Join(b.TempDir(), "s"))
	if err != nil {
		b.Fatal(err)
	}
	srv := &http.Server{Handler: n.edge.Handler()}
	go func() { _ = srv.Serve(l) }()
	b.Cleanup(func() { _ = srv.Close() })
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
	}}}
	client := dsecv1connect.NewProcessServiceClient(hc, "http://edge", connect.WithInterceptors(withProject("p1")))
	b.ReportAllocs()
	for b.Loop() {
		res, err := client.Exec(b.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"true"}}}))
		if err != nil || res.Msg.Outcome.GetExitCode() != 0 {
			b.Fatal(res, err)
		}
	}
}

// BenchmarkCreateKill is a whole life as far as the edge has part in it.
func BenchmarkCreateKill(b *testing.B) {
	n := newNode(b, nil)
	for b.Loop() {
		n.kill(n.create(&dsecv1.CreateRequest{}))
	}
}
