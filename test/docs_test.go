package test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// TestStreamsByCurl runs what docs/api.md says of streams, as it stands there.
func TestStreamsByCurl(t *testing.T) {
	testutil.Require(t, testutil.Program("curl"), testutil.Program("perl"), testutil.Program("bash"))
	s := up(t)
	sb, err := s.client(t).CreateSandbox(t.Context(), client.SandboxOptions{Backend: "fake"})
	check(t, err)
	key, err := os.ReadFile(s.keyFile)
	check(t, err)
	text, err := os.ReadFile("../docs/api.md")
	check(t, err)
	snippet := regexp.MustCompile(`(?s)    stream\(\) \{.*?\n\n(    stream [^\n]*\n)+`).FindString(string(text))
	if snippet == "" {
		t.Fatal("docs/api.md has no example of a stream")
	}
	if snippet = strings.Replace(snippet, "echo two", "echo zwölf", 1); !strings.Contains(snippet, "zwölf") {
		t.Fatal("the example of a stream has no message to put more than ASCII into")
	}
	cmd := exec.Command("bash", "-euo", "pipefail", "-c", strings.ReplaceAll(snippet, "http://127.0.0.1:7321", s.url))
	cmd.Env = append(environ(), "LC_ALL=C.UTF-8", "KEY="+strings.TrimSpace(string(key)), "ID="+string(sb.ID()))
	out, err := cmd.CombinedOutput()
	check(t, err)
	// Both calls tell the same command.
	for _, want := range []string{`"data":"b25lCg=="`, `"data":"enfDtmxmCg=="`, `"exitCode":0`} {
		if n := strings.Count(strings.ReplaceAll(string(out), ": ", ":"), want); n != 2 {
			t.Errorf("%d times %s in\n%s", n, want, out)
		}
	}
}
