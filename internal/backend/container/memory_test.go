package container

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
)

// BenchmarkIdle holds sandboxes that have served one command, and reports what
// each takes: the memory of its processes and what the kernel counts for them
// and for the launcher. What this process takes for it is not in it, nor is
// what the kernel does not count; bench/ measures the whole host.
func BenchmarkIdle(b *testing.B) {
	const count = 100
	h := newHost(b, nil)
	h.create().sh("true") // what all share
	b.ResetTimer()
	for b.Loop() {
		before := h.used()
		for range count {
			h.create().sh("true")
		}
		b.ReportMetric(float64(h.used()-before)/count/(1<<20), "MiB/sandbox")
	}
}

// used is what the tree of cgroups has in memory, in bytes.
func (h *host) used() int64 {
	h.Helper()
	v, err := os.ReadFile("/sys/fs/cgroup/" + h.config.Cgroup + "/memory.current")
	if errors.Is(err, os.ErrNotExist) {
		v, err = os.ReadFile("/sys/fs/cgroup/memory/" + h.config.Cgroup + "/memory.usage_in_bytes")
	}
	check(h, err)
	n, err := strconv.ParseInt(strings.TrimSpace(string(v)), 10, 64)
	check(h, err)
	return n
}
