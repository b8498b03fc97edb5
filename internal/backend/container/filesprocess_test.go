package container

import (
	"strconv"
	"strings"
	"testing"
)

// filesProcess is the number inside of the process that serves the sandbox's
// files, or 0.
func (s *sandbox) filesProcess() int {
	s.Helper()
	o := s.sh(`for p in /proc/[0-9]*; do read -r name < $p/comm && [ "$name" = chronus-files ] && echo ${p#/proc/}; done 2>/dev/null; true`)
	if o.out == "" {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(o.out))
	check(s, err)
	return pid
}

// S31: what serves files is a process that root inside can see and kill, and
// no more: nothing that it holds can be read, and it has no right that a
// command has not.
func TestFilesProcessIsSealed(t *testing.T) {
	h := newHost(t, func(c *Config) { c.Debug = false })
	s := h.create()
	if pid := s.filesProcess(); pid != 0 {
		t.Errorf("it runs before anybody asks for a file, as %d", pid)
	}
	s.write("/root/precious", 0, []byte("precious\n"))
	pid := s.filesProcess()
	if pid == 0 {
		t.Fatal("no process serves files")
	}
	var posture strings.Builder
	for line := range strings.Lines(s.posture(s.processes()[pid])) {
		// With nsdelegate it has a cgroup namespace of its own, as commands have.
		if h.b.tree.CommandNamespaces() && line == "ns cgroup: its own\n" {
			line = "ns cgroup: the sandbox's\n"
		}
		// As chronus, it keeps what its host has given it.
		if !strings.HasPrefix(line, "limit Max open files") && !strings.HasPrefix(line, "limit Max core file size") {
			posture.WriteString(line)
		}
	}
	golden(t, "files.golden", posture.String())

	for _, try := range []string{"cat /proc/PID/environ", "cat /proc/PID/maps", "cat /proc/PID/auxv", "readlink /proc/PID/exe", "readlink /proc/PID/root",
		"readlink /proc/PID/cwd", "ls /proc/PID/fd/", "cat /proc/PID/syscall", "readlink /proc/PID/ns/mnt", "exec 3</proc/PID/mem", "exec 3>/proc/PID/mem",
		"echo 500 > /proc/PID/oom_score_adj"} {
		if o := s.sh("(" + strings.ReplaceAll(try, "PID", strconv.Itoa(pid)) + ") 2>/dev/null"); o.OK() {
			t.Errorf("%s: %q", try, o.out)
		}
		if strings.Contains(try, "syscall") {
			continue // a program that runs has none to show
		}
		// The control: a process of the sandbox's own can be looked at.
		if o := s.sh("sleep 100 & (" + strings.ReplaceAll(try, "PID", "$!") + ") 2>&1; r=$?; kill $!; exit $r"); !o.OK() {
			t.Errorf("control: %s: %q", try, o.out)
		}
	}
	for range 3 {
		s.sh("kill -9 " + strconv.Itoa(pid))
		if got, err := s.read("/root/precious"); err != nil || string(got) != "precious\n" {
			t.Errorf("after its end: %q, %v", got, err)
		}
		if now := s.filesProcess(); now == pid || now == 0 {
			t.Errorf("it is %d and was %d", now, pid)
		} else {
			pid = now
		}
	}
	s.sh("kill -STOP -1")
	if got, err := s.read("/root/precious"); err != nil || string(got) != "precious\n" {
		t.Errorf("after a stop of everything: %q, %v", got, err)
	}
}
