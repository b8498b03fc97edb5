package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/cgroup"
)

const (
	// readAll reads the largest programs of the image.
	readAll = `/bin/cat /usr/local/go/bin/* /usr/local/go/pkg/tool/*/* | /bin/busybox wc -c`
	// readCopy does so with a copy that is the sandbox's own.
	readCopy = `/bin/cat /usr/local/go/bin/* > /copy && /bin/cat /copy | /bin/busybox wc -c`

	copies = 20 // sandboxes of the control
)

// pageCache: many sandboxes on one base read the same files; how much page cache
// they are charged with together, for a byte of them. What else the machine caches
// or drops meanwhile is not in that figure. The control shows that it counts what
// is not shared.
func pageCache(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	defer measure.Raise("/proc/sys/kernel/pid_max", 1<<20)()
	name := fmt.Sprintf("dsec-bench-%d", os.Getpid())
	charged, err := chargedTo(name)
	if err != nil {
		return nil, err
	}
	n, err := b.newNode(ctx, "DSEC_CONTAINER_CGROUP="+name)
	if err != nil {
		return nil, err
	}
	defer func() { err = n.stop(err) }()
	if err := n.loadVariants(ctx, b.tree, 0, 1); err != nil {
		return nil, err
	}
	if err := forgetBelow(filepath.Join(n.Dir, "data")); err != nil {
		return nil, err
	}
	held := make([]*client.Sandbox, b.many)
	limits := dsec.Limits{MemoryBytes: 512 << 20, DiskBytes: 64 << 20, Pids: 64, MilliCPU: 1000}
	err = measure.EachOf(b.many, 8, func(i int) (err error) { held[i], err = n.create(ctx, limits, variantName(0)); return })
	defer func() {
		err = errors.Join(err, measure.EachOf(b.many, 8, func(i int) error { return kill(held[i], nil) }))
	}()
	if err != nil {
		return nil, err
	}
	one, size, err := grown(ctx, charged, held[:1], readAll)
	if err != nil {
		return nil, err
	}
	others, _, err := grown(ctx, charged, held[1:], readAll)
	if err != nil {
		return nil, err
	}
	own := held[:min(copies, len(held))]
	control, copied, err := grown(ctx, charged, own, readCopy)
	if err != nil {
		return nil, err
	}
	if want := copied * int64(len(own)); one < size/2 || control < want*9/10 {
		return nil, fmt.Errorf("page cache was dropped meanwhile: of %d bytes read %d are charged, of %d in copies %d; measure on a machine with more memory", size, one, want, control)
	}
	mb := func(v int64) float64 { return float64(v) / 1e6 }
	return []measure.Row{measure.NewRow("L2_page_cache_x", fmt.Sprintf("page cache charged to %d sandboxes on one base that have read the same %.0f MB, in copies of them", b.many, mb(size)), "x", float64(one+others)/float64(size)).
		Target(measure.AtMost, 1.05, 1.05).
		Noted(fmt.Sprintf("%.1f MB after the first, %.1f MB more after all; control: %d sandboxes that read copies of their own of %.1f MB are charged with %.1f MB, %.2f copies",
			mb(one), mb(others), len(own), mb(copied), mb(control), float64(control)/float64(copied)))}, nil
}

// grown runs a script that reads in sandboxes and returns how much more page cache
// they have then, and what each read.
func grown(ctx context.Context, charged func() (int64, error), in []*client.Sandbox, script string) (more, size int64, err error) {
	before, err := charged()
	if err != nil {
		return 0, 0, err
	}
	sizes := make([]int64, len(in))
	err = measure.EachOf(len(in), 8, func(i int) (err error) { sizes[i], err = readIn(ctx, in[i], script); return })
	if err != nil {
		return 0, 0, err
	}
	after, err := charged()
	return after - before, sizes[0], err
}

// chargedTo returns what tells the page cache of files that a server's sandboxes
// are charged with.
func chargedTo(name string) (func() (int64, error), error) {
	layout, err := cgroup.Detect()
	if err != nil {
		return nil, err
	}
	dir, cache, shmem := layout.V2, "file", "shmem"
	if v1, ok := layout.V1["memory"]; ok {
		dir, cache, shmem = v1, "total_cache", "total_shmem"
	}
	return func() (int64, error) {
		text, err := os.ReadFile(filepath.Join(dir, name, "memory.stat"))
		if err != nil {
			return 0, err
		}
		stat := map[string]int64{}
		for line := range strings.Lines(string(text)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			stat[key], _ = strconv.ParseInt(value, 10, 64)
		}
		return stat[cache] - stat[shmem], nil
	}, nil
}

func readIn(ctx context.Context, sb *client.Sandbox, script string) (size int64, err error) {
	out, outcome, err := sb.Command("/bin/sh", "-c", script).Output(ctx)
	if err == nil && !outcome.OK() {
		err = fmt.Errorf("reading in a sandbox ended with %+v", outcome)
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(bytes.TrimSpace(out)), 10, 64)
}
