package cgroup

import (
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// cpuPeriod is the kernel's default: shorter ones throttle more finely and
// cost more.
const cpuPeriod = 100 * time.Millisecond

// SetLimits sets the limits; a zero value of a field leaves that one unlimited.
func (g *Group) SetLimits(l dsec.Limits) error {
	if l.MilliCPU < 0 || l.MemoryBytes < 0 || l.Pids < 0 {
		return dsec.Invalid("limits", "want no negative value")
	}
	set := g.setV1
	if g.tree.layout.Unified {
		set = g.setV2
	}
	if err := set(l); err != nil {
		return err
	}
	g.mu.Lock()
	g.limits = l
	g.mu.Unlock()
	return nil
}

func (g *Group) setV2(l dsec.Limits) error {
	work := g.name + "/work/"
	quota := "max"
	if l.MilliCPU > 0 {
		quota = strconv.FormatInt(quotaMicros(l.MilliCPU), 10)
	}
	period := strconv.FormatInt(cpuPeriod.Microseconds(), 10)
	for _, f := range []struct{ name, value string }{
		{work + "memory.max", orMax(l.MemoryBytes)},
		{work + "pids.max", orMax(l.Pids)},
		{work + "cpu.max", quota + " " + period},
		// chronus and what serves files: as much CPU time again as the commands have.
		{g.name + "/init/cpu.max", quota + " " + period},
	} {
		if err := writeAt(g.tree.v2, f.name, f.value); err != nil {
			return err
		}
	}
	// Sandboxes compete one level higher: there work is alone with chronus.
	if err := writeAt(g.tree.v2, g.name+"/cpu.weight", strconv.FormatInt(weight(shares(l.MilliCPU)), 10)); err != nil {
		return err
	}
	return g.setSwapMax(noSwap)
}

// noSwap: a limit that swap stretches is none. PageOut has another for the while.
const noSwap = "0"

// setSwapMax bounds what the commands may have in swap, on v2. The file is missing
// where the kernel has no swap accounting.
func (g *Group) setSwapMax(value string) error {
	err := writeAt(g.tree.v2, g.name+"/work/memory.swap.max", value)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func (g *Group) setV1(l dsec.Limits) error {
	if err := g.setV1Memory(l.MemoryBytes); err != nil {
		return err
	}
	if err := writeAt(g.tree.v1["pids"], g.name+"/pids.max", orMax(l.Pids)); err != nil {
		return err
	}
	quota := "-1"
	if l.MilliCPU > 0 {
		quota = strconv.FormatInt(quotaMicros(l.MilliCPU), 10)
	}
	if err := writeAt(g.tree.v1["cpu"], g.name+"/cpu.cfs_quota_us", quota); err != nil {
		return err
	}
	return writeAt(g.tree.v1["cpu"], g.name+"/cpu.shares", strconv.FormatInt(shares(l.MilliCPU), 10))
}

// setV1Memory sets memory and memory+swap to the same limit. The kernel
// refuses a state where the second is below the first, so that their order
// depends on the direction.
func (g *Group) setV1Memory(bytes int64) error {
	value := "-1"
	if bytes > 0 {
		value = strconv.FormatInt(bytes, 10)
	}
	dir := g.tree.v1["memory"]
	memory, memsw := g.name+"/memory.limit_in_bytes", g.name+"/memory.memsw.limit_in_bytes"
	// What TCP and UDP buffer is counted apart, and only once it was given a limit.
	tcp := "-1"
	if bytes > 0 {
		tcp = strconv.FormatInt(max(bytes/4, 1<<20), 10)
	}
	err := writeAt(dir, g.name+"/memory.kmem.tcp.limit_in_bytes", tcp)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err = writeAt(dir, memory, value)
	if errors.Is(err, unix.EINVAL) { // raising above the present memory+swap limit
		if err := writeAt(dir, memsw, value); err != nil {
			return err
		}
		return writeAt(dir, memory, value)
	}
	if err != nil {
		return err
	}
	if err := writeAt(dir, memsw, value); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Memory is how many bytes are charged to the commands now.
func (g *Group) Memory() (int64, error) {
	at, name := g.tree.v1["memory"], g.name+"/memory.usage_in_bytes"
	if g.tree.layout.Unified {
		at, name = g.tree.v2, g.name+"/work/memory.current"
	}
	n, err := readInt(at, name)
	return n, gone(err)
}

// Swapped is how many bytes of the commands are in swap, and in no memory; 0 where the
// kernel does not count them.
func (g *Group) Swapped() (int64, error) {
	if g.tree.layout.Unified {
		swap, err := readInt(g.tree.v2, g.name+"/work/memory.swap.current")
		if errors.Is(err, os.ErrNotExist) {
			return 0, nil
		} else if err != nil {
			return 0, gone(err)
		}
		both, err := readKey(g.tree.v2, g.name+"/work/memory.stat", "swapcached")
		return max(0, swap-both), gone(err)
	}
	b, err := readAt(g.tree.v1["memory"], g.name+"/memory.stat")
	if err != nil {
		return 0, gone(err)
	}
	swap, _ := lookup(b, "total_swap")
	both, _ := lookup(b, "total_swapcached")
	return max(0, swap-both), nil
}

// KernelMemory is how many bytes of Memory are the kernel's.
func (g *Group) KernelMemory() (int64, error) {
	if g.tree.layout.Unified {
		return readKey(g.tree.v2, g.name+"/work/memory.stat", "kernel") // since Linux 5.18
	}
	return readInt(g.tree.v1["memory"], g.name+"/memory.kmem.usage_in_bytes")
}

// TCPExcess is how many bytes TCP buffers past the limit, which on v1 holds for
// all but a little of each socket. On v2 they are part of the memory.
func (g *Group) TCPExcess() (int64, error) {
	if g.tree.layout.Unified {
		return 0, nil
	}
	limit, err := readInt(g.tree.v1["memory"], g.name+"/memory.kmem.tcp.limit_in_bytes")
	if err != nil {
		return 0, err
	}
	used, err := readInt(g.tree.v1["memory"], g.name+"/memory.kmem.tcp.usage_in_bytes")
	return max(used-limit, 0), err
}

func orMax(n int64) string {
	if n <= 0 {
		return "max"
	}
	return strconv.FormatInt(n, 10)
}

// quotaMicros is the CPU time of a period; the kernel takes no less than 1 ms.
func quotaMicros(milliCPU int64) int64 {
	return max(milliCPU*cpuPeriod.Microseconds()/1000, 1000)
}

// shares gives a sandbox its part of a crowded machine: 1024 for each CPU.
func shares(milliCPU int64) int64 {
	if milliCPU == 0 {
		return 1024
	}
	return min(max(milliCPU*1024/1000, 2), 262144)
}

// weight maps shares [2, 262144] to v2's [1, 10000].
func weight(shares int64) int64 { return 1 + (shares-2)*9999/262142 }

// Usage reads what the sandbox uses and has used. Disk figures are not its.
func (g *Group) Usage() (dsec.Usage, error) {
	g.mu.Lock()
	limits, commands := g.limits, g.commands
	g.mu.Unlock()
	u := dsec.Usage{MemoryLimit: limits.MemoryBytes, PidsLimit: limits.Pids, MilliCPU: limits.MilliCPU}
	// v2 accounts CPU time even where the cpu controller is on v1.
	usec, err := readKey(g.tree.v2, g.name+"/cpu.stat", "usage_usec")
	if err != nil {
		return u, gone(err)
	}
	u.CPU = time.Duration(usec) * time.Microsecond
	if g.tree.layout.Unified {
		err = g.usageV2(&u)
	} else {
		err = g.usageV1(&u, commands)
	}
	return u, gone(err)
}

func (g *Group) usageV2(u *dsec.Usage) error {
	work := g.name + "/work/"
	for _, f := range []struct {
		name string
		to   *int64
	}{{"memory.current", &u.MemoryBytes}, {"memory.peak", &u.MemoryPeak}, {"pids.current", &u.Pids}} {
		n, err := readInt(g.tree.v2, work+f.name)
		if err != nil {
			return err
		}
		*f.to = n
	}
	throttled, err := readKey(g.tree.v2, work+"cpu.stat", "throttled_usec")
	if err != nil {
		return err
	}
	u.CPUThrottled = time.Duration(throttled) * time.Microsecond
	u.OOMKills, err = readKey(g.tree.v2, work+"memory.events", "oom_kill")
	return err
}

func (g *Group) usageV1(u *dsec.Usage, commands int) error {
	memory := g.tree.v1["memory"]
	var err error
	if u.MemoryBytes, err = readInt(memory, g.name+"/memory.usage_in_bytes"); err != nil {
		return err
	}
	if u.MemoryPeak, err = readInt(memory, g.name+"/memory.max_usage_in_bytes"); err != nil {
		return err
	}
	if u.Pids, err = readInt(g.tree.v1["pids"], g.name+"/pids.current"); err != nil {
		return err
	}
	throttled, err := readKey(g.tree.v1["cpu"], g.name+"/cpu.stat", "throttled_time")
	if err != nil {
		return err
	}
	u.CPUThrottled = time.Duration(throttled)
	// v1 counts a kill only where the killed process was.
	for n := range commands {
		kills, err := readKey(memory, g.memoryDir(n)+"/memory.oom_control", "oom_kill")
		if err != nil {
			return err
		}
		u.OOMKills += kills
	}
	return nil
}

// gone turns the errors of a removed directory into the platform's.
func gone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return dsec.Errorf(dsec.CodeLost, "cgroup: the sandbox's group is gone")
	}
	return err
}

// String names the group for logs.
func (g *Group) String() string { return g.tree.opts.Name + "/" + g.name }
