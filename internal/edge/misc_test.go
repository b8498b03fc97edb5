package edge_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/fake"
	"github.com/opendsec/dsec/internal/edge"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

func TestErrorsTellNothingOfTheHost(t *testing.T) {
	const secret = "/var/lib/dsec/secret-of-the-host"
	n := newNode(t, func(_ *edge.Config, o *fake.Options) {
		o.OnCreate = func(_ context.Context, req backend.CreateRequest) error {
			if req.Spec.Job == "fails" {
				return errors.New("mount " + secret + ": EBUSY")
			}
			return nil
		}
		o.OnDial = func(dsec.SandboxID) error { return errors.New("connect " + secret) }
	})
	_, err := n.tryCreate(&dsecv1.CreateRequest{Job: "fails"})
	wantError(t, err, dsec.CodeInternal, "")
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("create: %v", err)
	}
	_, err = n.exec(n.create(&dsecv1.CreateRequest{}), "true")
	wantError(t, err, dsec.CodeUnavailable, "")
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("exec: %v", err)
	}
}

func TestMetricsAndHealth(t *testing.T) {
	reg := prometheus.NewRegistry()
	n := newNode(t, func(c *edge.Config, _ *fake.Options) { c.Metrics = reg })
	id := n.create(&dsecv1.CreateRequest{Job: "job-name"})
	n.shell(id, "exit 3")
	_, _ = n.tryCreate(&dsecv1.CreateRequest{Workdir: "relative"})
	n.kill(id)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, f := range families {
		for _, m := range f.Metric {
			text := m.String()
			if strings.Contains(text, id) || strings.Contains(text, "job-name") || strings.Contains(text, "p1") {
				t.Errorf("%s has a caller's name in it: %s", f.GetName(), text)
			}
			got[f.GetName()] += text
		}
	}
	for name, part := range map[string]string{
		"dsec_edge_creates_total": `value:"ok"`, "dsec_edge_commands_total": `value:"code"`,
		"dsec_edge_errors_total": `value:"invalid"`, "dsec_edge_kills_total": `value:"killed"`, "dsec_edge_sandboxes": "value:0",
	} {
		if !strings.Contains(strings.ReplaceAll(got[name], " ", ""), part) {
			t.Errorf("%s: %s, want %s in it", name, got[name], part)
		}
	}
	status := func() int {
		res, err := n.http.Get("http://edge/healthz")
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		return res.StatusCode
	}
	if s := status(); s != http.StatusOK {
		t.Errorf("healthz: %d", s)
	}
	if err := n.edge.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := status(); s != http.StatusServiceUnavailable {
		t.Errorf("healthz while it drains: %d", s)
	}
}

// TestManyExecsAtOnce: of 300 commands at once those beyond the limit are
// refused, those whose client leaves are killed, and the others are right.
func TestManyExecsAtOnce(t *testing.T) {
	n := newNode(t, func(c *edge.Config, o *fake.Options) { c.MaxCalls, o.Groups = 64, 4 })
	id := n.create(&dsecv1.CreateRequest{})
	var right, refused, left atomic.Int32
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%10 == 0 {
				time.AfterFunc(10*time.Millisecond, cancel)
			}
			text := fmt.Sprint("command ", i)
			res, err := n.process.Exec(ctx, connect.NewRequest(&dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "sleep 0.1; echo " + text}}))
			switch {
			case err == nil && string(res.Msg.Stdout) == text+"\n" && res.Msg.Outcome.GetEnd() != nil && res.Msg.Outcome.GetExitCode() == 0:
				right.Add(1)
			case ctx.Err() != nil:
				left.Add(1)
			case err != nil && typedError(err).Code == dsec.CodeExhausted:
				refused.Add(1)
			default:
				t.Errorf("command %d: %v, %v", i, res, err)
			}
		})
	}
	wg.Wait()
	if right.Load() == 0 || right.Load()+refused.Load()+left.Load() != 300 {
		t.Errorf("%d right, %d refused, %d left", right.Load(), refused.Load(), left.Load())
	}
	n.quiet() // the edge still kills those whose client left
	for _, p := range n.runs(id) {
		if o := n.ends(id, p); o == nil {
			t.Errorf("process %d: no outcome", p)
		}
	}
	if res := n.shell(id, "echo alive"); string(res.Stdout) != "alive\n" {
		t.Errorf("afterwards: %q", res.Stdout)
	}
}

// runs lists the processes of a sandbox that have not ended.
func (n *node) runs(id string) (processes []uint64) {
	n.t.Helper()
	list, err := n.process.ListProcesses(n.t.Context(), connect.NewRequest(&dsecv1.ListProcessesRequest{SandboxId: id}))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, p := range list.Msg.Processes {
		if p.Outcome == nil && p.Fault == "" {
			processes = append(processes, p.ProcessId)
		}
	}
	return processes
}
