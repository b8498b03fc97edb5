package container

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/disk"
	"github.com/opendsec/dsec/internal/testutil"
)

var background = context.Background()

// victimEnv makes the test binary a process with a backend, to be killed.
const victimEnv = "DSEC_TEST_VICTIM"

// errand is what a victim does: sweep, create, tell the handle, wait for a
// line, destroy. It kills itself before the step Crash.
type errand struct {
	RunDir, DiskDir, Cgroup, Chronus string
	ImageBytes                       int64
	Warm                             int
	Spare                            bool // the create finds one
	Pause                            bool // the sandbox is paused and resumed before its end
	Snapshot                         bool // instead of that one is taken of it
	Request                          backend.CreateRequest
	Images                           []string // of the request's layers
	Crash                            string
}

func victim() {
	var e errand
	must(json.Unmarshal([]byte(os.Getenv(victimEnv)), &e))
	must(os.Unsetenv(victimEnv)) // the launcher is the same binary
	for i, path := range e.Images {
		e.Request.Layers[i] = backend.FileLayer(e.Request.Layers[i].Digest, path)
	}
	b, err := New(Config{
		RunDir: e.RunDir, Disk: disk.Options{Dir: e.DiskDir, ImageBytes: e.ImageBytes, MaxImageBytes: e.ImageBytes}, Cgroup: e.Cgroup, Chronus: e.Chronus,
		Launcher: []string{"/proc/self/exe"}, Warm: e.Warm,
		Crash: func(step string) {
			if step == e.Crash {
				must(unix.Kill(os.Getpid(), unix.SIGKILL))
				select {}
			}
		},
	})
	must(err)
	must(b.Sweep(background, nil))
	if e.Spare {
		must(makeSpare(b, e.Request))
	}
	i, err := b.Create(background, e.Request)
	must(err)
	_, err = os.Stdout.Write(append(i.Handle(), '\n'))
	must(err)
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err == io.EOF {
		os.Exit(0)
	}
	if e.Pause {
		must(i.(backend.Pauser).Pause(background))
		must(i.(backend.Pauser).Resume(background))
	}
	if e.Snapshot {
		snap, err := i.(backend.Snapshotter).Snapshot(background)
		must(err)
		if snap.GoOn != nil {
			must(snap.GoOn())
		}
		must(snap.Close())
	}
	must(i.Destroy(background))
	must(b.Close())
	os.Exit(0)
}

// makeSpare asks for a kind until there is a spare of it.
func makeSpare(b *Backend, req backend.CreateRequest) error {
	for range hotAfter {
		req.ID = dsec.NewSandboxID("aaaaa")
		i, err := b.Create(background, req)
		if err == nil {
			err = i.Destroy(background)
		}
		if err != nil {
			return err
		}
	}
	for range 3000 {
		if spares(b) > 0 {
			return nil
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // the pool tells nobody
	}
	return errors.New("no spare is made")
}

func spares(b *Backend) (n int) {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	for _, d := range b.pool.kinds {
		n += len(d.spares)
	}
	return n
}

func must(err error) {
	if err != nil {
		println("victim:", cause(err))
		os.Exit(1)
	}
}

// startVictim returns what it says of its sandbox; empty if it died before.
func (h *host) startVictim(e errand) (cmd *exec.Cmd, stdin io.WriteCloser, handle string) {
	h.Helper()
	e.RunDir, e.DiskDir, e.Cgroup = h.config.RunDir, h.config.Disk.Dir, h.config.Cgroup
	e.Chronus, e.ImageBytes = h.config.Chronus, h.config.Disk.ImageBytes
	for _, l := range e.Request.Layers {
		e.Images = append(e.Images, imagePath(l))
	}
	raw, err := json.Marshal(e)
	check(h, err)
	cmd = exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), victimEnv+"="+string(raw))
	cmd.Stderr = os.Stderr
	stdin, err = cmd.StdinPipe()
	check(h, err)
	stdout, err := cmd.StdoutPipe()
	check(h, err)
	check(h, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil && err != io.EOF {
		h.Fatal(err)
	}
	return cmd, stdin, strings.TrimSpace(line)
}

func killed(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	_ = cmd.Wait()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() || ws.Signal() != unix.SIGKILL {
		t.Fatalf("the victim ended with %v, want it killed", cmd.ProcessState)
	}
}

// handOver closes the backend of h, which has no sandbox, so that another
// process may be the one of its directories.
func (h *host) handOver(t *testing.T) {
	t.Helper()
	check(t, h.b.Close())
	t.Cleanup(func() {
		if h.b == nil {
			h.open()
		}
	})
}

