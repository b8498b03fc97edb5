package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// conversion: an image that lies on this machine becomes what sandboxes can be
// made of. All read what the page cache has; what is written out is stored
// durably by dsec, by rivals only written.
func conversion(ctx context.Context, b *bench) ([]measure.Row, error) {
	n, err := b.newNode(ctx)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(b.work, "conversion")
	unpacked := filepath.Join(dir, "unpacked")
	if err = os.Mkdir(dir, 0o755); err == nil {
		_, err = untar(ctx, b.tree.path, unpacked) // what mkfs.erofs reads
	}
	var got map[string]*measure.Samples
	if err == nil {
		got, err = measure.Interleave(ctx, b.rounds, append([]measure.Contestant{b.ourConversion(n, dir)}, b.conversions(dir, unpacked)...)...)
	}
	err = errors.Join(err, n.stop(), os.RemoveAll(dir))
	if err != nil {
		return nil, err
	}
	rate := func(s *measure.Samples) float64 { return float64(b.tree.size) / 1e6 / (s.P50() / 1000) }
	r := measure.NewRow("I1_mb_s", "an image of an OCI layout, by the API, until it is stored durably as a layer", "MB/s", rate(got["dsec"])).
		Target(measure.AtLeast, 300, 500).Details(got["dsec"])
	var rows []measure.Row
	for _, name := range []string{"podman import", "tar -x", "mkfs.erofs"} {
		if s := got[name]; s != nil {
			rows = append(rows, r.Against(name, rate(s)).Noted(fmt.Sprintf("CPU of the rival %.0f ms", s.CPUMS())))
		}
	}
	return rows, nil
}

func (b *bench) ourConversion(n *node, dir string) measure.Contestant {
	count := 0
	return measure.Contestant{Name: "dsec", Per: 1, Once: func(ctx context.Context) (time.Duration, error) {
		count++ // no image is one that is there already
		path, name := filepath.Join(dir, "layout.tar"), fmt.Sprintf("layout-%d:1", count)
		if err := b.tree.writeLayout(path, count); err != nil {
			return 0, err
		}
		f, err := os.Open(path)
		if err != nil {
			return 0, err
		}
		defer func() { _ = f.Close() }()
		d, err := measure.Timed(func() error { return n.load(ctx, name, client.ImportOptions{}, f) })
		if err != nil {
			return 0, err
		}
		return d, n.RemoveLayer(ctx, name)
	}}
}

func (b *bench) conversions(dir, unpacked string) []measure.Contestant {
	out := filepath.Join(dir, "out")
	all := []measure.Contestant{{Name: "tar -x", Per: 1, Once: func(ctx context.Context) (time.Duration, error) {
		d, err := measure.Timed(func() error { _, err := untar(ctx, b.tree.path, out); return err })
		return d, errors.Join(err, os.RemoveAll(out))
	}}}
	if _, err := exec.LookPath("mkfs.erofs"); err == nil {
		all = append(all, measure.Contestant{Name: "mkfs.erofs", Per: 1, Once: func(ctx context.Context) (time.Duration, error) {
			d, err := measure.Timed(func() error { _, _, err := command(ctx, "mkfs.erofs", "--quiet", out, unpacked); return err })
			return d, errors.Join(err, os.RemoveAll(out))
		}})
	}
	if b.podman != nil {
		all = append(all, measure.Contestant{Name: "podman import", Per: 1, Once: func(ctx context.Context) (time.Duration, error) {
			d, err := measure.Timed(func() error { _, err := b.podman.load(ctx, b.tree.path, "localhost/conversion:1"); return err })
			if err != nil {
				return 0, err
			}
			return d, b.podman.remove(ctx, "localhost/conversion:1")
		}})
	}
	return all
}
