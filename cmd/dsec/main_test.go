package main

import (
	"bytes"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

func output(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, errw bytes.Buffer
	if code := run(t.Context(), args, strings.NewReader(""), &out, &errw); code != 0 {
		t.Errorf("%q: exit %d: %s", args, code, &errw)
	}
	return out.String(), errw.String()
}

func TestVersion(t *testing.T) {
	verb, _ := output(t, "version")
	flag, _ := output(t, "--version")
	if verb != "dsec "+version+"\n" || flag != verb {
		t.Errorf("%q, %q", verb, flag)
	}
}

// TestFlagHelp: the first words in backticks of a usage are what the flag's value is
// called, and a flag without one takes none.
func TestFlagHelp(t *testing.T) {
	help, _ := output(t, "exec", "-h")
	for _, want := range []string{`  -d +leave`, `  -n +do not`, `  -e KEY=VALUE +KEY=VALUE for`, `  --timeout duration +kill`, `  -o format .*\(default table\)`} {
		if !regexp.MustCompile("(?m)^" + want).MatchString(help) {
			t.Errorf("no %q in\n%s", want, help)
		}
	}
}

func TestOfRoot(t *testing.T) {
	err := &fs.PathError{Op: "mkdir", Path: "/x", Err: os.ErrPermission}
	if got := ofRoot(err).Error(); strings.Contains(got, "--backend fake --data-dir") != (os.Geteuid() != 0) {
		t.Error(got)
	}
	if ofRoot(os.ErrExist) != os.ErrExist || ofRoot(nil) != nil {
		t.Error("another error is changed")
	}
}
