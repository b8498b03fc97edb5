package container

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
)

func init() { tries["attack"], tries["killall"], tries["pin"] = attack, killAll, pin }

// filesProcess is the host's number of the process that serves the sandbox's
// files, or 0.
func (s *sandbox) filesProcess() int {
	s.Helper()
	files := &s.i.(*instance).files
	files.mu.Lock()
	defer files.mu.Unlock()
	if files.run == nil || files.run.ended {
		return 0
	}
	select {
	case <-files.run.proc.done:
		return 0
	default:
		return files.run.proc.pid
	}
}

// holdFile has a file read until the test ends: for so long what serves files is
// not idle, and is the same, however slow the rest is.
func (s *sandbox) holdFile() {
	s.Helper()
	s.sh("truncate -s 64M /root/large")
	r, err := s.client.Read(s.Context(), "/root/large", 0, -1)
	check(s, err)
	s.Cleanup(func() { _ = r.Close() })
}

// attack does all that root can do to a process, to each of the numbers but its
// own threads'.
func attack(args []string) {
	for _, arg := range args {
		if _, err := os.Stat("/proc/self/task/" + arg); err == nil {
			continue
		}
		pid, _ := strconv.Atoi(arg)
		target := uintptr(pid)
		zero := uintptr(unsafe.Pointer(&make([]byte, 128)[0]))
		one := &unix.Iovec{Base: &make([]byte, 1)[0], Len: 1}
		call := func(what string, nr uintptr, args ...uintptr) {
			a := append(args, 0, 0, 0, 0, 0, 0)
			_, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
			if errno == 0 {
				say(what+" "+arg, nil)
			} else {
				say(what+" "+arg, errno)
			}
		}
		call("stop", unix.SYS_KILL, target, uintptr(unix.SIGSTOP))
		call("kill", unix.SYS_KILL, target, uintptr(unix.SIGKILL))
		call("kill group", unix.SYS_KILL, -target, uintptr(unix.SIGKILL))
		call("tgkill", unix.SYS_TGKILL, target, target, uintptr(unix.SIGKILL))
		call("tkill", unix.SYS_TKILL, target, uintptr(unix.SIGKILL))
		call("queue", unix.SYS_RT_SIGQUEUEINFO, target, uintptr(unix.SIGKILL), zero)
		call("pidfd", unix.SYS_PIDFD_OPEN, target, 0)
		call("renice", unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, target, 19)
		call("renice group", unix.SYS_SETPRIORITY, unix.PRIO_PGRP, target, 19)
		call("idle", unix.SYS_SCHED_SETSCHEDULER, target, unix.SCHED_IDLE, zero)
		call("affinity", unix.SYS_SCHED_SETAFFINITY, target, 8, zero)
		call("ioprio", unix.SYS_IOPRIO_SET, 1, target, 3<<13)
		call("limit", unix.SYS_PRLIMIT64, target, unix.RLIMIT_CPU, zero, 0)
		call("seize", unix.SYS_PTRACE, unix.PTRACE_SEIZE, target, 0, 0)
		call("attach", unix.SYS_PTRACE, unix.PTRACE_ATTACH, target, 0, 0)
		call("read memory", unix.SYS_PROCESS_VM_READV, target, uintptr(unsafe.Pointer(one)), 1, uintptr(unsafe.Pointer(one)), 1)
	}
}

// killAll kills all that it can, for ever.
func killAll([]string) {
	fmt.Println("ready")
	for {
		_ = unix.Kill(-1, unix.SIGSTOP)
		_ = unix.Kill(-1, unix.SIGKILL)
		_, _, _ = unix.Syscall(unix.SYS_SETPRIORITY, unix.PRIO_USER, 0, 19)
	}
}

// pin keeps so many bytes of memory that outlive it.
func pin(args []string) {
	n, _ := strconv.Atoi(args[0])
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, n, unix.IPC_CREAT|0o600)
	if err == nil {
		var mem []byte
		if mem, err = unix.SysvShmAttach(id, 0, 0); err == nil {
			for i := 0; i < len(mem); i += 4096 {
				mem[i] = 1
			}
		}
	}
	say("pin", err)
}

