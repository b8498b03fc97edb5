package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/testutil"
)

const (
	holdMiB   = "CGROUP_TEST_MIB"
	holdForks = "CGROUP_TEST_FORKS"
)

func holdMemory() {
	mib, _ := strconv.Atoi(os.Getenv(holdMiB))
	forks, _ := strconv.Atoi(os.Getenv(holdForks))
	testutil.HoldMemory(mib, forks)
}

// holder is testutil.HoldMemory in a group.
type holder struct {
	*exec.Cmd
	g   *Group
	in  io.Writer
	out *bufio.Reader
}

func hold(t testing.TB, tree *Tree, mib, forks int) *holder {
	t.Helper()
	g := create(t, tree, dsec.NewSandboxID("aaaaa"), dsec.Limits{MilliCPU: 2000, MemoryBytes: int64(mib+64) << 20, Pids: 32})
	cmd := helper("hold")
	cmd.Env = append(cmd.Env, fmt.Sprint(holdMiB, "=", mib), fmt.Sprint(holdForks, "=", forks))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	check(t, err)
	stdout, err := cmd.StdoutPipe()
	check(t, err)
	h := &holder{Cmd: start(t, in(command(t, g), cmd)), g: g, in: stdin, out: bufio.NewReader(stdout)}
	h.holds(t)
	return h
}

// holds waits until the program has said that its memory is as it was.
func (h *holder) holds(t testing.TB) {
	t.Helper()
	if line, err := h.out.ReadString('\n'); err != nil || line != "true\n" {
		t.Fatalf("the memory is as before: %q, %v", line, err)
	}
}

func (h *holder) look(t testing.TB) {
	t.Helper()
	_, err := io.WriteString(h.in, "\n")
	check(t, err)
	h.holds(t)
}

func (h *holder) memory(t testing.TB) int64 {
	t.Helper()
	n, err := h.g.Memory()
	check(t, err)
	return n
}

// limits checks that the group has its own ones, whatever was done with them.
func (h *holder) limits(t testing.TB) {
	t.Helper()
	if h.g.tree.layout.Unified {
		if b, err := readAt(h.g.tree.v2, h.g.name+"/work/memory.swap.max"); err != nil || string(b) != "0\n" {
			t.Errorf("memory.swap.max is %q, %v", b, err)
		}
		return
	}
	n, err := readInt(h.g.tree.memory(), h.g.name+"/memory.limit_in_bytes")
	if err != nil || n != h.g.limits.MemoryBytes {
		t.Errorf("the limit is %d, %v; want %d", n, err, h.g.limits.MemoryBytes)
	}
}

// swapped is how many bytes of a process are in swap.
func swapped(t testing.TB, pid int) (sum int64) {
	t.Helper()
	list, err := readMappings(pid)
	check(t, err)
	for _, m := range list {
		sum += m.swapped
	}
	return sum
}

// What a frozen group has in memory goes into swap, whether one process has it or
// several, and comes back as it was. What is locked, and a process that is to be
// left alone, stay.
func TestPageOut(t *testing.T) {
	for name, forks := range map[string]int{"private": 0, "forked": 3} {
		t.Run(name, func(t *testing.T) {
			const mib = 48
			testutil.Require(t, testutil.Root)
			testutil.Swap(t, 512<<20)
			tree := openTree(t, 0)
			h := hold(t, tree, mib, forks)
			kept := chronus(t, h.g, "exec sleep 1000")
			testutil.WaitFor(t, 20*time.Second, "it sleeps", func() error {
				if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", kept.Process.Pid)); err != nil || !strings.Contains(string(state), "(sleep) S ") {
					return fmt.Errorf("%q, %v", state, err)
				}
				return nil
			})
			check(t, h.g.Freeze(t.Context()))
			before := h.memory(t)
			reason, err := h.g.PageOut(t.Context(), kept.Process.Pid)
			if err != nil || reason != "" {
				t.Fatalf("%q, %v", reason, err)
			}
			after := h.memory(t)
			if given := before - after; before < mib<<20 || given < (before-1<<20)*9/10 {
				t.Errorf("%d of %d bytes were given back", given, before)
			}
			h.limits(t)
			if n := swapped(t, kept.Process.Pid); n != 0 {
				t.Errorf("%d bytes of what was to be left alone are in swap", n)
			}
			if n := swapped(t, h.Process.Pid); n < (mib-1)<<20*9/10 {
				t.Errorf("%d bytes of the process are in swap", n)
			}
			check(t, h.g.Prefetch(t.Context(), kept.Process.Pid))
			if n := h.memory(t); n < before*9/10 {
				t.Errorf("%d of %d bytes are in memory again", n, before)
			}
			check(t, h.g.Thaw())
			h.look(t)
			if u, err := h.g.Usage(); err != nil || u.OOMKills != 0 {
				t.Errorf("%+v, %v", u, err)
			}
		})
	}
}

