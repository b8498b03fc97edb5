package test

import (
	"context"
	"net"
	"net/http"
	"testing"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec/client"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// BenchmarkHop compares an exec of nothing at an edge, through an apiserver
// that reaches it by a socket, and through both halves in one process: the
// differences are what the apiserver costs.
func BenchmarkHop(b *testing.B) {
	edge, api, _ := halves(b)
	sb, err := api.client(b).CreateSandbox(b.Context(), client.SandboxOptions{Backend: "fake"})
	check(b, err)
	direct := dsecv1connect.NewProcessServiceClient(&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", edge.ready)
		},
	}}, "http://edge")
	b.Run("edge", func(b *testing.B) {
		for b.Loop() {
			req := connect.NewRequest(&dsecv1.ExecRequest{SandboxId: string(sb.ID()), Command: &dsecv1.Command{Argv: []string{"true"}}})
			req.Header().Set("Dsec-Project", "default")
			_, err := direct.Exec(b.Context(), req)
			check(b, err)
		}
	})
	b.Run("apiserver", func(b *testing.B) { benchExec(b, sb) })
	b.Run("apiserver-parallel", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if _, _, err := sb.Command("true").Output(b.Context()); err != nil {
					b.Error(err)
				}
			}
		})
	})
	one := up(b)
	sb, err = one.client(b).CreateSandbox(b.Context(), client.SandboxOptions{Backend: "fake"})
	check(b, err)
	b.Run("up", func(b *testing.B) { benchExec(b, sb) })
	sess, err := sb.OpenSession(b.Context(), client.SessionOptions{})
	check(b, err)
	b.Run("up-session", func(b *testing.B) {
		for b.Loop() {
			_, err := sess.Run(b.Context(), "true", 0, nil, nil)
			check(b, err)
		}
	})
	b.Run("up-create-kill", func(b *testing.B) {
		c := one.client(b)
		for b.Loop() {
			sb, err := c.CreateSandbox(b.Context(), client.SandboxOptions{Backend: "fake"})
			check(b, err)
			check(b, sb.Kill(b.Context()))
		}
	})
}

func benchExec(b *testing.B, sb *client.Sandbox) {
	for b.Loop() {
		_, _, err := sb.Command("true").Output(b.Context())
		check(b, err)
	}
}
