package client

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// reading has a command that ends once it has its whole input, before whoever gave it that is answered.
type reading struct {
	dsecv1connect.UnimplementedProcessServiceHandler
	whole, ended chan struct{}
	left         chan bool
}

func (r *reading) Start(_ context.Context, _ *connect.Request[dsecv1.StartRequest], out *connect.ServerStream[dsecv1.ProcessEvent]) error {
	if err := out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: 7}}}); err != nil {
		return err
	}
	<-r.whole
	defer close(r.ended)
	return out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: &dsecv1.Outcome{End: &dsecv1.Outcome_ExitCode{ExitCode: 3}}}}})
}

func (r *reading) StreamStdin(ctx context.Context, in *connect.ClientStream[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	for in.Receive() {
		if in.Msg().Eof {
			close(r.whole)
		}
	}
	<-r.ended
	select {
	case <-ctx.Done():
		r.left <- true
	case <-time.After(500 * time.Millisecond): // it would leave at once
		r.left <- false
	}
	return connect.NewResponse(new(dsecv1.WriteStdinResponse)), in.Err()
}

// TestAnswerToTheInput: who waits for a command does not leave the call that gave it its input without an
// answer: the log would not know what came of that, and a replay would end there.
func TestAnswerToTheInput(t *testing.T) {
	r := &reading{whole: make(chan struct{}), ended: make(chan struct{}), left: make(chan bool, 1)}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewProcessServiceHandler(r))
	srv := httptest.NewServer(mux)
	defer srv.Close()
	c, err := New(Options{URL: srv.URL, APIKey: "e2b_x"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cmd := c.Sandbox("x").Command("cat")
	cmd.Stdin, cmd.Stdout = strings.NewReader("input"), io.Discard
	if o, err := cmd.Run(t.Context()); err != nil || o.Code != 3 {
		t.Errorf("%+v, %v", o, err)
	}
	if <-r.left {
		t.Error("it left before it was answered")
	}
}
