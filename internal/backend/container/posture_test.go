package container

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/confine"
)

// S01: all that the host's kernel says of the sandbox's processes is what it
// was when somebody last looked at the golden file: after a create, after a
// command, and with many threads.
func TestPosture(t *testing.T) {
	for name, forced := range map[string]bool{"as here": false, "as with nsdelegate": true} {
		t.Run(name, func(t *testing.T) { testPosture(t, forced) })
	}
}

func testPosture(t *testing.T, commandNamespaces bool) {
	h := newHost(t, func(c *Config) {
		c.Debug = false // which shares this process's stderr
		c.CommandNamespaces = commandNamespaces
	})
	s := h.createAs(func(r *backend.CreateRequest) { r.Spec.Limits.Pids = 256 })
	var all strings.Builder
	show := func(title string, pid int) {
		fmt.Fprintf(&all, "== %s\n%s\n", title, s.posture(pid))
	}
	show("PID 1 after create", s.pid1())
	command := s.hold(nil, "/bin/sh", "-c", "echo ready; read wait")
	show("command", command.pid)
	show("PID 1 after exec", s.pid1())
	threads := s.hold(nil, "/bin/inside", "threads", "100")
	if n := len(tasks(t, threads.pid)); n < 100 {
		t.Errorf("%d threads, want 100", n)
	}
	show("command with 100 threads", threads.pid)
	show("PID 1 after 100 threads", s.pid1())
	file := "posture.golden"
	if h.b.tree.CommandNamespaces() {
		file = "posture-nsdelegate.golden"
	}
	golden(t, file, all.String())

	// The control: what is looked at differs where nothing is confined.
	free := exec.Command("cat")
	input, err := free.StdinPipe()
	check(t, err)
	check(t, free.Start())
	own := s.posture(free.Process.Pid)
	check(t, input.Close())
	check(t, free.Wait())
	for _, want := range []string{"NoNewPrivs: 0\n", "Seccomp: 0\n", "ns user: host\n", "ns mnt: host\n", "uid map: 0 0 4294967295\n"} {
		if !strings.Contains(own, want) {
			t.Errorf("control: no %q in\n%s", want, own)
		}
	}
}

// posture describes a process of the sandbox as the host sees it, with the
// numbers that differ from run to run replaced.
func (s *sandbox) posture(pid int) string {
	s.Helper()
	dir := "/proc/" + strconv.Itoa(pid)
	lines := s.threads(pid)
	lines = append(lines, s.namespaces(pid)...)
	for _, name := range []string{"uid", "gid"} {
		lines = append(lines, name+" map: "+s.idMap(dir+"/"+name+"_map"))
	}
	groups, err := os.ReadFile(dir + "/setgroups")
	check(s, err)
	lines = append(lines, "setgroups: "+strings.TrimSpace(string(groups)))
	lines = append(lines, s.descriptors(pid)...)
	lines = append(lines, s.rlimits(pid)...)
	// The owner of these files is that of the process, or root where it is not dumpable.
	var st unix.Stat_t
	check(s, unix.Stat(dir+"/environ", &st))
	lines = append(lines, "owner of /proc files: "+s.owner(st.Uid))
	return strings.Join(lines, "\n") + "\n"
}

func (s *sandbox) owner(id uint32) string {
	base := s.i.(*instance).sh.slot.base()
	switch {
	case id >= base && id-base < idsPerSlot:
		return fmt.Sprintf("base+%d", id-base)
	case id == 0:
		return "the host's root"
	}
	return "another's"
}

func tasks(t testing.TB, pid int) []string {
	t.Helper()
	dirs, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	check(t, err)
	return dirs
}

// threads are the lines of the status of all threads, which must be alike.
func (s *sandbox) threads(pid int) []string {
	s.Helper()
	sets := map[string]bool{}
	for _, dir := range tasks(s, pid) {
		var lines []string
		for _, line := range statusLines(dir) {
			key, value, _ := strings.Cut(line, ":")
			switch key {
			case "Uid", "Gid", "Groups":
				var ids []string
				for f := range strings.FieldsSeq(value) {
					id, err := strconv.ParseUint(f, 10, 32)
					check(s, err)
					ids = append(ids, s.owner(uint32(id)))
				}
				lines = append(lines, strings.TrimSpace(key+": "+strings.Join(ids, " ")))
			case "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters":
				lines = append(lines, key+": "+strings.TrimSpace(value))
			}
		}
		if len(lines) > 0 { // or the thread has ended
			sets[strings.Join(lines, "\n")] = true
		}
	}
	all := slices.Sorted(maps.Keys(sets))
	if len(all) != 1 {
		s.Errorf("threads of %d differ:\n%s", pid, strings.Join(all, "\n--\n"))
	}
	return all
}

