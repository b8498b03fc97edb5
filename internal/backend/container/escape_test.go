package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

// S06: no other way to a mount or a namespace works either.
func TestNoMountsByOtherCalls(t *testing.T) {
	s := newHost(t, nil).create()
	lines := s.inside("moremounts")
	for _, line := range lines {
		if f := strings.Fields(line); f[len(f)-1] == "ok" || f[len(f)-1] == "error" {
			t.Errorf("%s, want it refused", line)
		}
	}
	if o := s.sh("cat /proc/kallsyms /proc/keys | wc -c; echo x > /proc/sys/kernel/domainname; cat /proc/mounts | wc -l"); !strings.HasPrefix(o.out, "0\n") {
		t.Errorf("masked files have %q", o.out)
	}
	control := onHost(t, "moremounts")
	for _, want := range []string{"new proc ok", "shared ok", "clone mnt ok", "fspick ok", "move ok"} {
		if !slices.Contains(control, want) {
			t.Errorf("control: no %q in %v", want, control)
		}
	}
}

// try runs a command that may be refused, or take too long.
func (s *sandbox) try(cmd chronusapi.Command) (o outcome, err error) {
	s.Helper()
	cmd.Env, cmd.Timeout = append([]string{"PATH=/bin"}, cmd.Env...), 20*time.Second
	req := chronusapi.StartRequest{Command: cmd}
	stream, err := s.client.Start(s.Context(), req)
	if errors.Is(err, chronusapi.ErrNeedGroup) {
		check(s, s.i.(backend.Grouper).AddGroup(s.Context()))
		stream, err = s.client.Start(s.Context(), req)
	}
	if err != nil {
		return o, err
	}
	defer stream.Close()
	for {
		ev, err := stream.Next()
		check(s, err)
		o.out += string(ev.Data)
		if ev.Kind == chronusapi.EventExited {
			o.Outcome = ev.Outcome
			if o.TimedOut {
				s.Errorf("%v hangs", cmd.Argv)
			}
			return o, nil
		}
	}
}

// S02: a working directory, a program or a file named by what /proc shows of
// chronus or of the command leads nowhere outside. (The shape of CVE-2024-21626.)
func TestNoWayThroughProc(t *testing.T) {
	s := newHost(t, nil).create()
	// What a root of the host's would have, and a sandbox has not.
	const look = "ls -d ./boot ./../../../../home ./var/lib/dpkg 2>/dev/null; pwd; cat ./cgroup.procs 2>/dev/null"
	refused := 0
	for _, base := range []string{"/proc/self", "/proc/1", "/proc/thread-self", "/dev"} {
		for n := range 64 {
			path := fmt.Sprintf("%s/fd/%d", base, n)
			o, err := s.try(chronusapi.Command{Argv: []string{"/bin/sh", "-c", look}, Cwd: path})
			switch {
			case err != nil:
				refused++
				if c := dsec.CodeOf(err); c == dsec.CodeInternal || c == dsec.CodeUnavailable {
					t.Errorf("cwd %s: %v", path, err)
				}
			case strings.Contains(o.out, "boot") || strings.Contains(o.out, "dpkg") || strings.Contains(o.out, "unreachable") || !strings.HasPrefix(strings.TrimSpace(o.out), "/"):
				t.Errorf("cwd %s: %q", path, o.out)
			}
			if _, err := s.read(path); err == nil {
				t.Errorf("%s can be read", path)
			}
			if _, err := s.client.Write(t.Context(), chronusapi.WriteRequest{Path: path, Append: true}, strings.NewReader("0")); err == nil {
				t.Errorf("%s can be written", path)
			}
			if _, _, err := s.client.ListDir(t.Context(), path, "", 10); err == nil {
				t.Errorf("%s can be listed", path)
			}
		}
		for _, path := range []string{base + "/root/etc", base + "/cwd/etc", base + "/exe", base + "/map_files/0-1", base + "/root/../../../etc/shadow"} {
			if got, err := s.read(path); err == nil {
				t.Errorf("%s reads %.100q", path, got)
			}
			if _, err := s.client.Download(t.Context(), path); err == nil {
				t.Errorf("%s can be downloaded", path)
			}
			if err := s.client.Mkdir(t.Context(), path+"/new", 0, true); err == nil {
				t.Errorf("a directory can be made below %s", path)
			}
		}
		// The binary of chronus, if at all, runs as any program and is not PID 1.
		for _, path := range []string{base + "/exe", base + "/root/bin/true", base + "/fd/3"} {
			_, _ = s.try(chronusapi.Command{Argv: []string{path}, Cwd: "/"})
		}
	}
	// The same by a link that the agent made, and for a session.
	for n := range 64 {
		link := fmt.Sprint("/tmp/work", n)
		s.sh(fmt.Sprintf("ln -s /proc/self/fd/%d %s", n, link))
		if o, err := s.try(chronusapi.Command{Argv: []string{"/bin/sh", "-c", look}, Cwd: link}); err == nil {
			t.Errorf("cwd %s, a link to /proc/self/fd/%d: %q", link, n, o.out)
		}
		if sess, err := s.client.OpenSession(t.Context(), chronusapi.SessionRequest{Env: []string{"PATH=/bin"}, Cwd: link}); err == nil {
			t.Errorf("a session in %s, a link to /proc/self/fd/%d", link, n)
			_ = s.client.CloseSession(t.Context(), sess.ID)
		}
		if got, err := s.read(link); err == nil {
			t.Errorf("%s reads %.100q", link, got)
		}
		if _, err := s.client.Upload(t.Context(), chronusapi.UploadRequest{Path: link + "/up"}, strings.NewReader(strings.Repeat("\x00", 1024))); err == nil {
			t.Errorf("something can be put into %s", link)
		}
	}
	sess, err := s.client.OpenSession(t.Context(), chronusapi.SessionRequest{Env: []string{"PATH=/bin"}, Cwd: "/tmp"})
	if err != nil {
		t.Errorf("control: a session in /tmp: %v", err)
	} else {
		check(t, s.client.CloseSession(t.Context(), sess.ID))
	}
	if refused < 100 {
		t.Errorf("only %d working directories were refused", refused)
	}
	if o, err := s.try(chronusapi.Command{Argv: []string{"/bin/sh", "-c", "pwd"}, Cwd: "/proc/self/../../etc/../tmp"}); err != nil || o.out != "/tmp\n" {
		t.Errorf("control: %q, %v", o.out, err)
	}
	info, err := s.client.Info(t.Context())
	if err != nil || info.Processes != 0 {
		t.Errorf("chronus says %+v, %v", info, err)
	}
}

