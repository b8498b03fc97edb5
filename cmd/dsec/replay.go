package main

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/opendsec/dsec/client"
)

// exitDiffers is the exit code of a replay that found a difference.
const exitDiffers = 1

func runReplay(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "replay")
	var o client.ReplayOptions
	f.Func("layer", "make the fresh sandbox of this `layer` in place of the recorded ones; may be repeated, lowest first", func(s string) error {
		o.Layers = append(o.Layers, s)
		return nil
	})
	f.Uint64Var(&o.Until, "until", 0, "`number` of the last entry; default the last there is")
	f.BoolVar(&o.IgnoreOutput, "ignore-output", false, "compare how actions ended, and not what they wrote or answered")
	f.Func("mask", "what matches the `regexp` in output is taken for equal; may be repeated", func(s string) error {
		re, err := regexp.Compile(s)
		o.Mask = append(o.Mask, re)
		return err
	})
	f.BoolVar(&o.Keep, "keep", false, "leave the fresh sandbox running, and print its ID")
	quiet := f.Bool("q", false, "do not tell each step on standard error")
	c, ids, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	if !*quiet {
		o.Step = func(s client.ReplayStep) {
			_, _ = fmt.Fprintf(e.stderr, "%-5d %s  %s, then %s\n", s.Seq, stepText(s), s.Replayed.Round(time.Microsecond), s.Original.Round(time.Microsecond))
		}
	}
	r, err := c.Sandbox(ids[0]).Replay(ctx, o)
	if r != nil {
		if perr := printReplay(f, r, o.Keep, err == nil); perr != nil {
			return perr
		}
	}
	if err == nil && !r.Equal() {
		return exitError{exitDiffers, ""}
	}
	return err
}

func stepText(s client.ReplayStep) string {
	return strings.TrimRight(kindName(s.Kind.String())+" "+requestText(s.Request), " ")
}

// replayReport is a replay as JSON. Equal is unset where it did not come to its end.
type replayReport struct {
	Sandbox    string            `json:"sandbox,omitempty"` // where it is kept
	Steps      int               `json:"steps"`
	Unended    int               `json:"unended"`
	Skipped    int               `json:"skipped"`
	Original   string            `json:"original"`
	Replayed   string            `json:"replayed"`
	Equal      *bool             `json:"equal,omitempty"`
	Difference *differenceReport `json:"difference,omitempty"`
}

type differenceReport struct {
	Seq      uint64 `json:"seq"`
	Kind     string `json:"kind"`
	Request  string `json:"request"`
	What     string `json:"what"`
	Expected string `json:"expected"`
	Got      string `json:"got"`
}

func printReplay(f *flags, r *client.Replay, kept, whole bool) error {
	out := replayReport{
		Steps: r.Steps, Unended: r.Unended, Skipped: r.Skipped,
		Original: r.Original.Round(time.Microsecond).String(), Replayed: r.Replayed.Round(time.Microsecond).String(),
	}
	if kept {
		out.Sandbox = string(r.Sandbox.ID())
	}
	if equal := r.Equal(); whole {
		out.Equal = &equal
	}
	rows := [][]string{
		{"steps", fmt.Sprintf("%d, in %s; then %s", out.Steps, out.Replayed, out.Original)},
		{"without an end", fmt.Sprint(out.Unended)}, {"not repeated", fmt.Sprint(out.Skipped)},
	}
	if out.Sandbox != "" {
		rows = append(rows, []string{"sandbox", out.Sandbox})
	}
	switch d := r.Difference; {
	case d != nil:
		out.Difference = &differenceReport{d.Seq, kindName(d.Kind.String()), requestText(d.Request), d.What, d.Expected, d.Got}
		rows = append(rows, []string{"differs", fmt.Sprintf("entry %d, %s: %s", d.Seq, stepText(d.ReplayStep), d.What)}, []string{"  expected", d.Expected}, []string{"  got", d.Got})
	case whole:
		rows = append(rows, []string{"equal", "yes"})
	default:
		rows = append(rows, []string{"equal", "as far as it came"})
	}
	return f.print(out, "", rows)
}
