package container

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
)

// tape keeps what goes over a connection, each way.
type tape struct {
	mu             sync.Mutex
	sent, received bytes.Buffer
}

type tapedConn struct {
	net.Conn
	tape *tape
}

func (c tapedConn) Write(p []byte) (int, error) {
	c.tape.mu.Lock()
	c.tape.sent.Write(p)
	c.tape.mu.Unlock()
	return c.Conn.Write(p)
}

func (c tapedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.tape.mu.Lock()
	c.tape.received.Write(p[:n])
	c.tape.mu.Unlock()
	return n, err
}

// recorded runs a command on a connection of its own and returns the bytes.
func (s *sandbox) recorded(argv ...string) *tape {
	s.Helper()
	t := &tape{}
	client := chronusapi.NewClient(func(ctx context.Context) (net.Conn, error) {
		c, err := s.i.Dial(ctx)
		return tapedConn{c, t}, err
	})
	defer client.Close()
	saved := s.client
	s.client = client
	defer func() { s.client = saved }()
	if o := s.run(argv...); !o.OK() {
		s.Fatalf("%v: %+v", argv, o)
	}
	return t
}

// start starts a command, in a group more where all are taken.
func (s *sandbox) start(req chronusapi.StartRequest) *chronusapi.Events {
	s.Helper()
	req.Command.Env, req.Command.Cwd = append([]string{"PATH=/bin"}, req.Command.Env...), "/"
	stream, err := s.client.Start(s.Context(), req)
	if errors.Is(err, chronusapi.ErrNeedGroup) {
		check(s, s.i.(backend.Grouper).AddGroup(s.Context()))
		stream, err = s.client.Start(s.Context(), req)
	}
	check(s, err)
	return stream
}

// number runs a command and returns its number: chronus counts what it starts.
func (s *sandbox) number(argv ...string) uint64 {
	s.Helper()
	stream := s.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: argv}})
	defer stream.Close()
	for n := uint64(0); ; {
		ev, err := stream.Next()
		check(s, err)
		switch ev.Kind {
		case chronusapi.EventStarted:
			n = ev.Process
		case chronusapi.EventExited:
			return n
		}
	}
}

// exists asks chronus, which uses no program of the sandbox.
func (s *sandbox) exists(path string) bool {
	s.Helper()
	_, err := s.client.Stat(s.Context(), path, false)
	if err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
		s.Fatal(cause(err))
	}
	return err == nil
}

func (s *sandbox) write(path string, mode uint32, data []byte) {
	s.Helper()
	_, err := s.client.Write(s.Context(), chronusapi.WriteRequest{Path: path, Mode: mode}, bytes.NewReader(data))
	check(s, err)
}

func (s *sandbox) read(path string) ([]byte, error) {
	r, err := s.client.Read(s.Context(), path, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// S29: what the host said to chronus, said again by a program inside to all
// that it can write or connect to, starts nothing.
func TestReplayedFrames(t *testing.T) {
	s := newHost(t, nil).create()
	frames := s.recorded("/bin/touch", "/forged").sent.Bytes()
	if !s.exists("/forged") {
		t.Fatal("the command that was recorded did nothing")
	}
	check(t, s.client.Remove(t.Context(), "/forged", false))
	s.write("/frames", 0, frames)
	// Descriptors of every kind to find: pipes of commands, a terminal, a session.
	s.hold(nil, "/bin/sh", "-c", "mkfifo /tmp/fifo; echo ready; cat")
	pty := s.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"/bin/cat"}}, PTY: &chronusapi.WindowSize{Rows: 9, Cols: 9}, OpenStdin: true})
	defer pty.Close()
	before := s.number("/bin/true")
	o := s.run("/bin/inside", "replay", "/frames")
	if i := strings.Index(o.out, "\nwritten to "); !o.OK() || i < 0 || strings.HasSuffix(o.out, " to 0\n") {
		t.Errorf("control: nothing could be written to: %+v %q", o.Outcome, o.out)
	}
	if strings.Contains(o.out, "\nconnected ") {
		t.Errorf("something listens inside: %q", o.out)
	}
	if s.exists("/forged") {
		t.Error("the frames were obeyed")
	}
	if after := s.number("/bin/true"); after != before+2 {
		t.Errorf("chronus has started %d commands, want 2", after-before)
	}
	// The control: from the host the same bytes are a request.
	c, err := s.i.Dial(t.Context())
	check(t, err)
	defer c.Close()
	_, err = c.Write(frames)
	check(t, err)
	_, err = io.ReadAtLeast(c, make([]byte, 1), 1) // it has answered
	check(t, err)
	if after := s.number("/bin/true"); after != before+4 {
		t.Errorf("control: chronus has started %d commands, want 4", after-before)
	}
}