// S31: what serves files is a process that nothing inside has a number for, and
// that has no right that a command has not.
func TestFilesProcessIsSealed(t *testing.T) {
	t.Run("as here", func(t *testing.T) { testFilesSealed(t, false) })
	t.Run("as with nsdelegate", func(t *testing.T) { testFilesSealed(t, true) })
}

func testFilesSealed(t *testing.T, commandNamespaces bool) {
	h := newHost(t, func(c *Config) {
		c.Debug = false
		c.CommandNamespaces = commandNamespaces
	})
	s := h.create()
	if pid := s.filesProcess(); pid != 0 {
		t.Errorf("it runs before anybody asks for a file, as %d", pid)
	}
	s.write("/root/precious", 0, []byte("precious\n"))
	s.holdFile()
	pid := s.filesProcess()
	if pid == 0 {
		t.Fatal("no process serves files")
	}
	var posture strings.Builder
	for line := range strings.Lines(s.posture(pid)) {
		// With nsdelegate it has a cgroup namespace of its own, as commands have.
		if h.b.tree.CommandNamespaces() && line == "ns cgroup: its own\n" {
			line = "ns cgroup: the sandbox's\n"
		}
		if strings.HasPrefix(line, "fd: /root/large ") { // that is held
			continue
		}
		// As chronus, it keeps what its host has given it.
		if !strings.HasPrefix(line, "limit Max open files") && !strings.HasPrefix(line, "limit Max core file size") {
			posture.WriteString(line)
		}
	}
	golden(t, "files.golden", posture.String())

	if o := s.sh("cat /proc/[0-9]*/comm"); strings.Contains(o.out, "chronus-files") || !strings.Contains(o.out, "chronus\n") {
		t.Errorf("of processes it sees %q", o.out)
	}
	before := s.unchanged(pid)
	// Its numbers on the host and in its own namespace, and all that are near the sandbox's.
	numbers := []string{"attack", strconv.Itoa(pid)}
	for n := 1; n < 400; n++ {
		numbers = append(numbers, strconv.Itoa(n))
	}
	for _, line := range s.inside(numbers...) {
		if f := strings.Fields(line); len(f) > 2 && f[len(f)-2] == strconv.Itoa(pid) && f[len(f)-1] != "ESRCH" && f[len(f)-1] != "EPERM" {
			t.Errorf("%s, want ESRCH", line)
		}
	}
	s.answers("an attack on every number")
	// The control: of the sandbox's own one can be had.
	if o := s.sh("sleep 100 & /bin/inside attack $!"); !strings.Contains(o.out, "kill ") || !strings.Contains(o.out, " ok\n") || !strings.Contains(o.out, "stop "+strings.Fields(o.out)[1]+" ok\n") {
		t.Errorf("control: %q", o.out)
	}
	if now := s.unchanged(pid); now != before {
		t.Errorf("it is %s, and was %s", now, before)
	}
}

// unchanged is what of a process others may have been changed.
func (s *sandbox) unchanged(pid int) string {
	s.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	check(s, err)
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	check(s, err)
	var cpus unix.CPUSet
	check(s, unix.SchedGetaffinity(pid, &cpus))
	f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')'):]))
	return fmt.Sprint("nice ", f[17], ", policy ", f[39], ", tracer", statusLine(s, pid, "TracerPid"), ", CPUs ", cpus.Count(), "\n", string(limits))
}

func statusLine(t testing.TB, pid int, field string) string {
	t.Helper()
	for _, line := range statusLines(fmt.Sprint("/proc/", pid)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			return value
		}
	}
	t.Fatalf("no %s of %d", field, pid)
	return ""
}

