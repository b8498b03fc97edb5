package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/testutil"
)

// A commit of a repository is a workspace in which the lint finds nothing, and the
// same one each time.
func TestImportOfACheckout(t *testing.T) {
	testutil.Require(t, testutil.Program("git"))
	s := up(t)
	repo, dir := t.TempDir(), t.TempDir()
	run := func(dir, name string, args ...string) (string, error) {
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		cmd.Env = append(environ(), "DSEC_URL="+s.url, "DSEC_KEY_FILE="+s.keyFile, "GIT_CONFIG_GLOBAL=/dev/null",
			"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@example.com", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@example.com")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	git := func(args ...string) string {
		t.Helper()
		out, err := run(repo, "git", args...)
		if err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
		return strings.TrimSpace(out)
	}
	git("init", "--quiet", "-b", "trunk")
	check(t, os.WriteFile(filepath.Join(repo, "main.go"), []byte("package main\n"), 0o644))
	git("add", "-A")
	git("commit", "--quiet", "-m", "task")
	task := git("rev-parse", "HEAD")
	check(t, os.WriteFile(filepath.Join(repo, "main.go"), []byte("package fixed\n"), 0o644))
	git("commit", "--quiet", "-am", "fix")

	out, err := run(dir, dsecBinary, "layer", "import", "project", "--git", repo, "--ref", "trunk~1", "--at", "/work/project", "--strict")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	layers, err := s.client(t).Layers(t.Context())
	check(t, err)
	l := layers[0]
	if l.Kind != "workspace" || l.Source != "git" || l.Origin == nil || l.Origin.Location != repo || l.Origin.Revision != task {
		t.Errorf("imported %+v from %+v", l, l.Origin)
	}
	// The clone as it is, with what the commit does not have, is not what --strict takes.
	if out, err := run(dir, dsecBinary, "layer", "import", "clone", repo, "--kind", "workspace", "--strict"); err == nil || !strings.Contains(out, "git:") {
		t.Errorf("the clone itself: %v: %s", err, out)
	}
	again, err := run(dir, dsecBinary, "layer", "import", "again", "--git", "file://"+repo, "--ref", task, "--at", "/work/project")
	if err != nil || !strings.Contains(again, l.Digest) {
		t.Errorf("imported again: %v: %s, want %s", err, again, l.Digest)
	}
	inspect, err := run(dir, dsecBinary, "layer", "inspect", "project")
	if err != nil || !strings.Contains(inspect, task) || !strings.Contains(inspect, repo) {
		t.Errorf("inspect: %v: %s", err, inspect)
	}
	for _, bad := range [][]string{{"x"}, {"x", repo, "--git", repo}, {"x", "--git", repo, "--image", "y"}, {"x", "--git", repo, "--ref", "none"}, {"x", repo, "--progress", "much"}} {
		if out, err := run(dir, dsecBinary, append([]string{"layer", "import"}, bad...)...); err == nil {
			t.Errorf("%v: %s", bad, out)
		}
	}
}
