package container

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
)

// answers fails the test where what the platform does without any program of
// the sandbox does not work.
func (s *sandbox) answers(after string) {
	s.Helper()
	if _, err := s.client.Info(s.Context()); err != nil {
		s.Errorf("after %s: health: %v", after, err)
	}
	if got, err := s.read("/root/precious"); err != nil || string(got) != "precious\n" {
		s.Errorf("after %s: read %q, %v", after, got, err)
	}
	if _, _, err := s.client.ListDir(s.Context(), "/root", "", 10); err != nil {
		s.Errorf("after %s: list: %v", after, err)
	}
	select {
	case <-s.i.Done():
		s.Fatalf("after %s: PID 1 is gone: %+v", after, s.i.Exit())
	default:
	}
}

// U09: an agent that breaks its own sandbox gets errors that tell so, never the
// outcome of a command, and the platform's own services go on.
func TestBrokenByItsAgent(t *testing.T) {
	s := newHost(t, nil).create()
	s.write("/root/precious", 0, []byte("precious\n"))
	refused := func(after string) {
		t.Helper()
		s.answers(after)
		for _, cmd := range []chronusapi.Command{{Argv: []string{"/bin/sh", "-c", "true"}}, {Argv: []string{"true"}}, {Shell: "exit 0"}} {
			o, err := s.try(cmd)
			var e *dsec.Error
			if !errors.As(err, &e) || e.Field != "command.argv" && e.Field != "command.shell" || e.Code != dsec.CodeNotFound && e.Code != dsec.CodeInvalid {
				t.Errorf("after %s: %v gives %+v, %v; want an error that names the command", after, cmd, o, err)
			}
		}
	}
	s.sh("kill -9 -1")
	s.answers("kill -9 -1")
	s.sh("for n in $(seq 1 64); do kill -$n 1; done 2>/dev/null")
	s.answers("every signal to PID 1")
	if o := s.sh("echo still"); o.out != "still\n" {
		t.Errorf("still usable, it says %q", o.out)
	}
	if o := s.sh("dd if=/dev/zero of=/root/fill bs=1M count=1000"); !strings.Contains(o.out, "No space") && !strings.Contains(o.out, "quota") {
		t.Errorf("the disk is not full: %q", o.out)
	}
	s.answers("a full disk")
	_, err := s.client.Write(t.Context(), chronusapi.WriteRequest{Path: "/root/more"}, bytes.NewReader(make([]byte, 8<<20)))
	if err == nil || dsec.CodeOf(err) != dsec.CodeExhausted {
		t.Errorf("write to the full disk: %v, want exhausted", err)
	}
	if o := s.sh("exit 3"); o.Code != 3 {
		t.Errorf("a command on a full disk: %+v, want 3", o.Outcome)
	}
	check(t, s.client.Remove(t.Context(), "/root/fill", false))
	s.sh("chmod 000 /bin/busybox /bin/inside")
	refused("chmod of the shell")
	s.write("/bin/new", 0o755, nil) // an empty file is no program
	if _, err := s.try(chronusapi.Command{Argv: []string{"/bin/new"}}); err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
		t.Errorf("an empty program: %v, want invalid", err)
	}
	check(t, s.client.Remove(t.Context(), "/bin", true))
	refused("removal of /bin")
	for _, dir := range []string{"/etc", "/usr", "/lib", "/tmp", "/home", "/var"} {
		if err := s.client.Remove(t.Context(), dir, true); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound && dsec.CodeOf(err) != dsec.CodeConflict {
			t.Errorf("remove %s: %v", dir, err)
		}
	}
	refused("removal of nearly all")
	// Whoever owns it can mend it, by the same calls.
	busybox, err := os.ReadFile(busyboxPath(t))
	check(t, err)
	check(t, s.client.Mkdir(t.Context(), "/bin", 0o755, true))
	s.write("/bin/sh", 0o755, busybox)
	if o := s.run("/bin/sh", "-c", "echo mended"); o.out != "mended\n" {
		t.Errorf("mended, it says %q, %+v", o.out, o.Outcome)
	}
}

func busyboxPath(t testing.TB) string {
	t.Helper()
	path, err := exec.LookPath("busybox")
	check(t, err)
	return path
}

