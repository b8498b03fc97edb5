package container

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/chronusbin"
)

// A program, an interpreter's place or a file of users that is named by way of
// what a command's process holds before it execs leads nowhere outside: chronus
// has directories of the host's cgroups, and ".." of one is the host's.
func TestNoProgramOfTheHost(t *testing.T) {
	bin, err := chronusbin.Binary() // static, so that it could run anywhere
	check(t, err)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	check(t, err)
	path := filepath.Join(dir, "program")
	check(t, os.WriteFile(path, bin, 0o755)) //nolint:gosec // it is to be found
	for at := dir; at != "/"; at = filepath.Dir(at) {
		info, err := os.Stat(at)
		check(t, err)
		check(t, os.Chmod(at, info.Mode().Perm()|0o055))
		if at == os.TempDir() {
			break
		}
	}
	s := newHost(t, nil).create()
	up := strings.Repeat("/..", 20)
	for _, base := range []string{"/proc/self/fd", "/proc/thread-self/fd", "/proc/1/fd", "/dev/fd"} {
		for n := range 64 {
			program := fmt.Sprintf("%s/%d%s%s", base, n, up, path)
			for _, cmd := range []chronusapi.Command{
				{Argv: []string{program}},
				{Argv: []string{"program"}, Env: []string{"PATH=" + filepath.Dir(program)}},
				{Argv: []string{fmt.Sprintf("%s/%d%s/bin/true", base, n, up)}},
			} {
				if o, err := s.try(cmd); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound && dsec.CodeOf(err) != dsec.CodeInvalid {
					t.Errorf("%v %v: %+v, %v; want no such program", cmd.Argv, cmd.Env, o, err)
				}
			}
		}
	}
	if o, err := s.try(chronusapi.Command{Argv: []string{"/proc/self/root/bin/true"}}); err != nil || !o.OK() {
		t.Errorf("control: %+v, %v", o, err)
	}
}
