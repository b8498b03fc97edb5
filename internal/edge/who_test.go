package edge_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// by is a request of somebody.
func by[T any](who string, msg *T) *connect.Request[T] {
	req := connect.NewRequest(msg)
	req.Header().Set("Dsec-Caller", who)
	return req
}

// TestTrajectoryTellsWho asked for what was done to a sandbox, over a restart too; what the edge did by
// itself nobody asked for.
func TestTrajectoryTellsWho(t *testing.T) {
	bubble(t, nil, func(t *testing.T, n *node) {
		ctx := t.Context()
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		made, err := n.CreateSandboxes(ctx, by("maker", &dsecv1.CreateSandboxesRequest{Items: []*dsecv1.CreateSandboxesItem{{Request: &dsecv1.CreateRequest{
			Backend: "fake", Job: "j", IdleTimeout: durationpb.New(time.Minute), IdleAction: "pause",
		}}}}))
		must(err)
		id := made.Msg.Items[0].GetCreated().GetSandbox().GetId()
		shell := func(who string) error {
			return second(n.process.Exec(ctx, by(who, &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "true"}})))
		}
		must(second(n.PauseSandbox(ctx, by("pauser", &dsecv1.PauseRequest{SandboxId: id}))))
		must(shell("runner")) // which resumes it
		must(second(n.ApplyToJob(ctx, by("job's", &dsecv1.ApplyToJobRequest{Job: "j", Action: "pause"}))))
		must(second(n.ResumeSandbox(ctx, by("resumer", &dsecv1.ResumeRequest{SandboxId: id}))))
		must(second(n.ExtendSandbox(ctx, by("extender", &dsecv1.ExtendRequest{SandboxId: id, MaxLifetime: durationpb.New(time.Hour)}))))
		in(2 * time.Minute) // it is idle
		n.restart()
		must(second(n.KillSandbox(ctx, by("killer", &dsecv1.KillRequest{SandboxId: id}))))
		must(second(n.KillSandbox(ctx, by("late", &dsecv1.KillRequest{SandboxId: id}))))
		var got []string
		for _, e := range n.trajectory(id) {
			if e.Phase != dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED {
				got = append(got, strings.TrimSpace(fmt.Sprintf("%s %s", strings.ToLower(strings.TrimPrefix(e.Kind.String(), "TRAJECTORY_KIND_")), e.Caller)))
			}
			if e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXTEND && e.Reason != "maximum lifetime 1h0m0s" {
				t.Errorf("extended by %q", e.Reason)
			}
		}
		want := []string{"create maker", "pause pauser", "resume runner", "exec runner", "pause job's", "resume resumer", "extend extender", "pause", "state killer"}
		if !slices.Equal(got, want) {
			t.Errorf("the trajectory says\n%q, want\n%q", got, want)
		}
	})
}
