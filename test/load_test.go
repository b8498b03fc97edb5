package test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/testutil"
)

// containersWith is containers, with an image of busybox named base.
func containersWith(t testing.TB) (*server, *client.Client) {
	t.Helper()
	s := containers(t)
	c := s.client(t)
	_, _, err := c.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	return s, c
}

// TestEndlessOutput is S22: output without end, that nobody reads or that is
// read a little at a time, takes no memory of the platform to speak of; what is
// lost of it is marked, and it can be killed.
func TestEndlessOutput(t *testing.T) {
	s, c := containersWith(t)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
	check(t, err)
	const endless = "while :; do echo 0123456789012345678901234567890123456789012345678901234567890123; done"
	_, _, err = sb.Shell("true").Output(t.Context())
	check(t, err)
	before := memory(t, s.process, "VmRSS")
	var detached []*client.Process
	for range 4 {
		p, err := sb.Shell(endless).Detach(t.Context())
		check(t, err)
		detached = append(detached, p)
	}
	slow, dst := io.Pipe()
	reading := sb.Shell(endless)
	reading.Stdout = dst
	check(t, reading.Start(t.Context()))
	ended := make(chan error, 1)
	go func() {
		o, err := reading.Wait() // which reads
		if err == nil && o.Signal != 9 {
			err = fmt.Errorf("ended with %+v", o)
		}
		ended <- err
	}()
	// 1 kB of the one that is read, for each time that all have moved on.
	seen := map[uint64]uint64{}
	for range 20 {
		_, err := io.ReadFull(slow, make([]byte, 1000))
		check(t, err)
		testutil.WaitFor(t, time.Minute, "the others write", func() error {
			list, err := sb.Processes(t.Context())
			check(t, err)
			for _, p := range list {
				if p.ID == reading.Process().ID || p.Ended() {
					continue
				}
				if p.NextSeq <= seen[p.ID] {
					return fmt.Errorf("process %d has written %d bytes", p.ID, p.NextSeq)
				}
			}
			for _, p := range list {
				seen[p.ID] = p.NextSeq
			}
			return nil
		})
	}
	if grown := memory(t, s.process, "VmRSS") - before; grown > 16<<20 {
		t.Errorf("the server has grown by %d MiB", grown>>20)
	}
	if n := seen[reading.Process().ID]; n > 16<<20 {
		t.Errorf("%d bytes were taken of the command that is read slowly", n)
	}
	for _, p := range detached {
		check(t, p.SignalTree(t.Context(), 9))
		gaps := 0
		o, err := p.Attach(t.Context(), 0, io.Discard, io.Discard, func(client.Gap) { gaps++ })
		if err != nil || o.Signal != 9 || gaps == 0 {
			t.Errorf("killed: %+v, %v, %d gaps", o, err, gaps)
		}
	}
	check(t, reading.Process().SignalTree(t.Context(), 9))
	go func() { _, _ = io.Copy(io.Discard, slow) }()
	if err := <-ended; err != nil {
		t.Errorf("the one that was read: %v", err)
	}
}