// S30: the agent replaces everything that a harness might use inside. What the
// platform says of files stays true, and so does a program of the harness's own.
func TestReplacedTools(t *testing.T) {
	s := newHost(t, nil).create()
	data := []byte(rand.Text())
	s.write("/root/answer", 0, data)
	want := fmt.Sprintf("%x", sha256.Sum256(data))
	o := s.sh(`set -e
mv /bin /bin.real; mkdir /bin
printf '#!/bin.real/busybox sh\necho lie\n' > /bin.real/liar; /bin.real/chmod 755 /bin.real/liar
for f in sh bash ls cat sha256sum busybox env; do /bin.real/cp /bin.real/liar /bin/$f; done
/bin.real/mkdir -p /lib /lib64; for f in /lib64/ld-linux-x86-64.so.2 /lib/ld-musl-x86_64.so.1; do /bin.real/cp /bin.real/liar $f; done
echo /lib/lie.so > /etc/ld.so.preload
for f in /etc/profile /etc/bash.bashrc /root/.profile /root/.bashrc /etc/environment; do echo 'echo lie; exit 0' > $f; done
/bin.real/rm -rf /usr /sbin; /bin.real/ln -s /bin /usr; /bin.real/ln -s /bin /sbin`)
	if o.Code != 0 {
		t.Fatalf("the agent's own work failed: %+v %s", o.Outcome, o.out)
	}
	if o := s.run("/bin/sha256sum", "/root/answer"); o.out != "lie\n" || o.Code != 0 {
		t.Errorf("control: the image's tool says %q, %+v", o.out, o.Outcome)
	}
	got, err := s.read("/root/answer")
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %q, %v; want %q", got, err, data)
	}
	if st, err := s.client.Stat(t.Context(), "/root/answer", false); err != nil || st.Size != int64(len(data)) {
		t.Errorf("stat %+v, %v", st, err)
	}
	dir, err := programs()
	check(t, err)
	program, err := os.ReadFile(filepath.Join(dir, "inside"))
	check(t, err)
	nonce := rand.Text()
	tool := "/" + rand.Text() + "/inside"
	check(t, s.client.Mkdir(t.Context(), filepath.Dir(tool), 0o700, false))
	s.write(tool, 0o700, program)
	o = s.run(tool, "hash", "/root/answer", nonce)
	fields := strings.SplitN(o.out, " ", 3)
	if len(fields) != 3 || fields[0] != want || fields[1] != nonce || o.Code != 0 {
		t.Errorf("the harness's program says %q, %+v; want %s %s", o.out, o.Outcome, want, nonce)
	}
	for _, lie := range []string{"LD_", "BASH_ENV", "ENV=", "lie"} {
		if strings.Contains(o.out, lie) {
			t.Errorf("its environment has %s: %s", lie, o.out)
		}
	}
}