// At every step at which the backend's process can die, the next one frees what
// is left, and the same ID can be used again.
func TestKilledAtEveryStep(t *testing.T) {
	for _, warm := range []int{0, 1} {
		for _, step := range CrashSteps {
			name := step
			if warm > 0 { // what a pool makes different
				if !slices.Contains([]string{"start", "command", "claim-slot", "setup", "handle", "sweep-groups"}, step) {
					continue
				}
				name += "/warm"
			}
			t.Run(name, func(t *testing.T) {
				h := newHost(t, nil)
				h.handOver(t)
				req := h.request()
				before := step
				if strings.HasPrefix(step, "sweep-") {
					before = "setup" // something to sweep
				}
				adopt := strings.HasPrefix(step, "adopt-")
				if adopt {
					warm = 2
				}
				cmd, stdin, handle := h.startVictim(errand{Request: req, Crash: before, Warm: warm, Spare: adopt})
				if handle != "" {
					_, err := io.WriteString(stdin, "destroy\n")
					check(t, err)
				}
				killed(t, cmd)
				if before != step { // a crash in the sweep that follows
					cmd, _, _ := h.startVictim(errand{Request: req, Crash: step, Warm: warm})
					killed(t, cmd)
				}
				h.open()
				check(t, h.b.Sweep(t.Context(), nil))
				i, err := h.b.Create(t.Context(), req)
				check(t, err)
				s := &sandbox{host: h, id: req.ID}
				s.use(i)
				if o := s.sh("echo again"); o.out != "again\n" {
					t.Errorf("have %q", o.out)
				}
				check(t, s.client.Close())
				check(t, i.Destroy(t.Context()))
			})
		}
	}
}

// A sandbox and what runs in it go on when the backend's process is killed.
func TestRecover(t *testing.T) {
	t.Run("cold", func(t *testing.T) { testRecover(t, errand{}) })
	t.Run("spare", func(t *testing.T) { testRecover(t, errand{Warm: 2, Spare: true}) })
}

func testRecover(t *testing.T, e errand) {
	h := newHost(t, nil)
	h.handOver(t)
	e.Request = h.request()
	req := e.Request
	cmd, _, handle := h.startVictim(e)
	if handle == "" {
		t.Fatal("the victim made no sandbox")
	}
	check(t, cmd.Process.Kill())
	killed(t, cmd)

	h.open()
	check(t, h.b.Sweep(t.Context(), map[dsec.SandboxID]bool{req.ID: true}))
	if _, err := h.b.Recover(t.Context(), dsec.NewSandboxID("aaaaa"), backend.Handle(handle)); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("another's handle: %v, want lost", err)
	}
	i, err := h.b.Recover(t.Context(), req.ID, backend.Handle(handle))
	check(t, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	t.Cleanup(func() { check(t, i.Destroy(background)); _ = s.client.Close() })
	if o := s.sh("hostname"); o.out != "sandbox\n" {
		t.Errorf("have %q", o.out)
	}
	if u, err := i.Usage(t.Context()); err != nil || u.MemoryLimit != req.Spec.Limits.MemoryBytes {
		t.Errorf("usage %+v, %v", u, err)
	}
	select {
	case <-i.Done():
		t.Fatal("PID 1 ended")
	default:
	}
	// A second restart, in which PID 1 was killed meanwhile.
	check(t, unix.Kill(pidOf(t, handle), unix.SIGKILL))
	<-i.Done()
	if i.Exit().Reason == "" {
		t.Error("no reason")
	}
	if _, err := h.b.Recover(t.Context(), req.ID, backend.Handle(handle)); err == nil || dsec.CodeOf(err) != dsec.CodeLost {
		t.Errorf("after its end: %v, want lost", err)
	}
}

func pidOf(t testing.TB, raw string) int {
	t.Helper()
	var h handle
	check(t, json.Unmarshal([]byte(raw), &h))
	return h.PID
}

// The launcher is the backend's to replace: creates go on, sandboxes too.
func TestLauncherKilled(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	run := h.b.launcher.run
	check(t, run.cmd.Process.Kill())
	<-run.dead
	if o := s.sh("echo alive"); o.out != "alive\n" {
		t.Errorf("have %q", o.out)
	}
	if o := h.create().sh("echo new"); o.out != "new\n" {
		t.Errorf("have %q", o.out)
	}
}