// TestThousandCommands is S25: of a thousand commands at once in one sandbox, a
// tenth of which are left by their callers, those beyond the limit are refused,
// the others are right, and nothing of any is left.
func TestThousandCommands(t *testing.T) {
	s, _ := containersWith(t)
	c, err := client.New(client.Options{URL: s.url, KeyFile: s.keyFile, Attempts: 1})
	check(t, err)
	defer c.Close()
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: dsec.Limits{Pids: 1000}})
	check(t, err)
	var right, refused, left atomic.Int32
	var wg sync.WaitGroup
	for i := range 1000 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			script, want := fmt.Sprintf("echo %d; exit %d", i, i%100), i%100
			if i%10 == 0 {
				script = fmt.Sprintf("echo %d; sleep 1000", i)
			}
			cmd := sb.Shell(script)
			if i%10 == 0 {
				r, w := io.Pipe()
				cmd.Stdout = w
				if err := cmd.Start(ctx); err != nil {
					if dsec.CodeOf(err) != dsec.CodeExhausted {
						t.Errorf("command %d: %v", i, err)
					}
					refused.Add(1)
					return
				}
				go func() {
					_, _ = io.ReadFull(r, make([]byte, 1)) // it runs
					cancel()
					_, _ = io.Copy(io.Discard, r)
				}()
				if o, err := cmd.Wait(); err == nil && o.Signal != 9 {
					t.Errorf("command %d was left and ended with %+v", i, o)
				}
				left.Add(1)
				return
			}
			out, o, err := cmd.Output(ctx)
			switch {
			case err == nil && string(out) == fmt.Sprintln(i) && o.Code == want && o.Signal == 0:
				right.Add(1)
			case err != nil && dsec.CodeOf(err) == dsec.CodeExhausted:
				refused.Add(1)
			default:
				t.Errorf("command %d: %q, %+v, %v", i, out, o, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d right, %d refused, %d left", right.Load(), refused.Load(), left.Load())
	if right.Load() == 0 || left.Load() == 0 || right.Load()+refused.Load()+left.Load() != 1000 {
		t.Errorf("%d right, %d refused, %d left", right.Load(), refused.Load(), left.Load())
	}
	testutil.WaitFor(t, time.Minute, "no command runs", func() error {
		list, err := sb.Processes(t.Context())
		check(t, err)
		for _, p := range list {
			if !p.Ended() || p.Lingering {
				return fmt.Errorf("%+v", p)
			}
		}
		return nil
	})
	if out, _, err := sb.Shell("echo alive; ls /proc | grep -c '^[0-9]'").Output(t.Context()); err != nil || !strings.HasPrefix(string(out), "alive\n") {
		t.Errorf("%q, %v", out, err)
	}
}

// TestKilledTwentyTimes is S64: the platform is killed twenty times under fifty
// commands that count. Each goes on from where it was, was started once, and
// ends once with its own status.
func TestKilledTwentyTimes(t *testing.T) {
	const sandboxes, each, kills = 10, 5, 20
	testutil.Require(t, testutil.Root, testutil.EROFS, testutil.Overlay, testutil.Program("busybox"))
	name, dir := testutil.Name(t), testutil.Dir(t)
	testutil.Ledger(t, name, filepath.Base(dir))
	c := &containerServer{name: name, dir: dir}
	t.Cleanup(func() { c.destroy(t) })
	c.start(t)
	defer func() { c.killAll(t) }() // while the last of the servers runs
	cl := c.client(t)
	_, _, err := cl.ImportLayer(t.Context(), "base", client.ImportOptions{}, bytes.NewReader(busyboxTar(t)))
	check(t, err)
	type counter struct {
		sandbox, file string
		process       uint64
		code, last    int
	}
	var all []*counter
	for range sandboxes {
		sb, err := cl.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}})
		check(t, err)
		for n := range each {
			k := &counter{sandbox: string(sb.ID()), file: fmt.Sprint("/tmp/", n), code: 10 + n}
			p, err := sb.Shell(fmt.Sprintf("echo start >> %s.starts; i=0; until [ -e /tmp/go ]; do i=$((i+1)); echo $i > %s; sleep 0.3; done; echo $i; exit %d", k.file, k.file, k.code)).Detach(t.Context())
			check(t, err)
			k.process = p.ID
			all = append(all, k)
		}
	}
	read := func(k *counter) int {
		t.Helper()
		text, err := cl.Sandbox(k.sandbox).ReadFile(t.Context(), k.file)
		if err != nil && dsec.CodeOf(err) == dsec.CodeNotFound {
			return 0
		}
		check(t, err)
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			return k.last // it is just being written
		}
		return n
	}
	for range kills {
		c.kill()
		c.start(t)
		cl = c.client(t)
		for _, k := range all {
			n := read(k)
			if n < k.last {
				t.Fatalf("%s of %s went back from %d to %d", k.file, k.sandbox, k.last, n)
			}
			k.last = n
		}
	}
	for _, k := range all {
		begun := k.last
		testutil.WaitFor(t, time.Minute, "it still counts", func() error {
			if n := read(k); n <= begun {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		starts, err := cl.Sandbox(k.sandbox).ReadFile(t.Context(), k.file+".starts")
		if err != nil || string(starts) != "start\n" {
			t.Errorf("%s of %s: started %q, %v", k.file, k.sandbox, starts, err)
		}
	}
	for _, k := range all {
		sb := cl.Sandbox(k.sandbox)
		check(t, sb.WriteFile(t.Context(), "/tmp/go", nil, 0))
		for range 2 { // and it is told the same again
			var out bytes.Buffer
			o, err := sb.Process(k.process).Attach(t.Context(), 0, &out, io.Discard, nil)
			if n, _ := strconv.Atoi(strings.TrimSpace(out.String())); err != nil || o.Code != k.code || n < k.last {
				t.Errorf("%s of %s: %+v, %v, %q; want %d and at least %d", k.file, k.sandbox, o, err, out.String(), k.code, k.last)
			}
		}
	}
}

// TestLargeInput is U16: 64 MiB go to a command's input and come back, and
// arguments as large as the kernel takes do; larger ones are refused by name.
func TestLargeInput(t *testing.T) {
	_, c := containersWith(t)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"base"}, Limits: dsec.Limits{MemoryBytes: 64 << 20}})
	check(t, err)
	const size = 64 << 20
	sent, got := sha256.New(), sha256.New()
	cmd := sb.Command("cat")
	cmd.Stdin = io.TeeReader(io.LimitReader(rand.Reader, size), sent)
	cmd.Stdout = got
	if o, err := cmd.Run(t.Context()); err != nil || !o.OK() || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("%+v, %v; the same bytes: %v", o, err, bytes.Equal(sent.Sum(nil), got.Sum(nil)))
	}
	args := []string{"echo"}
	for len(args) < 12 {
		args = append(args, strings.Repeat("x", 120_000))
	}
	out, o, err := sb.Command(args...).Output(t.Context())
	if err != nil || !o.OK() || string(out) != strings.Join(args[1:], " ")+"\n" {
		t.Errorf("%d bytes back of 1.3 MB of arguments, %+v, %v", len(out), o, err)
	}
	for name, args := range map[string][]string{
		"one string too long": {"echo", strings.Repeat("x", 200_000)},
		"all too long":        {"echo", strings.Repeat("x", 3<<20)},
		"too many":            append([]string{"echo"}, make([]string, 100_000)...),
	} {
		_, _, err := sb.Command(args...).Output(t.Context())
		var e *dsec.Error
		if !errors.As(err, &e) || e.Code != dsec.CodeInvalid || e.Field != "command.argv" {
			t.Errorf("%s: %v, want invalid command.argv", name, err)
		}
	}
	if out, _, err := sb.Command("echo", "alive").Output(t.Context()); err != nil || string(out) != "alive\n" {
		t.Errorf("%q, %v", out, err)
	}
}

