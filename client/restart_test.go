package client

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/apierr"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// files takes what is written, once it does not refuse any more.
type files struct {
	dsecv1connect.UnimplementedFileServiceHandler
	dsecv1connect.UnimplementedSessionServiceHandler
	r       *refusing
	written bytes.Buffer
}

func (f *files) Read(_ context.Context, _ *connect.Request[dsecv1.ReadRequest], out *connect.ServerStream[dsecv1.FileChunk]) error {
	if err := f.r.refuse(); err != nil {
		return err
	}
	return out.Send(&dsecv1.FileChunk{Data: []byte("read")})
}

func (f *files) Write(_ context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	if err := f.r.refuse(); err != nil {
		return nil, err
	}
	for in.Receive() {
		f.written.Write(in.Msg().GetData())
	}
	return connect.NewResponse(&dsecv1.WriteResponse{Size: int64(f.written.Len())}), in.Err()
}

func (f *files) RunCommands(_ context.Context, stream *connect.BidiStream[dsecv1.RunCommandRequest, dsecv1.ProcessEvent]) error {
	if _, err := stream.Receive(); err != nil {
		return err
	}
	if err := f.r.refuse(); err != nil {
		return err
	}
	return stream.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Exited{Exited: &dsecv1.Exited{Outcome: &dsecv1.Outcome{End: &dsecv1.Outcome_ExitCode{ExitCode: 4}}}}})
}

// TestRestartingServerIsWaitedFor: with every call, whether or not it could be sent
// twice, for it was accepted by none.
func TestRestartingServerIsWaitedFor(t *testing.T) {
	r := &refusing{err: apierr.Encode(dsec.Restarting("the edge shuts down")), n: 2}
	r.start = func(out *connect.ServerStream[dsecv1.ProcessEvent]) error {
		if err := r.refuse(); err != nil {
			return err
		}
		return out.Send(&dsecv1.ProcessEvent{Event: &dsecv1.ProcessEvent_Started{Started: &dsecv1.Started{ProcessId: 7}}})
	}
	f := &files{r: r}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(r))
	mux.Handle(dsecv1connect.NewProcessServiceHandler(r))
	mux.Handle(dsecv1connect.NewFileServiceHandler(f))
	mux.Handle(dsecv1connect.NewSessionServiceHandler(f))
	two := new(http.Protocols) // which streams both ways
	two.SetUnencryptedHTTP2(true)
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.Protocols = two
	srv.Start()
	t.Cleanup(srv.Close)
	c, err := New(Options{URL: srv.URL, APIKey: "e2b_x", Attempts: 1, Transport: &http.Transport{Protocols: two}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	sb := c.Sandbox("x")
	for name, do := range map[string]func() error{
		"create": func() error { _, err := c.CreateSandbox(t.Context(), SandboxOptions{}); return err },
		"output": func() error { _, _, err := sb.Command("true").Output(t.Context()); return err },
		"action": func() error {
			cmd := sb.Command("true")
			cmd.ActionID = "a"
			_, _, err := cmd.Output(t.Context())
			return err
		},
		"start": func() error { _, err := sb.Command("true").Detach(t.Context()); return err },
		"read": func() error {
			data, err := sb.ReadFile(t.Context(), "/x")
			if string(data) != "read" {
				t.Errorf("read %q", data)
			}
			return err
		},
		"write": func() error {
			f.written.Reset()
			err := sb.WriteFile(t.Context(), "/x", []byte("data"), 0)
			if f.written.String() != "data" {
				t.Errorf("wrote %q", f.written.String())
			}
			return err
		},
		"session": func() error {
			o, err := sb.Session("s").Run(t.Context(), "true", 0, nil, nil)
			if err == nil && o.Code != 4 {
				t.Errorf("session: %+v", o)
			}
			return err
		},
	} {
		r.calls.Store(0)
		if err := do(); err != nil || r.calls.Load() != 3 {
			t.Errorf("%s: %v after %d calls", name, err, r.calls.Load())
		}
	}
	// What comes once is not sent again: some of it is gone.
	r.calls.Store(0)
	_, err = sb.Write(t.Context(), "/x", io.MultiReader(strings.NewReader("once")), WriteOptions{})
	if err == nil || !restarting(err) || r.calls.Load() != 1 {
		t.Errorf("%v after %d calls", err, r.calls.Load())
	}
}

// TestNobodySignsWithNoSecret: what is no secret verifies nothing.
func TestNobodySignsWithNoSecret(t *testing.T) {
	stamp := strconv.FormatInt(time.Now().Unix(), 10)
	for size, want := range map[int]dsec.Code{0: dsec.CodeInvalid, 1: dsec.CodeInvalid, 23: dsec.CodeInvalid, 24: "", 64: "", 65: dsec.CodeInvalid} {
		key := bytes.Repeat([]byte{0}, size)
		mac := hmac.New(sha256.New, key)
		_, _ = fmt.Fprintf(mac, "id.%s.body", stamp)
		h := http.Header{
			"Webhook-Id": {"id"}, "Webhook-Timestamp": {stamp},
			"Webhook-Signature": {"v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))},
		}
		for _, prefix := range []string{"", "whsec_"} {
			err := VerifyWebhook(prefix+base64.StdEncoding.EncodeToString(key), h, []byte("body"))
			if (err == nil) != (want == "") || err != nil && dsec.CodeOf(err) != want {
				t.Errorf("%q and %d bytes: %v, want %q", prefix, size, err, want)
			}
		}
	}
}
