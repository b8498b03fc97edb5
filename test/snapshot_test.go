package test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// says runs a command and returns what it wrote.
func says(t *testing.T, sb *client.Sandbox, script string) string {
	t.Helper()
	out, o, err := sb.Shell(script).Output(t.Context())
	if err != nil || !o.OK() {
		t.Errorf("%s: %v, %+v", script, err, o)
	}
	return string(out)
}

// TestForksDiverge: each sandbox of a fork has what was there at that moment, and goes its own
// way; a fork of one that was forked often has all of it.
func TestForksDiverge(t *testing.T) {
	s := containers(t)
	cl := s.client(t)
	importOf(t, cl, "base", client.ImportOptions{}, busyboxTar(t))
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Env: map[string]string{"KEPT": "yes"}, Labels: map[string]string{"of": "the first"}})
	check(t, err)
	says(t, sb, "cd /root; echo one > file; mkdir -p deep/er; echo two > deep/er/f; ln -s file link; rm -r /bin/ls; echo h > .ash_history")
	want := says(t, sb, "cd /root; cat file deep/er/f link .ash_history; test ! -e /bin/ls; echo $KEPT")
	made, report, err := sb.Fork(t.Context(), 16, client.ForkOptions{RequestID: "f", Labels: map[string]string{"fork": "yes"}})
	check(t, err)
	if len(made) != 16 || report.Files == 0 || report.Frozen <= 0 || len(report.Removed) != 0 {
		t.Fatalf("%d made, %+v", len(made), report)
	}
	var wg sync.WaitGroup
	for i, m := range made {
		check(t, m.Err)
		wg.Go(func() {
			if got := says(t, m.Sandbox, "cd /root; cat file deep/er/f link .ash_history; test ! -e /bin/ls; echo $KEPT"); got != want {
				t.Errorf("fork %d has %q, want %q", i, got, want)
			}
			says(t, m.Sandbox, fmt.Sprintf("echo %d > /root/file; rm -r /root/deep", i))
		})
	}
	wg.Wait()
	for i, m := range made {
		if got := says(t, m.Sandbox, "cat /root/file"); got != fmt.Sprintf("%d\n", i) {
			t.Errorf("fork %d has %q", i, got)
		}
	}
	again, _, err := sb.Fork(t.Context(), 16, client.ForkOptions{RequestID: "f", Labels: map[string]string{"fork": "yes"}})
	check(t, err)
	for i, m := range again {
		check(t, m.Err)
		if m.Sandbox.ID() != made[i].Sandbox.ID() {
			t.Errorf("the fork that is made again has %s in place of %s", m.Sandbox.ID(), made[i].Sandbox.ID())
		}
		check(t, m.Sandbox.Kill(t.Context()))
	}
	if got := says(t, sb, "cat /root/file"); got != "one\n" {
		t.Errorf("the first has %q", got)
	}
	collapsed := 0
	for i := range 12 {
		says(t, sb, fmt.Sprintf("echo %d >> /root/all; rm -f /root/last; mkdir -p /root/d%d; touch /root/last; rm -rf /root/d%d", i, i, i-1))
		one, report, err := sb.Fork(t.Context(), 1, client.ForkOptions{})
		check(t, err)
		check(t, one[0].Err)
		check(t, sb.Kill(t.Context()))
		sb = one[0].Sandbox
		collapsed += report.Collapsed
	}
	info, err := sb.Info(t.Context())
	check(t, err)
	if got := says(t, sb, "cd /root; cat all; ls -d d*; cat file"); collapsed == 0 || len(info.Spec.Layers) > 10 || got != strings.Join([]string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "d11", "deep", "one", ""}, "\n") {
		t.Errorf("after a chain: %q, of %d layers, %d collapsed", got, len(info.Spec.Layers), collapsed)
	}
	check(t, sb.Kill(t.Context()))
}

