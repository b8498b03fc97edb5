//go:build linux && amd64

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// statusKeys are the lines of /proc/<pid>/status that make up a posture.
var statusKeys = []string{
	"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Uid", "Gid", "Groups",
	"Speculation_Store_Bypass", "SpeculationIndirectBranch",
}

func caps([]string) (any, error) {
	own, err := status("/proc/self/status")
	if err != nil {
		return nil, err
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil, err
	}
	alike := true
	var unlike []string
	for _, t := range tasks {
		other, err := status("/proc/self/task/" + t.Name() + "/status")
		if err != nil {
			return nil, err
		}
		for _, k := range statusKeys {
			if other[k] != own[k] {
				alike, unlike = false, append(unlike, t.Name()+" "+k+" "+other[k])
			}
		}
	}
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return nil, err
	}
	securebits, err := unix.PrctlRetInt(unix.PR_GET_SECUREBITS, 0, 0, 0, 0)
	if err != nil {
		return nil, err
	}
	all := map[string]any{"threads_alike": alike, "threads_unlike": unlike, "dumpable": dumpable, "securebits": securebits}
	for k, v := range own {
		all[k] = v
	}
	return all, nil
}

func status(path string) (map[string]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for line := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(line, ":")
		for _, want := range statusKeys {
			if k == want {
				found[k] = strings.Join(strings.Fields(v), " ")
			}
		}
	}
	return found, nil
}

func fds([]string) (any, error) {
	// A snapshot, before anything here opens more: the directory itself is left out.
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	open := map[string]string{}
	for _, n := range names {
		if n == strconv.Itoa(int(dir.Fd())) {
			continue
		}
		link, err := os.Readlink("/proc/self/fd/" + n)
		if err != nil {
			return nil, err
		}
		if link == "anon_inode:[eventpoll]" || link == "anon_inode:[eventfd]" || strings.HasPrefix(filepath.Base(link), "cpu.") {
			continue // of this program's runtime, which follows the cgroup's CPU limit
		}
		open[n] = link
	}
	links := map[string]any{"fds": open}
	for _, n := range []string{"cwd", "root", "exe"} {
		if links[n], err = os.Readlink("/proc/self/" + n); err != nil {
			return nil, err
		}
	}
	return links, nil
}

func namespaces([]string) (any, error) {
	names, err := os.ReadDir("/proc/self/ns")
	if err != nil {
		return nil, err
	}
	ns := map[string]string{}
	for _, n := range names {
		if ns[n.Name()], err = os.Readlink("/proc/self/ns/" + n.Name()); err != nil {
			return nil, err
		}
	}
	result := map[string]any{"ns": ns}
	for _, n := range []string{"uid_map", "gid_map", "setgroups", "cgroup"} {
		text, err := os.ReadFile("/proc/self/" + n)
		if err != nil {
			return nil, err
		}
		result[n] = strings.TrimSpace(string(text))
	}
	return result, nil
}

func mounts([]string) (any, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var all []map[string]string
	for line := range strings.Lines(string(text)) {
		before, after, _ := strings.Cut(line, " - ")
		b, a := strings.Fields(before), strings.Fields(after)
		if len(b) < 6 || len(a) < 3 {
			continue
		}
		all = append(all, map[string]string{
			"root": b[3], "point": b[4], "options": b[5], "optional": strings.Join(b[6:], " "),
			"type": a[0], "source": a[1], "super": a[2],
		})
	}
	return map[string]any{"mounts": all}, nil
}

// procWrites opens for writing and writes nothing: where that is possible, so is the rest.
func procWrites([]string) (any, error) {
	results := map[string]string{}
	for _, path := range []string{
		"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sys/kernel/hostname",
		"/proc/sys/vm/drop_caches", "/proc/sys/vm/overcommit_memory", "/proc/sys/fs/binfmt_misc/register",
		"/proc/sys/net/ipv4/ip_forward", "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg",
		"/proc/self/oom_score_adj", "/proc/1/oom_score_adj", "/proc/1/mem", "/proc/1/environ",
		"/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/memory/release_agent", "/sys/fs/cgroup/cgroup.procs",
		"/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max",
		"/sys/kernel/uevent_helper", "/sys/kernel/debug", "/sys/kernel/mm/transparent_hugepage/enabled",
		"/proc/kallsyms", "/proc/keys", "/proc/modules", "/proc/config.gz", "/proc/kpagecgroup", "/proc/cmdline",
	} {
		results[path] = write(path)
	}
	return results, nil
}

func write(path string) string {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return result(err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return result(err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3) {
		return "null" // covered by the null device
	}
	_, err = unix.Write(fd, nil)
	return result(err)
}

func limits([]string) (any, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, err
	}
	all := map[string]any{"cpus": set.Count()}
	for name, resource := range map[string]int{
		"nofile": unix.RLIMIT_NOFILE, "core": unix.RLIMIT_CORE, "nproc": unix.RLIMIT_NPROC, "stack": unix.RLIMIT_STACK,
		"memlock": unix.RLIMIT_MEMLOCK, "as": unix.RLIMIT_AS,
	} {
		var l unix.Rlimit
		if err := unix.Getrlimit(resource, &l); err != nil {
			return nil, err
		}
		all[name] = []uint64{l.Cur, l.Max}
	}
	for name, path := range map[string]string{
		"online": "/sys/devices/system/cpu/online", "possible": "/sys/devices/system/cpu/possible",
		"memory_v1": "/sys/fs/cgroup/memory/memory.limit_in_bytes", "memory_v2": "/sys/fs/cgroup/memory.max",
	} {
		if text, err := os.ReadFile(path); err == nil {
			all[name] = strings.TrimSpace(string(text))
		}
	}
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(meminfo)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemTotal:" {
			if all["memory_kib"], err = strconv.Atoi(f[1]); err != nil {
				return nil, err
			}
		}
	}
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	all["cpuinfo"] = strings.Count("\n"+string(cpuinfo), "\nprocessor\t")
	return all, nil
}

// endpoints lists what a program inside could try to talk to.
func endpoints([]string) (any, error) {
	all := map[string]any{}
	for name, path := range map[string]string{
		"unix": "/proc/net/unix", "tcp": "/proc/net/tcp", "tcp6": "/proc/net/tcp6", "udp": "/proc/net/udp", "udp6": "/proc/net/udp6",
	} {
		lines := []string{}
		if text, err := os.ReadFile(path); err == nil {
			for i, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
				if i > 0 { // a heading
					lines = append(lines, line)
				}
			}
		}
		all[name] = lines
	}
	var sockets []string
	err := filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		if path == "/proc" || err != nil && d != nil && d.IsDir() {
			return fs.SkipDir
		}
		if err == nil && d.Type()&fs.ModeSocket != 0 {
			sockets = append(sockets, path)
		}
		return nil
	})
	all["sockets"] = sockets
	return all, err
}
