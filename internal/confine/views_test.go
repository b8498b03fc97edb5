package confine

import (
	"bytes"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

func TestProcMasksCoverEverythingElse(t *testing.T) {
	masks, err := ProcMasks("/proc")
	if err != nil {
		t.Fatal(err)
	}
	covered := map[string]bool{}
	for _, m := range masks {
		info, err := os.Lstat(path.Join("/proc", m.Path))
		if err != nil || info.IsDir() != m.Dir {
			t.Errorf("%+v: %v, %v", m, info, err)
		}
		covered[m.Path] = true
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		kept := slices.Contains(ProcKeep, e.Name()) || strings.Trim(e.Name(), "0123456789") == ""
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		roots := info.Mode().IsRegular() && info.Mode()&0o077 == 0 // the host's, who is nobody inside
		if (kept || roots) == covered[e.Name()] {
			t.Errorf("%s: kept %v, mode %v, covered %v", e.Name(), kept, info.Mode(), covered[e.Name()])
		}
	}
	// On every kernel that dsec supports.
	for _, name := range []string{"kallsyms", "sys/kernel/core_pattern", "cmdline", "version_signature", "iomem", "interrupts"} {
		if _, err := os.Lstat("/proc/" + name); err == nil && !covered[name] {
			t.Errorf("%s is not covered", name)
		}
	}
}

func TestProcMasksRefuseWhatTheyCannotCover(t *testing.T) {
	fsys := fstest.MapFS{"odd": {Mode: os.ModeSymlink}, "fine": {}}
	if m, err := masksOf(fsys, ".", func(string) bool { return false }); err == nil {
		t.Errorf("a symbolic link: %v, want an error", m)
	}
}

func TestSysFilesSayTheCPUs(t *testing.T) {
	for n, list := range map[int]string{1: "0\n", 2: "0-1\n", 16: "0-15\n"} {
		seen := map[string]bool{}
		for _, f := range SysFiles(n) {
			if f.Path != path.Clean(f.Path) || path.IsAbs(f.Path) || seen[f.Path] {
				t.Errorf("path %q", f.Path)
			}
			seen[f.Path] = true
			if f.Path == "devices/system/cpu/online" && string(f.Data) != list {
				t.Errorf("%d CPUs: online %q, want %q", n, f.Data, list)
			}
		}
		if !seen["devices/system/cpu/online"] || !seen["fs/cgroup"] {
			t.Errorf("%d CPUs: %v", n, seen)
		}
	}
}

func TestCPUsRoundUpToTheHost(t *testing.T) {
	for _, test := range []struct {
		milli int64
		host  int
		want  int
	}{{1, 8, 1}, {1000, 8, 1}, {1001, 8, 2}, {64_000, 8, 8}, {0, 8, 8}, {500, 0, 1}} {
		if got := CPUs(test.milli, test.host); got != test.want {
			t.Errorf("CPUs(%d, %d) = %d, want %d", test.milli, test.host, got, test.want)
		}
	}
}

func TestMeminfoHasTheKernelsShape(t *testing.T) {
	host, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	got := Meminfo(64 << 20)
	if !bytes.HasPrefix(got, []byte("MemTotal:          65536 kB\nMemFree:")) {
		t.Errorf("starts %q", got[:40])
	}
	for line := range bytes.Lines(got) {
		name, _, _ := bytes.Cut(line, []byte(":"))
		known := bytes.Contains(host, append(slices.Clone(name), ':'))
		if !known || len(line) != len("MemTotal:          65536 kB\n") && !bytes.HasPrefix(name, []byte("Vmalloc")) {
			t.Errorf("%q is no line of this kernel's", line)
		}
	}
}

func TestProcStatHasTheKernelsShape(t *testing.T) {
	host, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	btime, err := BootTime(host)
	if err != nil || btime < 1 {
		t.Fatalf("%d, %v", btime, err)
	}
	got := ProcStat(btime, 3)
	if again, err := BootTime(got); again != btime || err != nil {
		t.Errorf("btime is %d, %v, want %d", again, err, btime)
	}
	// Every kind of line, but for how many processors there are.
	names := func(text []byte) (list []string) {
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if f[0] != "cpu" && strings.HasPrefix(f[0], "cpu") {
				continue
			}
			if f[0] == "cpu" || f[0] == "softirq" {
				f[0] += strconv.Itoa(len(f))
			}
			list = append(list, f[0])
		}
		return list
	}
	if !slices.Equal(names(got), names(host)) {
		t.Errorf("lines are %v, the host's %v", names(got), names(host))
	}
	if n := strings.Count(string(got), "\ncpu"); n != 3 {
		t.Errorf("%d processors, want 3", n)
	}
	if _, err := BootTime([]byte("cpu 1\n")); err == nil {
		t.Error("a file without btime has one")
	}
	if f := strings.Fields(Loadavg); len(f) != 5 || strings.Count(f[3], "/") != 1 {
		t.Errorf("%q is no loadavg", Loadavg)
	}
}

func TestCPUInfoIsCutAfterAProcessor(t *testing.T) {
	host := []byte("processor\t: 0\nx\n\nprocessor\t: 1\nx\n\nprocessor\t: 2\nx\n\n")
	for n, want := range map[int]int{0: 1, 1: 1, 2: 2, 3: 3, 9: 3} {
		if got := bytes.Count(CPUInfo(host, n), []byte("processor")); got != want {
			t.Errorf("%d processors for %d, want %d", got, n, want)
		}
	}
}

func TestRlimitsCanBeGiven(t *testing.T) {
	limits, err := Rlimits()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range limits {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.Resource, &now); err != nil {
			t.Fatal(err)
		}
		if l.Soft > l.Hard || l.Hard > now.Max {
			t.Errorf("%+v, of at most %d", l, now.Max)
		}
	}
}
