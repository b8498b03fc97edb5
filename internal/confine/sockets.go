package confine

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// SocketWatch is a cgroup program that notes in which network namespaces an
// IPv4 or IPv6 socket was made, of whatever kind and by whatever call. A
// namespace goes by its cookie, which no other one ever has. The kernel runs
// the program for every such socket of a process in the cgroup or below it, and
// for none that the kernel itself makes.
type SocketWatch struct {
	prog  *ebpf.Program
	link  *link.RawLink
	marks *ebpf.Map // cookie of each watched namespace: 0, or 1 once a socket was made there
}

// NewSocketWatch watches a v2 cgroup, given by a descriptor of its directory,
// and all below it, until it is closed or this process ends. It has room for
// so many namespaces at a time. Its error wraps errors.ErrUnsupported where the
// kernel, its lockdown or a program of others further up does not allow it.
func NewSocketWatch(cgroup, room int) (_ *SocketWatch, err error) {
	defer func() {
		switch {
		case err == nil:
		case errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EPERM):
			err = fmt.Errorf("socket watch: %w: %w", errors.ErrUnsupported, err)
		default:
			err = fmt.Errorf("socket watch: %w", err)
		}
	}()
	w := &SocketWatch{}
	w.marks, err = ebpf.NewMap(&ebpf.MapSpec{
		Name: "dsec_sockets", Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: uint32(room),
	})
	if err != nil {
		return nil, err
	}
	w.prog, err = ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "dsec_sockets", Type: ebpf.CGroupSock, AttachType: ebpf.AttachCGroupInetSockCreate,
		License: "Apache-2.0", Instructions: socketProgram(w.marks.FD()),
	})
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	// A link and no plain attachment: it ends with its descriptor.
	w.link, err = link.AttachRawLink(link.RawLinkOptions{Target: cgroup, Program: w.prog, Attach: ebpf.AttachCGroupInetSockCreate})
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// Add begins to watch a namespace, or begins again.
func (w *SocketWatch) Add(cookie uint64) error { return w.marks.Put(cookie, uint32(0)) }

// Quiet reports whether the namespace is watched and no socket was made in it
// since Add.
func (w *SocketWatch) Quiet(cookie uint64) bool {
	var mark uint32
	return w.marks.Lookup(cookie, &mark) == nil && mark == 0
}

// Remove ends the watch of a namespace, if there is one.
func (w *SocketWatch) Remove(cookie uint64) { _ = w.marks.Delete(cookie) }

// Close ends all watches.
func (w *SocketWatch) Close() error {
	var errs []error
	if w.link != nil {
		errs = append(errs, w.link.Close())
	}
	if w.prog != nil {
		errs = append(errs, w.prog.Close())
	}
	return errors.Join(append(errs, w.marks.Close())...)
}

// socketProgram marks the socket's namespace if it is in the map, and allows
// the socket.
func socketProgram(marks int) asm.Instructions {
	return asm.Instructions{
		asm.FnGetNetnsCookie.Call(), // of the context
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		asm.LoadMapPtr(asm.R1, marks),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -8),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "allow"),
		asm.StoreImm(asm.R0, 0, 1, asm.Word),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("allow"),
		asm.Return(),
	}
}
