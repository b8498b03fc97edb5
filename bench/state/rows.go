package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/bench/internal/measure"
	"github.com/opendsec/dsec/client"
)

const gib = 1 << 30

// freeze: a sandbox that does nothing stops.
func (b *bench) freeze(ctx context.Context) ([]measure.Row, error) {
	sb, err := b.create(ctx, "")
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Kill(context.WithoutCancel(ctx)) }()
	s, err := b.samples(ctx, 10*b.rounds, func(ctx context.Context) error { _, err := sb.Resume(ctx); return err },
		func(ctx context.Context) error { _, err := sb.Pause(ctx, client.PauseOptions{}); return err })
	if err != nil {
		return nil, err
	}
	return []measure.Row{measure.NewRow("R1_freeze_ms", "pause of an idle sandbox, until nothing in it runs, p50", "ms", s.P50()).
		Target(measure.AtMost, 20, 1).Details(s)}, nil
}

// holder has a script hold so much memory.
func (b *bench) holder(ctx context.Context, script string, bytes int64) (*client.Sandbox, error) {
	sb, err := b.create(ctx, "")
	if err != nil {
		return nil, err
	}
	if _, err = sb.Shell(script).Detach(ctx); err == nil {
		err = resident(ctx, sb, bytes)
	}
	if err != nil {
		_ = sb.Kill(context.WithoutCancel(ctx))
		return nil, err
	}
	return sb, nil
}

// resident waits until a sandbox has so much of the node's memory.
func resident(ctx context.Context, sb *client.Sandbox, bytes int64) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		u, err := sb.Usage(ctx)
		if err != nil || u.MemoryBytes >= bytes {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("it has %d bytes of memory, want %d", u.MemoryBytes, bytes)
		}
	}
}

// moved pauses a sandbox that has so much memory, again and again, and tells at what
// rate that is moved out, in GiB a second, and how much of it, in percent.
func (b *bench) moved(ctx context.Context, sb *client.Sandbox, bytes int64, resume func(context.Context) error) (rate, back float64, s *measure.Samples, err error) {
	s = new(measure.Samples)
	var before, after int64
	for range b.rounds {
		if err := resident(ctx, sb, bytes); err != nil {
			return 0, 0, nil, err
		}
		var info *dsec.Sandbox
		d, err := measure.Timed(func() (err error) { info, err = sb.Pause(ctx, client.PauseOptions{Wait: true}); return err })
		if err != nil {
			return 0, 0, nil, err
		}
		s.Times = append(s.Times, d)
		before, after = before+info.Pause.MemoryBefore, after+info.Pause.Memory
		if err := resume(ctx); err != nil {
			return 0, 0, nil, err
		}
	}
	each := float64(before-after) / float64(len(s.Times))
	return each / gib / s.Quantile(0.5).Seconds(), 100 * float64(before-after) / float64(before), s, nil
}

// pageOut: 256 MiB of private memory go, and come back.
func (b *bench) pageOut(ctx context.Context) ([]measure.Row, error) {
	const held = 256 << 20
	sb, err := b.holder(ctx, fmt.Sprintf("(head -c %d /dev/urandom; sleep 100000) | tail -c %d > /dev/null", held, held), held)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Kill(context.WithoutCancel(ctx)) }()
	first := new(measure.Samples)
	rate, back, s, err := b.moved(ctx, sb, held, func(ctx context.Context) error {
		d, err := measure.Timed(func() error { _, err := output(ctx, sb, "true"); return err })
		first.Times = append(first.Times, d)
		return err
	})
	if err != nil {
		return nil, err
	}
	return []measure.Row{
		measure.NewRow("R1_pageout_gib_s", "256 MiB of private memory into zram, with the freeze", "GiB/s", rate).Target(measure.AtLeast, 0.5, 1).Details(s),
		measure.NewRow("R1_given_back_pct", "of a sandbox's memory given back to the node by that", "%", back).Target(measure.AtLeast, 90, 95),
		measure.NewRow("R1_resume_ms", "first command in it after that, p50", "ms", first.P50()).Target(measure.AtMost, 50, 20).Details(first),
	}, nil
}

// forked: memory that five processes share go, which the kernel moves by another way.
func (b *bench) forked(ctx context.Context) ([]measure.Row, error) {
	const held = 128 << 20
	sb, err := b.holder(ctx, `x=$(dd if=/dev/urandom bs=1M count=100 2>/dev/null | /bin/busybox base64)
		for i in 1 2 3 4; do (sleep 100000; echo "$x" > /dev/null) & done; wait; echo "$x" > /dev/null`, held)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sb.Kill(context.WithoutCancel(ctx)) }()
	rate, back, s, err := b.moved(ctx, sb, held, func(ctx context.Context) error { _, err := sb.Resume(ctx); return err })
	if err != nil {
		return nil, err
	}
	return []measure.Row{
		measure.NewRow("R1_forked_gib_s", "memory that five processes share since a fork, into zram", "GiB/s", rate).Target(measure.AtLeast, 0.15, 0.25).Details(s),
		measure.NewRow("R1_forked_back_pct", "of it given back to the node", "%", back).Target(measure.AtLeast, 90, 95),
	}, nil
}