// U09: the same by a shell that removes everything at once, which a command
// that runs meanwhile survives.
func TestRemovesEverything(t *testing.T) {
	s := newHost(t, nil).create()
	s.write("/root/precious", 0, []byte("precious\n"))
	running := s.hold(nil, "/bin/sh", "-c", "echo ready; read x; exit 9")
	o := s.sh("cd /; rm -rf bin etc usr lib tmp sys proc dev var .[a-z]* 2>/dev/null; echo gone")
	if !strings.HasSuffix(o.out, "gone\n") {
		t.Errorf("%q, %+v", o.out, o.Outcome)
	}
	s.answers("rm -rf")
	if _, err := s.try(chronusapi.Command{Argv: []string{"ls"}}); err == nil || dsec.CodeOf(err) != dsec.CodeNotFound {
		t.Errorf("ls: %v, want not_found", err)
	}
	list, err := s.client.Processes(t.Context())
	check(t, err)
	for _, p := range list {
		if p.Outcome == nil {
			_, err := s.client.WriteStdin(t.Context(), p.ID, []byte("go\n"), true)
			check(t, err)
		}
	}
	for {
		ev, err := running.Next()
		check(t, err)
		if ev.Kind == chronusapi.EventExited {
			if ev.Outcome.Code != 9 {
				t.Errorf("the command that ran ended with %+v, want 9", ev.Outcome)
			}
			return
		}
	}
}

// U21, U31: what takes all of its memory and processors does not keep the
// platform out; after the kernel has killed it the files are there.
func TestHogs(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	s.write("/root/precious", 0, []byte("precious\n"))
	limit := h.request().Spec.Limits.MemoryBytes
	s.hold(nil, "/bin/inside", "hog", fmt.Sprint(limit*8/10))
	before := s.cpu()
	for n := range 20 {
		s.answers("a hog")
		if o := s.sh("echo here"); o.out != "here\n" {
			t.Fatalf("command %d beside a hog: %q, %+v", n, o.out, o.Outcome)
		}
		s.write("/root/written", 0, []byte("x"))
	}
	if s.cpu() == before {
		t.Error("control: the hog uses no CPU")
	}
	if o := s.run("/bin/inside", "hog", fmt.Sprint(limit)); !o.OOM {
		t.Errorf("too much memory: %+v, want OOM", o.Outcome)
	}
	s.answers("an OOM")
	if o := s.sh("cat /root/precious; echo more > /root/after; cat /root/after"); o.out != "precious\nmore\n" {
		t.Errorf("after the OOM: %q", o.out)
	}
}

// S70: a sandbox with a process that cannot be killed now is not gone, says so
// in time, and is once it can be.
func TestProcessThatCannotBeKilled(t *testing.T) {
	const freezer = "/sys/fs/cgroup/freezer"
	testutil.Require(t, testutil.Root)
	if _, err := os.Stat(freezer + "/cgroup.procs"); err != nil {
		t.Skip("no freezer of cgroup v1, in which a process cannot be killed")
	}
	h := newHost(t, nil)
	dir := filepath.Join(freezer, testutil.Name(t))
	check(t, os.Mkdir(dir, 0o755))
	set := func(state string) {
		t.Helper()
		check(t, os.WriteFile(dir+"/freezer.state", []byte(state), 0))
		testutil.WaitFor(t, 20*time.Second, state, func() error {
			if got, err := os.ReadFile(dir + "/freezer.state"); err != nil || strings.TrimSpace(string(got)) != state {
				return fmt.Errorf("%s, %w", got, err)
			}
			return nil
		})
	}
	t.Cleanup(func() {
		set("THAWED")
		testutil.WaitFor(t, 20*time.Second, "its process is gone", func() error { return os.Remove(dir) })
	})
	req := h.request()
	i, err := h.b.Create(t.Context(), req)
	check(t, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	t.Cleanup(func() {
		set("THAWED")
		check(t, i.Destroy(context.Background()))
	})
	stuck := s.hold(nil, "/bin/sh", "-c", "echo ready; read x")
	check(t, os.WriteFile(dir+"/cgroup.procs", []byte(fmt.Sprint(stuck.pid)), 0))
	set("FROZEN")
	_ = s.client.Close()
	for range 2 { // and it can be tried again
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		begun := time.Now()
		err := i.Destroy(ctx)
		cancel()
		if err == nil || dsec.CodeOf(err) == dsec.CodeNotFound {
			t.Fatalf("destroyed while a process cannot be killed: %v", err)
		}
		if d := time.Since(begun); d > 40*time.Second {
			t.Errorf("the try took %v", d)
		}
		var e *dsec.Error
		if !errors.As(err, &e) || strings.Contains(e.Message, "/") {
			t.Errorf("%v, want a typed error without paths", err)
		}
	}
	// Others are made and destroyed meanwhile, and the ID is taken.
	if o := h.create().sh("echo other"); o.out != "other\n" {
		t.Errorf("another says %q", o.out)
	}
	if _, err := h.b.Create(t.Context(), backend.CreateRequest{ID: req.ID, Spec: req.Spec, Layers: req.Layers}); err == nil || dsec.CodeOf(err) != dsec.CodeConflict {
		t.Errorf("the same ID: %v, want conflict", err)
	}
	set("THAWED")
	check(t, i.Destroy(t.Context()))
	select {
	case <-i.Done():
	default:
		t.Error("destroyed, and not done")
	}
}