// A page-out that is given up at any moment leaves limits and memory as they are.
func TestPageOutGivenUp(t *testing.T) {
	testutil.Require(t, testutil.Root)
	testutil.Swap(t, 512<<20)
	tree := openTree(t, 0)
	h := hold(t, tree, 48, 1)
	for n := range 8 {
		check(t, h.g.Freeze(t.Context()))
		ctx, cancel := context.WithCancelCause(t.Context())
		given := errors.New("given up")
		timer := time.AfterFunc(time.Duration(n)*5*time.Millisecond, func() { cancel(given) })
		if n == 0 {
			timer.Stop()
			cancel(given)
		}
		_, err := h.g.PageOut(ctx, 0)
		if err != nil && !errors.Is(err, given) || n == 0 && err == nil {
			t.Errorf("given up after %d steps: %v", n, err)
		}
		timer.Stop()
		cancel(nil)
		h.limits(t)
		check(t, h.g.Thaw())
		h.look(t)
	}
	// What was killed in the middle left another limit.
	if !tree.layout.Unified {
		check(t, writeAt(tree.memory(), h.g.name+"/memory.limit_in_bytes", strconv.Itoa(56<<20)))
	} else {
		check(t, h.g.setSwapMax("max"))
	}
	check(t, h.g.RestoreMemory())
	h.limits(t)
}

func TestPageOutWithoutSwap(t *testing.T) {
	tree := openTree(t, 0)
	if free, err := freeSwap(); err != nil || free > 0 {
		t.Skipf("the host has swap of its own: %d bytes, %v", free, err)
	}
	h := hold(t, tree, 8, 0)
	check(t, h.g.Freeze(t.Context()))
	before := h.memory(t)
	reason, err := h.g.PageOut(t.Context(), 0)
	if err != nil || !strings.Contains(reason, "no swap") || h.memory(t) < before {
		t.Errorf("%q, %v, %d bytes of %d", reason, err, h.memory(t), before)
	}
	check(t, h.g.Thaw())
	h.look(t)
}

func TestRangesAfter(t *testing.T) {
	for _, c := range []struct {
		n    uint64
		want string
	}{
		{0, "[{30 20}]"}, // the first is refused
		{10, "[{30 20}]"},
		{5, "[{15 5} {30 20}]"},
		{17, "[{37 13}]"},
		{30, "[]"},
		{31, "[]"},
	} {
		if got := fmt.Sprint(after([]memoryRange{{10, 10}, {30, 20}}, c.n)); got != c.want {
			t.Errorf("after %d bytes: %s, want %s", c.n, got, c.want)
		}
	}
}

func TestMappings(t *testing.T) {
	for line, want := range map[string]mapping{
		"7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ":                        {memoryRange: memoryRange{0x7f0000000000, 4096}, private: true},
		"00400000-00402000 r-xp 00001000 fe:00 12345 /bin/a b\\012c (deleted)":    {memoryRange: memoryRange{0x400000, 8192}, private: true, file: true},
		"7f0000000000-7f0000001000 rw-s 00000000 00:01 1029 /dev/zero (deleted)":  {memoryRange: memoryRange{0x7f0000000000, 4096}, file: true},
		"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0      [vsyscall]": {memoryRange: memoryRange{0xffffffffff600000, 4096}, private: true},
		"Rss 4 kB": {}, "": {}, "1-0 rw-p 0 0 0": {}, "1-2 rw 0 0 0": {}, "1-2 rw-p": {},
	} {
		at, rest, _ := strings.Cut(line, " ")
		if m, ok := parseMapping(at, rest); m != want || ok != (want.size > 0) {
			t.Errorf("%q: %+v, %v", line, m, ok)
		}
	}
	own, err := readMappings(os.Getpid())
	var resident int64
	for _, m := range own {
		resident += m.resident
	}
	if err != nil || len(own) < 10 || resident < 1<<20 {
		t.Errorf("of this process: %d mappings, %d bytes, %v", len(own), resident, err)
	}
}

func BenchmarkPageOut(b *testing.B) {
	for name, forks := range map[string]int{"private": 0, "forked": 3} {
		b.Run(name, func(b *testing.B) {
			testutil.Require(b, testutil.Root)
			testutil.Swap(b, 1<<30)
			tree := openTree(b, 0)
			h := hold(b, tree, 256, forks)
			var froze, paged, fetched time.Duration
			var before, after int64
			for b.Loop() {
				begun := time.Now()
				check(b, h.g.Freeze(b.Context()))
				froze += time.Since(begun)
				before += h.memory(b)
				begun = time.Now()
				_, err := h.g.PageOut(b.Context(), 0)
				check(b, err)
				paged += time.Since(begun)
				after += h.memory(b)
				begun = time.Now()
				check(b, h.g.Prefetch(b.Context(), 0))
				fetched += time.Since(begun)
				check(b, h.g.Thaw())
				h.look(b)
			}
			b.ReportMetric(froze.Seconds()*1e3/float64(b.N), "freeze-ms")
			b.ReportMetric(float64(before-after)/(1<<30)/paged.Seconds(), "pageout-GiB/s")
			b.ReportMetric(100*float64(before-after)/float64(before), "%given-back")
			b.ReportMetric(float64(before-after)/(1<<30)/fetched.Seconds(), "prefetch-GiB/s")
		})
	}
}