func (s *sandbox) namespaces(pid int) []string {
	s.Helper()
	names, err := os.ReadDir("/proc/self/ns")
	check(s, err)
	var lines []string
	for _, n := range names {
		link := func(pid int) string {
			target, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, n.Name()))
			check(s, err)
			return target
		}
		what := "its own"
		switch link(pid) {
		case link(os.Getpid()):
			what = "host"
		case link(s.pid1()):
			what = "the sandbox's"
		}
		lines = append(lines, "ns "+n.Name()+": "+what)
	}
	return lines
}

func (s *sandbox) idMap(path string) string {
	s.Helper()
	text, err := os.ReadFile(path)
	check(s, err)
	f := strings.Fields(string(text))
	for i := 1; i < len(f); i += 3 {
		if f[i] == strconv.FormatUint(uint64(s.i.(*instance).sh.slot.base()), 10) {
			f[i] = "base"
		}
	}
	return strings.Join(f, " ")
}

// descriptors are the kinds of what a process has open: how many it has of one
// kind says nothing. Those that a child would inherit are told apart.
func (s *sandbox) descriptors(pid int) []string {
	s.Helper()
	kinds := map[string]bool{}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	check(s, err)
	for _, e := range entries {
		path := fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name())
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		kind, ok := s.kindOf(path)
		if !ok {
			continue
		}
		var flags uint64
		for line := range strings.Lines(string(info)) {
			if v, ok := strings.CutPrefix(line, "flags:"); ok {
				flags, err = strconv.ParseUint(strings.TrimSpace(v), 8, 64)
				check(s, err)
			}
		}
		if flags&unix.O_CLOEXEC == 0 {
			kind += ", inherited"
		}
		if n, _ := strconv.Atoi(e.Name()); n <= 2 {
			kind += ", as " + e.Name()
		}
		kinds["fd: "+kind] = true
	}
	return slices.Sorted(maps.Keys(kinds))
}

// kindOf tells what a descriptor refers to, by the file system: a name could
// be any program's choice.
func (s *sandbox) kindOf(path string) (string, bool) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	link, err := os.Readlink(path)
	if err != nil || unix.Statfs(path, &fs) != nil || unix.Stat(path, &st) != nil {
		return "", false
	}
	const pipefs, pidfs = 0x50495045, 0x50494446
	switch {
	case fs.Type == pipefs:
		return "pipe", true
	case fs.Type == unix.SOCKFS_MAGIC:
		return "socket", true
	case fs.Type == pidfs || strings.Contains(link, "[pidfd]"):
		return "pidfd", true
	case fs.Type == unix.CGROUP_SUPER_MAGIC || fs.Type == unix.CGROUP2_SUPER_MAGIC:
		// The runtime of a Go program follows its CPU limit.
		return "cgroup", !strings.HasPrefix(filepath.Base(link), "cpu.")
	case strings.HasPrefix(link, "anon_inode:"):
		return link, true
	case st.Mode&unix.S_IFMT == unix.S_IFCHR:
		return fmt.Sprintf("device %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), true
	}
	return fmt.Sprintf("%s on %#x", link, fs.Type), true
}

func (s *sandbox) rlimits(pid int) []string {
	s.Helper()
	own := limitsOf(s, os.Getpid())
	var lines []string
	for name, value := range limitsOf(s, pid) {
		switch {
		case pid == s.pid1() && (name == "Max open files" || name == "Max core file size"):
			continue // chronus keeps what its host has given it
		case name == "Max open files":
			limits, err := confine.Rlimits()
			check(s, err)
			for _, l := range limits {
				if n := strconv.FormatUint(l.Hard, 10); l.Resource == unix.RLIMIT_NOFILE && value == n+" "+n {
					value = "at most 65536"
				}
			}
		case name == "Max core file size":
		case value == own[name]:
			value = "the host's"
		}
		lines = append(lines, "limit "+name+": "+value)
	}
	slices.Sort(lines)
	return lines
}

func limitsOf(t testing.TB, pid int) map[string]string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	check(t, err)
	all := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if name := strings.TrimSpace(line[:min(26, len(line))]); strings.HasPrefix(name, "Max ") {
			f := strings.Fields(line[26:])
			all[name] = f[0] + " " + f[1]
		}
	}
	return all
}
