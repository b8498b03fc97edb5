package main

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func runJobCreate(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "job create")
	var o client.JobOptions
	var labels pairs
	f.Var(&labels, "label", "`KEY=VALUE` to find it by; may be repeated")
	f.Var(span{&o.Lease}, "lease", "how `long` a heartbeat keeps it, 5s to 24h; default it never expires")
	f.BoolVar(&o.KillOnExpiry, "kill", false, "kill its sandboxes once the lease ran out, in place of pausing them")
	grace := f.String("grace", "", "kill them that long after they were paused for it; default 24h")
	names, err := f.parse(args, 1, 1, 0)
	if err != nil {
		return err
	}
	o.Labels = labels.m
	if o.Grace, err = lifetime("--grace", *grace); err != nil {
		return err
	}
	c, err := f.client()
	if err != nil {
		return err
	}
	defer c.Close()
	j, err := c.CreateJob(ctx, names[0], o)
	if err != nil {
		return err
	}
	return f.print(map[string]any{"name": j.Name()}, "", [][]string{{j.Name()}})
}

func runJobList(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "job list")
	var o client.JobListOptions
	var labels pairs
	all := f.Bool("a", false, "also those that have ended")
	f.Var(&labels, "label", "only with that `KEY=VALUE`; may be repeated")
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	if o.Labels = labels.m; *all {
		o.States = []dsec.JobState{dsec.JobActive, dsec.JobExpired, dsec.JobEnded}
	}
	jobs, rows := []*dsec.Job{}, [][]string{}
	for j, err := range c.Jobs(ctx, o) {
		if err != nil {
			return err
		}
		jobs = append(jobs, j)
		rows = append(rows, []string{j.Name, string(j.State), leaseText(j), age(j.Created), dash((&pairs{j.Labels}).String())})
	}
	return f.print(jobs, "NAME STATE LEASE AGE LABELS", rows)
}

func leaseText(j *dsec.Job) string {
	if j.Lease == 0 {
		return "-"
	}
	return j.Lease.String()
}

func runJobGet(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "job get")
	c, names, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	j, err := c.Job(names[0]).Info(ctx)
	if err != nil {
		return err
	}
	rows := [][]string{
		{"name", j.Name}, {"state", fmt.Sprintf("%s since %s", j.State, j.Changed.Format(time.RFC3339))},
		{"lease", leaseText(j)}, {"labels", dash((&pairs{j.Labels}).String())}, {"created", j.Created.Format(time.RFC3339)},
	}
	if j.Lease > 0 {
		rows = append(rows, []string{"on expiry", j.OnExpiry})
		if j.OnExpiry == "pause" {
			rows = append(rows, []string{"grace", j.Grace.String()})
		}
	}
	return f.print(j, "", rows)
}

func runJobHeartbeat(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "job heartbeat")
	c, names, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	j, err := c.Job(names[0]).Heartbeat(ctx)
	if err != nil {
		return err
	}
	return f.print(j, "", nil)
}

func runJobPause(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "job pause")
	options := pauseFlags(f)
	return onJob(ctx, f, args, func(ctx context.Context, j *client.Job) ([]client.JobResult, error) {
		o, err := options()
		if err != nil {
			return nil, err
		}
		return j.Pause(ctx, o)
	})
}

func runJobResume(ctx context.Context, e *env, args []string) error {
	return onJob(ctx, clientFlags(e, "job resume"), args, func(ctx context.Context, j *client.Job) ([]client.JobResult, error) { return j.Resume(ctx) })
}

func runJobKill(ctx context.Context, e *env, args []string) error {
	return onJob(ctx, clientFlags(e, "job kill"), args, func(ctx context.Context, j *client.Job) ([]client.JobResult, error) { return j.Kill(ctx) })
}

func runJobEnd(ctx context.Context, e *env, args []string) error {
	return onJob(ctx, clientFlags(e, "job end"), args, func(ctx context.Context, j *client.Job) ([]client.JobResult, error) { return j.End(ctx) })
}

// onJob does something to the sandboxes of a job and shows what became of each.
func onJob(ctx context.Context, f *flags, args []string, act func(context.Context, *client.Job) ([]client.JobResult, error)) error {
	c, names, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	results, err := act(ctx, c.Job(names[0]))
	if err != nil {
		return err
	}
	type item struct {
		ID    dsec.SandboxID `json:"id"`
		State dsec.State     `json:"state"`
		Error string         `json:"error,omitempty"`
		Code  dsec.Code      `json:"code,omitempty"`
	}
	items, rows := []item{}, [][]string{}
	var failed []error
	for _, r := range results {
		it := item{ID: r.ID, State: r.State}
		if r.Err != nil {
			failed = append(failed, r.Err)
			it.Error, it.Code = r.Err.Error(), dsec.CodeOf(r.Err)
		}
		items = append(items, it)
		rows = append(rows, []string{string(r.ID), string(r.State), dash(it.Error)})
	}
	if err := f.print(items, "ID STATE ERROR", rows); err != nil {
		return err
	}
	if len(failed) > 0 {
		return exitError{exitCode(failed[0]), fmt.Sprintf("%d of %d failed; the first: %s", len(failed), len(results), line(failed[0]))}
	}
	return nil
}
