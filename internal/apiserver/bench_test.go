package apiserver

import (
	"context"
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/daemon"
	"github.com/opendsec/dsec/internal/testutil"
	"github.com/opendsec/dsec/internal/watcher"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// BenchmarkForward is what the apiserver's hop costs: an exec that does
// nothing, at a stub edge directly and through an apiserver. cpu-us/op counts
// both ends of each connection and does not depend on what else runs.
func BenchmarkForward(b *testing.B) {
	for _, via := range []string{"memory", "socket"} {
		stub := newStub("fake")
		mux := http.NewServeMux()
		mux.Handle(dsecv1connect.NewEdgeServiceHandler(stub))
		mux.Handle(dsecv1connect.NewProcessServiceHandler(stub))
		endpoint := watcher.Endpoint{Name: via, Transport: &daemon.Local{Handler: mux}}
		direct := endpoint.Transport
		if via == "socket" {
			path := testutil.Dir(b) + "/edge.sock"
			l, err := daemon.ListenUnix(path)
			check(b, err)
			dial := func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", path) }
			endpoint = watcher.Endpoint{Name: via, Dial: dial}
			direct = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
			srv := daemon.HTTPServer(mux, testutil.Logger(b))
			go func() { _ = srv.Serve(l) }()
			b.Cleanup(func() { _ = srv.Close() })
		}
		req := &dsecv1.ExecRequest{SandboxId: string(dsec.NewSandboxID(stub.id)), Command: &dsecv1.Command{Argv: []string{"true"}}}
		b.Run(via+"/edge", func(b *testing.B) {
			edge := dsecv1connect.NewProcessServiceClient(&http.Client{Transport: direct}, "http://edge")
			cpu(b, func() {
				_, err := edge.Exec(b.Context(), connect.NewRequest(req))
				check(b, err)
			})
		})
		b.Run(via+"/apiserver", func(b *testing.B) {
			r := newRigOver(b, []watcher.Endpoint{endpoint})
			through := dsecv1connect.NewProcessServiceClient(http.DefaultClient, r.url)
			cpu(b, func() {
				call := connect.NewRequest(req)
				call.Header().Set("Authorization", "Bearer "+r.secret)
				_, err := through.Exec(b.Context(), call)
				check(b, err)
			})
		})
	}
}

func cpu(b *testing.B, f func()) {
	f()
	b.ReportAllocs()
	before := used(b)
	for b.Loop() {
		f()
	}
	b.ReportMetric(float64((used(b)-before).Microseconds())/float64(b.N), "cpu-us/op")
}

func used(b *testing.B) time.Duration {
	var u syscall.Rusage
	check(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
