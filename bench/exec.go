package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// execs: the round trip of a command in a sandbox that is there, of a builtin
// in a session over an open stream, and what chronus holds afterwards.
func execs(ctx context.Context, b *bench) (rows []measure.Row, err error) {
	sb, err := b.create(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = kill(sb, err) }()
	theirs, stop, err := b.rivals.execs(ctx, 30)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	ours := measure.Contestant{Name: "dsec", Per: 50, Once: func(ctx context.Context) (time.Duration, error) {
		return measure.Timed(func() error { return runTrue(ctx, sb) })
	}}
	got, err := measure.Interleave(ctx, b.rounds, append(append([]measure.Contestant{ours}, theirs...), floorExec())...)
	if err != nil {
		return nil, err
	}
	r := measure.NewRow("X1_ms", "exec of a static true, p50", "ms", got["dsec"].P50()).
		Target(measure.AtMost, 1.6, 1.1).WithFloor(got["floor"].P50()).Details(got["dsec"]).With(b.features)
	rows = measure.Compact([]measure.Row{r.Rivalled("crun exec", got["crun"]), r.Rivalled("runc exec", got["runc"]), r.Rivalled("podman exec", got["podman"])})

	builtin, hops, err := sessionBuiltin(ctx, b, sb)
	if err != nil {
		return rows, err
	}
	rows = append(rows, measure.NewRow("X2_ms", "a builtin in a session over an open stream, p50", "ms", builtin.P50()).
		Target(measure.AtMost, 0.3, 0.15).WithFloor(hops.P50()).Details(builtin).With(b.features))
	if mib, err := chronusMemory(ctx, b, sb); err != nil {
		return rows, err
	} else if mib > 0 {
		rows = append(rows, measure.NewRow("X3_mib", "private memory of chronus after at least 100 execs, idle", "MiB", mib).Target(measure.AtMost, 0.7, 0.7).With(b.features))
	}
	return rows, nil
}

// sessionBuiltin measures a session's command, and the hops that it makes.
func sessionBuiltin(ctx context.Context, b *bench, sb *client.Sandbox) (builtin, hops *measure.Samples, err error) {
	floor, stop, err := floorHops()
	if err != nil {
		return nil, nil, err
	}
	defer stop()
	session, err := sb.OpenSession(ctx, client.SessionOptions{})
	if err != nil {
		return nil, nil, err
	}
	once := func(ctx context.Context) (time.Duration, error) {
		return measure.Timed(func() error {
			outcome, err := session.Run(ctx, ":", 0, io.Discard, io.Discard)
			if err == nil && !outcome.OK() {
				err = fmt.Errorf(": ended with %+v", outcome)
			}
			return err
		})
	}
	got, err := measure.Interleave(ctx, b.rounds, measure.Contestant{Name: "session", Per: 100, Once: once}, floor)
	return got["session"], got["floor"], errors.Join(err, session.Close(ctx))
}

// chronusMemory is what PID 1 of the sandbox holds privately once it had time
// to give back what it does not need, in MiB; 0 where there is no such process.
func chronusMemory(ctx context.Context, b *bench, sb *client.Sandbox) (float64, error) {
	for range 100 {
		if err := runTrue(ctx, sb); err != nil {
			return 0, err
		}
	}
	pid := initBelow(b.PID())
	if pid == 0 {
		return 0, nil
	}
	select {
	case <-time.After(5 * time.Second):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	return float64(measure.PrivateMemory(pid)) / (1 << 20), nil
}

// initBelow finds a process that is 1 in its own namespace and descends from
// pid: the server's only sandbox, where it holds no shells ready.
func initBelow(pid int) int {
	parents, inits := map[int]int{}, []int{}
	files, _ := filepath.Glob("/proc/[0-9]*/status")
	for _, file := range files {
		var self, parent int
		_, _ = fmt.Sscan(filepath.Base(filepath.Dir(file)), &self)
		for line := range strings.Lines(measure.ReadFile(file)) {
			f := strings.Fields(line)
			switch {
			case len(f) > 1 && f[0] == "PPid:":
				_, _ = fmt.Sscan(f[1], &parent)
			case len(f) > 2 && f[0] == "NSpid:" && f[len(f)-1] == "1":
				inits = append(inits, self)
			}
		}
		parents[self] = parent
	}
	for _, init := range inits {
		for up := parents[init]; up > 1; up = parents[up] {
			if up == pid {
				return init
			}
		}
	}
	return 0
}