// S12: a process that crashes and wants a core file leaves none, inside or on
// the host, and starts no program of the host's.
func TestCrashLeavesNoCore(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	check(t, err)
	here, err := os.ReadDir(".")
	check(t, err)
	o := s.run("/bin/inside", "core")
	if o.Signal != 11 {
		t.Errorf("%+v %q, want signal 11", o.Outcome, o.out)
	}
	for line := range strings.Lines(o.out) {
		if !strings.HasSuffix(line, " EPERM\n") {
			t.Errorf("%s, want EPERM", line)
		}
	}
	if o := s.sh("ls -d /core* /tmp/core* /root/core* 2>/dev/null; find / -xdev -name '*core.*' | grep -v busybox"); o.out != "" {
		t.Errorf("inside are %q, with the pattern %s", o.out, pattern)
	}
	if after, err := os.ReadDir("."); err != nil || len(after) != len(here) {
		t.Errorf("here are %d files, before %d, %v", len(after), len(here), err)
	}
}

// S04: more shapes that an image's own directories may have.
func TestImageShapes(t *testing.T) {
	h := newHost(t, nil)
	target := filepath.Join(t.TempDir(), "target")
	check(t, os.MkdirAll(target, 0o755))
	for name, change := range map[string]func(root string) error{
		"/proc is a file": func(root string) error {
			return errors.Join(os.Remove(root+"/proc"), os.WriteFile(root+"/proc", nil, 0o644))
		},
		"/dev is a file": func(root string) error {
			return errors.Join(os.Remove(root+"/dev"), os.WriteFile(root+"/dev", nil, 0o644))
		},
		"/sys leads to itself": func(root string) error { return errors.Join(os.Remove(root+"/sys"), os.Symlink("sys", root+"/sys")) },
		"/proc leads to itself up": func(root string) error {
			return errors.Join(os.Remove(root+"/proc"), os.Symlink("../proc", root+"/proc"))
		},
		"/dev through another": func(root string) error {
			return errors.Join(os.Remove(root+"/dev"), os.Symlink("dev2", root+"/dev"), os.Symlink(target, root+"/dev2"))
		},
	} {
		_, err := h.b.Create(t.Context(), h.request(image(t, func(root string) { check(t, change(root)) })))
		if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("%s: %v, want invalid", name, err)
		}
	}
	for name, change := range map[string]func(root string) error{
		"/etc/hosts is a directory": func(root string) error { return os.MkdirAll(root+"/etc/hosts/x", 0o755) },
		"/dev/null is a directory":  func(root string) error { return os.MkdirAll(root+"/dev/null/x", 0o755) },
		"/dev is full of links": func(root string) error {
			return errors.Join(os.Symlink(target, root+"/dev/pts"), os.Symlink(target, root+"/dev/shm"), os.Symlink(target+"/null", root+"/dev/null"), os.Symlink(target, root+"/dev/mqueue"))
		},
		"/proc is full": func(root string) error { return os.MkdirAll(root+"/proc/self/fd", 0o755) },
		"/etc/passwd is a link": func(root string) error {
			return errors.Join(os.Remove(root+"/etc/passwd"), os.Symlink("/proc/self/environ", root+"/etc/passwd"))
		},
	} {
		req := h.request(image(t, func(root string) { check(t, change(root)) }))
		i, err := h.b.Create(t.Context(), req)
		if err != nil {
			if dsec.CodeOf(err) != dsec.CodeInvalid {
				t.Errorf("%s: %v, want invalid", name, cause(err))
			}
			continue
		}
		s := &sandbox{host: h, id: req.ID}
		s.use(i)
		if o := s.sh("echo x > /dev/null; echo y > /dev/shm/y; cat /dev/shm/y; ls /proc | grep -c '^1$'"); o.out != "y\n1\n" {
			t.Errorf("%s: %q", name, o.out)
		}
		check(t, s.client.Close())
		check(t, i.Destroy(context.Background()))
	}
	if entries, err := os.ReadDir(target); err != nil || len(entries) != 0 {
		t.Errorf("the host's directory has %v, %v", entries, err)
	}
}

