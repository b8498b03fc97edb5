package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/internal/trajectory"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// A log of this process's own, on the disk of the server's: what its calls take is what an
// exec waits for it.

// ownLog opens one in a directory that goes with it.
func (b *bench) ownLog() (dir string, l *trajectory.Log, err error) {
	if dir, err = os.MkdirTemp(filepath.Join(b.Dir, "data"), "bench-"); err != nil {
		return "", nil, err
	}
	l, _, err = trajectory.Open(trajectory.Options{Dir: dir})
	return dir, l, err
}

// note notes an exec of echo as the edge does.
func note(ctx context.Context, l *trajectory.Log, id dsec.SandboxID, action string) error {
	argv := [][]byte{[]byte("echo"), []byte(action)}
	req := &dsecv1.ExecRequest{SandboxId: string(id), Command: &dsecv1.Command{Argv: []string{"echo", action}}}
	digest, err := trajectory.RequestDigest(req)
	if err != nil {
		return err
	}
	a, earlier, err := l.Begin(ctx, id, &dsecv1.TrajectoryEntry{
		Kind: dsecv1.TrajectoryKind_TRAJECTORY_KIND_EXEC, Caller: "bench", ActionId: action, RequestDigest: digest,
		Request: &dsecv1.TrajectoryRequest{Argv: argv},
	})
	if err == nil && earlier != nil {
		err = errors.New("it was there already")
	}
	if err != nil {
		return err
	}
	a.Output(dsecv1.Stream_STREAM_STDOUT, []byte(action+"\n"))
	return a.End(&dsecv1.TrajectoryEntry{Outcome: &dsecv1.Outcome{End: &dsecv1.Outcome_ExitCode{}}})
}

// overhead: what the log adds to an exec.
func (b *bench) overhead(ctx context.Context) ([]measure.Row, error) {
	sb, err := b.create(ctx, "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Kill(context.WithoutCancel(ctx)) }()
	dir, l, err := b.ownLog()
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close(); _ = os.RemoveAll(dir) }()
	id := dsec.NewSandboxID("bench")
	if err := l.Add(id, "bench"); err != nil {
		return nil, err
	}
	nothing := func(context.Context) error { return nil }
	i := 0
	execs, logs := new(measure.Samples), new(measure.Samples)
	for range b.rounds { // in turns: the machine is not always as fast
		e, err := b.samples(ctx, 100, nothing, func(ctx context.Context) error {
			_, _, err := sb.Command("/bin/busybox", "echo", "1").Output(ctx)
			return err
		})
		if err != nil {
			return nil, err
		}
		g, err := b.samples(ctx, 100, nothing, func(ctx context.Context) error { i++; return note(ctx, l, id, fmt.Sprint(i)) })
		if err != nil {
			return nil, err
		}
		execs.Times, logs.Times = append(execs.Times, e.Times...), append(logs.Times, g.Times...)
	}
	return []measure.Row{
		measure.NewRow("T1_log_overhead_pct", fmt.Sprintf("that the log adds to an exec: its calls take %.3g of %.3g ms, p50", logs.P50(), execs.P50()), "%", 100*logs.P50()/(execs.P50()-logs.P50())).
			Target(measure.AtMost, 10, 3).Details(logs),
	}, nil
}

// reopen: a log is opened that has a trajectory of 1,000 steps, until its last one is found.
func (b *bench) reopen(ctx context.Context) ([]measure.Row, error) {
	dir, l, err := b.ownLog()
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	id := dsec.NewSandboxID("bench")
	if err := l.Add(id, "bench"); err != nil {
		return nil, err
	}
	for i := range 1000 {
		if err := note(ctx, l, id, fmt.Sprint(i)); err != nil {
			return nil, err
		}
	}
	s := new(measure.Samples)
	for range b.rounds {
		if err := l.Close(); err != nil {
			return nil, err
		}
		begun := time.Now()
		if l, _, err = trajectory.Open(trajectory.Options{Dir: dir}); err != nil {
			return nil, err
		}
		earlier, err := l.Lookup(ctx, id, "999")
		s.Times = append(s.Times, time.Since(begun))
		if err != nil || earlier == nil || earlier.Ended == nil {
			return nil, fmt.Errorf("the last step: %v, %w", earlier, err)
		}
	}
	if err := l.Close(); err != nil {
		return nil, err
	}
	return []measure.Row{
		measure.NewRow("T3_reopen_ms", "start on the log of a trajectory of 1,000 steps, until the last one is found, p50", "ms", s.P50()).Target(measure.AtMost, 50, 50).Details(s),
	}, nil
}
