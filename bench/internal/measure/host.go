package measure

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// HostFacts name the machine in one line.
func HostFacts() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	model := "unknown CPU"
	for line := range strings.Lines(ReadFile("/proc/cpuinfo")) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			model = strings.TrimSpace(value)
			break
		}
	}
	return fmt.Sprintf("%d x %s, %d GiB, Linux %s", runtime.NumCPU(), model, Meminfo("MemTotal")>>30, unix.ByteSliceToString(u.Release[:]))
}

// ReadFile is a small file of the kernel's, empty where there is none.
func ReadFile(path string) string {
	b, _ := os.ReadFile(path)
	return string(b)
}

// Meminfo is a value of /proc/meminfo in bytes.
func Meminfo(name string) int64 {
	for line := range strings.Lines(ReadFile("/proc/meminfo")) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name+":" {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			return kib << 10
		}
	}
	return 0
}

// load is the load of the last minute.
func load() float64 {
	first, _, _ := strings.Cut(ReadFile("/proc/loadavg"), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}

// MachineCPU is the time that all CPUs were busy since boot. /proc/stat counts
// in hundredths of a second, which a round of samples is long enough for.
func MachineCPU() time.Duration {
	line, _, _ := strings.Cut(ReadFile("/proc/stat"), "\n")
	var busy int64
	for i, f := range strings.Fields(line) {
		if i == 0 || i == 4 || i == 5 || i > 8 { // name, idle, iowait, guest
			continue
		}
		n, _ := strconv.ParseInt(f, 10, 64)
		busy += n
	}
	return time.Duration(busy) * 10 * time.Millisecond
}

// PrivateMemory is the memory that only this process holds, in bytes: its
// anonymous pages. The kernel's Private_ counters also hold the pages of its
// program where no second process runs it, all of them dirty on a tmpfs.
func PrivateMemory(pid int) int64 {
	var total int64
	for line := range strings.Lines(ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Anonymous:" {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			total += kib << 10
		}
	}
	return total
}

// Raise sets a sysctl to at least value and returns how to set it back.
func Raise(path string, value int64) func() {
	old := strings.TrimSpace(ReadFile(path))
	if n, err := strconv.ParseInt(old, 10, 64); err != nil || n >= value {
		return func() {}
	}
	_ = os.WriteFile(path, []byte(strconv.FormatInt(value, 10)), 0)
	return func() { _ = os.WriteFile(path, []byte(old), 0) }
}

// UnmountBelow takes away what a rival left mounted in our own directory.
func UnmountBelow(dir string) {
	var points []string
	for line := range strings.Lines(ReadFile("/proc/self/mountinfo")) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			points = append(points, f[4])
		}
	}
	for _, p := range slices.Backward(points) {
		_ = unix.Unmount(p, unix.MNT_DETACH)
	}
}
