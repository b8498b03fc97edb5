//go:build linux && amd64

package rawexec

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The parent waits for the exec, or goes on: then the end of the child tells
// the tests that its report is there.
var modes = map[string]uint64{"vfork": unix.CLONE_VM | unix.CLONE_VFORK, "shared": unix.CLONE_VM}

func eachMode(t *testing.T, f func(t *testing.T, flags uint64)) {
	for name, flags := range modes {
		t.Run(name, func(t *testing.T) { f(t, flags) })
	}
}

func reap(t *testing.T, pid int) syscall.WaitStatus {
	t.Helper()
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &ws, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			t.Fatalf("wait4(%d): %v", pid, err)
		}
		return ws
	}
}

func (p *Program) exec(path string, argv, env []string) {
	p.UnblockSignals()
	p.Call("exec", unix.SYS_EXECVE, Str(path), Strs(argv), Strs(env))
}

// output starts p with stdout as a pipe and returns what it wrote.
func output(t *testing.T, flags uint64, build func(p *Program)) (string, syscall.WaitStatus, error) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var p Program
	p.Call("stdout", unix.SYS_DUP3, Int(int(w.Fd())), Int(1), Int(0))
	build(&p)
	c, err := p.Start(Options{Flags: flags})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	ws := reap(t, c.PID)
	return string(out), ws, c.Wait()
}

func TestExec(t *testing.T) {
	eachMode(t, func(t *testing.T, flags uint64) {
		out, ws, err := output(t, flags, func(p *Program) {
			p.exec("/bin/sh", []string{"sh", "-c", `echo "$0|$1|$A"; exit 7`, "", "two words"}, []string{"A=b=c"})
		})
		if err != nil || ws.ExitStatus() != 7 || out != "|two words|b=c\n" {
			t.Fatalf("out %q, status %v, %v", out, ws, err)
		}
	})
}

func TestFailureNamesTheCall(t *testing.T) {
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	eachMode(t, func(t *testing.T, flags uint64) {
		for _, tt := range []struct {
			name  string
			errno syscall.Errno
			build func(p *Program)
		}{
			{"exec", syscall.ENOENT, func(p *Program) { p.exec("/nonexistent", []string{"x"}, nil) }},
			{"exec", syscall.EACCES, func(p *Program) { p.exec("/etc/passwd", []string{"x"}, nil) }},
			{"open", syscall.ENOTDIR, func(p *Program) {
				p.Call("open", unix.SYS_OPENAT, Int(unix.AT_FDCWD), Str("/etc/passwd/x"), Int(unix.O_RDONLY))
				p.exec("/bin/true", []string{"true"}, nil)
			}},
			{"read", syscall.EPIPE, func(p *Program) {
				p.Positive(p.Call("read", unix.SYS_READ, Int(null), Ptr(unsafe.Pointer(new(byte))), Int(1)))
				p.exec("/bin/true", []string{"true"}, nil)
			}},
		} {
			_, ws, err := output(t, flags, tt.build)
			var e *Error
			if !errors.As(err, &e) || e.Call != tt.name || e.Errno != tt.errno || ws.ExitStatus() != 127 {
				t.Errorf("got %v, status %v; want %s: %v", err, ws, tt.name, tt.errno)
			}
		}
	})
}

func TestIgnoredFailure(t *testing.T) {
	eachMode(t, func(t *testing.T, flags uint64) {
		out, ws, err := output(t, flags, func(p *Program) {
			p.Ignore(p.Call("rmdir", unix.SYS_RMDIR, Str("/nonexistent")))
			p.exec("/bin/echo", []string{"echo", "content"}, nil)
		})
		if err != nil || ws.ExitStatus() != 0 || out != "content\n" {
			t.Fatalf("out %q, status %v, %v", out, ws, err)
		}
	})
}