// A create whose launcher dies, or whose caller goes, while PID 1 is being made
// leaves nothing (the ledger looks), and the next one works.
func TestLauncherKilledAmidACreate(t *testing.T) {
	amid := func() {}
	h := newHost(t, func(c *Config) {
		c.Crash = func(step string) {
			if step == "command" {
				amid()
			}
		}
	})
	check(t, h.create().i.Destroy(background))
	for name, f := range map[string]func(cancel func()){
		"launcher killed": func(func()) {
			run := h.b.launcher.run
			check(t, run.cmd.Process.Kill())
			<-run.dead
		},
		"launcher stopped, caller gone": func(cancel func()) {
			run := h.b.launcher.run
			check(t, run.cmd.Process.Signal(unix.SIGSTOP))
			cancel()
			time.AfterFunc(100*time.Millisecond, func() { _ = run.cmd.Process.Signal(unix.SIGCONT) })
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		amid = func() { f(cancel) }
		i, err := h.b.Create(ctx, h.request())
		cancel()
		amid = func() {}
		// The answer may have come before the launcher's death.
		if err == nil {
			check(t, i.Destroy(background))
		} else if name == "launcher killed" && dsec.CodeOf(err) != dsec.CodeUnavailable {
			t.Errorf("%s: %v", name, cause(err))
		}
		if o := h.create().sh("echo ok"); o.out != "ok\n" {
			t.Errorf("%s: have %q", name, o.out)
		}
	}
}

// A shell that died in the pool is freed and not given out.
func TestDeadShellIsNotGivenOut(t *testing.T) {
	h := newHost(t, nil)
	sh, err := h.b.newShell(t.Context())
	check(t, err)
	check(t, sh.await(t.Context()))
	sh.warm = true
	check(t, sh.proc.kill())
	<-sh.proc.done
	h.b.pool.want = 1
	h.b.pool.shells = []*shell{sh}
	s := h.create()
	if o := s.sh("echo ok"); o.out != "ok\n" || s.i.Warm() {
		t.Errorf("have %q, warm %v", o.out, s.i.Warm())
	}
}

func TestWarmCreate(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Warm = 2 })
	h.awaitWarm(2)
	s := h.create()
	if o := s.sh("echo ok"); o.out != "ok\n" || !s.i.Warm() {
		t.Errorf("have %q, warm %v", o.out, s.i.Warm())
	}
	h.awaitWarm(2) // refilled
	if n := h.b.Warm(); n != 2 {
		t.Errorf("%d shells are ready, want 2 and no more", n)
	}
}

// Creates that ask for the same get sandboxes that were made before: each with
// an ID of its own, its own limits and nothing of another.
func TestSpares(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Warm = 4 })
	req := h.request()
	check(t, makeSpare(h.b, req))
	req.ID = dsec.NewSandboxID("aaaaa")
	i, err := h.b.Create(t.Context(), req)
	check(t, err)
	s := &sandbox{host: h, id: req.ID}
	s.use(i)
	destroyed := false
	t.Cleanup(func() {
		_ = s.client.Close()
		if !destroyed {
			check(t, i.Destroy(background))
		}
	})
	if o := s.sh("hostname; ls /tmp; echo x >/tmp/x"); o.out != "sandbox\n" || !i.Warm() {
		t.Errorf("have %q, warm %v", o.out, i.Warm())
	}
	if c, err := h.b.slots.claimed(i.(*instance).sh.slot); err != nil || c.id != req.ID {
		t.Errorf("the slot is of %+v, %v", c, err)
	}
	u, err := i.Usage(t.Context())
	if err != nil || u.MemoryLimit != req.Spec.Limits.MemoryBytes || u.DiskLimit != req.Spec.Limits.DiskBytes {
		t.Errorf("usage %+v, %v", u, err)
	}
	other := req
	other.ID = dsec.NewSandboxID("aaaaa")
	other.Spec.Limits.MemoryBytes *= 2
	j, err := h.b.Create(t.Context(), other)
	check(t, err)
	if u, err := j.Usage(t.Context()); err != nil || u.MemoryLimit != other.Spec.Limits.MemoryBytes {
		t.Errorf("a create with other limits: %+v, %v", u, err)
	}
	check(t, errors.Join(j.Destroy(t.Context()), i.Destroy(t.Context())))
	destroyed = true
}

// What nobody asks for any more is not held ready.
func TestSparesCool(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Warm = 4 })
	check(t, makeSpare(h.b, h.request()))
	p := h.b.pool
	p.mu.Lock()
	for _, d := range p.kinds {
		d.last = d.last.Add(-2 * keepSpares)
	}
	p.mu.Unlock()
	p.wake <- struct{}{}
	testutil.WaitFor(t, 30*time.Second, "the pool", func() error {
		if n, warm := spares(h.b), h.b.Warm(); n > 0 || warm != 4 {
			return fmt.Errorf("%d spares among %d", n, warm)
		}
		return nil
	})
}

func (h *host) awaitWarm(n int) {
	h.Helper()
	testutil.WaitFor(h, 30*time.Second, "warm pool", func() error {
		if have := h.b.Warm(); have < n {
			return fmt.Errorf("%d shells, want %d", have, n)
		}
		return nil
	})
}
