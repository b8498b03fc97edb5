package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// podmanRuns are containers that podman starts at once: more are no faster.
const podmanRuns = 4

// burst: many sandboxes at once over several images that no node has seen, from a
// store of little bandwidth, until each has given its first output.
func burst(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	t := b.tree
	if !b.quick { // without sources: all images are stored three times over
		if t, err = goTree(ctx, filepath.Join(b.work, "small.tar"), true); err != nil {
			return nil, err
		}
	}
	st, err := b.newStore(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.close()) }()
	n, err := b.newNode(ctx, st.env...)
	if err != nil {
		return nil, err
	}
	defer func() { err = n.stop(err) }()
	if err := n.loadVariants(ctx, t, 0, b.images+1); err != nil {
		return nil, err
	}
	if err := errors.Join(n.forget(ctx), st.forget()); err != nil {
		return nil, err
	}
	st.pace(b.bandwidth)
	one, _, err := b.burstOf(ctx, st, n, 1, b.images, 1) // what one sandbox of one image needs
	if err != nil {
		return nil, err
	}
	all, took, err := b.burstOf(ctx, st, n, b.burst, 0, b.images)
	if err != nil {
		return nil, err
	}
	what := fmt.Sprintf("%d sandboxes at once over %d never-seen images of %.0f MB, store of %.0f MB/s, until each answered; all held, each answers again",
		b.burst, b.images, float64(t.size)/1e6, float64(b.bandwidth)/1e6)
	r := measure.NewRow("I4_s", what, "s", took.Seconds()).Noted(fmt.Sprintf("%.0f MB fetched", float64(all)/1e6))
	if _, known := st.read(); known {
		rows = append(rows, measure.NewRow("I4_fetched_x", "bytes fetched in the burst, of those that one sandbox of each image alone needs", "x", float64(all)/float64(one)/float64(b.images)).
			Target(measure.AtMost, 1.05, 1.05))
	}
	theirs, fetched, err := b.podmanBurst(ctx, st, t)
	if theirs > 0 {
		r = r.Against("podman import, podman run", theirs.Seconds())
		rows = append(rows, measure.NewRow("I4_vs_podman", "how many times faster", "x", theirs.Seconds()/took.Seconds()).Target(measure.AtLeast, 5, 20).
			Against("podman import each, podman run (s)", theirs.Seconds()).Noted(fmt.Sprintf("%.0f MB fetched; %d at once, none held", float64(fetched)/1e6, podmanRuns)))
	}
	return append([]measure.Row{r}, rows...), err
}

// burstOf creates count sandboxes of images from the first on, and returns how many
// bytes came from the store, and how long it took until the last one answered.
func (b *bench) burstOf(ctx context.Context, st *layerStore, n *node, count, first, images int) (fetched int64, took time.Duration, err error) {
	held := make([]*client.Sandbox, count)
	before, _ := st.read()
	took, err = measure.Timed(func() error {
		return measure.EachOf(count, count, func(i int) (err error) {
			held[i], err = n.first(ctx, variantName(first+i%images))
			return err
		})
	})
	after, _ := st.read()
	if err == nil {
		err = measure.EachOf(count, 8, func(i int) error { return version(ctx, held[i]) })
	}
	return after - before, took, errors.Join(err, measure.EachOf(count, 8, func(i int) error { return kill(held[i], nil) }))
}

// podmanBurst is the same by podman, whose containers need not be alive together.
func (b *bench) podmanBurst(ctx context.Context, st *layerStore, t tree) (took time.Duration, fetched int64, err error) {
	if b.podman == nil {
		return 0, 0, nil
	}
	st.fast()
	tar := func(i int) string { return fmt.Sprintf("image-%d.tar", i) }
	image := func(i int) string { return fmt.Sprintf("localhost/burst-%d:1", i) }
	var names []string
	for i := range b.images {
		names = append(names, image(i))
		if err := t.writeVariant(filepath.Join(st.place.backing, tar(i)), i); err != nil {
			return 0, 0, err
		}
	}
	before := st.place.BytesRead()
	st.pace(b.bandwidth)
	took, err = measure.Timed(func() error {
		err := measure.EachOf(b.images, podmanRuns, func(i int) error {
			_, err := b.podman.load(ctx, filepath.Join(st.place.Dir(), tar(i)), image(i))
			return err
		})
		if err != nil {
			return err
		}
		return measure.EachOf(b.burst, podmanRuns, func(i int) error {
			_, err := b.podman.version(ctx, image(i%b.images))
			return err
		})
	})
	fetched = st.place.BytesRead() - before
	st.fast()
	for i := range b.images {
		err = errors.Join(err, os.Remove(filepath.Join(st.place.backing, tar(i))))
	}
	return took, fetched, errors.Join(err, b.podman.remove(ctx, names...))
}
