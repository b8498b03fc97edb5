package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
	"github.com/opendsec/dsec/proto/dsec/v1/dsecv1connect"
)

// TestFilesWrittenBetweenPauses is U11: what was written after one resume is there after
// the next, over restarts of the server too; and so are processes and their memory.
func TestFilesWrittenBetweenPauses(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Job: "train"})
	check(t, err)
	want := ""
	for i := range 8 {
		line := fmt.Sprintf("line %d\n", i)
		want += line
		out, o, err := sb.Shell("echo " + strings.TrimSpace(line) + " >> /root/f; cat /root/f").Output(t.Context())
		check(t, err)
		if string(out) != want || !o.OK() {
			t.Fatalf("cycle %d: %q, %+v; want %q", i, out, o, want)
		}
		if i%2 == 0 {
			_, err = sb.Pause(t.Context(), client.PauseOptions{Wait: true})
			check(t, err)
		} else if results, err := cl.Job("train").Pause(t.Context(), client.PauseOptions{}); err != nil || len(results) != 1 || results[0].State != dsec.StatePaused {
			t.Fatalf("cycle %d: %v, %v", i, results, err)
		}
		if i%3 == 2 {
			restart(t, c)
		}
		if info, err := sb.Info(t.Context()); err != nil || info.State != dsec.StatePaused {
			t.Fatalf("cycle %d: %v, %v; want it paused", i, info, err)
		}
		switch i % 4 { // else the next command resumes it
		case 1:
			_, err = sb.Resume(t.Context())
		case 2:
			_, err = cl.Job("train").Resume(t.Context())
		}
		check(t, err)
	}
}

// exec calls Exec with an action ID, as any HTTP client can.
func (s *server) exec(t *testing.T, id, action, script string) (stdout string, code int, replayed bool, status int) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"sandboxId": id, "command": map[string]any{"shell": script}})
	check(t, err)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+dsecv1connect.ProcessServiceExecProcedure, bytes.NewReader(body))
	check(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+readKey(t, s.keyFile))
	req.Header.Set("Dsec-Action-Id", action)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", 0, false, 0 // the server went away
	}
	defer func() { _ = res.Body.Close() }()
	var answer struct {
		Stdout  []byte
		Outcome struct{ ExitCode int }
	}
	_ = json.NewDecoder(res.Body).Decode(&answer)
	return string(answer.Stdout), answer.Outcome.ExitCode, res.Header.Get("Dsec-Replayed") == "1", res.StatusCode
}

// TestActionsRunOnceOverKilledServers: whatever the server was doing when it was killed,
// each command has run once in the end, and its caller knows how it ended.
func TestActionsRunOnceOverKilledServers(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	id := string(sb.ID())
	const actions, rounds = 12, 4
	script := func(i int) string {
		return fmt.Sprintf("echo %d >> /root/ran; sleep 0.%d; echo out %d; exit %d", i, i%10, i, i)
	}
	for range rounds {
		var wg sync.WaitGroup
		for i := range actions {
			wg.Go(func() { c.exec(t, id, fmt.Sprintf("a%d", i), script(i)) })
		}
		_, _, _, _ = c.exec(t, id, "first", "true")
		restart(t, c)
		wg.Wait()
	}
	testutil.WaitFor(t, time.Minute, "the outcome of all", func() error {
		for i := range actions {
			out, code, _, status := c.exec(t, id, fmt.Sprintf("a%d", i), script(i))
			if status != http.StatusOK || out != fmt.Sprintf("out %d\n", i) || code != i {
				return fmt.Errorf("action %d: status %d, %q, exit code %d", i, status, out, code)
			}
		}
		return nil
	})
	ended := 0
	for e, err := range sb.Trajectory(t.Context(), client.TrajectoryOptions{Kinds: []dsecv1.TrajectoryKind{dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC}}) {
		check(t, err)
		if e.Outcome != nil {
			ended++
		}
	}
	if ended != actions+1 {
		t.Errorf("%d commands have ended by the log, want %d", ended, actions+1)
	}
	cmd := sb.Shell(script(7))
	cmd.ActionID = "a7"
	if out, o, err := cmd.Output(t.Context()); err != nil || string(out) != "out 7\n" || o.Code != 7 || !cmd.Replayed {
		t.Errorf("by the SDK: %q, %+v, %v, replayed %v", out, o, err, cmd.Replayed)
	}
	out, _, err := sb.Shell("sort -n /root/ran").Output(t.Context())
	check(t, err)
	want := ""
	for i := range actions {
		want += fmt.Sprintf("%d\n", i)
	}
	if string(out) != want {
		t.Errorf("they ran so often:\n%s", out)
	}
}
