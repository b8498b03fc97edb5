// Command state measures what dsec keeps over interruptions: pauses, the memory that
// they give back, and trajectories. It writes bench/results/state.json for programs and
// bench/STATE.md for people. Run it as root on a machine that does nothing else; where
// there is no swap it makes a zram device, and removes it.
//
//	go run ./bench/state               everything
//	go run ./bench/state -only R1      rows whose ID starts with R1
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

const layer = "small:1" // static busybox

// bench is what a suite works with.
type bench struct {
	*measure.Server
	out, only string
	rounds    int
	job       int // sandboxes of a job
	features  []string
}

func main() {
	b := new(bench)
	binary := flag.String("binary", "bin/dsec", "the `dsec` to measure")
	flag.StringVar(&b.out, "out", "bench", "directory of STATE.md and results/")
	flag.StringVar(&b.only, "only", "", "comma-separated `prefixes` of the rows to measure")
	flag.IntVar(&b.rounds, "rounds", 10, "samples of each row")
	flag.IntVar(&b.job, "job", 500, "sandboxes of a job")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, b, *binary); err != nil {
		fmt.Fprintln(os.Stderr, "bench-state:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, b *bench, binary string) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("run me as root: sandboxes need it")
	}
	work, err := os.MkdirTemp("", "dsec-state-")
	if err != nil {
		return err
	}
	defer func() { measure.UnmountBelow(work); _ = os.RemoveAll(work) }()
	swapoff, err := swap(4 << 30)
	if err != nil {
		return fmt.Errorf("swap: %w", err)
	}
	defer swapoff()
	if err := os.Mkdir(filepath.Join(work, "up"), 0o700); err != nil {
		return err
	}
	b.Server, err = measure.StartServer(ctx, binary, filepath.Join(work, "up"), "DSEC_EDGE_BACKENDS=container", "DSEC_CONTAINER_DISK_IMAGE_BYTES=4294967296")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.End(), b.Remove()) }()
	image, err := measure.BusyboxTar()
	if err == nil {
		_, _, err = b.ImportLayer(ctx, layer, client.ImportOptions{}, bytes.NewReader(image))
	}
	if err != nil {
		return err
	}
	var rows []measure.Row
	var problems []error
	for _, s := range []struct {
		ids string
		run func(context.Context) ([]measure.Row, error)
	}{
		{"R1_freeze_ms", b.freeze},
		{"R1_pageout_gib_s R1_given_back_pct R1_resume_ms", b.pageOut},
		{"R1_forked_gib_s R1_forked_back_pct", b.forked},
		{"R2_job_pause_s R2_job_resume_s", b.jobs},
		{"R3_pack_s R3_frozen_ms", b.packs},
		{"R3_fork_ms", b.forks},
		{"T1_exec_ms T2_fastforward_per_s T2_one_per_s", b.forward},
		{"T1_log_overhead_pct", b.overhead},
		{"T3_reopen_ms", b.reopen},
	} {
		if ctx.Err() != nil || !b.wants(s.ids) {
			continue
		}
		fmt.Fprintln(os.Stderr, "bench-state:", s.ids)
		got, err := s.run(ctx)
		for _, r := range got {
			rows = append(rows, r.With(b.features))
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", s.ids, err))
		}
	}
	measure.Print(os.Stdout, rows)
	if len(rows) > 0 {
		report := measure.Report{
			JSON: filepath.Join(b.out, "results", "state.json"), Markdown: filepath.Join(b.out, "STATE.md"),
			Title: "State: results", Command: "make bench-state",
			Notes: "By the API, from the call to its answer. Sandboxes are of busybox. Swap is a zram device with the kernel's default compression, and the memory is of random bytes.",
		}
		problems = append(problems, report.Write(rows))
	}
	return errors.Join(problems...)
}

func (b *bench) wants(ids string) bool {
	if b.only == "" {
		return true
	}
	for id := range strings.FieldsSeq(ids) {
		for prefix := range strings.SplitSeq(b.only, ",") {
			if strings.HasPrefix(id, prefix) {
				return true
			}
		}
	}
	return false
}

// create makes a sandbox, and sees what is in force in the first one.
func (b *bench) create(ctx context.Context, job string) (*client.Sandbox, error) {
	sb, err := b.CreateSandbox(ctx, client.SandboxOptions{Layers: []string{layer}, Job: job, Limits: dsec.Limits{MemoryBytes: 1 << 30}})
	if err == nil && b.features == nil {
		b.features, err = measure.Observe(ctx, sb)
	}
	return sb, err
}

// samples calls once so often, and before it, untimed, prepare.
func (b *bench) samples(ctx context.Context, n int, prepare func(context.Context) error, once func(context.Context) error) (*measure.Samples, error) {
	s := new(measure.Samples)
	for range n {
		if err := prepare(ctx); err != nil {
			return nil, err
		}
		d, err := measure.Timed(func() error { return once(ctx) })
		if err != nil {
			return nil, err
		}
		s.Times = append(s.Times, d)
	}
	return s, nil
}

// run runs a script to its end, which must be a success.
func output(ctx context.Context, sb *client.Sandbox, script string) (string, error) {
	out, o, err := sb.Shell(script).Output(ctx)
	if err == nil && !o.OK() {
		err = fmt.Errorf("%.40q ended with %+v", script, o)
	}
	return string(out), err
}