func TestSignalsAreUnblockedAndDefault(t *testing.T) {
	eachMode(t, func(t *testing.T, flags uint64) {
		out, ws, err := output(t, flags, func(p *Program) {
			p.exec("/bin/cat", []string{"cat", "/proc/self/status"}, nil)
		})
		if err != nil || ws.ExitStatus() != 0 {
			t.Fatalf("status %v, %v", ws, err)
		}
		// What the test was started with stays ignored: signal 32, with some parents.
		ignored := regexp.MustCompile(`(?m)^SigIgn:.*$`).FindString(readFile(t, "/proc/self/status"))
		for _, line := range []string{"SigBlk:\t0000000000000000", ignored, "SigCgt:\t0000000000000000"} {
			if !strings.Contains(out, "\n"+line+"\n") {
				t.Errorf("no line %q in %s", line, out)
			}
		}
	})
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestParentsSignalMaskIsKept(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mask := func() (s unix.Sigset_t) {
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, nil, &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := mask()
	var p Program
	p.exec("/nonexistent", []string{"x"}, nil)
	c, err := p.Start(Options{Flags: unix.CLONE_VM | unix.CLONE_VFORK})
	if err != nil {
		t.Fatal(err)
	}
	reap(t, c.PID)
	if after := mask(); after != before {
		t.Errorf("mask %v, before %v", after, before)
	}
}

func TestProgramWithoutExecEnds(t *testing.T) {
	eachMode(t, func(t *testing.T, flags uint64) {
		_, ws, err := output(t, flags, func(*Program) {})
		if err != nil || ws.ExitStatus() != 0 || !ws.Exited() {
			t.Fatalf("status %v, %v", ws, err)
		}
	})
}

// With CLONE_VM alone the parent goes on, collects garbage and moves its stack
// while the child waits, and a program is started again with other arguments.
func TestChildThatSharesMemoryWaitsForItsParent(t *testing.T) {
	var p Program
	wait := p.Call("wait", unix.SYS_READ, Int(-1), Bytes(make([]byte, 1)), Int(1))
	p.Positive(wait)
	fail := p.Call("fail", unix.SYS_CLOSE, Int(-1))
	for _, c := range []struct {
		name   string
		signal func(parent int) error
		failed int
	}{
		{"go", func(parent int) error { _, err := unix.Write(parent, []byte{1}); return err }, fail},
		{"parent gives up", func(parent int) error { return unix.Shutdown(parent, unix.SHUT_WR) }, wait},
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		p.Set(wait, 0, Int(pair[1]))
		child, err := p.Start(Options{Flags: unix.CLONE_VM, Pidfd: true})
		if err != nil {
			t.Fatal(err)
		}
		syscall.Close(pair[1])
		runtime.GC()
		growStack(1000)
		if err := errors.Join(unix.PidfdSendSignal(child.Pidfd, 0, nil, 0), c.signal(pair[0])); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if n, err := unix.Read(pair[0], make([]byte, 1)); n != 0 || err != nil {
			t.Fatalf("%s: %d, %v", c.name, n, err)
		}
		var failed *Error
		if err := child.Wait(); !errors.As(err, &failed) || failed.Index != c.failed {
			t.Errorf("%s: %v", c.name, err)
		}
		if ws := reap(t, child.PID); ws.ExitStatus() != 127 {
			t.Errorf("%s: status %v", c.name, ws)
		}
		syscall.Close(pair[0])
		syscall.Close(child.Pidfd)
	}
}

func growStack(n int) int {
	var room [256]byte
	if n == 0 {
		return int(room[0])
	}
	return growStack(n-1) + int(room[n%len(room)])
}

func TestCloneFailureLeavesNoChild(t *testing.T) {
	before := openFDs(t)
	var p Program
	for _, o := range []Options{{Flags: unix.CLONE_VFORK}, {}, {Flags: unix.CLONE_VM | unix.CLONE_THREAD}} {
		if c, err := p.Start(o); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("got %v, %v; want EINVAL", c, err)
		}
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d open files, before %d", after, before)
	}
}

func openFDs(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestManyAtOnce starts children from many goroutines while the garbage
// collector runs and the stacks grow: everything that could break a child
// which shares memory with a running Go program.
func TestManyAtOnce(t *testing.T) {
	stop := make(chan struct{})
	var noise sync.WaitGroup
	for range 2 {
		noise.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					garbage := make([][]byte, 100)
					for i := range garbage {
						garbage[i] = bytes.Repeat([]byte{byte(i)}, 1000)
					}
					runtime.GC()
				}
			}
		})
	}
	defer noise.Wait()
	defer close(stop)
	eachMode(t, func(t *testing.T, flags uint64) {
		var wg sync.WaitGroup
		for g := range 16 {
			wg.Go(func() {
				for i := range 15 {
					want := (g + i) % 100
					var p Program
					for range 20 {
						p.Call("noop", unix.SYS_GETPPID)
					}
					if i%3 == 0 {
						p.exec("/nonexistent", []string{"x"}, nil)
					} else {
						p.exec("/bin/sh", []string{"sh", "-c", fmt.Sprintf("exit %d", want)}, []string{"PATH=/bin"})
					}
					c, err := p.Start(Options{Flags: flags})
					if err != nil {
						t.Error(err)
						return
					}
					ws := reap(t, c.PID)
					err = c.Wait()
					if i%3 == 0 {
						if !errors.Is(err, syscall.ENOENT) || ws.ExitStatus() != 127 {
							t.Errorf("got %v, %v; want ENOENT", err, ws)
						}
					} else if err != nil || ws.ExitStatus() != want {
						t.Errorf("got %v, %v; want exit %d", err, ws, want)
					}
				}
			})
		}
		wg.Wait()
	})
}

func BenchmarkStart(b *testing.B) {
	for name, flags := range modes {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				var p Program
				p.exec("/bin/true", []string{"true"}, nil)
				c, err := p.Start(Options{Flags: flags})
				if err != nil {
					b.Fatal(err)
				}
				var ws syscall.WaitStatus
				if _, err := syscall.Wait4(c.PID, &ws, 0, nil); err != nil {
					b.Fatal(err)
				}
				if err := c.Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
