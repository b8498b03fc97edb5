package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// packs: 100 MB that were just written become a layer.
func (b *bench) packs(ctx context.Context) ([]measure.Row, error) {
	sb, err := b.create(ctx, "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Kill(context.WithoutCancel(ctx)) }()
	frozen := new(measure.Samples)
	s, err := b.samples(ctx, b.rounds, func(ctx context.Context) error {
		// New files: what was truncated btrfs writes out when it is closed.
		_, err := output(ctx, sb, "rm -rf /data; mkdir /data; for i in 1 2 3 4 5 6 7 8 9 10; do head -c 10000000 /dev/urandom > /data/$i; done")
		return err
	}, func(ctx context.Context) error {
		l, report, err := sb.Pack(ctx, "packed", nil)
		if err == nil && report.Bytes < 100e6 {
			err = fmt.Errorf("a layer of %d bytes: %+v", report.Bytes, l)
		}
		if err == nil {
			frozen.Times = append(frozen.Times, report.Frozen)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return []measure.Row{
		measure.NewRow("R3_pack_s", "100 MB that a sandbox has just written, until they are a layer in the store, p50", "s", s.P50()/1000).Target(measure.AtMost, 2, 0.7).Details(s),
		measure.NewRow("R3_frozen_ms", "for which its processes stood still, p50", "ms", frozen.P50()).Target(measure.AtMost, 200, 50).Details(frozen),
	}, nil
}

// forks: sixteen sandboxes of one that has written 1 MB.
func (b *bench) forks(ctx context.Context) ([]measure.Row, error) {
	sb, err := b.create(ctx, "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Kill(context.WithoutCancel(ctx)) }()
	var made []client.Created
	kill := func(ctx context.Context) (err error) {
		for _, m := range made {
			if m.Err == nil {
				m.Err = m.Sandbox.Kill(context.WithoutCancel(ctx))
			}
			err = errors.Join(err, m.Err)
		}
		made = nil
		return err
	}
	s, err := b.samples(ctx, b.rounds, func(ctx context.Context) error {
		if err := kill(ctx); err != nil {
			return err
		}
		_, err := output(ctx, sb, "head -c 1000000 /dev/urandom > /root/file")
		return err
	}, func(ctx context.Context) (err error) {
		made, _, err = sb.Fork(ctx, 16, client.ForkOptions{})
		if err == nil && made[15].Err == nil {
			_, err = output(ctx, made[15].Sandbox, "wc -c /root/file")
		}
		return err
	})
	if err = errors.Join(err, kill(ctx)); err != nil {
		return nil, err
	}
	return []measure.Row{
		measure.NewRow("R3_fork_ms", "16 sandboxes of one that has written 1 MB, until the last of them has answered a command, p50", "ms", s.P50()).
			Target(measure.AtMost, 500, 150).Details(s),
	}, nil
}