// S86: whatever the agent made of the files of accounts, a user is looked up or
// refused soon, and root needs none of them.
func TestHostileAccounts(t *testing.T) {
	s := newHost(t, nil).create()
	if o := s.sh("printf 'me:x:1000:1000::/:/bin/sh\n' > /etc/passwd; printf 'us:x:7:me\n' > /etc/group"); !o.OK() {
		t.Fatal(o.out)
	}
	as := func(user string) (string, error) {
		o, err := s.try(chronusapi.Command{Argv: []string{"/bin/stat", "-L", "-c", "%u", "/proc/self"}, User: user})
		return o.out, err
	}
	if got, err := as("me:us"); err != nil || got != "1000\n" {
		t.Errorf("control: %q, %v", got, err)
	}
	for _, user := range []string{"-1", "4294967295", "4294967296", "65536", "99999999999999999999999", "me:", ":us", "me:us:x", "me:-1", "me:4294967295", "../me", "me\nroot", "nobody at all", "me:nobody", "0x0", "+0", " 0"} {
		if got, err := as(user); err == nil {
			t.Errorf("user %q runs as %q", user, got)
		} else if c := dsec.CodeOf(err); c != dsec.CodeInvalid && c != dsec.CodeNotFound {
			t.Errorf("user %q: %v", user, err)
		}
	}
	for name, script := range map[string]string{
		"a FIFO":      "rm -rf /etc/passwd; mkfifo /etc/passwd",
		"a device":    "rm -rf /etc/passwd; ln -s /dev/zero /etc/passwd",
		"a directory": "rm -rf /etc/passwd; mkdir /etc/passwd",
		"huge":        "rm -rf /etc/passwd; dd if=/dev/zero of=/etc/passwd bs=1M count=30",
		"one line":    "rm -rf /etc/passwd; yes me:x | head -c 9000000 | tr -d '\\n' > /etc/passwd",
		"a loop":      "rm -rf /etc/passwd; ln -s passwd /etc/passwd",
		"magic":       "rm -rf /etc/passwd; ln -s /proc/1/root/etc/passwd /etc/passwd",
		"missing":     "rm -rf /etc/passwd",
		"no etc":      "rm -rf /etc; ln -s /proc/1 /etc",
	} {
		s.sh(script)
		if got, err := as("me"); err == nil {
			t.Errorf("%s: me runs as %q", name, got)
		} else if c := dsec.CodeOf(err); c == dsec.CodeInternal || c == dsec.CodeUnavailable {
			t.Errorf("%s: %v", name, err)
		}
		if got, err := as(""); err != nil || got != "0\n" {
			t.Errorf("%s: root is %q, %v", name, got, err)
		}
	}
}
