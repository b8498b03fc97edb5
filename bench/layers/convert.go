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
	"github.com/opendsec/dsec/internal/layer"
)

// conversion: an image that lies on this machine becomes what sandboxes can be
// made of: by the layer store alone, and by a server to which it is sent. All read what
// the page cache has; what is written out is stored durably by dsec, by rivals only
// written.
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
	var s *layer.Store
	if err == nil {
		s, err = b.openStore(filepath.Join(dir, "store"))
	}
	var got map[string]*measure.Samples
	if err == nil {
		ours := []measure.Contestant{
			b.ourConversion("dsec", dir, func(ctx context.Context, f *os.File) (string, error) {
				meta, _, err := s.Build(ctx, layer.BuildOptions{}, f)
				return meta.Digest, err
			}, s.Remove),
			b.ourConversion("dsec, API", dir, func(ctx context.Context, f *os.File) (string, error) {
				return "layout:1", n.load(ctx, "layout:1", client.ImportOptions{}, f)
			}, n.RemoveLayer),
		}
		got, err = measure.Interleave(ctx, b.rounds, append(ours, b.conversions(dir, unpacked)...)...)
		err = errors.Join(err, s.Close())
	}
	err = errors.Join(n.stop(err), os.RemoveAll(dir))
	if err != nil {
		return nil, err
	}
	rate := func(s *measure.Samples) float64 { return float64(b.tree.size) / 1e6 / (s.P50() / 1000) }
	r := measure.NewRow("I1_mb_s", "an image of an OCI layout on this machine, until it is stored durably as a layer", "MB/s", rate(got["dsec"])).
		Target(measure.AtLeast, 300, 500).Details(got["dsec"])
	api := measure.NewRow("I1_api_mb_s", "the same, sent to a server by its API", "MB/s", rate(got["dsec, API"])).Details(got["dsec, API"])
	var rows []measure.Row
	for _, name := range []string{"podman import", "tar -x", "mkfs.erofs"} {
		if s := got[name]; s != nil {
			rows = append(rows, r.Against(name, rate(s)).Noted(fmt.Sprintf("CPU of the rival %.0f ms", s.CPUMS())))
		}
	}
	return append(rows, api), nil
}

// openStore opens a layer store in this process, which imports as a server does.
func (b *bench) openStore(dir string) (*layer.Store, error) {
	binary, err := filepath.Abs(b.binary)
	if err != nil {
		return nil, err
	}
	return layer.Open(dir, layer.Options{CollapseBytes: 3 << 30, Own: true, HelperCommand: []string{binary, layer.HelperVerb}})
}

// ourConversion times load with a layout of an image that is not there yet, and removes
// what load says it became.
func (b *bench) ourConversion(name, dir string, load func(context.Context, *os.File) (string, error), remove func(context.Context, string) error) measure.Contestant {
	count := 0
	return measure.Contestant{Name: name, Per: 1, Once: func(ctx context.Context) (time.Duration, error) {
		count++
		path := filepath.Join(dir, "layout.tar")
		if err := b.tree.writeLayout(path, count); err != nil {
			return 0, err
		}
		f, err := os.Open(path)
		if err != nil {
			return 0, err
		}
		defer func() { _ = f.Close() }()
		var made string
		d, err := measure.Timed(func() (err error) { made, err = load(ctx, f); return err })
		if err != nil {
			return 0, err
		}
		return d, remove(ctx, made)
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
