package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// readAll reads the largest programs of the image.
const readAll = `/bin/cat /usr/local/go/bin/* /usr/local/go/pkg/tool/*/* | /bin/busybox wc -c`

// pageCache: many sandboxes on one base read the same files; how much the page
// cache grows, for a byte of them.
func pageCache(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	defer measure.Raise("/proc/sys/kernel/pid_max", 1<<20)()
	n, err := b.newNode(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.stop()) }()
	if err := n.loadVariants(ctx, b.tree, 0, 1); err != nil {
		return nil, err
	}
	if err := forgetBelow(filepath.Join(n.Dir, "data")); err != nil {
		return nil, err
	}
	held := make([]*client.Sandbox, b.many)
	err = measure.EachOf(b.many, 8, func(i int) (err error) { held[i], err = n.create(ctx, small, variantName(0)); return })
	defer func() {
		err = errors.Join(err, measure.EachOf(b.many, 8, func(i int) error { return kill(held[i], nil) }))
	}()
	if err != nil {
		return nil, err
	}
	before := measure.Meminfo("Cached")
	size, err := readIn(ctx, held[0])
	if err != nil {
		return nil, err
	}
	one := measure.Meminfo("Cached") - before
	err = measure.EachOf(b.many, 8, func(i int) error { _, err := readIn(ctx, held[i]); return err })
	if err != nil {
		return nil, err
	}
	all := measure.Meminfo("Cached") - before
	if one < size/2 || all < one {
		return nil, fmt.Errorf("the page cache of the machine shrank meanwhile: %d bytes more after the first had read %d, %d after all; measure on one that does nothing else", one, size, all)
	}
	mb := float64(size) / 1e6
	return []measure.Row{measure.NewRow("L2_page_cache_x", fmt.Sprintf("page cache after %d sandboxes on one base have read the same %.0f MB, in copies of them", b.many, mb), "x", float64(all)/float64(size)).
		Target(measure.AtMost, 1.05, 1.05).
		Noted(fmt.Sprintf("%.0f MB after the first, %.0f MB after all: the others added %.2f copies", float64(one)/1e6, float64(all)/1e6, float64(all-one)/float64(size)))}, nil
}

func readIn(ctx context.Context, sb *client.Sandbox) (size int64, err error) {
	out, outcome, err := sb.Command("/bin/sh", "-c", readAll).Output(ctx)
	if err == nil && !outcome.OK() {
		err = fmt.Errorf("reading in a sandbox ended with %+v", outcome)
	}
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(bytes.TrimSpace(out)), 10, 64)
}
