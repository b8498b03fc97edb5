package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

// coldCreate: create to the first command's exit code, one after the other,
// nothing taken from a pool of shells. The kill is outside the measured time.
func coldCreate(ctx context.Context, b *bench) ([]measure.Row, error) {
	ours := measure.Contestant{Name: "dsec", Per: 30, Once: func(ctx context.Context) (time.Duration, error) {
		var sb *client.Sandbox
		d, err := measure.Timed(func() (err error) { sb, err = b.first(ctx); return })
		if err == nil && sb.Warm {
			err = errors.New("a create meant to be cold was served from the pool")
		}
		return d, kill(sb, err)
	}}
	all := append([]measure.Contestant{ours}, b.rivals.run(30)...)
	got, err := measure.Interleave(ctx, b.rounds, append(all, floorNamespaces())...)
	if err != nil {
		return nil, err
	}
	r := measure.NewRow("C1_ms", "create to first exit code, cold, one after the other, p50", "ms", got["dsec"].P50()).
		Target(measure.AtMost, 4.5, 2.5).WithFloor(got["floor"].P50()).Details(got["dsec"]).With(b.features)
	rows := []measure.Row{r.Rivalled("crun run", got["crun"]), r.Rivalled("crun confined run", got["crun confined"]), r.Rivalled("runc run", got["runc"]), r.Rivalled("bwrap", got["bwrap"]), r.Rivalled("podman run", got["podman"])}
	if crun := got["crun"]; crun != nil {
		rows = append(rows, measure.NewRow("C1_vs_crun", "how many times faster than crun run", "x", crun.P50()/got["dsec"].P50()).
			Target(measure.AtLeast, 1.4, 2.5).Details(got["dsec"]).With(b.features).Rivalled("crun run", crun))
	}
	return measure.Compact(rows), nil
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
func warmCreate(ctx context.Context, b *bench) ([]measure.Row, error) {
	same, err := b.fromPool(ctx, func(int) int64 { return pids })
	if err != nil {
		return nil, err
	}
	differing, err := b.fromPool(ctx, func(n int) int64 { return pids + 1 + int64(n) })
	if err != nil {
		return nil, err
	}
	return []measure.Row{
		measure.NewRow("C4_ms", "create from the warm pool until it takes commands, p50; all ask for the same, so that spares serve them", "ms", same.create.P50()).
			Target(measure.AtMost, 1.0, 0.4).Details(&same.create).With(b.features).Noted(same.note),
		measure.NewRow("C4_first_exit_ms", "the same to first exit code, p50", "ms", same.first.P50()).Details(&same.first).With(b.features).Noted(same.note),
		measure.NewRow("C4_shell_ms", "create from a warm shell until it takes commands, p50; each asks for limits of its own", "ms", differing.create.P50()).
			Target(measure.AtMost, 1.0, 0.4).Details(&differing.create).With(b.features).Noted(differing.note),
	}, nil
}

type pooled struct {
	create, first measure.Samples
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
		p.create.Times, p.first.Times = append(p.create.Times, made), append(p.first.Times, total)
	}
	if len(p.create.Times) == 0 {
		return p, errors.New("no create was served from the pool")
	}
	p.note = fmt.Sprintf("%d of %d served cold and left out", missed, b.rounds*30)
	return p, nil
}

// sustained: create, exec and kill in a loop, 4 at once. Before each turn a
// second of it goes uncounted, in which the pools run dry, so that refilling
// them is in the figure. Rivals take turns with it, each a third of its time.
func sustained(ctx context.Context, b *bench) ([]measure.Row, error) {
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
	r := measure.NewRow("C2_per_s", "create + exec + kill, 4 at once, refill counted", "1/s", ours.perSecond()).
		Target(measure.AtLeast, 300, 600).Details(&ours.Samples).With(b.features)
	rows := []measure.Row{r}
	for _, name := range names {
		if l := theirs[name]; l != nil {
			against := r.Against(name+" run", l.perSecond())
			against.Note = fmt.Sprintf("rival: p99 %.3g ms, CPU %.3g ms", l.P99(), l.CPUMS())
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
	measure.Samples
	took time.Duration
}

func (l *loop) perSecond() float64 { return float64(len(l.Times)) / l.took.Seconds() }

// run goes on with it for a time.
func (l *loop) run(ctx context.Context, parallel int, d time.Duration, once func(ctx context.Context) error) error {
	var mu sync.Mutex
	before, start := measure.MachineCPU(), time.Now()
	g, gctx := errgroup.WithContext(ctx)
	for range parallel {
		g.Go(func() error {
			for time.Since(start) < d {
				took, err := measure.Timed(func() error { return once(gctx) })
				if err != nil {
					return err
				}
				mu.Lock()
				l.Times = append(l.Times, took)
				mu.Unlock()
			}
			return nil
		})
	}
	err := g.Wait()
	l.took += time.Since(start)
	l.CPU += measure.MachineCPU() - before
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
func burst(ctx context.Context, b *bench) ([]measure.Row, error) {
	const n = 100
	var best measure.Samples
	for range b.rounds {
		d, err := b.oneBurst(ctx, n)
		if err != nil {
			return nil, err
		}
		best.Times = append(best.Times, d)
	}
	r := measure.NewRow("C3_ms", "100 at once until the last one's first exit code; all held, each answers again; median of rounds", "ms", best.P50()).
		Target(measure.AtMost, 350, 160).Details(&best).With(b.features)
	rows := []measure.Row{r}
	for _, name := range []string{"crun", "podman"} {
		if d, ok, err := b.rivals.burst(ctx, name, n); err != nil {
			return rows, err
		} else if ok {
			rows = append(rows, r.Against(name+" run", measure.Milliseconds(d)))
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
	err := measure.EachOf(n, n, func(i int) (err error) { sandboxes[i], err = b.first(ctx); return })
	d := time.Since(start)
	if err == nil {
		err = measure.EachOf(n, n, func(i int) error { return runTrue(ctx, sandboxes[i]) })
	}
	return d, errors.Join(err, measure.EachOf(n, 8, func(i int) error { return kill(sandboxes[i], nil) }))
}