// S31: a process prints what the platform's own answer to a command that went
// well looks like, on every stream, and fails.
func TestPrintedFrames(t *testing.T) {
	s := newHost(t, nil).create()
	tape := s.recorded("/bin/true")
	lies := append(tape.received.Bytes(), tape.sent.Bytes()...)
	lies = append(lies, "\nexit code: 0\n\x00\x04\x1b]0;complete\a"...)
	s.write("/lies", 0, lies)
	o := s.sh("cat /lies; cat /lies >&2; exit 7")
	if o.Code != 7 || o.Signal != 0 || o.Claimed || strings.Count(o.out, string(lies)) != 2 || len(o.out) != 2*len(lies) {
		t.Errorf("%+v, %d bytes; want 7 and %d", o.Outcome, len(o.out), 2*len(lies))
	}
	if o := s.sh("cat /lies; kill -9 $$"); o.Signal != 9 || o.OK() {
		t.Errorf("%+v, want signal 9", o.Outcome)
	}
	// A child that prints after its parent has failed changes nothing either.
	if o := s.sh("(cat /lies; echo late) & exit 7"); o.Code != 7 {
		t.Errorf("%+v, want 7", o.Outcome)
	}
	if o := s.sh("echo alive"); o.out != "alive\n" {
		t.Errorf("have %q", o.out)
	}
}

// S31: whatever a session's command does to the private descriptors of its
// shell, its status is marked as claimed, and chronus and others go on.
func TestForgedSessionStatus(t *testing.T) {
	s := newHost(t, nil).create()
	s.sh("true")
	for name, command := range map[string]string{
		"writes to all":    `for n in 1 2 3 4 5 6 7 8 9; do for fd in /proc/$$/fd/*; do case $fd in */0|*/1|*/2) ;; *) (echo "$n 0" > $fd) 2>/dev/null;; esac; done; done; false`,
		"writes garbage":   `for fd in /proc/$$/fd/*; do case $fd in */0|*/1|*/2) ;; *) (head -c 100000 /dev/urandom > $fd) 2>/dev/null;; esac; done; false`,
		"closes all":       `i=3; while [ $i -lt 64 ]; do eval "exec $i>&- $i<&-"; i=$((i+1)); done; false`,
		"replaces itself":  `exec /bin/sleep 0.01`,
		"kills its shell":  `kill -9 $$`,
		"stops its shell":  `kill -STOP $$`,
		"redefines read":   `read() { return 0; }; printf() { return 0; }; echo() { return 0; }; false`,
		"ends and returns": `trap 'echo 1 0' EXIT; exit 0`,
	} {
		t.Run(name, func(t *testing.T) {
			open := chronusapi.SessionRequest{Env: []string{"PATH=/bin"}, Cwd: "/"}
			sess, err := s.client.OpenSession(t.Context(), open)
			if errors.Is(err, chronusapi.ErrNeedGroup) {
				check(t, s.i.(backend.Grouper).AddGroup(t.Context()))
				sess, err = s.client.OpenSession(t.Context(), open)
			}
			check(t, err)
			stream, err := s.client.RunCommand(t.Context(), chronusapi.SessionCommand{Session: sess.ID, Command: command, Timeout: 2 * time.Second})
			check(t, err)
			defer stream.Close()
			for {
				ev, err := stream.Next()
				if err != nil {
					if dsec.CodeOf(err) == dsec.CodeInternal {
						t.Errorf("an error that is not typed: %v", err)
					}
					break // the session is lost, and says so
				}
				if ev.Kind == chronusapi.EventExited {
					if !ev.Outcome.Claimed {
						t.Errorf("%+v is not marked as claimed", ev.Outcome)
					}
					break
				}
			}
			if err := s.client.CloseSession(t.Context(), sess.ID); err != nil && dsec.CodeOf(err) != dsec.CodeNotFound {
				t.Errorf("close: %v", err)
			}
			if o := s.sh("echo alive; exit 5"); o.out != "alive\n" || o.Code != 5 || o.Claimed {
				t.Errorf("a command beside it: %q %+v", o.out, o.Outcome)
			}
		})
	}
}