// TestHostileImageConfig is S100: what an image's configuration says reaches
// the sandbox's own commands, and nothing of the host's.
func TestHostileImageConfig(t *testing.T) {
	s, c := containersWith(t)
	archive := func(config string) []byte { return ociLayout(t, busyboxTar(t), config) }
	_, _, err := c.ImportLayer(t.Context(), "hostile", client.ImportOptions{}, bytes.NewReader(archive(
		`{"Env":["LD_PRELOAD=/evil.so","LD_LIBRARY_PATH=/evil","PATH=/bin:/evil","GODEBUG=x=y","DSEC_EDGE_MAX_SANDBOXES=1"],"User":"65534:65534","WorkingDir":"/tmp","Volumes":{"/proc":{},"/":{}},"ExposedPorts":{"22/tcp":{}},"Entrypoint":["/evil"],"Cmd":["/evil"]}`)))
	check(t, err)
	sb, err := c.CreateSandbox(t.Context(), client.SandboxOptions{Layers: []string{"hostile"}})
	check(t, err)
	out, o, err := sb.Shell("echo $LD_PRELOAD; id -u; readlink /proc/self/cwd; cat /proc/1/environ 2>/dev/null | wc -c").Output(t.Context())
	if err != nil || !o.OK() || string(out) != "/evil.so\n65534\n/tmp\n0\n" {
		t.Errorf("%q, %+v, %v", out, o, err)
	}
	// No process of the host has any of it.
	for _, pid := range family(t, s.cmd.Process.Pid) {
		if env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)); err == nil && bytes.Contains(env, []byte("/evil")) {
			t.Errorf("process %d has %q", pid, env)
		}
	}
	for _, config := range []string{
		`{"WorkingDir":"/proc/self/fd/8"}`, `{"WorkingDir":"/tmp/../proc/1/root"}`, `{"User":"a:b:c"}`, `{"User":"root\u0000x"}`, `{"User":"-1"}`, `{"Env":["=x"]}`, `{"Env":["A=\u0000"]}`,
	} {
		_, _, err := c.ImportLayer(t.Context(), "refused", client.ImportOptions{}, bytes.NewReader(archive(config)))
		if err == nil || dsec.CodeOf(err) != dsec.CodeInvalid {
			t.Errorf("%s: %v, want invalid", config, err)
		}
	}
	layers, err := c.Layers(t.Context())
	if err != nil || len(layers) != 2 {
		t.Errorf("layers %+v, %v; want base and hostile", layers, err)
	}
}

// family is a process with its descendants.
func family(t testing.TB, pid int) []int {
	t.Helper()
	all := []int{pid}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	check(t, err)
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for child := range strings.FieldsSeq(string(text)) {
			n, err := strconv.Atoi(child)
			check(t, err)
			all = append(all, family(t, n)...)
		}
	}
	return all
}
