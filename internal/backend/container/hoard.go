package container

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec/internal/units"
)

// The kernel charges nearly all that it keeps for a process to the memory of
// its cgroup, and not three things (measured in docs/kernel.md): what a netlink
// socket has queued for its owner, 2 GiB in 8 seconds; the ranges of files that
// are locked, 0.6 GiB; and on v1 what TCP buffers, 1.2 GiB, of which each socket
// gets a little past the limit. Nothing bounds how many there are in a sandbox,
// and a seccomp program cannot count. So memory is looked at: where the kernel's
// own grew, it is looked for whoever hoards, and what runs there is killed.

const (
	// hoardLimit is how many bytes a sandbox may have of each, past its limits.
	hoardLimit = 64 << 20
	hoardEvery = time.Second

	netlinkSize = 2 << 10 // of a socket without its queue
	lockSize    = 200     // of one locked range
)

// hoardBounds are what the watch of hoards goes by.
type hoardBounds struct {
	// growth is how much the kernel's memory grows between two looks. A sandbox
	// takes 0.4 MiB of it by itself.
	growth int64
	node   int64 // what all sandboxes may hold together; see hoardnode.go
	code   int64 // how much machine code there may be on the host; see hoardcode.go
}

// watchHoards looks until ctx ends.
func (b *Backend) watchHoards(ctx context.Context) {
	tick := time.NewTicker(hoardEvery)
	defer tick.Stop()
	var memory, mapped growth
	look := lockLook{now: time.Now, log: b.log}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if memory.exceeds(b.config.hoards.growth, kernelMemory, b.log) {
			instances := b.byMemory()
			b.killHoards(instances)
			for _, i := range instances {
				look.add(i.lockTurn())
			}
		}
		counting := len(look.turns) > 0
		look.pass() // the locks that are not counted yet
		if counting && len(look.turns) == 0 {
			b.boundHoards() // now all is known that they hold
		}
		if mapped.exceeds(b.config.hoards.growth/2, mappedMemory, b.log) {
			b.boundCode()
		}
	}
}

// A growth tells whether a figure has grown by so much since it last did, or was
// lower. The first time it is as if it had.
type growth struct {
	low   int64
	known bool // the figure could be read last time
	begun bool
}