// TestPackedLayers are bases like others: named, listed, put under toolkits, exported, and
// without what was to be left out.
func TestPackedLayers(t *testing.T) {
	s := containers(t)
	cl := s.client(t)
	importOf(t, cl, "base", client.ImportOptions{}, busyboxTar(t))
	importOf(t, cl, "tool", client.ImportOptions{Kind: dsec.LayerToolkit}, tarOfOne(t, "opt/tool", "tool"))
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base", "tool"}, Env: map[string]string{"TOKEN": "of its creator"}})
	check(t, err)
	says(t, sb, `cd /root; echo kept > kept; echo h > .ash_history; mkdir -p .cache/pip; echo c > .cache/pip/c; printf -- '-----BEGIN RSA %s-----\n' 'PRIVATE KEY' > key; echo x > out.log`)
	l, report, err := sb.Pack(t.Context(), "mine:1", &client.Scrub{Remove: []string{"/**/*.log"}})
	check(t, err)
	var removed []string
	for _, x := range report.Removed {
		removed = append(removed, x.Path+" "+x.Reason)
	}
	if got := strings.Join(removed, ", "); l.Name != "mine:1" || l.Source != "pack" || len(l.Parents) != 2 || len(removed) != 4 {
		t.Errorf("%+v, without %s", l, got)
	}
	check(t, sb.Kill(t.Context()))
	importOf(t, cl, "more", client.ImportOptions{Kind: dsec.LayerToolkit}, tarOfOne(t, "opt/more", "more"))
	made, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"mine:1", "more"}})
	check(t, err)
	if got := says(t, made, "cat /root/kept /opt/tool /opt/more; ls -A /root; echo $TOKEN"); !strings.HasPrefix(got, "kept\ntoolmore") || strings.Contains(got, "history") ||
		strings.Contains(got, "key") || strings.Contains(got, "out.log") || strings.Contains(got, "creator") {
		t.Errorf("it has %q", got)
	}
	for field, call := range map[string]func() error{
		"name":          func() error { _, _, err := made.Pack(t.Context(), "no such name!", nil); return err },
		"scrub.keep[0]": func() error { _, _, err := made.Pack(t.Context(), "x", &client.Scrub{Keep: []string{"x"}}); return err },
		"count":         func() error { _, _, err := made.Fork(t.Context(), 0, client.ForkOptions{}); return err },
		"count ":        func() error { _, _, err := made.Fork(t.Context(), 1_000_000, client.ForkOptions{}); return err },
		"lose_memory":   func() error { _, _, err := made.Migrate(t.Context(), client.MigrateOptions{}); return err },
		"sandbox_id": func() error {
			_, _, err := cl.Sandbox(string(dsec.NewSandboxID("aaaaa"))).Pack(t.Context(), "x", nil)
			return err
		},
		"scrub.secrets": func() error { _, _, err := made.Pack(t.Context(), "x", &client.Scrub{Secrets: "sell"}); return err },
	} {
		if e := typed(t, call()); e.Field != strings.TrimSpace(field) {
			t.Errorf("%s: %v", field, e)
		}
	}
	check(t, made.Kill(t.Context()))
	if _, _, err := made.Pack(t.Context(), "x", nil); dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("of one that has ended: %v", err)
	}
}

// TestPacksOfForksAreScrubbed: what forks and migrations take along as it is does not come
// into a layer that has a name.
func TestPacksOfForksAreScrubbed(t *testing.T) {
	s := containers(t)
	cl := s.client(t)
	importOf(t, cl, "base", client.ImportOptions{}, busyboxTar(t))
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	says(t, sb, `cd /root; echo kept > kept; echo h > .ash_history; printf -- '-----BEGIN RSA %s-----\n' 'PRIVATE KEY' > key`)
	made, _, err := sb.Fork(t.Context(), 1, client.ForkOptions{})
	check(t, err)
	check(t, made[0].Err)
	check(t, sb.Kill(t.Context()))
	sb, _, err = made[0].Sandbox.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
	check(t, err)
	if _, _, err := sb.Pack(t.Context(), "mine", &client.Scrub{Secrets: "refuse"}); err == nil || !strings.Contains(err.Error(), "/root/key") {
		t.Errorf("the key is not refused: %v", err)
	}
	l, report, err := sb.Pack(t.Context(), "mine", nil)
	check(t, err)
	if len(report.Removed) != 2 || report.Collapsed != 2 || len(l.Parents) != 1 {
		t.Errorf("%+v on %v", report, l.Parents)
	}
	if got := says(t, sb, "ls -A /root"); !strings.Contains(got, "key") {
		t.Errorf("it has %q by now", got)
	}
	check(t, sb.Kill(t.Context()))
	sb, err = cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"mine"}})
	check(t, err)
	if got := says(t, sb, "ls -A /root; cat /root/kept"); got != "kept\nkept\n" {
		t.Errorf("what is made of it has %q", got)
	}
	check(t, sb.Kill(t.Context()))
}

