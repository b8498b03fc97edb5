package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec/client"
)

// coldCreate: create to the first command's exit code, one after the other,
// nothing taken from a pool of shells. The kill is outside the measured time.
func coldCreate(ctx context.Context, b *bench) ([]row, error) {
	ours := contestant{"dsec", 30, func(ctx context.Context) (time.Duration, error) {
		var sb *client.Sandbox
		d, err := timed(func() (err error) { sb, err = b.first(ctx); return })
		if err == nil && sb.Warm {
			err = errors.New("a create meant to be cold was served from the pool")
		}
		return d, kill(sb, err)
	}}
	all := append([]contestant{ours}, b.rivals.run(30)...)
	got, err := interleave(ctx, b.rounds, append(all, floorNamespaces())...)
	if err != nil {
		return nil, err
	}
	r := newRow("C1_ms", "create to first exit code, cold, one after the other, p50", "ms", got["dsec"].p50()).
		target(atMost, 4.5, 2.5).floor(got["floor"].p50()).details(got["dsec"]).with(b.features)
	rows := []row{r.rivalled("crun run", got["crun"]), r.rivalled("crun confined run", got["crun confined"]), r.rivalled("runc run", got["runc"]), r.rivalled("bwrap", got["bwrap"]), r.rivalled("podman run", got["podman"])}
	if crun := got["crun"]; crun != nil {
		rows = append(rows, newRow("C1_vs_crun", "how many times faster than crun run", "x", crun.p50()/got["dsec"].p50()).
			target(atLeast, 1.4, 2.5).details(got["dsec"]).with(b.features).rivalled("crun run", crun))
	}
	return compact(rows), nil
}

// kill ends a sandbox after a sample, whatever became of it.
func kill(sb *client.Sandbox, err error) error {
	if sb == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(err, sb.Kill(ctx))
}

// warmCreate: the same from a pool that is given the time to refill between
// two creates, so that each is served from it: by a spare where all ask for the
// same, by a shell where each asks for limits of its own.
func warmCreate(ctx context.Context, b *bench) ([]row, error) {
	same, err := b.fromPool(ctx, func(int) int64 { return pids })
	if err != nil {
		return nil, err
	}
	differing, err := b.fromPool(ctx, func(n int) int64 { return pids + 1 + int64(n) })
	if err != nil {
		return nil, err
	}
	return []row{
		newRow("C4_ms", "create from the warm pool until it takes commands, p50; all ask for the same, so that spares serve them", "ms", same.create.p50()).
			target(atMost, 1.0, 0.4).details(&same.create).with(b.features).noted(same.note),
		newRow("C4_first_exit_ms", "the same to first exit code, p50", "ms", same.first.p50()).details(&same.first).with(b.features).noted(same.note),
		newRow("C4_shell_ms", "create from a warm shell until it takes commands, p50; each asks for limits of its own", "ms", differing.create.p50()).
			target(atMost, 1.0, 0.4).details(&differing.create).with(b.features).noted(differing.note),
	}, nil
}

type pooled struct {
	create, first samples
	note          string
}

func (b *bench) fromPool(ctx context.Context, limit func(n int) int64) (p pooled, err error) {
	missed := 0
	for n := range b.rounds * 30 {
		start := time.Now()
		sb, err := b.createWith(ctx, limit(n))
		made := time.Since(start)
		if err == nil {
			err = runTrue(ctx, sb)
		}
		total := time.Since(start)
		if err := kill(sb, err); err != nil {
			return p, err
		}
		if !sb.Warm {
			missed++
			continue
		}
		p.create.times, p.first.times = append(p.create.times, made), append(p.first.times, total)
	}
	if len(p.create.times) == 0 {
		return p, errors.New("no create was served from the pool")
	}
	p.note = fmt.Sprintf("%d of %d served cold and left out", missed, b.rounds*30)
	return p, nil
}

