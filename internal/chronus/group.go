package chronus

import (
	"bytes"
	"io"
	"os"
	"strconv"
	"syscall"

	"github.com/opendsec/dsec/internal/chronusapi"
)

// group is a control group that one command at a time runs in. Its fields
// after the descriptors are guarded by Chronus.mu.
type group struct {
	chronusapi.Group
	owner *process // the last command in it; nil if none was yet
	oom   int64    // oom kills seen when the last command ended
	bad   bool     // its descriptors do not work: never used again
}

func newGroup(g chronusapi.Group) *group {
	gr := &group{Group: g}
	gr.oom, _ = gr.oomKills()
	return gr
}

// takeGroup finds a free group for p. The caller holds c.mu.
func (c *Chronus) takeGroup(p *process) (*group, error) {
	for _, g := range c.groups {
		if g.bad || g.owner != nil && !g.owner.ended.Load() {
			continue
		}
		if g.populated() {
			continue // descendants of an ended command
		}
		g.owner = p
		return g, nil
	}
	return nil, chronusapi.ErrNeedGroup
}

// populated reports whether a process is in the group.
func (g *group) populated() bool {
	if g.Events < 0 {
		return g.owner != nil && len(family(g.owner.getPID())) > 0
	}
	n, ok := field(g.Events, "populated ")
	return !ok || n != 0
}

// oomKills is how many processes of the group were killed for memory so far.
func (g *group) oomKills() (int64, bool) {
	if g.OOM < 0 {
		return 0, false
	}
	return field(g.OOM, "oom_kill ")
}

// ownsGroup reports whether p's group was not given to another command since.
func (p *process) ownsGroup() bool {
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	return p.group.owner == p
}

// killRounds bounds how often a group is looked over for processes that were
// forked meanwhile.
const killRounds = 32

// killGroup ends every process of p's group, at once. A group that p has given
// back is empty of p's processes, and may hold another command's: it is left
// alone, for which the lock is held over the kill. False: not killed.
//
// cgroup.kill is the last resort: on Linux 6.18 a process that is cloned into
// a cgroup which was ever killed that way is killed at once (clone3 compares
// the cgroup's kill counter with that of its parent's cgroup), so that the
// group can never be used again. One process after the other is as sure: what
// has SIGKILL pending cannot fork.
func (p *process) killGroup() bool {
	g := p.group
	if g.Kill < 0 {
		return false
	}
	p.c.mu.Lock()
	defer p.c.mu.Unlock()
	if g.owner != p || g.killAll() {
		return true
	}
	g.bad = g.Dir >= 0 // a process that is moved in is not killed
	_, err := syscall.Write(g.Kill, []byte("1"))
	return err == nil
}

// killAll kills the processes of the group until there are none but killed
// ones. False: they cannot be listed, or fork faster than that.
func (g *group) killAll() bool {
	killed := make(map[int]bool)
	for range killRounds {
		pids := g.pids()
		if len(pids) == 0 {
			return !g.populated() || len(killed) > 0
		}
		found := false
		for _, pid := range pids {
			if !killed[pid] {
				killed[pid], found = true, true
				killPID(pid)
			}
		}
		if !found {
			return true
		}
	}
	return false
}

// pids lists the processes of the group, where chronus may read that.
func (g *group) pids() []int {
	if g.Dir < 0 {
		return nil
	}
	fd, err := syscall.Openat(g.Dir, "cgroup.procs", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "cgroup.procs")
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		return nil
	}
	var list []int
	for line := range bytes.Lines(text) {
		if pid, err := strconv.Atoi(string(bytes.TrimSpace(line))); err == nil && pid > 1 {
			list = append(list, pid)
		}
	}
	return list
}

// field reads the number after key at the start of a line of a small file.
func field(fd int, key string) (int64, bool) {
	var buf [1024]byte
	n, err := syscall.Pread(fd, buf[:], 0)
	if err != nil || n <= 0 {
		return 0, false
	}
	for line := range bytes.Lines(buf[:n]) {
		if rest, ok := bytes.CutPrefix(line, []byte(key)); ok {
			v, err := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64)
			return v, err == nil
		}
	}
	return 0, false
}
