package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestStories runs each story with a server of its own, on the fake backend.
func TestStories(t *testing.T) {
	testscript.Run(t, params(t, "testdata/script", func(t testing.TB) *server { return up(t) }))
}

func params(t *testing.T, dir string, serve func(testing.TB) *server) testscript.Params {
	return testscript.Params{
		Dir:                 dir,
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			s := serve(e.T().(testing.TB))
			e.Setenv("PATH", filepath.Dir(dsecBinary)+string(os.PathListSeparator)+e.Getenv("PATH"))
			e.Setenv("DSEC_URL", s.url)
			e.Setenv("DSEC_KEY_FILE", s.keyFile)
			e.Setenv("DIR", s.dir)
			e.Setenv("ADDR", strings.TrimPrefix(s.url, "http://"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// capture NAME: standard output of the last command, as a variable.
			"capture": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) != 1 {
					ts.Fatalf("usage: capture NAME")
				}
				ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
			},
			// exits CODE COMMAND...: the command ends with exactly that code.
			"exits": func(ts *testscript.TestScript, neg bool, args []string) {
				if neg || len(args) < 2 {
					ts.Fatalf("usage: exits CODE COMMAND...")
				}
				script := "\"$@\"; c=$?; if [ $c != " + args[0] + " ]; then echo exit code $c, want " + args[0] + " >&2; exit 1; fi"
				ts.Check(ts.Exec("sh", append([]string{"-c", script, "sh"}, args[1:]...)...))
			},
		},
		Condition: func(cond string) (bool, error) {
			return cond == "root" && os.Getuid() == 0, nil
		},
	}
}
