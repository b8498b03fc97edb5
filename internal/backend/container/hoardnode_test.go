package container

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/testutil"
)

func init() { tries["seccomps"] = seccomps }

// Those that hold most are ended, no more than must be, and none that has little.
func TestExcessIsOfTheLargest(t *testing.T) {
	const m = 1 << 20
	for _, tt := range []struct {
		held  []int64
		limit int64
		want  []int64
	}{
		{nil, 0, nil},
		{[]int64{60 * m, 10 * m, 60 * m}, 130 * m, nil},
		{[]int64{10 * m, 60 * m, 50 * m}, 119 * m, []int64{60 * m}},
		{[]int64{10 * m, 60 * m, 50 * m}, 60 * m, []int64{60 * m}},
		{[]int64{10 * m, 60 * m, 50 * m}, 59 * m, []int64{60 * m, 50 * m}},
		{[]int64{10 * m, 60 * m, 50 * m}, 0, []int64{60 * m, 50 * m, 10 * m}},
		{slices.Repeat([]int64{hoardLeast - 1}, 100), 64 * m, nil},
		{append(slices.Repeat([]int64{hoardLeast - 1}, 100), hoardLeast), 64 * m, []int64{hoardLeast}},
	} {
		var list []holding
		for _, n := range tt.held {
			list = append(list, holding{bytes: n})
		}
		var got []int64
		for _, h := range excess(list, tt.limit) {
			got = append(got, h.bytes)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("of %v at most %d: ended are %v, want %v", tt.held, tt.limit, got, tt.want)
		}
	}
}

// Growth is told once for each so much, and from where the figure last was low.
func TestGrowthIsFromTheLastLow(t *testing.T) {
	log := testutil.Logger(t)
	var g growth
	failed := func() (int64, error) { return 0, os.ErrNotExist }
	at := func(n int64) func() (int64, error) { return func() (int64, error) { return n, nil } }
	for n, tt := range []struct {
		read func() (int64, error)
		want bool
	}{
		{failed, false}, {at(500), true}, {at(550), false}, {at(599), false}, {at(600), true}, {at(650), false},
		{at(100), false}, {at(199), false}, {at(200), true}, {at(299), false}, {failed, false}, {at(210), true},
	} {
		if got := g.exceeds(100, tt.read, log); got != tt.want {
			t.Errorf("figure %d: %v, want %v", n, got, tt.want)
		}
	}
}

// endOf waits for the end of a command.
func (s *sandbox) endOf(stream *chronusapi.Events) dsec.Outcome {
	s.Helper()
	for {
		ev, err := stream.Next()
		check(s, err)
		if ev.Kind == chronusapi.EventExited {
			return ev.Outcome
		}
	}
}

// stillRuns fails the test where a sandbox's first command has ended.
func (s *sandbox) stillRuns() {
	s.Helper()
	list, err := s.client.Processes(s.Context())
	check(s, err)
	if len(list) == 0 || list[0].Outcome != nil {
		s.Errorf("what held little: %+v", list)
	}
}

// Sandboxes that each hold less than one may are ended where together they hold
// more than the node can spare, and first the one that holds most.
func TestHoardersTogetherAreEnded(t *testing.T) {
	h := newHost(t, func(c *Config) { c.hoards = hoardBounds{growth: 1 << 20, node: 80 << 20} })
	most, some, few := h.create(), h.create(), h.create()
	few.hold(nil, "/bin/inside", "netlinks", "5")
	kept := some.hold(nil, "/bin/inside", "netlinks", "25")
	// It may be ended before it holds all that.
	killed := most.start(chronusapi.StartRequest{Command: chronusapi.Command{Argv: []string{"/bin/inside", "netlinks", "55"}}, OpenStdin: true})
	defer func() { _ = killed.Close() }()
	o := most.endOf(killed)
	if o.Signal != int(unix.SIGKILL) {
		t.Errorf("what held most ended with %+v", o)
	}
	// It was within its own bound: that end is the node's and not its own.
	forNode := func(s *sandbox) bool {
		return s.i.(backend.NodeUser).KilledForNode(o.Started, o.Started.Add(o.Duration))
	}
	if !forNode(most) || forNode(some) {
		t.Errorf("killed for the node: %v and %v, want that one and not the other", forNode(most), forNode(some))
	}
	for _, s := range []*sandbox{most, some, few} {
		if o := s.sh("echo here"); o.out != "here\n" {
			t.Errorf("%s: %+v", s.id, o)
		}
	}
	some.stillRuns()
	few.stillRuns()
	_ = kept.Close()
}

// farJumps is a program of as much machine code as can be.
func farJumps() []unix.SockFilter {
	list := make([]unix.SockFilter, 4096)
	for n := range list {
		list[n] = unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0x12345678, Jt: uint8(min(250, max(0, len(list)-n-2)))}
	}
	list[len(list)-1] = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}
	return list
}

// seccomps starts so many threads that each take all programs that they can.
func seccomps(args []string) {
	threads, _ := strconv.Atoi(args[0])
	list := farJumps()
	prog := unix.SockFprog{Len: uint16(len(list)), Filter: &list[0]}
	taken := make(chan int)
	for range threads {
		go func() {
			runtime.LockOSThread()
			n := 0
			for {
				_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
				if errno != 0 {
					break
				}
				n++
			}
			taken <- n
			select {}
		}()
		fmt.Println("took", <-taken)
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// A sandbox that takes what the host's kernel has for the machine code of all is
// ended before others can start no command any more.
func TestHoardedMachineCodeIsBounded(t *testing.T) {
	testutil.Require(t, testutil.Root)
	before, err := machineCode()
	check(t, err)
	if before == 0 {
		t.Skip("the kernel compiles no programs, or does not tell of it")
	}
	h := newHost(t, func(c *Config) { c.hoards = hoardBounds{growth: 1 << 20, code: before + 8<<20} })
	greedy, modest := h.create(), h.create()
	modest.hold(nil, "/bin/inside", "seccomps", "4")
	o := greedy.endOf(greedy.start(chronusapi.StartRequest{OpenStdin: true, Command: chronusapi.Command{Argv: []string{"/bin/inside", "seccomps", "50"}}}))
	if o.Signal != int(unix.SIGKILL) {
		t.Errorf("it ended with %+v", o)
	}
	for _, s := range []*sandbox{greedy, modest} {
		if o := s.sh("echo here"); o.out != "here\n" {
			t.Errorf("%s: %+v", s.id, o)
		}
	}
	modest.stillRuns()
}
