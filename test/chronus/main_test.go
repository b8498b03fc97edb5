// Package chronus_test runs chronus, the PID 1 of a sandbox, and looks at it as
// an edge does: through its protocol, and from outside by /proc. The program is
// built here, as it is shipped and with the sanitizers of the C compiler.
package chronus_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(stageEnv); path != "" {
		println("stage:", stage(path, os.Args[1:]).Error()) // it returns only an error
		os.Exit(1)
	}
	// What a chronus leaves that was killed comes here.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	code := m.Run()
	if binDir != "" {
		_ = os.RemoveAll(binDir)
	}
	os.Exit(code)
}

// binDir holds the programs; TestMain removes it.
var binDir string

var makeBinDir = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "dsec-chronus-")
	binDir = dir
	return dir, err
})

// build is one way to build chronus.
type build struct {
	name string
	make func() (string, error)
}

var (
	shipped = build{"chronus", program("chronus", "../../chronus/build", "OUT")}
	builds  = []build{shipped, {"sanitized", program("sanitized", "../../chronus/build", "--asan", "OUT")}}
)

// program makes a binary, once, by a command that has OUT for its path.
func program(name string, argv ...string) func() (string, error) {
	return sync.OnceValues(func() (string, error) {
		dir, err := makeBinDir()
		if err != nil {
			return "", err
		}
		out := filepath.Join(dir, name)
		for i, arg := range argv {
			if arg == "OUT" {
				argv[i] = out
			}
		}
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%q: %w\n%s", argv, err, text)
		}
		return out, nil
	})
}

func (b build) path(t testing.TB) string { return made(t, b.make) }

func made(t testing.TB, program func() (string, error)) string {
	t.Helper()
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// The stage is this test binary again, in namespaces that it was started in. It
// does what a launcher does, and becomes chronus. Its variable names the
// program, and its arguments are those of chronus; descriptor 3 goes through.
const (
	stageEnv = "DSEC_TEST_STAGE"
	rootEnv  = "DSEC_TEST_ROOT"  // a directory for the minimal root
	shellEnv = "DSEC_TEST_SHELL" // what /bin/sh is, beside no bash
)

func stage(path string, args []string) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private: %w", err)
	}
	env := os.Environ()
	if sh := os.Getenv(shellEnv); sh != "" {
		err = onlyShell(sh)
	} else {
		env = nil
		err = minimalRoot(os.Getenv(rootEnv))
	}
	if err != nil {
		return err
	}
	return unix.Exec("/proc/self/fd/"+strconv.Itoa(fd), append([]string{"chronus"}, args...), env)
}

// onlyShell makes sh the /bin/sh of this mount namespace, and takes bash away.
func onlyShell(sh string) (err error) {
	none, err := os.CreateTemp("", "dsec-none-") // not executable
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, none.Close(), os.Remove(none.Name())) }()
	// Where /bin is /usr/bin, the second mount would be over the first: over none
	// itself, which could not be removed.
	covered := map[string]bool{}
	for target, source := range map[string]string{"bash": none.Name(), "sh": sh} {
		for _, dir := range []string{"/bin/", "/usr/bin/"} {
			path, err := filepath.EvalSymlinks(dir + target)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			if covered[path] {
				continue
			}
			covered[path] = true
			if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("%s over %s: %w", source, path, err)
			}
		}
	}
	return nil
}

// minimalRoot makes a root like that of a warm container at dir, and enters it.
func minimalRoot(dir string) (err error) {
	at := func(name string) string { return filepath.Join(dir, name) }
	mount := func(source, target, fstype string, flags uintptr) {
		if err == nil {
			if err = unix.Mount(source, target, fstype, flags, ""); err != nil {
				err = fmt.Errorf("mount %s: %w", target, err)
			}
		}
	}
	mount("dsec-test", dir, "tmpfs", 0)
	for _, name := range []string{"proc", "dev"} {
		err = errors.Join(err, os.Mkdir(at(name), 0o755))
	}
	mount("/dev", at("dev"), "", unix.MS_BIND|unix.MS_REC)
	mount("proc", at("proc"), "proc", 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Chdir(dir), unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/"))
}
