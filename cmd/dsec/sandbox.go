package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/units"
)

func runCreate(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox create")
	var o client.SandboxOptions
	var envs, labels pairs
	var cpus float64
	n := f.Int("n", 1, "make `N` sandboxes alike, at most 1000")
	f.Func("backend", "`kind`: container (default) or fake", func(s string) error { o.Backend = dsec.Kind(s); return nil })
	f.Float64Var(&cpus, "cpus", 0, "CPUs, for example 1.5; default the server's")
	f.Var(size{&o.Limits.MemoryBytes}, "memory", "memory limit, for example 512M")
	f.Var(size{&o.Limits.DiskBytes}, "disk", "limit of the writable layer, for example 2G")
	f.Int64Var(&o.Limits.DiskInodes, "inodes", 0, "limit of files in the writable layer")
	f.Int64Var(&o.Limits.Pids, "pids", 0, "limit of processes and threads")
	f.Var(&envs, "e", "`KEY=VALUE` for every command; may be repeated")
	f.StringVar(&o.User, "u", "", "`user` of every command: name, uid, name:group or uid:gid")
	f.StringVar(&o.Workdir, "w", "", "working `directory` of every command")
	idle := f.String("idle-timeout", "", "kill after that long without activity, for example 30m; 0 is never")
	f.Func("idle-action", "what is done after --idle-timeout: `kill or pause`; default kill", func(s string) error {
		if o.IdleAction = dsec.IdleAction(s); o.IdleAction != dsec.IdleKill && o.IdleAction != dsec.IdlePause {
			return errors.New("want kill or pause")
		}
		return nil
	})
	life := f.String("max-lifetime", "", "kill that long after the create; 0 is never")
	f.Var(&labels, "label", "`KEY=VALUE` to find it by; may be repeated")
	f.StringVar(&o.Job, "job", "", "`name` of the job that it belongs to")
	f.StringVar(&o.RequestID, "request-id", "", "`ID` that makes the create repeatable: same ID, same sandbox")
	layers, err := f.parse(args, 0, -1, 0)
	if err != nil {
		return err
	}
	o.Layers, o.Env, o.Labels, o.Limits.MilliCPU = layers, envs.m, labels.m, int64(math.Round(cpus*1000))
	if o.IdleTimeout, err = lifetime("--idle-timeout", *idle); err != nil {
		return err
	}
	if o.MaxLifetime, err = lifetime("--max-lifetime", *life); err != nil {
		return err
	}
	c, err := f.client()
	if err != nil {
		return err
	}
	defer c.Close()
	if *n == 1 {
		sb, err := c.CreateSandbox(ctx, o)
		if err != nil {
			return err
		}
		return f.print(map[string]any{"id": sb.ID(), "warm": sb.Warm}, "", [][]string{{string(sb.ID())}})
	}
	return createMany(ctx, f, c, *n, o)
}

func createMany(ctx context.Context, f *flags, c *client.Client, n int, o client.SandboxOptions) error {
	results, err := c.CreateSandboxes(ctx, n, o)
	if err != nil {
		return asGiven(err, "count", "-n")
	}
	return printCreated(f, results, func(items []createdItem) any { return items })
}

// lifetime reads a flag in which 0 is never and nothing is the server's default.
func lifetime(flag, text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	var d time.Duration
	err := (span{&d}).Set(text)
	if err == nil && d < 0 {
		err = errors.New("want a time to come")
	}
	if err != nil {
		return 0, dsec.Invalid(flag, "%v, or 0 for never", err)
	}
	if d == 0 {
		return client.Never, nil
	}
	return d, nil
}

