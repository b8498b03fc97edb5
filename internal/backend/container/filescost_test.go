package container

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"golang.org/x/sys/unix"
)

func init() { tries["hardtree"] = hardTree }

// hardTree makes, below a directory, levels of directories with names as long
// as they can be, and many files with two names each at the end of them.
func hardTree(args []string) {
	at, err := unix.Open(args[0], unix.O_PATH|unix.O_DIRECTORY, 0)
	levels, _ := strconv.Atoi(args[1])
	files, _ := strconv.Atoi(args[2])
	long := strings.Repeat("n", 250)
	for range levels {
		if err == nil {
			err = unix.Mkdirat(at, long, 0o755)
		}
		if err == nil {
			at, err = unix.Openat(at, long, unix.O_PATH|unix.O_DIRECTORY, 0)
		}
	}
	for n := 0; n < files && err == nil; n++ {
		var fd int
		name := strconv.Itoa(n)
		if fd, err = unix.Openat(at, name, unix.O_CREAT|unix.O_WRONLY, 0o644); err == nil {
			unix.Close(fd)
			err = unix.Linkat(at, name, at, long+name, 0)
		}
	}
	say("tree", err)
}

// status is a field in KiB of what the host tells of a process.
func statusKiB(t *testing.T, pid int, field string) (n int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	check(t, err)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			n, err = strconv.Atoi(strings.Fields(value)[0])
			check(t, err)
			return n
		}
	}
	t.Fatalf("no %s in %s", field, text)
	return 0
}

// What serves a sandbox's files walks trees that its agent made: it does so with
// the sandbox's memory and CPU time, and takes little memory itself whatever the
// trees are.
func TestFilesAreReadAtTheSandboxsCost(t *testing.T) {
	h := newHost(t, nil)
	s := h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.DiskInodes = 30000 })
	s.write("/root/precious", 0, []byte("precious\n"))
	pid := s.filesProcess()
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	check(t, err)
	name := h.groupOf(s)
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch inside := strings.Contains(f[2], name); {
		case f[1] == "memory" || f[1] == "cpu" || f[1] == "cpu,cpuacct" || f[1] == "":
			if !inside {
				t.Errorf("what serves files is in %s", line)
			}
		case f[1] == "pids" && inside:
			t.Errorf("a fork bomb keeps out what serves files: %s", line)
		}
	}
	for _, tt := range []struct {
		dir           string
		levels, files int
		refused       bool
	}{
		{"/root/wide", 0, 8000, false},
		{"/root/long", 15, 4000, false},
		{"/root/deep", 400, 4000, true},
	} {
		s.sh("mkdir -p " + tt.dir)
		if lines := s.inside("hardtree", tt.dir, strconv.Itoa(tt.levels), strconv.Itoa(tt.files)); len(lines) != 1 || lines[0] != "tree ok" {
			t.Fatalf("%s: %v", tt.dir, lines)
		}
		r, err := s.client.Download(t.Context(), tt.dir)
		check(t, err)
		n, err := io.Copy(io.Discard, r)
		_ = r.Close()
		if refused := err != nil && dsec.CodeOf(err) == dsec.CodeInvalid; refused != tt.refused || !refused && err != nil {
			t.Errorf("%s: download: %d bytes, %v; refused is to be %v", tt.dir, n, err, tt.refused)
		}
		pid = s.filesProcess() // another one, where it was idle while the tree was made
		after := ""
		for {
			list, more, err := s.client.ListDir(t.Context(), tt.dir, after, 1000)
			check(t, err)
			if !more {
				break
			}
			after = list[len(list)-1].Name
		}
		check(t, s.client.Remove(t.Context(), tt.dir, true))
		if now := s.filesProcess(); now != pid {
			t.Fatalf("%s: what served files is gone", tt.dir)
		}
		peak := statusKiB(t, pid, "VmHWM")
		t.Logf("%s: %d KiB, of that %d anonymous", tt.dir, peak, statusKiB(t, pid, "RssAnon"))
		if peak > 48<<10 {
			t.Errorf("%s took %d KiB of what serves files", tt.dir, peak)
		}
	}
}

// A sandbox without any memory left still has its files read: what is in the way is killed.
func TestFilesAreReadWhereMemoryIsUsedUp(t *testing.T) {
	h := newHost(t, nil)
	for _, memory := range []int64{8 << 20, 128 << 20} {
		s := h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.MemoryBytes = memory })
		s.write("/root/precious", 0, []byte("precious\n"))
		s.sh("while :; do dd if=/dev/zero of=/dev/shm/$RANDOM bs=64k count=1000 2>/dev/null || break; done")
		check(t, s.i.(*instance).files.run.proc.kill())
		s.answers("a full memory")
	}
}
