package edge_test

import (
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/edge"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestBackendIsTriedAgain: what failed at the start works later, and until then
// the edge says that it is not ready.
func TestBackendIsTriedAgain(t *testing.T) {
	var broken atomic.Bool
	broken.Store(true)
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnProbe = func() error {
			if broken.Load() {
				return errors.New("the disk is full")
			}
			return nil
		}
	})
	health := func() (int, string) {
		res, err := n.http.Get("http://edge/healthz")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		text, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(text)
	}
	if status, text := health(); status != http.StatusServiceUnavailable || !strings.Contains(text, "fake: the probe failed") {
		t.Errorf("healthz without a backend: %d %s", status, text)
	}
	_, err := n.tryCreate(&dsecv1.CreateRequest{})
	wantError(t, err, dsec.CodeUnsupported, "backend")
	broken.Store(false)
	testutil.WaitFor(t, 30*time.Second, "the backend", func() error {
		_, err := n.tryCreate(&dsecv1.CreateRequest{})
		return err
	})
	if status, text := health(); status != http.StatusOK {
		t.Errorf("healthz: %d %s", status, text)
	}
}

// TestCommandKilledForTheNode: nor is it told where commands were killed for what
// all sandboxes had together.
func TestCommandKilledForTheNode(t *testing.T) {
	var killed atomic.Bool
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.KilledForNode = func(from, until time.Time) bool { return killed.Load() && !until.Before(from) }
	})
	id := n.create(&dsecv1.CreateRequest{})
	run := func() error {
		_, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Argv: []string{"true"}}}))
		return err
	}
	if err := run(); err != nil {
		t.Fatal(err)
	}
	killed.Store(true)
	wantError(t, run(), dsec.CodeOutcomeUnknown, "")
	killed.Store(false)
	if err := run(); err != nil {
		t.Error(err)
	}
}

// TestStarvedCommand: how a command ended while the disk of all sandboxes was
// full is told by no call, and its output by those that stream it.
func TestStarvedCommand(t *testing.T) {
	var starved atomic.Bool
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.DiskStarved = func(from, until time.Time) bool { return starved.Load() && !until.Before(from) }
	})
	id := n.create(&dsecv1.CreateRequest{})
	command := &dsecv1.Command{Argv: []string{"echo", "text"}}
	sane, err := n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: command}))
	if err != nil {
		t.Fatal(err)
	}
	session, err := n.session.OpenSession(t.Context(), connect.NewRequest(&dsecv1.OpenSessionRequest{SandboxId: id}))
	if err != nil {
		t.Fatal(err)
	}
	starved.Store(true)
	_, err = n.process.Exec(t.Context(), connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: command}))
	wantError(t, err, dsec.CodeOutcomeUnknown, "")
	follow := func(what string, stream *connect.ServerStreamForClient[dsecv1.ProcessEvent], err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stream.Close() }()
		out := ""
		for stream.Receive() {
			if stream.Msg().GetExited() != nil {
				t.Errorf("%s tells an outcome", what)
			}
			out += string(stream.Msg().GetOutput().GetData())
		}
		wantError(t, stream.Err(), dsec.CodeOutcomeUnknown, "")
		if out != "text\n" {
			t.Errorf("%s: output %q", what, out)
		}
	}
	started, err := n.process.Start(t.Context(), connect.NewRequest(&dsecv1.StartRequest{SandboxId: id, Command: command}))
	follow("start", started, err)
	attached, err := n.process.Attach(t.Context(), connect.NewRequest(&dsecv1.AttachRequest{SandboxId: id, ProcessId: sane.Msg.ProcessId}))
	follow("attach", attached, err)
	for range 2 { // the session goes on
		ran, err := n.session.RunCommand(t.Context(), connect.NewRequest(&dsecv1.RunCommandRequest{
			SandboxId: id, SessionId: session.Msg.SessionId, Command: "echo text",
		}))
		follow("session", ran, err)
	}
	list := func() []*dsecv1.Process {
		res, err := n.process.ListProcesses(t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
		if err != nil {
			t.Fatal(err)
		}
		return res.Msg.Processes
	}
	for _, p := range list() {
		if p.SessionId == "" && (p.Outcome != nil || !strings.Contains(p.Fault, "disk was full")) {
			t.Errorf("listed: outcome %v, fault %q", p.Outcome, p.Fault)
		}
	}
	starved.Store(false)
	for _, p := range list() {
		if p.SessionId == "" && (p.Outcome == nil || p.Fault != "") {
			t.Errorf("listed: outcome %v, fault %q", p.Outcome, p.Fault)
		}
	}
}

// TestWhoseDiskIsFull: a file that the sandbox's own limit leaves no room for is
// told from one that the node's disk has none for.
func TestWhoseDiskIsFull(t *testing.T) {
	if text, err := os.ReadFile("../../chronus/err.c"); err != nil || !strings.Contains(string(text), strconv.Quote(chronusapi.DiskFull)) {
		t.Errorf("chronus has other words for a full disk than %q: %v", chronusapi.DiskFull, err)
	}
	var starved atomic.Bool
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.DiskStarved = func(_, _ time.Time) bool { return starved.Load() }
	})
	id := n.create(&dsecv1.CreateRequest{Limits: &dsecv1.Limits{DiskBytes: 1 << 20}})
	for _, node := range []bool{false, true} {
		starved.Store(node)
		up := n.file.Write(t.Context())
		err := up.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Open{Open: &dsecv1.WriteOpen{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/big"}}}})
		for i := 0; i < 32 && err == nil; i++ {
			err = up.Send(&dsecv1.WriteRequest{Message: &dsecv1.WriteRequest_Data{Data: make([]byte, 64<<10)}})
		}
		if err != nil && !errors.Is(err, io.EOF) { // refused before the end
			t.Fatal(err)
		}
		_, err = up.CloseAndReceive()
		want := dsec.CodeExhausted
		if node {
			want = dsec.CodeUnavailable // the platform's fault, which no reward may carry
		}
		e := wantError(t, err, want, "open.path")
		if strings.Contains(e.Message, "node's disk") != node || strings.Contains(e.Message, "disk of the sandbox") == node {
			t.Errorf("the node's disk is full: %t: %v", node, err)
		}
	}
	if _, err := n.file.Mkdir(t.Context(), connect.NewRequest(&dsecv1.MkdirRequest{SandboxId: id, Path: &dsecv1.Path{Path: "/tmp/d"}})); err != nil {
		t.Errorf("a call that does not fail: %v", err)
	}
}