// sustained: create, exec and kill in a loop, 4 at once. Before each turn a
// second of it goes uncounted, in which the pools run dry, so that refilling
// them is in the figure. Rivals take turns with it, each a third of its time.
func sustained(ctx context.Context, b *bench) ([]row, error) {
	const parallel = 4
	life := func(ctx context.Context) error {
		sb, err := b.first(ctx)
		return kill(sb, err)
	}
	turn := time.Duration(b.sustain) * time.Second / time.Duration(b.rounds)
	names := []string{"crun", "crun confined", "podman"}
	var ours loop
	theirs := make(map[string]*loop)
	for range b.rounds {
		if err := new(loop).run(ctx, parallel, time.Second, life); err != nil {
			return nil, err
		}
		if err := ours.run(ctx, parallel, turn, life); err != nil {
			return nil, err
		}
		for _, name := range names {
			rival := b.rivals[name]
			if rival == nil {
				continue
			}
			if theirs[name] == nil {
				theirs[name] = new(loop)
			}
			err := theirs[name].run(ctx, parallel, turn/3, func(ctx context.Context) error { return command(ctx, rival.run(newID())) })
			if err != nil {
				return nil, err
			}
		}
	}
	if err := b.nothingLeft(ctx); err != nil {
		return nil, err
	}
	r := newRow("C2_per_s", "create + exec + kill, 4 at once, refill counted", "1/s", ours.perSecond()).
		target(atLeast, 300, 600).details(&ours.samples).with(b.features)
	rows := []row{r}
	for _, name := range names {
		if l := theirs[name]; l != nil {
			against := r.against(name+" run", l.perSecond())
			against.Note = fmt.Sprintf("rival: p99 %.3g ms, CPU %.3g ms", l.p99(), l.cpuMS())
			rows = append(rows, against)
		}
	}
	if len(rows) > 1 {
		rows = rows[1:]
	}
	return rows, nil
}

// loop is one thing done over and over, some at once.
type loop struct {
	samples
	took time.Duration
}

func (l *loop) perSecond() float64 { return float64(len(l.times)) / l.took.Seconds() }

// run goes on with it for a time.
func (l *loop) run(ctx context.Context, parallel int, d time.Duration, once func(ctx context.Context) error) error {
	var mu sync.Mutex
	before, start := machineCPU(), time.Now()
	g, gctx := errgroup.WithContext(ctx)
	for range parallel {
		g.Go(func() error {
			for time.Since(start) < d {
				took, err := timed(func() error { return once(gctx) })
				if err != nil {
					return err
				}
				mu.Lock()
				l.times = append(l.times, took)
				mu.Unlock()
			}
			return nil
		})
	}
	err := g.Wait()
	l.took += time.Since(start)
	l.cpu += machineCPU() - before
	return err
}

// nothingLeft fails if the server still has a sandbox that has not ended.
func (b *bench) nothingLeft(ctx context.Context) error {
	for sb, err := range b.Sandboxes(ctx, client.ListOptions{}) {
		if err != nil {
			return err
		}
		return fmt.Errorf("sandbox %s is left, %s", sb.ID, sb.State)
	}
	return nil
}

// burst: 100 at once. It counts only if all are alive together at the end and
// each answers a second command.
func burst(ctx context.Context, b *bench) ([]row, error) {
	const n = 100
	var best samples
	for range b.rounds {
		d, err := b.oneBurst(ctx, n)
		if err != nil {
			return nil, err
		}
		best.times = append(best.times, d)
	}
	r := newRow("C3_ms", "100 at once until the last one's first exit code; all held, each answers again; median of rounds", "ms", best.p50()).
		target(atMost, 350, 160).details(&best).with(b.features)
	rows := []row{r}
	for _, name := range []string{"crun", "podman"} {
		if d, ok, err := b.rivals.burst(ctx, name, n); err != nil {
			return rows, err
		} else if ok {
			rows = append(rows, r.against(name+" run", milliseconds(d)))
		}
	}
	if len(rows) > 1 {
		rows = rows[1:]
	}
	return rows, nil
}

func (b *bench) oneBurst(ctx context.Context, n int) (time.Duration, error) {
	sandboxes := make([]*client.Sandbox, n)
	start := time.Now()
	err := eachOf(n, n, func(i int) (err error) { sandboxes[i], err = b.first(ctx); return })
	d := time.Since(start)
	if err == nil {
		err = eachOf(n, n, func(i int) error { return runTrue(ctx, sandboxes[i]) })
	}
	return d, errors.Join(err, eachOf(n, 8, func(i int) error { return kill(sandboxes[i], nil) }))
}

// eachOf calls f for 0 to n-1, some at once, and returns the first error.
func eachOf(n, parallel int, f func(i int) error) error {
	var g errgroup.Group
	g.SetLimit(parallel)
	for i := range n {
		g.Go(func() error { return f(i) })
	}
	return g.Wait()
}
