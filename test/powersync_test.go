package test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// synced runs a command whose entry is to be on the disk before its answer.
func (s *server) synced(t *testing.T, id, script string) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"sandboxId": id, "command": map[string]any{"shell": script}})
	check(t, err)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+dsecv1connect.ProcessServiceExecProcedure, bytes.NewReader(body))
	check(t, err)
	for name, value := range map[string]string{"Content-Type": "application/json", "Authorization": "Bearer " + readKey(t, s.keyFile), "Dsec-Sync": "1"} {
		req.Header.Set(name, value)
	}
	res, err := http.DefaultClient.Do(req)
	check(t, err)
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d", script, res.StatusCode)
	}
}

// TestPowerCutAfterASync is S76 for what was done and for what watches: the machine loses its power right
// after an answer that had the log on the disk. That entry is there, jobs and webhooks are, and the
// sandbox, which is lost with its machine, is told as that.
func TestPowerCutAfterASync(t *testing.T) {
	v := newVolume(t)
	run := filepath.Join(testutil.Dir(t), "run")
	start := func() *server {
		p := start(t, "up", "--backend", "fake", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(v.dir, "data"), "--run-dir", run)
		return &server{p, p.ready, filepath.Join(v.dir, "data", "admin.key"), ""}
	}
	s := start()
	c := s.client(t)
	_, err := c.CreateJob(t.Context(), "train", client.JobOptions{})
	check(t, err)
	hook, _, err := c.CreateWebhook(t.Context(), "https://example.com/", client.EventFilter{Job: "none"}, "")
	check(t, err)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake, Job: "train"})
	check(t, err)
	s.synced(t, string(sb.ID()), "echo promised; exit 3")
	v.keep() // the answer was given just now
	s.kill()
	check(t, os.RemoveAll(run))
	v.cut()

	s = start()
	c = s.client(t)
	if j, err := c.Job("train").Info(t.Context()); err != nil || j.State != dsec.JobActive {
		t.Errorf("the job: %+v, %v", j, err)
	}
	if h, err := c.Webhook(t.Context(), hook.ID); err != nil || h.State != "ok" {
		t.Errorf("the webhook: %+v, %v", h, err)
	}
	sb = c.Sandbox(string(sb.ID()))
	if info, err := sb.Info(t.Context()); err != nil || info.State != dsec.StateLost {
		t.Errorf("the sandbox: %+v, %v", info, err)
	}
	found := ""
	for e, err := range sb.Trajectory(t.Context(), client.TrajectoryOptions{Kinds: []dsecv1.TrajectoryKind{dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC}}) {
		if err != nil {
			t.Errorf("its trajectory: %v", err)
			break
		}
		if e.Outcome.GetExitCode() == 3 {
			for _, p := range e.Output.GetHead() {
				found += string(p.Data)
			}
		}
	}
	if !strings.Contains(found, "promised") {
		t.Errorf("what was promised is not in the log: %q", found)
	}
	s.stop()
}
