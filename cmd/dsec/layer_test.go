package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
)

// TestImportNamesWhatWasGiven: who imports knows of a file, a name and a flag, and
// not of the fields of the call.
func TestImportNamesWhatWasGiven(t *testing.T) {
	for field, want := range map[string]string{
		"archive": "a.tar: bad (invalid)", "name": "NAME: bad (invalid)", "select": "--select: bad (invalid)",
		"manifest": "a.tar: manifest: bad (invalid)", "": "bad (invalid)",
	} {
		if got := line(ofImport(dsec.Invalid(field, "bad"), "a.tar")); got != want {
			t.Errorf("%s: %q, want %q", field, got, want)
		}
	}
	if got := line(ofImport(dsec.Invalid("archive", "bad"), "-")); got != "standard input: bad (invalid)" {
		t.Error(got)
	}
	if err := errors.New("of the disk"); ofImport(err, "a.tar") != err {
		t.Error("an error of this machine is changed")
	}
}

// TestFlagsThatMeanNothingAreRefused: before anything is sent. There is no server.
func TestFlagsThatMeanNothingAreRefused(t *testing.T) {
	t.Setenv("DSEC_URL", "http://127.0.0.1:1")
	t.Setenv("DSEC_API_KEY", "e2b_00")
	dir := t.TempDir()
	id := strings.Repeat("a", 25)
	for _, tt := range []struct {
		flag string
		args []string
	}{
		{"--ref", []string{"layer", "import", "x", dir, "--ref", "v1"}},
		{"--depth", []string{"layer", "import", "x", dir, "--depth", "1"}},
		{"--submodules", []string{"layer", "import", "x", "--image", "y", "--submodules"}},
		{"--no-git", []string{"layer", "import", "--no-git", "x", "-"}},
		{"--platform", []string{"layer", "import", "x", dir, "--platform", "linux/amd64"}},
		{"--credentials", []string{"layer", "import", "x", "--git", dir, "--credentials", "none"}},
		{"--verify", []string{"layer", "import", "x", dir, "--verify"}},
		{"--select", []string{"layer", "import", "x", "--image", "y", "--select", "v1"}},
		{"--select", []string{"layer", "import", "x", "--git", dir, "--select", "v1"}},
		{"--at", []string{"layer", "import", "x", dir, "--at", "/opt"}},
		{"--at", []string{"layer", "import", "x", "--git", dir, "--kind", "base", "--at", "/opt"}},
		{"--kind", []string{"layer", "import", "x", dir, "--kind", "tools"}},
		{"FILE", []string{"layer", "import", "x", dir, "--git", dir}},
		{"FILE", []string{"layer", "import", "x", "--image", "y", "--git", dir}},
		{"FILE", []string{"layer", "import", "x"}},
		{"-a", []string{"cp", "-a", id + ":/x", dir}},
		{"-a", []string{"cp", "-a", "-", id + ":/x"}},
		{"-a", []string{"sandbox", "list", "-a", "--state", "lost"}},
		{"-q", []string{"sandbox", "list", "-q", "-o", "json"}},
	} {
		stdout, stderr, code := tell(t, tt.args...)
		if stdout != "" || code != 2 || !strings.HasPrefix(stderr, "dsec: "+tt.flag+": ") || !strings.HasSuffix(stderr, " (invalid)\n") || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%q: exit %d, %q", tt.args, code, stderr)
		}
	}
}

// TestFlagsOfExecThatMeanNothing: 125, for any other code could be the command's own.
func TestFlagsOfExecThatMeanNothing(t *testing.T) {
	t.Setenv("DSEC_URL", "http://127.0.0.1:1")
	t.Setenv("DSEC_API_KEY", "e2b_00")
	for _, flags := range [][]string{{"-t", "-d"}, {"--tty", "--detach"}, {"-o", "json", "-t"}, {"-n", "-t"}} {
		_, stderr, code := tell(t, append(append([]string{"exec"}, flags...), strings.Repeat("a", 25), "true")...)
		if code != 125 || !strings.HasPrefix(stderr, "dsec: "+flags[0]+": means nothing with ") || !strings.HasSuffix(stderr, " (invalid)\n") {
			t.Errorf("%q: exit %d, %q", flags, code, stderr)
		}
	}
}

// TestAPipeThatNobodyWritesTo: waiting for the writer of a named pipe can be given up.
func TestAPipeThatNobodyWritesTo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, _, err := openArchive(ctx, &env{}, path, "")
		ended <- err
	}()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if f, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil { // lets go who still waits
		_ = f.Close()
	}
}