func (g *growth) exceeds(by int64, read func() (int64, error), log *slog.Logger) bool {
	now, err := read()
	if err != nil {
		if g.known || !g.begun {
			log.Error("the kernel's memory is not known", "err", err)
		}
		g.known, g.begun = false, true
		return false
	}
	first := !g.known
	g.known, g.begun = true, true
	if first || now-g.low >= by {
		g.low = now
		return true
	}
	g.low = min(g.low, now)
	return false
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

// byMemory lists the instances, those with the most memory first: the kernel
// has one table of the netlink sockets of all, and whoever has many has much
// else that is charged.
func (b *Backend) byMemory() []*instance {
	list := b.instances()
	memory := make(map[*instance]int64, len(list))
	for _, i := range list {
		if sh := i.shell(); sh != nil {
			memory[i], _ = sh.group.Memory()
		}
	}
	slices.SortFunc(list, func(x, y *instance) int { return cmp.Compare(memory[y], memory[x]) })
	return list
}

// killHoards kills what runs in each sandbox that has too much of what is counted
// at once, which locks are not: those of one must not keep the others from this look.
func (b *Backend) killHoards(instances []*instance) {
	for _, i := range instances {
		if what := i.hoard(); what != "" {
			i.killHoard(tooMuch(what))
		}
	}
}

// tooMuch is the reason for the end of a sandbox that is past a limit of its own.
func tooMuch(what string) string {
	return fmt.Sprintf("it took more than %s of the host's memory for %s, which no limit of the sandbox counts", units.Bytes(hoardLimit), what)
}

// hoardAgain is how soon a sandbox that hoards again is ended itself.
const hoardAgain = time.Minute

// killHoard kills what runs in the sandbox, as for want of memory: what it kept is
// free then, its commands were killed and may be scored as that, and the sandbox
// goes on. One that soon hoards again is ended, for the reason, which its Exit tells.
func (i *instance) killHoard(reason string) {
	i.mu.Lock()
	again := time.Since(i.hoarded) < hoardAgain
	i.hoarded = time.Now()
	if again {
		i.cause = reason
	}
	i.hoards = hoards{}
	group := i.sh.group
	i.mu.Unlock()
	i.b.log.Warn("sandbox takes the host's memory", "sandbox", i.id, "reason", reason, "sandbox_ends", again)
	kill := group.KillCommands
	if again {
		kill = group.Kill
	}
	if err := kill(); err != nil {
		i.b.log.Error("what hoards is not killed", "sandbox", i.id, "err", err)
	}
}

// killForNode is killHoard for what all sandboxes have together: how commands end
// is not theirs then, see KilledForNode.
func (i *instance) killForNode(reason string) {
	i.mu.Lock()
	i.forNode = append(i.forNode, time.Now())
	i.mu.Unlock()
	i.killHoard(reason)
}

// KilledForNode implements backend.NodeUser.
func (i *instance) KilledForNode(from, until time.Time) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.ContainsFunc(i.forNode, func(t time.Time) bool { return !t.Before(from) && !t.After(until) })
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

// hoard notes what the instance has, but for locks, and tells what of it is too
// much, or nothing.
func (i *instance) hoard() (what string) {
	sh := i.shell()
	if sh == nil {
		return ""
	}
	// The namespace is that of PID 1 even where the number is used again: then it
	// is another sandbox's, or the host's, which has no such queues.
	sockets, err := netlinkBytes(fmt.Sprintf("/proc/%d/net", sh.proc.pid), hoardLimit)
	if err != nil {
		i.b.log.Debug("netlink sockets are not known", "sandbox", i.id, "err", err)
	}
	tcp, err := sh.group.TCPExcess()
	if err != nil {
		i.b.log.Debug("buffers of TCP are not known", "sandbox", i.id, "err", err)
	}
	if !i.running() {
		sockets = 0 // whose they are is not known
	}
	i.note(func(h *hoards) { h.sockets, h.tcp = sockets, tcp })
	switch {
	case sockets >= hoardLimit:
		return "netlink sockets"
	case tcp >= hoardLimit:
		return "buffers of TCP"
	}
	return ""
}

// lockTurn counts the instance's locks and kills what runs there for too many.
func (i *instance) lockTurn() *lockTurn {
	const limit = hoardLimit / lockSize
	return &lockTurn{
		id: i.id,
		walk: lockWalk{limit: limit, list: func() ([]int, error) {
			sh := i.shell()
			if sh == nil || !i.running() {
				return nil, nil
			}
			return sh.group.CommandPIDs()
		}},
		counted: func(n int) {
			if n >= limit {
				i.killHoard(tooMuch("locks of files"))
				return
			}
			i.note(func(h *hoards) { h.locks = int64(n) * lockSize })
		},
	}
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

// netlinkBytes sums up what the netlink sockets of a namespace have, up to limit.
// The kernel walks those of all namespaces, each has some of its own, to list those
// of one: 2,000 sandboxes took 6 s of CPU so. Most have none that a process made, and how
// many those are is a number.
func netlinkBytes(netDir string, limit int64) (sum int64, err error) {
	if n, err := netlinkSockets(netDir); err == nil && n == 0 {
		return 0, nil
	}
	f, err := os.Open(netDir + "/netlink")
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

// netlinkSockets is how many netlink sockets the processes of a namespace have.
func netlinkSockets(netDir string) (int64, error) {
	text, err := os.ReadFile(netDir + "/protocols")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		// protocol size sockets memory ...
		if fields := strings.Fields(line); len(fields) > 2 && fields[0] == "NETLINK" {
			return strconv.ParseInt(fields[2], 10, 64)
		}
	}
	return 0, errors.New("no line of netlink in " + netDir + "/protocols")
}