// An agent that kills and stops all that it can, for ever, keeps no file from
// being read or written.
func TestFilesAreServedWhileEverythingIsKilled(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	s.write("/root/precious", 0, []byte("precious\n"))
	s.holdFile()
	pid := s.filesProcess()
	s.hold(nil, "/bin/inside", "killall")
	for n := range 30 {
		text := []byte(strings.Repeat("x", 100_000*n))
		s.write("/root/written", 0, text)
		if got, err := s.read("/root/written"); err != nil || string(got) != string(text) {
			t.Fatalf("%d of %d bytes, %v", len(got), len(text), err)
		}
		s.answers("the kill of everything")
	}
	if now := s.filesProcess(); now != pid {
		t.Errorf("what serves files is %d, and was %d", now, pid)
	}
}

// It is started in all states of a sandbox's processes, is one for many calls at
// once, and there is another after its end.
func TestFilesProcessIsReplaced(t *testing.T) {
	h := newHost(t, nil)
	s := h.create()
	errs := make(chan error)
	for range 20 {
		go func() {
			_, err := s.client.Stat(t.Context(), "/root", false)
			errs <- err
		}()
	}
	for range 20 {
		check(t, <-errs)
	}
	files := &s.i.(*instance).files
	for range 3 {
		pid := s.filesProcess()
		run := files.run
		check(t, run.proc.kill()) // as the host may
		if _, err := s.client.Stat(t.Context(), "/root", false); err != nil {
			t.Error(err)
		}
		<-run.over
		if now := s.filesProcess(); now == 0 || now == pid {
			t.Errorf("it is %d, and was %d", now, pid)
		}
		if s.i.(backend.FileServer).FilesStarved(time.Now().Add(-time.Hour)) {
			t.Error("that is told as a want of the sandbox's memory")
		}
	}
	// It shuts its socket down when it had nothing to do for a while: nothing is
	// lost to that.
	check(t, files.run.control.CloseWrite())
	if _, err := s.client.Stat(t.Context(), "/root", false); err != nil {
		t.Error(err)
	}
}

// A sandbox whose memory is used up by what no process has, so that none can be
// killed for it, has files that cannot be served, and is told apart from a
// platform that fails.
func TestFilesWithoutMemoryAreTheSandboxs(t *testing.T) {
	h := newHost(t, nil)
	if h.b.tree.Layout().Unified {
		t.Skip("on cgroup v2 what serves files has memory of its own")
	}
	s := h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.MemoryBytes = 32 << 20 })
	begun := time.Now()
	if lines := s.inside("pin", strconv.Itoa(17<<20)); len(lines) != 1 || lines[0] != "pin ok" {
		t.Fatal(lines)
	}
	s.sh("while dd if=/dev/zero bs=16k count=2000 of=/dev/shm/$RANDOM 2>/dev/null; do :; done")
	_, err := s.client.Stat(t.Context(), "/root", false)
	if err == nil || dsec.CodeOf(err) != dsec.CodeUnavailable {
		t.Fatalf("stat: %v", err)
	}
	if !s.i.(backend.FileServer).FilesStarved(begun) {
		t.Errorf("%v is not told as a want of the sandbox's memory", cause(err))
	}
	if s.i.(backend.FileServer).FilesStarved(time.Now()) {
		t.Error("nor is it from now on")
	}
	if _, err := s.client.Info(t.Context()); err != nil {
		t.Errorf("health: %v", err)
	}
	shm := fmt.Sprintf("/proc/%d/root/dev/shm", s.pid1()) // a command might not get the memory to do it
	names, err := os.ReadDir(shm)
	check(t, err)
	for _, name := range names {
		check(t, os.Remove(shm+"/"+name.Name()))
	}
	if _, err := s.client.Stat(t.Context(), "/root", false); err != nil {
		t.Errorf("with memory again: %v", err)
	}
}

// chronus itself serves no files: the call breaks its connection.
func TestChronusServesNoFiles(t *testing.T) {
	s := newHost(t, nil).create()
	client := chronusapi.NewClient(s.i.Dial)
	defer client.Close()
	var e *dsec.Error
	if _, err := client.Stat(t.Context(), "/", false); !errors.As(err, &e) || e.Code != dsec.CodeUnavailable {
		t.Errorf("got %v", err)
	}
	if o := s.sh("echo here"); o.out != "here\n" {
		t.Errorf("it says %q", o.out)
	}
}
