package main

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

const toolkits = 5

// compose: what a workspace and toolkits add to a create. The node has the layers
// mounted, as where other sandboxes have them.
func compose(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	n, err := b.newNode(ctx, "DSEC_CONTAINER_WARM=0")
	if err != nil {
		return nil, err
	}
	defer func() { err = n.stop(err) }()
	all := []string{smallLayer, "work:1"}
	if err := n.loadFiles(ctx, "work:1", dsec.LayerWorkspace, "work"); err != nil {
		return nil, err
	}
	for i := range toolkits {
		name := fmt.Sprintf("tools-%d:1", i)
		if err := n.loadFiles(ctx, name, dsec.LayerToolkit, fmt.Sprintf("opt/tools-%d", i)); err != nil {
			return nil, err
		}
		all = append(all, name)
	}
	first, err := measure.Timed(func() error { return n.once(ctx, all) })
	if err != nil {
		return nil, err
	}
	held, err := n.create(ctx, small, all...)
	if err != nil {
		return nil, err
	}
	defer func() { err = kill(held, err) }()
	creating := func(name string, layers ...string) measure.Contestant {
		return measure.Contestant{Name: name, Per: 10, Once: func(ctx context.Context) (time.Duration, error) {
			var sb *client.Sandbox
			d, err := measure.Timed(func() (err error) { sb, err = n.create(ctx, small, layers...); return })
			return d, kill(sb, err)
		}}
	}
	got, err := measure.Interleave(ctx, 4*b.rounds, creating("base", smallLayer), creating("all", all...))
	if err != nil {
		return nil, err
	}
	base, seven := got["base"], got["all"]
	return []measure.Row{measure.NewRow("L1_compose_ms", "create of base, workspace and 5 toolkits, p50, more than of base alone", "ms", seven.P50()-base.P50()).
		Target(measure.AtMost, 0.3, 0.3).Details(seven).Against("base alone, p50", base.P50()).
		Noted(fmt.Sprintf("CPU %.2f ms more; the first such sandbox of a node, which mounts the layers: %.1f ms to its kill", seven.CPUMS()-base.CPUMS(), measure.Milliseconds(first)))}, nil
}

// once creates a sandbox and kills it.
func (n *node) once(ctx context.Context, layers []string) error {
	sb, err := n.create(ctx, small, layers...)
	return kill(sb, err)
}

// loadFiles imports a layer of 100 files of 4 KiB below dir.
func (n *node) loadFiles(ctx context.Context, name string, kind dsec.LayerKind, dir string) error {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range 100 {
		content := bytes.Repeat(fmt.Appendf(nil, "%s %4d\n", dir, i), 4096/(len(dir)+6))
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%s/file-%d", dir, i), Mode: 0o644, Size: int64(len(content))})
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return n.load(ctx, name, client.ImportOptions{Kind: kind}, &b)
}
