package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec/client"
)

// spareMemory is left for the machine: below it no more sandboxes are made.
const spareMemory = 1 << 30

// density holds as many idle sandboxes as asked for, each of which has
// answered one command. All memory of the host counts: what MemAvailable lost,
// the server's and the kernel's part included.
func density(ctx context.Context, b *bench) ([]row, error) {
	defer raise("/proc/sys/kernel/pid_max", 1<<20)()
	alone, err := b.create(ctx)
	if err != nil {
		return nil, err
	}
	quiet, err := b.execSamples(ctx, alone)
	if err != nil {
		return nil, kill(alone, err)
	}
	before := meminfo("MemAvailable")
	var mu sync.Mutex
	var held []*client.Sandbox
	err = eachOf(b.density, 8, func(int) error {
		if meminfo("MemAvailable") < spareMemory {
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
	var rows []row
	if err == nil && len(held) > 0 {
		rows, err = b.measureHeld(ctx, held, alone, quiet, before)
	}
	seconds, kerr := b.killAll(append(held, alone))
	rows = append(rows, newRow("D2_s", fmt.Sprintf("kill of %d sandboxes", len(held)+1), "s", seconds).target(atMost, 10, 2).with(b.features))
	return rows, errors.Join(err, kerr, b.nothingLeft(ctx))
}

// measureHeld takes what must be taken while all are alive.
func (b *bench) measureHeld(ctx context.Context, held []*client.Sandbox, alone *client.Sandbox, quiet *samples, before int64) ([]row, error) {
	lost := before - meminfo("MemAvailable")
	if err := eachOf(len(held), 8, func(i int) error { return runTrue(ctx, held[i]) }); err != nil {
		return nil, fmt.Errorf("of %d held: %w", len(held), err)
	}
	crowded, err := b.execSamples(ctx, alone)
	if err != nil {
		return nil, err
	}
	mib := float64(lost) / float64(len(held)) / (1 << 20)
	rss := fmt.Sprintf("the server's own part: %.0f KiB each", float64(privateMemory(b.cmd.Process.Pid))/float64(len(held))/(1<<10))
	return []row{
		newRow("D1_count", "idle sandboxes held, each answered two commands", "sandboxes", float64(len(held))).target(atLeast, 2000, 3200).with(b.features),
		newRow("D1_mib", "memory of the host for each of them", "MiB", mib).target(atMost, 2.0, 1.3).with(b.features).noted(rss),
		newRow("X4_ratio", "exec p50 with these neighbours against alone", "x", crowded.p50()/quiet.p50()).target(atMost, 1.5, 1.5).details(crowded).with(b.features),
	}, nil
}

func (b *bench) execSamples(ctx context.Context, sb *client.Sandbox) (*samples, error) {
	got, err := interleave(ctx, b.rounds, contestant{"exec", 50, func(ctx context.Context) (time.Duration, error) {
		return timed(func() error { return runTrue(ctx, sb) })
	}})
	return got["exec"], err
}

func (b *bench) killAll(sandboxes []*client.Sandbox) (seconds float64, err error) {
	d, err := timed(func() error {
		return eachOf(len(sandboxes), 16, func(i int) error { return kill(sandboxes[i], nil) })
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: kill:", err)
	}
	return d.Seconds(), err
}
