// Command bench measures dsec beside crun, runc, podman and bubblewrap, in one
// run on one machine, and writes bench/results/container.json for programs and
// bench/RESULTS.md for people. Run it as root on a machine that does nothing
// else:
//
//	go run ./bench            everything, about ten minutes
//	go run ./bench -quick     fewer samples, for trying it out; writes nothing
//	go run ./bench -only C1   rows whose ID starts with C1
//
// Everything of dsec goes through the public API, Connect over loopback, from
// this process to a `dsec up` that it starts. Contestants take turns, round by
// round, so that a neighbour's load meets all of them. A contestant that is
// not installed has no figure; nothing is taken from an earlier run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/opendsec/dsec/bench/internal/measure"
)

// options are the flags.
type options struct {
	binary   string
	backend  string
	out      string
	only     string
	quick    bool
	rounds   int
	sustain  int // seconds
	density  int
	copySize int64 // bytes
	profiles string
}

func main() {
	if len(os.Args) == 2 && (os.Args[1] == relayCommand || os.Args[1] == echoCommand) {
		relay(os.Args[1])
	}
	var o options
	flag.StringVar(&o.binary, "binary", "bin/dsec", "the `dsec` to measure")
	flag.StringVar(&o.backend, "backend", "container", "kind of sandbox")
	flag.StringVar(&o.out, "out", "bench", "directory of RESULTS.md and results/")
	flag.StringVar(&o.only, "only", "", "comma-separated `prefixes` of the rows to measure")
	flag.BoolVar(&o.quick, "quick", false, "few samples; write nothing")
	flag.IntVar(&o.rounds, "rounds", 6, "rounds in which the contestants take turns")
	flag.IntVar(&o.sustain, "sustain", 30, "seconds of the sustained rate")
	flag.IntVar(&o.density, "density", 2000, "idle sandboxes to hold")
	flag.Int64Var(&o.copySize, "copy", 1<<30, "bytes of the file copied in and out")
	flag.StringVar(&o.profiles, "profiles", "", "a `directory` for CPU profiles of the server")
	flag.Parse()
	if o.quick {
		o.rounds, o.sustain, o.density, o.copySize = 2, 3, 50, 32<<20
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// suite is one group of rows. It returns what it measured, also beside an error.
type suite struct {
	ids  []string
	warm int // containers held ready by the server it is given
	run  func(ctx context.Context, b *bench) ([]measure.Row, error)
}

func suites() []suite {
	return []suite{
		{[]string{"C1_ms", "C1_vs_crun"}, 0, coldCreate},
		{[]string{"C4_ms", "C4_first_exit_ms", "C4_shell_ms"}, 32, warmCreate},
		{[]string{"C2_per_s"}, 32, sustained},
		{[]string{"C3_ms"}, 32, burst},
		{[]string{"X1_ms", "X2_ms", "X3_mib"}, 0, execs},
		{[]string{"D1_count", "D1_mib", "D2_s", "X4_ratio"}, 0, density},
		{[]string{"F1_up_mib_per_s", "F1_down_mib_per_s", "F1_growth_mib"}, 0, copies},
	}
}

func (o options) wants(s suite) bool {
	if o.only == "" {
		return true
	}
	for prefix := range strings.SplitSeq(o.only, ",") {
		for _, id := range s.ids {
			if strings.HasPrefix(id, prefix) {
				return true
			}
		}
	}
	return false
}

// run measures what was asked for. A suite that fails leaves the others' rows.
func run(ctx context.Context, o options) error {
	if os.Geteuid() != 0 && o.backend != "fake" {
		return errors.New("run me as root: sandboxes and rivals need it")
	}
	work, err := os.MkdirTemp("", "dsec-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	rivals, undo, err := findRivals(work)
	if err != nil {
		return err
	}
	defer undo()
	var rows []measure.Row
	var problems []error
	for _, s := range suites() {
		if !o.wants(s) || ctx.Err() != nil {
			continue
		}
		got, err := runSuite(ctx, o, s, work, rivals)
		rows = append(rows, got...)
		if err != nil {
			err = fmt.Errorf("%s: %w", strings.Join(s.ids, " "), err)
			fmt.Fprintln(os.Stderr, "bench:", err)
			problems = append(problems, err)
		}
	}
	measure.Print(os.Stdout, rows)
	if !o.quick && len(rows) > 0 {
		problems = append(problems, report(o.out).Write(rows))
	}
	return errors.Join(problems...)
}

// bench is what a suite works with.
type bench struct {
	options
	*server
	rivals rivals
	work   string
}

func runSuite(ctx context.Context, o options, s suite, work string, r rivals) ([]measure.Row, error) {
	fmt.Fprintf(os.Stderr, "bench: %s\n", strings.Join(s.ids, " "))
	srv, err := startServer(ctx, o, work, s.warm)
	if err != nil {
		return nil, err
	}
	profiled := func() error { return nil }
	if o.profiles != "" {
		profiled = srv.profile(ctx, filepath.Join(o.profiles, s.ids[0]))
	}
	rows, err := s.run(ctx, &bench{o, srv, r, work})
	return rows, errors.Join(err, profiled(), srv.stop())
}

func report(dir string) measure.Report {
	return measure.Report{
		JSON: filepath.Join(dir, "results", "container.json"), Markdown: filepath.Join(dir, "RESULTS.md"), Title: "Results", Command: "make bench",
		Notes: `CPU ms is time of all the machine's CPUs for one sample, the client's included. The floor is what the kernel alone takes for the same,
without limits, layers or an API. Contestants took turns round by round; rivals ran by posix_spawn, without a shell.`,
	}
}
