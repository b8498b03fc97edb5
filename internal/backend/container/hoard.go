package container

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The kernel charges nearly all that it keeps for a process to the memory of
// its cgroup, and not three things (measured in docs/kernel.md): what a netlink
// socket has queued for its owner, 2 GiB in 8 seconds; the ranges of files that
// are locked, 0.6 GiB; and on v1 what TCP buffers, 1.2 GiB, of which each socket
// gets a little past the limit. Nothing bounds how many there are in a sandbox,
// and a seccomp program cannot count. So memory is looked at: where the kernel's
// own grew, it is looked for whoever hoards, and that sandbox is ended.

const (
	// hoardLimit is how many bytes a sandbox may have of each, past its limits.
	hoardLimit = 64 << 20
	// hoardGrowth is how much the kernel's memory grows between two looks. A
	// sandbox takes 0.4 MiB of it by itself.
	hoardGrowth = 64 << 20
	hoardEvery  = time.Second

	netlinkSize = 2 << 10 // of a socket without its queue
	lockSize    = 200     // of one locked range
)

// watchHoards looks until ctx ends.
func (b *Backend) watchHoards(ctx context.Context) {
	tick := time.NewTicker(hoardEvery)
	defer tick.Stop()
	var low int64 // 0 looks once at the start
	known := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, err := kernelMemory()
		if err != nil && known {
			b.log.Error("kernel memory is not known", "err", err)
		}
		if known = err == nil; !known {
			continue
		}
		if low = min(low, now); now-low < hoardGrowth {
			continue
		}
		b.endHoards()
		low = now
	}
}

// kernelMemory is how many bytes the kernel has for itself and cannot give back,
// with what TCP buffers, of all network namespaces.
func kernelMemory() (int64, error) {
	slab, err := fieldAfter("/proc/meminfo", "SUnreclaim:", "")
	if err != nil {
		return 0, err
	}
	pages, err := fieldAfter("/proc/self/net/sockstat", "TCP:", "mem")
	return slab<<10 + pages*int64(os.Getpagesize()), err
}

// fieldAfter is the number that comes first, or after name, in the line of a
// file that begins with start.
func fieldAfter(path, start, name string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != start {
			continue
		}
		at := 1
		if name != "" {
			at = slices.Index(fields, name) + 1
		}
		if at > 0 && at < len(fields) {
			return strconv.ParseInt(fields[at], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s: no line %s with %s", path, start, name)
}

// endHoards ends each sandbox that has too much. Those with the most memory come
// first: the kernel has one table of the netlink sockets of all, and whoever has
// many has much else that is charged.
func (b *Backend) endHoards() {
	b.mu.Lock()
	memory := make(map[*instance]int64, len(b.live))
	for _, i := range b.live {
		memory[i] = 0
	}
	b.mu.Unlock()
	for i := range memory {
		if sh := i.shell(); sh != nil {
			memory[i], _ = sh.group.Memory()
		}
	}
	for _, i := range slices.SortedFunc(maps.Keys(memory), func(x, y *instance) int { return cmp.Compare(memory[y], memory[x]) }) {
		if what := i.hoard(); what != "" {
			b.log.Warn("sandbox takes the host's memory", "sandbox", i.id, "what", what)
			i.endFor(fmt.Sprintf("it took more than %d MiB of the host's memory for %s, which no limit of the sandbox counts", hoardLimit>>20, what))
		}
	}
}

// shell is the instance's container, or nil where it has none.
func (i *instance) shell() *shell {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.sh == nil || i.sh.proc == nil || i.sh.group == nil {
		return nil
	}
	return i.sh
}

// hoard tells what the instance has too much of, or nothing.
func (i *instance) hoard() string {
	sh := i.shell()
	if sh == nil {
		return ""
	}
	// The namespace is that of PID 1 even where the number is used again: then it
	// is another sandbox's, or the host's, which has no such queues.
	if n, err := netlinkBytes(fmt.Sprintf("/proc/%d/net/netlink", sh.proc.pid), hoardLimit); err == nil && n >= hoardLimit && i.running() {
		return "netlink sockets"
	}
	if n, err := sh.group.TCPExcess(); err == nil && n >= hoardLimit {
		return "buffers of TCP"
	}
	pids, err := sh.group.CommandPIDs()
	if err != nil {
		return ""
	}
	locks := 0
	for _, pid := range pids {
		if locks += heldLocks(pid, hoardLimit/lockSize-locks); locks >= hoardLimit/lockSize {
			return "locks of files"
		}
	}
	return ""
}

// running reports whether PID 1 has not ended.
func (i *instance) running() bool {
	select {
	case <-i.done:
		return false
	default:
		return true
	}
}

// netlinkBytes sums up what the sockets of a table of netlink sockets have, up
// to limit.
func netlinkBytes(path string, limit int64) (sum int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() && sum < limit {
		// sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 {
			continue
		}
		rmem, err := strconv.ParseInt(fields[4], 10, 64)
		if err != nil {
			continue // the heading
		}
		wmem, _ := strconv.ParseInt(fields[5], 10, 64)
		sum += netlinkSize + rmem + wmem
	}
	return sum, lines.Err()
}

// heldLocks counts the ranges of files that a process has locked, up to limit.
// A process may end meanwhile; its files are those of the host's kernel alone.
func heldLocks(pid, limit int) (n int) {
	dir := fmt.Sprintf("/proc/%d/fdinfo", pid)
	d, err := os.Open(dir)
	if err != nil {
		return 0
	}
	defer d.Close()
	seen := map[string]bool{}
	for n < limit {
		names, err := d.Readdirnames(256)
		for _, name := range names {
			if n < limit {
				n += locksOf(dir+"/"+name, limit-n, seen)
			}
		}
		if err != nil {
			return n
		}
	}
	return n
}

// locksOf counts the locks in an fdinfo. Those of a process on a file are told
// for each descriptor of that, and counted once.
func locksOf(path string, limit int, seen map[string]bool) (n int) {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	r := bufio.NewReader(io.LimitReader(f, int64(limit)*256+4096))
	file, posix := "", false
	for n < limit {
		line, err := r.ReadSlice('\n')
		switch {
		case bytes.HasPrefix(line, []byte("mnt_id:")), bytes.HasPrefix(line, []byte("ino:")):
			file += string(line)
		case bytes.HasPrefix(line, []byte("lock:")) && bytes.Contains(line, []byte("POSIX")):
			if seen[file] && !posix {
				return n
			}
			posix, seen[file] = true, true
			n++
		case bytes.HasPrefix(line, []byte("lock:")):
			n++
		}
		if err != nil {
			return n
		}
	}
	return n
}

// endFor ends the sandbox for a reason that its Exit tells.
func (i *instance) endFor(reason string) {
	i.mu.Lock()
	i.cause = reason
	group := i.sh.group
	i.mu.Unlock()
	if err := group.Kill(); err != nil {
		i.b.log.Error("sandbox is not ended", "sandbox", i.id, "err", err)
	}
}
