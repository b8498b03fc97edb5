package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/units"
)

// scrubFlags are those of what is not packed.
func scrubFlags(f *flags) *client.Scrub {
	s := new(client.Scrub)
	add := func(list *[]string) func(string) error {
		return func(pattern string) error { *list = append(*list, pattern); return nil }
	}
	f.Func("remove", "leave out what matches the `pattern`, an absolute path with * and **; may be repeated", add(&s.Remove))
	f.Func("keep", "keep what matches the `pattern`, whatever else says; may be repeated", add(&s.Keep))
	f.BoolVar(&s.NoDefaults, "all", false, "leave out nothing by default but the platform's own: no caches, no histories")
	f.StringVar(&s.Secrets, "secrets", "", "`remove`, keep or refuse files that hold what looks like a secret")
	return s
}

func runPack(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox pack")
	scrub := scrubFlags(f)
	c, pos, err := f.connect(args, 2, 2, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	l, report, err := c.Sandbox(pos[0]).Pack(ctx, pos[1], scrub)
	if err != nil {
		return ofScrub(asGiven(err, "name", "NAME"))
	}
	if f.output == "json" {
		return f.print(map[string]any{"layer": l, "report": report}, "", nil)
	}
	rows := [][]string{
		{"name", l.Name}, {"digest", l.Digest}, {"files", fmt.Sprint(report.Files)}, {"size", units.Bytes(report.Bytes)},
		{"stood still", report.Frozen.Round(10 * time.Microsecond).String()},
	}
	if report.Collapsed > 0 {
		rows = append(rows, []string{"became one with", fmt.Sprintf("%d packs below", report.Collapsed)})
	}
	return f.print(nil, "", append(rows, removedRows(report)...))
}

// removedRows tell what was left out.
func removedRows(r *client.PackReport) (rows [][]string) {
	for _, x := range r.Removed {
		what := x.Reason
		if x.Note != "" {
			what += ", " + x.Note
		}
		rows = append(rows, []string{"left out", fmt.Sprintf("%s (%s): %d files, %s", x.Path, what, x.Files, units.Bytes(x.Bytes))})
	}
	if r.RemovedMore > 0 {
		rows = append(rows, []string{"left out", fmt.Sprintf("%d more", r.RemovedMore)})
	}
	return rows
}

// ofScrub names the flags in place of the fields.
func ofScrub(err error) error {
	de, ok := errors.AsType[*dsec.Error](err)
	if !ok {
		return err
	}
	if field, ok := strings.CutPrefix(de.Field, "scrub."); ok {
		return asGiven(err, de.Field, "--"+field)
	}
	return err
}

func runFork(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox fork")
	var o client.ForkOptions
	var envs, labels pairs
	n := f.Int("n", 1, "make `N` sandboxes, at most 1000")
	f.Var(&envs, "e", "`KEY=VALUE` for every command, over the sandbox's own; may be repeated")
	f.Var(&labels, "label", "`KEY=VALUE` beside the sandbox's own; may be repeated")
	f.Func("job", "`name` of the job that they belong to; default the sandbox's", func(s string) error { o.Job = &s; return nil })
	f.StringVar(&o.RequestID, "request-id", "", "`ID` that makes the fork repeatable: same ID, same sandboxes")
	c, pos, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	o.Env, o.Labels = envs.m, labels.m
	results, report, err := c.Sandbox(pos[0]).Fork(ctx, *n, o)
	if err != nil {
		return asGiven(err, "count", "-n")
	}
	return printCreated(f, results, func(items []createdItem) any { return map[string]any{"sandboxes": items, "report": report} })
}

func runMigrate(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox migrate")
	var o client.MigrateOptions
	f.BoolVar(&o.LoseMemory, "lose-memory", false, "go on though processes and their memory are lost: only the disk is moved")
	f.BoolVar(&o.LoseActions, "lose-actions", false, "go on though what has an action ID is done again where it is asked for again")
	c, pos, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	s, report, err := c.Sandbox(pos[0]).Migrate(ctx, o)
	if err != nil {
		return asGiven(err, "lose_memory", "--lose-memory", "lose_actions", "--lose-actions")
	}
	return f.print(map[string]any{"id": s.ID(), "report": report}, "", [][]string{{string(s.ID())}})
}

// createdItem is one of many that were to be made, as the CLI shows it.
type createdItem struct {
	ID    dsec.SandboxID `json:"id,omitempty"`
	Warm  bool           `json:"warm,omitempty"`
	Error string         `json:"error,omitempty"`
	Code  dsec.Code      `json:"code,omitempty"`
}

// printCreated prints what was made, as JSON within a document, and fails where something was not.
func printCreated(f *flags, results []client.Created, document func([]createdItem) any) error {
	var items []createdItem
	var rows [][]string
	var failed []error
	for _, r := range results {
		if r.Err != nil {
			failed = append(failed, r.Err)
			items = append(items, createdItem{Error: r.Err.Error(), Code: dsec.CodeOf(r.Err)})
			continue
		}
		items = append(items, createdItem{ID: r.Sandbox.ID(), Warm: r.Sandbox.Warm})
		rows = append(rows, []string{string(r.Sandbox.ID())})
	}
	if err := f.print(document(items), "", rows); err != nil {
		return err
	}
	if len(failed) > 0 {
		return exitError{exitCode(failed[0]), fmt.Sprintf("%d of %d were not made; the first: %s", len(failed), len(results), line(failed[0]))}
	}
	return nil
}
