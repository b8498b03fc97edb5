// Command layers measures the layers of dsec beside tar, mkfs.erofs and podman, in
// one run on one machine, and writes bench/results/layers.json for programs and
// bench/LAYERS.md for people. Run it as root on a machine that does nothing else:
//
//	go run ./bench/layers              everything
//	go run ./bench/layers -quick       small images, few samples; writes nothing
//	go run ./bench/layers -only I2     rows whose ID starts with I2; the others stay as they are
//	go run ./bench/layers -store s3    layers in a bucket, filled on first touch
//
// The image is Go's own tree as this machine has it, on busybox. The store of
// layers and what rivals read their images from are in the same place, with the
// same delay or the same bandwidth. Contestants take turns.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
)

// options are the flags.
type options struct {
	binary    string
	out       string
	only      string
	store     string
	verify    bool
	quick     bool
	rounds    int
	delay     time.Duration
	bandwidth int64 // bytes a second
	images    int   // of a burst
	burst     int   // sandboxes of it
	many      int   // sandboxes on one base
}

func main() {
	var o options
	flag.StringVar(&o.binary, "binary", "bin/dsec", "the `dsec` to measure")
	flag.StringVar(&o.out, "out", "bench", "directory of LAYERS.md and results/")
	flag.StringVar(&o.only, "only", "", "comma-separated `prefixes` of the rows to measure")
	flag.StringVar(&o.store, "store", "dir", "where layers are: dir or s3, with a delay, or the `URL` of a store that is used as it is")
	flag.BoolVar(&o.verify, "verify", false, "check every byte that is read, also of a dir")
	flag.BoolVar(&o.quick, "quick", false, "small images, few samples; write nothing")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds in which the contestants take turns")
	flag.DurationVar(&o.delay, "delay", time.Millisecond, "of each read of the store")
	flag.Int64Var(&o.bandwidth, "bandwidth", 100e6, "of the store in a burst, bytes a second")
	flag.IntVar(&o.images, "images", 20, "images of a burst")
	flag.IntVar(&o.burst, "burst", 200, "sandboxes of a burst")
	flag.IntVar(&o.many, "many", 1000, "sandboxes on one base")
	flag.Parse()
	if o.quick {
		o.rounds, o.images, o.burst, o.many = 2, 2, 6, 10
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench-layers:", err)
		os.Exit(1)
	}
}

// suite is one group of rows. It returns what it measured, also beside an error.
type suite struct {
	ids []string
	run func(ctx context.Context, b *bench) ([]measure.Row, error)
}

func suites() []suite {
	return []suite{
		{[]string{"I1_mb_s", "I1_api_mb_s"}, conversion},
		{[]string{"I2_ms", "I2_vs_tar", "I2_vs_podman", "I2_bytes_pct", "I2_written_fewer_pct"}, neverSeen},
		{[]string{"I2_filled_ms", "I2_traced_ms"}, traced},
		{[]string{"L1_compose_ms"}, compose},
		{[]string{"I3_warm_pct", "I3_cold_pct"}, build},
		{[]string{"I4_vs_podman", "I4_fetched_x"}, burst},
		{[]string{"L2_page_cache_x"}, pageCache},
	}
}

func (o options) wants(s suite) bool {
	return o.only == "" || slices.ContainsFunc(strings.Split(o.only, ","), func(prefix string) bool {
		return slices.ContainsFunc(s.ids, func(id string) bool { return strings.HasPrefix(id, prefix) })
	})
}

// bench is what a suite works with.
type bench struct {
	options
	work   string // for files, on a disk
	tree   tree
	podman *podman // nil where it is not installed
	// features of a sandbox, as seen from inside one.
	features []string
}

// run measures what was asked for. A suite that fails leaves the others' rows.
func run(ctx context.Context, o options) error {
	if os.Geteuid() != 0 {
		return errors.New("run me as root: sandboxes and rivals need it")
	}
	work, err := os.MkdirTemp("", "dsec-layers-")
	if err != nil {
		return err
	}
	defer func() { measure.UnmountBelow(work); _ = os.RemoveAll(work) }()
	b := &bench{options: o, work: work, podman: findPodman(work)}
	defer b.podman.undoAll()
	if b.tree, err = goTree(ctx, filepath.Join(work, "tree.tar"), o.quick); err != nil {
		return err
	}
	var rows []measure.Row
	var problems []error
	for _, s := range suites() {
		if !o.wants(s) || ctx.Err() != nil {
			continue
		}
		ids := strings.Join(s.ids, " ")
		fmt.Fprintln(os.Stderr, "bench-layers:", ids)
		got, err := s.run(ctx, b)
		for _, r := range got {
			rows = append(rows, r.With(b.features))
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", ids, err)
			fmt.Fprintln(os.Stderr, "bench-layers:", err)
			problems = append(problems, err)
		}
	}
	measure.Print(os.Stdout, rows)
	if !o.quick && len(rows) > 0 {
		problems = append(problems, b.report().Write(rows))
	}
	return errors.Join(problems...)
}

func (b *bench) report() measure.Report {
	verified := ""
	if b.verify {
		verified = ", every byte checked"
	}
	return measure.Report{
		JSON: filepath.Join(b.out, "results", "layers.json"), Markdown: filepath.Join(b.out, "LAYERS.md"),
		Title: "Layers: results", Command: "make bench-layers",
		Notes: fmt.Sprintf(`The image is the tree of Go on busybox: %.0f MB in %d files. Store of layers: %s%s. A MB is 10^6 bytes. Rivals read their images
from a file in the same place, with the same delay or bandwidth, unless a note says otherwise. CPU ms is of all of the machine for one sample.`,
			float64(b.tree.size)/1e6, b.tree.files, b.store, verified),
	}
}
