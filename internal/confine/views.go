package confine

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
)

// Programs size their pools and heaps by what these files say, so they show
// the sandbox's limits and not the host. They are static: a program that wants
// to know what is in use asks its cgroup.

// File is one file or directory to be made.
type File struct {
	Path string // relative
	Dir  bool
	Data []byte // of a file
	Link string // of a symbolic link: its target
}

// CPUs is how many CPUs a sandbox with a limit sees: the limit rounded up, at
// least one and at most the host's.
func CPUs(milliCPU int64, host int) int {
	if milliCPU <= 0 {
		return max(host, 1)
	}
	return int(max(1, min(int64(host), (milliCPU+999)/1000)))
}

// SysFiles is the whole content of /sys for a sandbox that sees n CPUs: what C
// libraries, the JVM, Node and Go read, and the mount point of the cgroup.
func SysFiles(n int) []File {
	n = max(n, 1)
	list := "0"
	if n > 1 {
		list = "0-" + strconv.Itoa(n-1)
	}
	files := []File{
		{Path: "fs/cgroup", Dir: true},
		{Path: "class/net", Dir: true},
		{Path: "devices/system/cpu/online", Data: []byte(list + "\n")},
		{Path: "devices/system/cpu/possible", Data: []byte(list + "\n")},
		{Path: "devices/system/cpu/present", Data: []byte(list + "\n")},
		{Path: "devices/system/node/online", Data: []byte("0\n")},
		{Path: "devices/system/node/possible", Data: []byte("0\n")},
		{Path: "devices/system/node/node0/cpulist", Data: []byte(list + "\n")},
	}
	for i := range n {
		files = append(files, File{Path: fmt.Sprintf("devices/system/cpu/cpu%d", i), Dir: true})
	}
	// Facts of the host's kernel that allocators and garbage collectors tune by.
	for _, name := range []string{
		"kernel/mm/transparent_hugepage/enabled",
		"kernel/mm/transparent_hugepage/hpage_pmd_size",
		"kernel/mm/transparent_hugepage/shmem_enabled",
	} {
		if data, err := os.ReadFile("/sys/" + name); err == nil {
			files = append(files, File{Path: name, Data: data})
		}
	}
	return files
}

// Meminfo is a /proc/meminfo for a memory limit in bytes: all of it free, and
// no swap.
func Meminfo(limit int64) []byte {
	var b bytes.Buffer
	total := limit / 1024
	for _, f := range []struct {
		name string
		kib  int64
	}{
		{"MemTotal", total}, {"MemFree", total}, {"MemAvailable", total}, {"Buffers", 0}, {"Cached", 0}, {"SwapCached", 0},
		{"Active", 0}, {"Inactive", 0}, {"Active(anon)", 0}, {"Inactive(anon)", 0}, {"Active(file)", 0}, {"Inactive(file)", 0},
		{"Unevictable", 0}, {"Mlocked", 0}, {"SwapTotal", 0}, {"SwapFree", 0}, {"Dirty", 0}, {"Writeback", 0},
		{"AnonPages", 0}, {"Mapped", 0}, {"Shmem", 0}, {"KReclaimable", 0}, {"Slab", 0}, {"SReclaimable", 0}, {"SUnreclaim", 0},
		{"KernelStack", 0}, {"PageTables", 0}, {"CommitLimit", total}, {"Committed_AS", 0},
		{"VmallocTotal", 34359738367}, {"VmallocUsed", 0}, {"VmallocChunk", 0},
	} {
		fmt.Fprintf(&b, "%-16s%8d kB\n", f.name+":", f.kib)
	}
	return b.Bytes()
}

// CPUInfo is a /proc/cpuinfo with the first n processors of the host's.
func CPUInfo(host []byte, n int) []byte {
	blocks := bytes.SplitAfter(host, []byte("\n\n"))
	return bytes.Join(blocks[:min(max(n, 1), len(blocks))], nil)
}

// ProcStat is a /proc/stat of n processors that were never busy, since a boot at
// btime (seconds since 1970): what all sandboxes of a host do is no business of
// one, and cannot be told for one alone in a file that does not change.
func ProcStat(btime int64, n int) []byte {
	var b bytes.Buffer
	b.WriteString("cpu  0 0 0 0 0 0 0 0 0 0\n")
	for i := range max(n, 1) {
		fmt.Fprintf(&b, "cpu%d 0 0 0 0 0 0 0 0 0 0\n", i)
	}
	fmt.Fprintf(&b, "intr 0\nctxt 0\nbtime %d\nprocesses 0\nprocs_running 1\nprocs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n", btime)
	return b.Bytes()
}

// BootTime finds btime in the host's /proc/stat.
func BootTime(stat []byte) (int64, error) {
	for line := range bytes.Lines(stat) {
		if value, ok := bytes.CutPrefix(line, []byte("btime ")); ok {
			return strconv.ParseInt(string(bytes.TrimSpace(value)), 10, 64)
		}
	}
	return 0, errors.New("/proc/stat has no btime")
}

// Loadavg is the /proc/loadavg of every sandbox. By the host's, builds that are
// told to wait for a low load would wait for the neighbours.
const Loadavg = "0.00 0.00 0.00 1/1 1\n"

// DevFiles is the content of the /dev that all sandboxes share, but for the
// nodes; pts, shm and mqueue are each sandbox's own mounts.
func DevFiles() []File {
	return []File{
		{Path: "pts", Dir: true}, {Path: "shm", Dir: true}, {Path: "mqueue", Dir: true},
		{Path: "fd", Link: "/proc/self/fd"},
		{Path: "stdin", Link: "/proc/self/fd/0"},
		{Path: "stdout", Link: "/proc/self/fd/1"},
		{Path: "stderr", Link: "/proc/self/fd/2"},
		{Path: "ptmx", Link: "pts/ptmx"},
	}
}

// Device is a character device of /dev, with mode 0666.
type Device struct {
	Name         string
	Major, Minor uint32
}

// DevNodes are the device nodes of the shared /dev.
func DevNodes() []Device {
	return []Device{
		{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
	}
}
