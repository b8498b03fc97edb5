package container

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/opendsec/dsec/internal/units"
)

// A seccomp program is compiled, and what comes of that is charged to nobody but
// one account of the host, net.core.bpf_jit_limit, of which every command of every
// sandbox takes a little: where it is used up none starts any more. Each thread
// may have programs of its own with 32,768 instructions, for which the kernel
// keeps up to 13 bytes of code each. What it keeps otherwise, 8 bytes or more of
// each, is charged, and by that and the number of its programs the code of a
// sandbox can be told well enough to find whoever has most.

const (
	// codeShare is the part of the account at which somebody is looked for, and
	// twice what is left to those that stay.
	codeShare = 2
	// codeSize is the most that one program is compiled to.
	codeSize = 4096 * 13
	// ownPrograms are the platform's, which every command has.
	ownPrograms = 2
)

// mappedMemory is how many bytes the kernel has mapped for itself, of which code
// is a part.
func mappedMemory() (int64, error) {
	kib, err := fieldAfter("/proc/meminfo", "VmallocUsed:", "")
	return kib << 10, err
}

// machineCode is how many bytes the kernel has for compiled programs.
func machineCode() (sum int64, err error) {
	text, err := os.ReadFile("/proc/vmallocinfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, "bpf_prog_pack_alloc") && !strings.Contains(line, "bpf_jit_alloc_exec") {
			continue
		}
		if f := strings.Fields(line); len(f) > 1 {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			sum += n
		}
	}
	return sum, nil
}

// boundCode kills what runs in those sandboxes that have most code, where there
// is so much on the host that commands may soon not start.
func (b *Backend) boundCode() {
	bound := b.config.hoards.code
	used, err := machineCode()
	if err != nil {
		b.log.Debug("machine code of programs is not known", "err", err)
	}
	if bound == 0 || used < bound {
		return
	}
	var list []holding
	for _, i := range b.instances() {
		list = append(list, holding{i, i.code()})
	}
	for _, h := range excess(list, bound/2) {
		h.killForNode(fmt.Sprintf("seccomp programs took more than %s of the %s that the host's kernel has for the machine code of all, and of those that were left it had most: up to %s",
			units.Bytes(bound), units.Bytes(codeShare*bound), units.Bytes(h.bytes)))
	}
}

// code is about how many bytes of it the instance's own programs have, at most.
func (i *instance) code() int64 {
	sh := i.shell()
	if sh == nil || !i.running() {
		return 0
	}
	kernel, err := sh.group.KernelMemory()
	if err != nil || kernel < hoardLeast {
		return 0 // it cannot have much
	}
	pids, err := sh.group.CommandPIDs()
	if err != nil {
		return 0
	}
	var programs int64
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/task", pid)
		threads, err := os.ReadDir(dir)
		if err != nil {
			continue // it has ended
		}
		for _, thread := range threads {
			if n, err := fieldAfter(dir+"/"+thread.Name()+"/status", "Seccomp_filters:", ""); err == nil {
				programs += max(n-ownPrograms, 0)
			}
		}
	}
	return min(programs*codeSize, kernel)
}