// TestErrorsOfThisMachineAreTyped: each has the code and the exit code of its kind, and
// names what was given.
func TestErrorsOfThisMachineAreTyped(t *testing.T) {
	t.Setenv("DSEC_URL", "http://127.0.0.1:1")
	t.Setenv("DSEC_API_KEY", "e2b_00")
	t.Chdir(t.TempDir())
	for _, name := range []string{"taken", "docker.json"} {
		if err := os.WriteFile(name, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir("dir.tar", 0o700); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"dsec: FILE: nosuch.tar: no such file or directory (not_found)\n":                         {"layer", "import", "x", "nosuch.tar"},
		"dsec: FILE: taken/x: not a directory (invalid)\n":                                        {"layer", "import", "x", "taken/x"},
		"dsec: --credentials: nosuch: no such file or directory (not_found)\n":                    {"layer", "import", "x", "--image", "y", "--credentials", "nosuch"},
		"dsec: --credentials: docker.json has none for docker.io (invalid)\n":                     {"layer", "import", "x", "--image", "y", "--credentials", "docker.json"},
		"dsec: FILE: taken is there already; --replace puts the export in its place (conflict)\n": {"layer", "export", "x", "taken"},
		"dsec: FILE: taken is no OCI layout, want one to replace (conflict)\n":                    {"layer", "export", "x", "taken", "--replace"},
		"dsec: FILE: dir.tar is no file, want one to replace (conflict)\n":                        {"layer", "export", "x", "dir.tar", "--replace"},
		"dsec: FILE: nodir/x.tar: no such file or directory (not_found)\n":                        {"layer", "export", "x", "nodir/x.tar"},
		"dsec: FILE: nodir/x/: no such file or directory (not_found)\n":                           {"layer", "export", "x", "nodir/x/"},
		"dsec: FILE: taken/x.tar: not a directory (invalid)\n":                                    {"layer", "export", "x", "taken/x.tar"},
		"dsec: SRC: nosuch: no such file or directory (not_found)\n":                              {"cp", "nosuch", strings.Repeat("a", 25) + ":/x"},
		"dsec: config: nosuch.toml: no such file or directory (not_found)\n":                      {"layer", "list", "--config", "nosuch.toml"},
		"dsec: --git: ./nosuch: no such file or directory (not_found)\n":                          {"layer", "import", "x", "--git", "./nosuch"},
		"dsec: cannot reach http://127.0.0.1:1; is `dsec up` running? (unavailable)\n":            {"layer", "remove", "x"},
	} {
		code := dsec.Code(want[strings.LastIndex(want, "(")+1 : len(want)-2])
		_, stderr, exit := tell(t, args...)
		if stderr != want || exit != dsec.Codes[code].Exit {
			t.Errorf("%q: exit %d, %q, want %q", args, exit, stderr, want)
		}
	}
	if left, err := filepath.Glob("*"); err != nil || len(left) != 3 {
		t.Errorf("what failed left %q, %v", left, err)
	}
	for code, err := range map[dsec.Code]error{
		dsec.CodeDenied:    &fs.PathError{Op: "open", Path: "x", Err: syscall.EACCES},
		dsec.CodeConflict:  &os.LinkError{Op: "rename", Old: "x", New: "y", Err: syscall.EEXIST},
		dsec.CodeInvalid:   &fs.PathError{Op: "read", Path: "x", Err: syscall.EISDIR},
		dsec.CodeExhausted: &fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC},
		dsec.CodeInternal:  errors.New("of no kind"),
		dsec.CodeLost:      dsec.Errorf(dsec.CodeLost, "x"),
	} {
		if got := typed(err).Code; got != code {
			t.Errorf("%v is %s, want %s", err, got, code)
		}
	}
}

// TestErrorsOfAnExportNameWhatWasAskedFor: not the file that would have become it.
func TestErrorsOfAnExportNameWhatWasAskedFor(t *testing.T) {
	for want, err := range map[string]error{
		"FILE: x.tar: no space left on device (exhausted)":       errors.Join(&fs.PathError{Op: "write", Path: "x.tar.1.part", Err: syscall.ENOSPC}),
		"FILE: x.tar/blobs: no space left on device (exhausted)": &fs.PathError{Op: "mkdir", Path: "x.tar.1.part/blobs", Err: syscall.ENOSPC},
		"FILE: x.tar: file exists (conflict)":                    &os.LinkError{Op: "rename", Old: "x.tar.1.part", New: "x.tar", Err: syscall.EEXIST},
		"x (lost)":                                               &dsec.Error{Code: dsec.CodeLost, Message: "x", Err: &fs.PathError{Op: "read", Path: "x.tar.1.part", Err: syscall.EIO}},
	} {
		if got := line(ofPart(err, "x.tar.1.part", "x.tar")); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if err := ofPart(nil, "x.tar.1.part", "x.tar"); err != nil {
		t.Errorf("no error became %v", err)
	}
}

// TestErrorsNameWhatWasGiven: an argument or a flag, not the field of the call.
func TestErrorsNameWhatWasGiven(t *testing.T) {
	of := dsec.Invalid("new_name", "x")
	if err := asGiven(of, "name", "NAME", "new_name", "NEW-NAME"); err.Error() != dsec.Invalid("NEW-NAME", "x").Error() {
		t.Error(err)
	}
	if of.Field != "new_name" {
		t.Error("the error itself was changed")
	}
	for _, err := range []error{dsec.Invalid("kind", "x"), errors.New("x"), nil} {
		if got := asGiven(err, "name", "NAME"); fmt.Sprint(got) != fmt.Sprint(err) {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// TestErrorsOfWhatIsUnpacked: they name the file of this machine, by its path from here.
func TestErrorsOfWhatIsUnpacked(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("dst/sub/taken/x", 0o700); err != nil {
		t.Fatal(err)
	}
	for want, h := range map[string]tar.Header{
		"DST: dst/sub/taken: file exists (conflict)":                          {Name: "sub/taken", Typeflag: tar.TypeReg, Mode: 0o600},
		"DST: dst/link: no such file or directory (not_found)":                {Name: "./link", Typeflag: tar.TypeLink, Linkname: "none"},
		`the sandbox sent a name that leaves the directory: "../x" (invalid)`: {Name: "../x", Typeflag: tar.TypeReg},
	} {
		var b bytes.Buffer
		if err := tar.NewWriter(&b).WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if err := unpack(&b, "dst"); err == nil || line(err) != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
