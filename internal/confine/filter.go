package confine

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// Filter is the seccomp program of chronus and everything below it: the
// policy of this package for x86-64, and the end of any process that makes a
// call of another architecture or of the x32 ABI. It is compiled once.
func Filter() []unix.SockFilter { return slices.Clone(filter()) }

var filter = sync.OnceValue(func() []unix.SockFilter {
	p, err := newPolicy()
	if err != nil {
		panic(err) // the input is fixed at build time and tested
	}
	return p.compile()
})

// ChildFilter is a second program, for commands and not for chronus: clone3
// fails with ENOSYS, so that C libraries use clone, whose flags Filter sees.
func ChildFilter() []unix.SockFilter {
	return []unix.SockFilter{
		load(offNr),
		jump(unix.BPF_JEQ, unix.SYS_CLONE3, 0, 1),
		ret(errno(unix.ENOSYS)),
		ret(allow),
	}
}

// Bytes is a program as the kernel reads it: an array of struct sock_filter.
func Bytes(prog []unix.SockFilter) []byte {
	b := make([]byte, 0, 8*len(prog))
	for _, i := range prog {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b
}

// Offsets in struct seccomp_data.
const (
	offNr   = 0
	offArch = 4
	offArgs = 16 // 8 bytes each, low half first
)

const (
	// x32 is set in the numbers of x32's calls.
	x32 = 0x40000000
	// skipped is the number that a tracer gives a call to have it not run.
	skipped = 1<<32 - 1
)

func load(off uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
}

func ret(a action) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: uint32(a)}
}

func jump(op uint16, k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jt: yes, Jf: no}
}

// compile writes the policy as a binary search over ranges of call numbers
// that are treated alike. Attaching a program costs time for each instruction
// on the way to each call's answer, because the kernel works out ahead which
// calls are always allowed (and then does not run the program for them).
func (p *policy) compile() []unix.SockFilter {
	prog := []unix.SockFilter{
		load(offArch),
		jump(unix.BPF_JEQ, unix.AUDIT_ARCH_X86_64, 1, 0),
		ret(killProcess),
		load(offNr),
	}
	prog = append(prog, search(p.ranges())...)
	if len(prog) > unix.BPF_MAXINSNS {
		panic(fmt.Sprintf("confine: a program of %d instructions", len(prog)))
	}
	return prog
}

// span is the calls from first up to the next span's first.
type span struct {
	first uint32
	rules []rule // the last one has no conditions
}

// ranges lists all spans, in order, from 0 to 2^32-1.
func (p *policy) ranges() []span {
	spans := []span{{0, p.of(0)}}
	add := func(first uint32, rules []rule) {
		last := spans[len(spans)-1].rules
		if len(rules) == 1 && len(last) == 1 && rules[0].do == last[0].do {
			return
		}
		spans = append(spans, span{first, rules})
	}
	for nr := uint32(1); nr <= p.newest; nr++ {
		add(nr, p.of(nr))
	}
	add(p.newest+1, p.of(p.newest+1))
	add(x32, p.of(x32))
	add(skipped, p.of(skipped))
	return spans
}

// of returns the rules of one call, ended by one that always applies.
func (p *policy) of(nr uint32) []rule {
	switch {
	case nr == skipped:
		return []rule{{do: errno(unix.ENOSYS)}}
	case nr >= x32:
		return []rule{{do: killProcess}}
	case nr > p.newest:
		return []rule{{do: errno(unix.ENOSYS)}}
	}
	rules := p.rules[nr]
	if len(rules) == 0 || rules[len(rules)-1].conds != nil {
		rules = append(slices.Clip(rules), rule{do: p.other})
	}
	return rules
}

// search finds the span of the call number in the accumulator. It halves the
// calls and not the spans: the kernel asks for each call once.
func search(spans []span) []unix.SockFilter {
	if len(spans) == 1 {
		return decide(spans[0].rules)
	}
	half := 1
	middle := spans[0].first/2 + min(spans[len(spans)-1].first, maxCalls)/2
	for half < len(spans)-1 && spans[half].first < middle {
		half++
	}
	low, high := search(spans[:half]), search(spans[half:])
	return append(append(branch(spans[half].first, len(low)), low...), high...)
}

// maxCalls is about how many calls x86-64 has: no more are asked for.
const maxCalls = 500

// branch goes on where the number is below first, and skips n instructions
// where it is not. A conditional jump reaches 255 instructions.
func branch(first uint32, n int) []unix.SockFilter {
	if n <= 255 {
		return []unix.SockFilter{jump(unix.BPF_JGE, first, uint8(n), 0)}
	}
	return []unix.SockFilter{
		jump(unix.BPF_JGE, first, 0, 1),
		{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(n)},
	}
}

// decide applies rules in their order.
func decide(rules []rule) (prog []unix.SockFilter) {
	loaded := -1 // the argument that the accumulator holds
	for _, r := range rules {
		if len(r.conds) == 1 && r.conds[0].mask == allBits {
			c := r.conds[0]
			if loaded != c.arg {
				prog = append(prog, load(offArgs+8*uint32(c.arg)))
			}
			prog = append(prog, jump(unix.BPF_JEQ, c.value, 0, 1), ret(r.do))
			loaded = c.arg
			continue
		}
		loaded = -1
		var body []unix.SockFilter
		// From the last condition to the first, so that the distance to the
		// next rule is known.
		body = append(body, ret(r.do))
		for _, c := range slices.Backward(r.conds) {
			test := []unix.SockFilter{load(offArgs + 8*uint32(c.arg))}
			if c.mask != allBits {
				test = append(test, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: c.mask})
			}
			test = append(test, jump(unix.BPF_JEQ, c.value, 0, uint8(len(body)))) // a rule is short
			body = append(test, body...)
		}
		prog = append(prog, body...)
	}
	return prog
}