// jobs: all sandboxes of a job at once.
func (b *bench) jobs(ctx context.Context) ([]measure.Row, error) {
	job, err := b.CreateJob(ctx, "bench", client.JobOptions{})
	if err != nil {
		return nil, err
	}
	defer func() { _, _ = job.End(context.WithoutCancel(ctx)) }()
	made, err := b.CreateSandboxes(ctx, b.job, client.SandboxOptions{Layers: []string{layer}, Job: job.Name()})
	if err != nil {
		return nil, err
	}
	for _, m := range made {
		if m.Err != nil {
			return nil, m.Err
		}
	}
	pause, resume := new(measure.Samples), new(measure.Samples)
	for range b.rounds {
		if err := timeJob(ctx, pause, func(ctx context.Context) ([]client.JobResult, error) { return job.Pause(ctx, client.PauseOptions{}) }, b.job); err != nil {
			return nil, err
		}
		if err := timeJob(ctx, resume, job.Resume, b.job); err != nil {
			return nil, err
		}
	}
	what := fmt.Sprintf("%d sandboxes of a job, in one call", b.job)
	return []measure.Row{
		measure.NewRow("R2_job_pause_s", "pause of "+what+", p50", "s", pause.P50()/1000).Target(measure.AtMost, 5, 1).Details(pause),
		measure.NewRow("R2_job_resume_s", "resume of "+what+", p50", "s", resume.P50()/1000).Details(resume),
	}, nil
}

func timeJob(ctx context.Context, s *measure.Samples, act func(context.Context) ([]client.JobResult, error), want int) error {
	var results []client.JobResult
	d, err := measure.Timed(func() (err error) { results, err = act(ctx); return err })
	if err != nil {
		return err
	}
	if len(results) != want {
		return fmt.Errorf("%d results, want %d", len(results), want)
	}
	for _, r := range results {
		if r.Err != nil {
			return r.Err
		}
	}
	s.Times = append(s.Times, d)
	return nil
}

// trajectoryOf is a sandbox in which actions are done.
type trajectoryOf struct{ sb *client.Sandbox }

// all asks for so many actions, one after the other.
func (t trajectoryOf) all(ctx context.Context, actions int) (s *measure.Samples, replayed int, err error) {
	s = new(measure.Samples)
	for i := range actions {
		cmd := t.sb.Command("/bin/busybox", "echo", fmt.Sprint(i))
		cmd.ActionID = fmt.Sprint(i)
		d, err := measure.Timed(func() error {
			out, _, err := cmd.Output(ctx)
			if err == nil && string(out) != fmt.Sprintln(i) {
				err = fmt.Errorf("action %d says %q", i, out)
			}
			return err
		})
		if err != nil {
			return nil, 0, err
		}
		if cmd.Replayed {
			replayed++
		}
		s.Times = append(s.Times, d)
	}
	return s, replayed, nil
}

// forward: actions that were done are answered from the log, of one rollout and of many at
// once, as after a preemption.
func (b *bench) forward(ctx context.Context) ([]measure.Row, error) {
	const rollouts, actions = 16, 500
	var all []trajectoryOf
	defer func() {
		for _, t := range all {
			_ = t.sb.Kill(context.WithoutCancel(ctx))
		}
	}()
	for range rollouts {
		sb, err := b.create(ctx, "")
		if err != nil {
			return nil, err
		}
		all = append(all, trajectoryOf{sb})
	}
	first, n, err := all[0].all(ctx, actions)
	if err == nil && n != 0 {
		err = fmt.Errorf("%d of the first were replayed", n)
	}
	if err != nil {
		return nil, err
	}
	var rest errgroup.Group
	for _, t := range all[1:] {
		rest.Go(func() error { _, _, err := t.all(ctx, actions); return err })
	}
	if err := rest.Wait(); err != nil {
		return nil, err
	}
	again, n, err := all[0].all(ctx, actions)
	if err == nil && n != actions {
		err = fmt.Errorf("%d of %d were replayed", n, actions)
	}
	if err != nil {
		return nil, err
	}
	var together errgroup.Group
	took, err := measure.Timed(func() error {
		for _, t := range all {
			together.Go(func() error {
				_, n, err := t.all(ctx, actions)
				if err == nil && n != actions {
					err = fmt.Errorf("%d of %d were replayed", n, actions)
				}
				return err
			})
		}
		return together.Wait()
	})
	if err != nil {
		return nil, err
	}
	total := time.Duration(0)
	for _, d := range again.Times {
		total += d
	}
	return []measure.Row{
		measure.NewRow("T1_exec_ms", "echo, run as an action, by the API, p50", "ms", first.P50()).Details(first),
		measure.NewRow("T2_fastforward_per_s", fmt.Sprintf("actions that were done, asked for again by %d rollouts at once, each one after the other", rollouts), "1/s", rollouts*actions/took.Seconds()).
			Target(measure.AtLeast, 2000, 10_000),
		measure.NewRow("T2_one_per_s", "the same by one rollout alone", "1/s", actions/total.Seconds()).Details(again),
	}, nil
}
