package edge_test

import (
	"slices"
	"testing"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestOlderLogRunsNothingAgain is S74 for what was done: a state directory that was put back has a log
// without the last actions. None of them is done again, and that some may be missing is told.
func TestOlderLogRunsNothingAgain(t *testing.T) {
	n := newNode(t, nil)
	run := func(id, action string) (replayed bool, err error) {
		exec := &dsecv1.ExecRequest{SandboxId: id, Command: &dsecv1.Command{Shell: "echo " + action + " >> /tmp/ran"}}
		res, err := n.process.Exec(t.Context(), named(exec, action))
		return err == nil && wasReplayed(res.Header()), err
	}
	must := func(id, action string, replayed bool) {
		t.Helper()
		if got, err := run(id, action); err != nil || got != replayed {
			t.Errorf("action %s: replayed %v, %v; want %v", action, got, err, replayed)
		}
	}
	old, ended := n.create(&dsecv1.CreateRequest{}), n.create(&dsecv1.CreateRequest{})
	must(old, "before", false)
	older := t.TempDir()
	copyDir(t, n.cfg.StateDir, older)
	must(old, "after", false)
	must(ended, "after", false)
	n.kill(ended)
	young := n.create(&dsecv1.CreateRequest{})
	must(young, "young", false)
	n.close()
	copyDir(t, older, n.cfg.StateDir)
	n.start()
	for range 2 { // it stays so over another restart
		must(old, "before", true)
		for id, action := range map[string]string{old: "after", young: "young"} {
			_, err := run(id, action)
			wantError(t, err, dsec.CodeOutcomeUnknown, "")
		}
		n.restart()
	}
	for id, want := range map[string]string{old: "before\nafter\n", young: "young\n"} {
		if got := string(n.shell(id, "cat /tmp/ran").Stdout); got != want {
			t.Errorf("it ran %q, want %q", got, want)
		}
	}
	for _, id := range []string{old, young, ended} {
		if !slices.ContainsFunc(n.trajectory(id), func(e *dsecv1.TrajectoryEntry) bool { return e.Gap != nil }) {
			t.Errorf("the trajectory says %q, and of no gap", told(n.trajectory(id)))
		}
	}
	must(n.create(&dsecv1.CreateRequest{}), "new", false)
}