// TestMigrate: what takes a sandbox's place has its disk and answers to its ID, over a restart
// too, and processes are gone, as was said.
func TestMigrate(t *testing.T) {
	c := new(containerServer)
	cl := kept(t, c)
	sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Job: "train", Env: map[string]string{"KEPT": "yes"}})
	check(t, err)
	says(t, sb, "echo text > /root/file; (sleep 1000 &)")
	moved, report, err := sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
	check(t, err)
	if moved.ID() == sb.ID() || report.Frozen <= 0 {
		t.Errorf("%s became %s, %+v", sb.ID(), moved.ID(), report)
	}
	for range 2 {
		if got := says(t, sb, "cat /root/file; echo $KEPT; ps | grep -c '[s]leep 1000'; true"); got != "text\nyes\n0\n" {
			t.Errorf("by its old ID: %q", got)
		}
		if info, err := sb.Info(t.Context()); err != nil || info.ID != moved.ID() || info.State != dsec.StateRunning || info.Spec.Job != "train" {
			t.Errorf("by its old ID: %+v, %v", info, err)
		}
		restart(t, c)
	}
	cmd := moved.Shell("echo once >> /root/acted")
	cmd.ActionID = "a"
	_, _, err = cmd.Output(t.Context())
	check(t, err)
	if again, report, err := sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true}); err != nil || again.ID() != moved.ID() || report != nil {
		t.Errorf("by its old ID it is moved again: %v, %+v, %v", again, report, err)
	}
	if _, _, err := moved.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true}); dsec.CodeOf(err) != dsec.CodeConflict || typed(t, err).Field != "lose_actions" {
		t.Errorf("with an action in its log: %v", err)
	}
	second, _, err := moved.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true, LoseActions: true})
	check(t, err)
	says(t, sb, "echo more >> /root/file")
	if got := says(t, second, "cat /root/file"); got != "text\nmore\n" {
		t.Errorf("after the second time it has %q", got)
	}
	check(t, sb.Kill(t.Context()))
	if info, err := second.Info(t.Context()); err != nil || info.State != dsec.StateStopped {
		t.Errorf("killed by the first ID: %+v, %v", info, err)
	}
}

// TestLogsOfMovedSandboxes: each ID leads to its own log, whatever calls went from one to the
// other before.
func TestLogsOfMovedSandboxes(t *testing.T) {
	sb, err := up(t).client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: dsec.KindFake})
	check(t, err)
	says(t, sb, "echo before")
	moved, _, err := sb.Migrate(t.Context(), client.MigrateOptions{LoseMemory: true})
	check(t, err)
	says(t, sb, "echo after") // by the old ID, in the new one
	for _, follow := range []bool{false, true} {
		for of, want := range map[*client.Sandbox]string{sb: "before\n", moved: "after\n"} {
			var got strings.Builder
			for e, err := range of.Trajectory(t.Context(), client.TrajectoryOptions{Follow: follow}) {
				check(t, err)
				if e.Kind == dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC && e.Outcome != nil {
					check(t, of.TrajectoryOutput(t.Context(), e.Seq, &got))
					break
				}
			}
			if got.String() != want {
				t.Errorf("the log of %s has %q, want %q", of.ID(), got.String(), want)
			}
		}
	}
}

func typed(t *testing.T, err error) *dsec.Error {
	t.Helper()
	e, ok := err.(*dsec.Error)
	if !ok {
		t.Fatalf("%v is no error of the API", err)
	}
	return e
}
