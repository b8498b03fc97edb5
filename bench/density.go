package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// spareMemory is left for the machine: below it no more sandboxes are made.
const spareMemory = 1 << 30

// density holds as many idle sandboxes as asked for, each of which has
// answered one command. All memory of the host counts: what MemAvailable lost,
// the server's and the kernel's part included.
func density(ctx context.Context, b *bench) ([]measure.Row, error) {
	defer measure.Raise("/proc/sys/kernel/pid_max", 1<<20)()
	alone, err := b.create(ctx)
	if err != nil {
		return nil, err
	}
	quiet, err := b.execSamples(ctx, alone)
	if err != nil {
		return nil, kill(alone, err)
	}
	before := measure.Meminfo("MemAvailable")
	var mu sync.Mutex
	var held []*client.Sandbox
	err = measure.EachOf(b.density, 8, func(int) error {
		if measure.Meminfo("MemAvailable") < spareMemory {
			return nil
		}
		sb, err := b.first(ctx)
		if sb != nil {
			mu.Lock()
			held = append(held, sb)
			mu.Unlock()
		}
		return err
	})
	var rows []measure.Row
	if err == nil && len(held) > 0 {
		rows, err = b.measureHeld(ctx, held, alone, quiet, before)
	}
	seconds, kerr := b.killAll(append(held, alone))
	rows = append(rows, measure.NewRow("D2_s", fmt.Sprintf("kill of %d sandboxes", len(held)+1), "s", seconds).Target(measure.AtMost, 10, 2).With(b.features))
	return rows, errors.Join(err, kerr, b.nothingLeft(ctx))
}

// measureHeld takes what must be taken while all are alive.
func (b *bench) measureHeld(ctx context.Context, held []*client.Sandbox, alone *client.Sandbox, quiet *measure.Samples, before int64) ([]measure.Row, error) {
	lost := before - measure.Meminfo("MemAvailable")
	if err := measure.EachOf(len(held), 8, func(i int) error { return runTrue(ctx, held[i]) }); err != nil {
		return nil, fmt.Errorf("of %d held: %w", len(held), err)
	}
	crowded, err := b.execSamples(ctx, alone)
	if err != nil {
		return nil, err
	}
	mib := float64(lost) / float64(len(held)) / (1 << 20)
	rss := fmt.Sprintf("the server's own part: %.0f KiB each", float64(measure.PrivateMemory(b.PID()))/float64(len(held))/(1<<10))
	return []measure.Row{
		measure.NewRow("D1_count", "idle sandboxes held, each answered two commands", "sandboxes", float64(len(held))).Target(measure.AtLeast, 2000, 3200).With(b.features),
		measure.NewRow("D1_mib", "memory of the host for each of them", "MiB", mib).Target(measure.AtMost, 2.0, 1.3).With(b.features).Noted(rss),
		measure.NewRow("X4_ratio", "exec p50 with these neighbours against alone", "x", crowded.P50()/quiet.P50()).Target(measure.AtMost, 1.5, 1.5).Details(crowded).With(b.features),
	}, nil
}

func (b *bench) execSamples(ctx context.Context, sb *client.Sandbox) (*measure.Samples, error) {
	got, err := measure.Interleave(ctx, b.rounds, measure.Contestant{Name: "exec", Per: 50, Once: func(ctx context.Context) (time.Duration, error) {
		return measure.Timed(func() error { return runTrue(ctx, sb) })
	}})
	return got["exec"], err
}

func (b *bench) killAll(sandboxes []*client.Sandbox) (seconds float64, err error) {
	d, err := measure.Timed(func() error {
		return measure.EachOf(len(sandboxes), 16, func(i int) error { return kill(sandboxes[i], nil) })
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: kill:", err)
	}
	return d.Seconds(), err
}