// S35: a path whose directories are exchanged all the time leads to a file of
// the sandbox or to a typed error, whatever is read or written by it.
func TestExchangedWhileRead(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	canary := "dsec-canary-" + rand.Text()
	dir := t.TempDir() // the same path is the host's
	check(t, os.WriteFile(filepath.Join(dir, "file"), []byte(canary), 0o644))
	o := s.sh("mkdir -p /x " + dir + "; echo one > /x/file; echo two > " + dir + "/file; ln -s " + dir + " /y; ln -s /proc/self/root" + dir + " /z; ln -s /proc/1/root" + dir + " /w")
	if !o.OK() {
		t.Fatal(o.out)
	}
	for _, with := range []string{"/y", "/z", "/w"} {
		racer := s.hold(nil, "/bin/inside", "swap", "/x", with)
		seen := map[string]int{}
		// On a busy machine the racer may not get to run for many reads.
		until := time.Now().Add(time.Minute)
		for n := 0; n < 400 || len(seen) < 2 && time.Now().Before(until); n++ {
			got, err := s.read("/x/file")
			switch {
			case err == nil && (string(got) == "one\n" || string(got) == "two\n"):
				seen[string(got)]++
			case err != nil && slices.Contains([]dsec.Code{dsec.CodeInvalid, dsec.CodeNotFound, dsec.CodeDenied}, dsec.CodeOf(err)):
				seen["error"]++
			default:
				t.Fatalf("%s: read %q, %v", with, got, cause(err))
			}
			if n%20 != 0 {
				continue
			}
			if r, err := s.client.Download(t.Context(), "/x"); err == nil {
				data, _ := io.ReadAll(r)
				_ = r.Close()
				if bytes.Contains(data, []byte(canary)) {
					t.Fatal("the download has the host's bytes")
				}
			}
			_, _ = s.client.Write(t.Context(), chronusapi.WriteRequest{Path: "/x/written"}, strings.NewReader("x"))
			_, _ = s.client.Upload(t.Context(), chronusapi.UploadRequest{Path: "/x/new"}, bytes.NewReader(make([]byte, 1024)))
			_ = s.client.Remove(t.Context(), "/x/new", true)
		}
		_ = racer.Close()
		testutil.WaitFor(t, time.Minute, "the racer ends", func() error {
			if syscall.Kill(racer.pid, 0) == nil {
				return errors.New("it runs")
			}
			return nil
		})
		t.Logf("%s: %v", with, seen)
		if len(seen) < 2 {
			t.Errorf("control: %s: the race was never seen: %v", with, seen)
		}
		// Whoever is where now, /x is the directory again.
		s.sh("[ -h /x ] && { mv /x /tmp/link; mv " + with + " /x; mv /tmp/link " + with + "; }; true")
	}
	entries, err := os.ReadDir(dir)
	check(t, err)
	if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(got) != canary || len(entries) != 1 {
		t.Errorf("the host's directory has %v and %q, %v", entries, got, err)
	}
}

// S35: a file that grows while it is read ends where it ended, and a tree that
// grows is a whole tar or a typed error.
func TestGrowingArtifact(t *testing.T) {
	s := newHost(t, nil).create()
	s.hold(nil, "/bin/sh", "-c", "mkdir /grow; echo begin > /grow/a; echo ready; while :; do echo more >> /grow/a; done")
	for range 20 {
		got, err := s.read("/grow/a")
		if err != nil || !bytes.HasPrefix(got, []byte("begin\nmore\n")) {
			t.Fatalf("read %.40q, %v", got, err)
		}
		r, err := s.client.Download(t.Context(), "/grow")
		check(t, err)
		_, err = io.Copy(io.Discard, r)
		_ = r.Close()
		if err != nil && dsec.CodeOf(err) == dsec.CodeInternal {
			t.Errorf("download: %v", err)
		}
	}
}