// sandboxView is a sandbox as the CLI shows it.
type sandboxView struct {
	ID          dsec.SandboxID    `json:"id"`
	State       dsec.State        `json:"state"`
	Reason      string            `json:"reason,omitempty"`
	Conditions  []string          `json:"conditions,omitempty"`
	Backend     dsec.Kind         `json:"backend"`
	Layers      []string          `json:"layers"`
	Limits      dsec.Limits       `json:"limits"`
	User        string            `json:"user,omitempty"`
	Workdir     string            `json:"workdir,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Job         string            `json:"job,omitempty"`
	Created     time.Time         `json:"created"`
	Active      time.Time         `json:"active,omitzero"`
	IdleTimeout string            `json:"idle_timeout,omitempty"`
	IdleAction  dsec.IdleAction   `json:"idle_action,omitempty"`
	Deadline    time.Time         `json:"deadline,omitzero"`
	Pause       *dsec.Pause       `json:"pause,omitempty"`
}

func view(s *dsec.Sandbox) sandboxView {
	v := sandboxView{
		ID: s.ID, State: s.State, Reason: s.Reason, Conditions: s.Conditions, Backend: s.Spec.Kind, Layers: s.Spec.Layers,
		Limits: s.Spec.Limits, User: s.Spec.User, Workdir: s.Spec.Workdir, Labels: s.Spec.Labels, Job: s.Spec.Job,
		Created: s.Created, Active: s.Active, Deadline: s.Deadline, Pause: s.Pause,
	}
	if s.Spec.IdleTimeout > 0 {
		v.IdleTimeout, v.IdleAction = s.Spec.IdleTimeout.String(), s.Spec.IdleAction
	}
	if v.Layers == nil {
		v.Layers = []string{}
	}
	return v
}

func runList(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox list")
	var o client.ListOptions
	var labels pairs
	all := f.Bool("a", false, "also those that have ended")
	quiet := f.Bool("q", false, "IDs only")
	f.StringVar(&o.Job, "job", "", "only of that `job`")
	f.Var(&labels, "label", "only with that `KEY=VALUE`; may be repeated")
	f.Func("state", "only in that `state`; may be repeated", func(s string) error {
		if !dsec.State(s).Valid() {
			return errors.New("want pending, starting, running, paused, stopping, stopped, failed or lost")
		}
		o.States = append(o.States, dsec.State(s))
		return nil
	})
	if _, err := f.parse(args, 0, 0, 0); err != nil {
		return err
	}
	if f.output == "json" {
		if err := f.without("with -o json, which has all", "q"); err != nil {
			return err
		}
	}
	if len(o.States) > 0 {
		if err := f.without("with --state", "a"); err != nil {
			return err
		}
	}
	if *all {
		o.States = []dsec.State{
			dsec.StatePending, dsec.StateStarting, dsec.StateRunning, dsec.StatePaused, dsec.StateStopping,
			dsec.StateStopped, dsec.StateFailed, dsec.StateLost,
		}
	}
	o.Labels, o.PageSize = labels.m, 1000
	c, err := f.client()
	if err != nil {
		return err
	}
	defer c.Close()
	views, rows := []sandboxView{}, [][]string{}
	for s, err := range c.Sandboxes(ctx, o) {
		if err != nil {
			return err
		}
		views = append(views, view(s))
		rows = append(rows, []string{string(s.ID), string(s.State), string(s.Spec.Kind), first(s.Spec.Layers), dash(s.Spec.Job), age(s.Created), dash(s.Reason)})
	}
	if *quiet {
		for _, v := range views {
			_, _ = fmt.Fprintln(e.stdout, v.ID)
		}
		return nil
	}
	return f.print(views, "ID STATE BACKEND LAYER JOB AGE REASON", rows)
}

func first(s []string) string {
	switch len(s) {
	case 0:
		return "-"
	case 1:
		return s[0]
	}
	return fmt.Sprintf("%s +%d", s[0], len(s)-1)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func age(t time.Time) string {
	d := time.Since(t)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func runGet(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox get")
	c, ids, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := c.Sandbox(ids[0]).Info(ctx)
	if err != nil {
		return err
	}
	l := s.Spec.Limits
	rows := [][]string{
		{"id", string(s.ID)},
		{"state", string(s.State)},
		{"reason", dash(s.Reason)},
		{"backend", string(s.Spec.Kind)},
		{"layers", fmt.Sprint(s.Spec.Layers)},
		{"limits", fmt.Sprintf("%g CPUs, %s memory, %s disk, %d files, %d processes", float64(l.MilliCPU)/1000, units.Bytes(l.MemoryBytes), units.Bytes(l.DiskBytes), l.DiskInodes, l.Pids)},
		{"user", dash(s.Spec.User)},
		{"workdir", dash(s.Spec.Workdir)},
		{"labels", dash((&pairs{s.Spec.Labels}).String())},
		{"job", dash(s.Spec.Job)},
		{"created", s.Created.Format(time.RFC3339)},
	}
	if s.Spec.IdleTimeout > 0 {
		rows = append(rows, []string{"idle timeout", fmt.Sprintf("%s, then %s", s.Spec.IdleTimeout, s.Spec.IdleAction)})
	}
	if !s.Deadline.IsZero() {
		rows = append(rows, []string{"deadline", s.Deadline.Format(time.RFC3339)})
	}
	if p := s.Pause; p != nil {
		rows = append(rows, []string{"paused", pauseText(p)})
	}
	for _, cond := range s.Conditions {
		rows = append(rows, []string{"condition", cond})
	}
	return f.print(view(s), "", rows)
}

func runKill(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox kill")
	return eachSandbox(ctx, f, args, "killed", (*client.Sandbox).Kill)
}

// eachSandbox does the same to each of the sandboxes that args name. One that fails is
// told of, and leaves the others alone.
func eachSandbox(ctx context.Context, f *flags, args []string, what string, act func(*client.Sandbox, context.Context) error) error {
	c, ids, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	var failed error
	done := []string{}
	for _, id := range ids {
		if err := act(c.Sandbox(id), ctx); err != nil {
			_, _ = fmt.Fprintf(f.env.stderr, "dsec: %s: %s\n", id, line(err))
			failed = err
			continue
		}
		done = append(done, id)
	}
	if f.output == "json" {
		if err := f.print(map[string]any{what: done}, "", nil); err != nil {
			return err
		}
	}
	if failed != nil {
		return exitError{code: exitCode(failed)}
	}
	return nil
}
