package confine

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Devices is a cgroup program that refuses every device but DevNodes and
// terminals, to whoever is in a cgroup that it is attached to. A sandbox has
// no other nodes and cannot make any; this holds where one comes in by a
// mistake of ours.
type Devices struct{ prog *ebpf.Program }

// terminals are /dev/ptmx and what devpts has.
var terminals = struct {
	ptmx             Device
	slaves, slavesTo uint32 // majors
}{Device{"ptmx", 5, 2}, 136, 143}

// NewDevices loads the program. Its error wraps errors.ErrUnsupported where
// the kernel or its lockdown has no such programs.
func NewDevices() (*Devices, error) {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "dsec_devices", Type: ebpf.CGroupDevice, AttachType: ebpf.AttachCGroupDevice,
		License: "Apache-2.0", Instructions: deviceProgram(),
	})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("device program: %w: %w", errors.ErrUnsupported, err)
	}
	if err != nil {
		return nil, fmt.Errorf("device program: %w", err)
	}
	return &Devices{prog}, nil
}

// Attach puts the program on a v2 cgroup, given by a descriptor of its
// directory, for as long as the cgroup exists.
func (d *Devices) Attach(cgroup int) error {
	err := link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: cgroup, Program: d.prog, Attach: ebpf.AttachCGroupDevice, Flags: unix.BPF_F_ALLOW_MULTI,
	})
	if err != nil {
		return fmt.Errorf("device program: attach: %w", err)
	}
	return nil
}

// Close lets go of the program; cgroups keep it.
func (d *Devices) Close() error { return d.prog.Close() }

// deviceProgram reads struct bpf_cgroup_dev_ctx: the type in the low half of
// the first word, major, minor.
func deviceProgram() asm.Instructions {
	const typeChar = 2 // BPF_DEVCG_DEV_CHAR
	prog := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word),
		asm.And.Imm(asm.R2, 0xffff),
		asm.JNE.Imm(asm.R2, typeChar, "refuse"),
		asm.LoadMem(asm.R3, asm.R1, 4, asm.Word),
		asm.LoadMem(asm.R4, asm.R1, 8, asm.Word),
		asm.JLT.Imm(asm.R3, int32(terminals.slaves), "nodes"),
		asm.JLE.Imm(asm.R3, int32(terminals.slavesTo), "allow"),
		asm.Ja.Label("refuse"),
	}
	for i, n := range append(DevNodes(), terminals.ptmx) {
		test := asm.Instructions{
			asm.JNE.Imm(asm.R3, int32(n.Major), fmt.Sprint("node", i)),
			asm.JEq.Imm(asm.R4, int32(n.Minor), "allow"),
			asm.Mov.Imm(asm.R0, 0).WithSymbol(fmt.Sprint("node", i)),
		}
		if i == 0 {
			test[0] = test[0].WithSymbol("nodes")
		}
		prog = append(prog, test...)
	}
	return append(prog,
		asm.Mov.Imm(asm.R0, 0).WithSymbol("refuse"),
		asm.Return(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("allow"),
		asm.Return(),
	)
}
