package chronus

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
)

// killTree ends the command with all its descendants.
func (p *process) killTree() {
	if p.group != nil && p.killGroup() {
		p.killStarted()
		return
	}
	// Without cgroup.kill, processes that fork meanwhile are found by going
	// over them again; a bound keeps a fork bomb from holding us for ever.
	for range 20 {
		pids := p.descendants()
		p.killStarted()
		for _, pid := range pids {
			killPID(pid)
		}
		if len(pids) == 0 {
			return
		}
	}
}

// killStarted kills the started process alone. A child that has not joined
// its group yet, or has not even exec'd, is known by its pid.
func (p *process) killStarted() {
	if p.ended.Load() {
		return
	}
	if pid := p.getPID(); pid > 0 && p.c.reaper.signal(pid, syscall.SIGKILL) != nil && !p.ended.Load() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func killPID(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) }

// signalTree sends a signal to the command and its descendants.
func (p *process) signalTree(sig syscall.Signal) {
	for _, pid := range p.descendants() {
		_ = syscall.Kill(pid, sig)
	}
}

// descendants lists the processes of the command that run: those of its
// group; without one those of its session, and what descends from it.
func (p *process) descendants() []int {
	if p.group == nil {
		return family(p.getPID())
	}
	if !p.ownsGroup() {
		return nil // it was empty when it was given to another command
	}
	if pids := p.group.pids(); len(pids) > 0 {
		return pids
	}
	if !p.group.populated() {
		return nil
	}
	return family(p.getPID())
}

// family scans /proc for the session of leader and its descendants.
func family(leader int) []int {
	if leader <= 1 {
		return nil // not started yet; session 0 is everything that has none
	}
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	children := make(map[int][]int)
	in := make(map[int]bool)
	var list []int
	add := func(pid int) {
		if !in[pid] {
			in[pid] = true
			list = append(list, pid)
		}
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		state, ppid, session, ok := statOf(pid)
		if !ok || state == 'Z' || state == 'X' {
			continue
		}
		children[ppid] = append(children[ppid], pid)
		if session == leader || pid == leader {
			add(pid)
		}
	}
	for i := 0; i < len(list); i++ {
		for _, pid := range children[list[i]] {
			add(pid)
		}
	}
	return list
}

// statOf reads state, parent and session of a process.
func statOf(pid int) (state byte, ppid, session int, ok bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, 0, false
	}
	// The name, in parentheses, may have any bytes.
	i := bytes.LastIndexByte(text, ')')
	if i < 0 {
		return 0, 0, 0, false
	}
	f := bytes.Fields(text[i+1:])
	if len(f) < 4 || len(f[0]) != 1 {
		return 0, 0, 0, false
	}
	ppid, err1 := strconv.Atoi(string(f[1]))
	session, err2 := strconv.Atoi(string(f[3]))
	return f[0][0], ppid, session, err1 == nil && err2 == nil
}
