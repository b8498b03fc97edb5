package chronus_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"golang.org/x/sys/unix"
)

// accountFiles starts a sandbox whose /etc has what fill makes in it.
func accountFiles(t *testing.T, fill func(etc string) error) *sandbox {
	t.Helper()
	return newSandbox(t, 1, func(r *chronusapi.SetupRequest) {
		etc := detachedTmpfs(t)
		t.Cleanup(func() { unix.Close(etc) })
		if err := fill("/proc/self/fd/" + strconv.Itoa(etc)); err != nil {
			t.Fatal(err)
		}
		r.Mounts = append(r.Mounts, chronusapi.Mount{FD: etc, Path: "/etc"})
	})
}

// The files of accounts are the agent's to write. No user may come out of them
// that is not plainly in them, and nobody waits for a file that is none.
func TestAccountFilesAreTakenLineByLine(t *testing.T) {
	passwd := strings.Join([]string{
		"",
		":x:1:1::/:",
		"short:x:2",
		"spaces :x:3:3::/:",
		"negative:x:-4:4::/:",
		"huge:x:4294967296:5::/:",
		"none:x:4294967295:5::/:",
		"letters:x:6a:6::/:",
		"nogroup:x:7:::/:",
		strings.Repeat("long", 50_000) + ":x:8:8::/:",
		"twice:x:9:9::/nine:",
		"twice:x:10:10::/ten:",
		"relative:x:11:11::home:",
		"\xff\x01:x:12:12::/:",
		"more:x:13:13::/:/bin/sh:extra:fields",
		"last:x:14:14::/last:",
	}, "\n")
	group := strings.Join([]string{
		"short:x",
		"bad:x:x:last",
		"wheel:x:20:other,last",
		"prefix:x:21:lastly,xlast",
		"again:x:22:last,last",
		"empty:x:23:",
		"end:x:24:last",
	}, "\n")
	s := accountFiles(t, func(etc string) error {
		return errors.Join(os.WriteFile(filepath.Join(etc, "passwd"), []byte(passwd), 0o644),
			os.WriteFile(filepath.Join(etc, "group"), []byte(group), 0o644))
	})
	ids := func(user string) (string, error) {
		t.Helper()
		req := shell("sed -n 's/^[UG]id:.\\([0-9]*\\).*/\\1/p; s/^Groups:.//p' /proc/self/status; echo $HOME")
		req.Command.User = user
		ev, err := s.start(t, req)
		if err != nil {
			return "", err
		}
		return strings.Join(strings.Fields(collect(t, ev, nil).stdout), " "), nil
	}
	for user, want := range map[string]string{
		"twice": "9 9 /nine", "10": "10 10 /ten", "relative": "11 11 /", "\xff\x01": "12 12 /", "more": "13 13 /",
		"last": "14 14 20 22 24 /last", "last:wheel": "14 20 /last", "last:77": "14 77 /last", "14": "14 14 20 22 24 /last", "99": "99 0 /", "99:end": "99 24 /",
	} {
		if got, err := ids(user); err != nil || got != want {
			t.Errorf("%q: got %q, %v; want %q", user, got, err, want)
		}
	}
	for _, user := range []string{"short", "spaces", "negative", "huge", "none", "letters", "nogroup", "root", "lastly", "last:short", "last:bad", "last:nobody"} {
		_, err := ids(user)
		wantError(t, err, dsec.CodeNotFound, "command.user")
	}
	for _, user := range []string{":", ":0", "4294967295", "4294967296", "-1", "0:-1", "last:", "-", "99999999999999999999"} {
		_, err := ids(user)
		wantError(t, err, dsec.CodeInvalid, "command.user")
	}
}

func TestAccountFilesThatAreNone(t *testing.T) {
	for name, fill := range map[string]func(path string) error{
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o666) },
		"directory": func(path string) error { return os.Mkdir(path, 0o755) },
		"loop":      func(path string) error { return os.Symlink("passwd", path) },
		"magic":     func(path string) error { return os.Symlink("/proc/self/fd/0", path) },
		"device":    func(path string) error { return os.Symlink("/dev/zero", path) },
		"large": func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, 4<<20+1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := accountFiles(t, func(etc string) error { return fill(filepath.Join(etc, "passwd")) })
			req := argv("true")
			req.Command.User = "nobody"
			_, err := s.start(t, req)
			wantError(t, err, dsec.CodeInvalid, "command.user")
			req.Command.User = ""
			if r := s.run(t, req); !r.outcome.OK() {
				t.Errorf("root needs no file: %+v", r)
			}
		})
	}
	s := accountFiles(t, func(string) error { return nil })
	req := argv("true")
	req.Command.User = "nobody"
	_, err := s.start(t, req)
	wantError(t, err, dsec.CodeNotFound, "command.user")
	if req.Command.User = "7:8"; !s.run(t, req).outcome.OK() {
		t.Error("numbers need no file")
	}
}
