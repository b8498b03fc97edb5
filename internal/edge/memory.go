package edge

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/units"
)

// memoryLeft is what a node keeps free when sandboxes come back from its swap.
const memoryLeft = 128 << 20

// resuming is memory that sandboxes being resumed are about to take.
type resuming struct{ bytes atomic.Int64 }

// makeRoom sets apart memory of the node for a sandbox that comes back from swap,
// until free is called. Without room it is exhausted, and the sandbox stays where it is.
func (e *Edge) makeRoom(need int64) (free func(), err error) {
	if need <= 0 {
		return func() {}, nil
	}
	free = func() { e.resuming.bytes.Add(-need) }
	all := e.resuming.bytes.Add(need)
	available, err := e.cfg.availableMemory()
	if err == nil && available-memoryLeft < all {
		err = dsec.Errorf(dsec.CodeExhausted, "the node has %s of memory to give, and what is being resumed needs %s: the sandbox stays paused", units.Bytes(max(0, available-memoryLeft)), units.Bytes(all))
	}
	if err != nil {
		free()
		return nil, err
	}
	return free, nil
}

// availableMemory is what the kernel says it can give without swapping.
func availableMemory() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/meminfo tells no MemAvailable")
}
