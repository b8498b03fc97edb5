package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// filterFlags are those of what picks events.
func filterFlags(f *flags) func() client.EventFilter {
	var o client.EventFilter
	var labels pairs
	f.StringVar(&o.Job, "job", "", "only of the job of that `name`, and its sandboxes")
	f.Var(&labels, "label", "only with `KEY=VALUE`; may be repeated")
	f.Func("kind", "only sandbox or job events; may be repeated", func(s string) error {
		if s != client.EventSandbox && s != client.EventJob {
			return errors.New("want sandbox or job")
		}
		o.Kinds = append(o.Kinds, s)
		return nil
	})
	f.Func("state", "only of that `state`, for example failed; may be repeated", func(s string) error { o.States = append(o.States, s); return nil })
	f.Func("sandbox", "only of the sandbox of that `ID`; may be repeated", func(s string) error {
		o.SandboxIDs = append(o.SandboxIDs, dsec.SandboxID(s))
		return nil
	})
	return func() client.EventFilter { o.Labels = labels.m; return o }
}

func runEvents(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "events")
	filter := filterFlags(f)
	var o client.EventOptions
	f.StringVar(&o.Cursor, "cursor", "", "go on behind the event with that `cursor` (-o json tells it)")
	f.BoolVar(&o.FromStart, "from-start", false, "begin with the oldest event that is kept")
	n := f.Int("n", 0, "end after `N` events; 0 is never")
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	o.EventFilter = filter()
	seen := 0
	for ev, err := range c.Events(ctx, o) {
		if err != nil {
			return err
		}
		line := eventText(ev)
		if f.output == "json" {
			b, err := json.Marshal(ev)
			if err != nil {
				return err
			}
			line = string(b)
		}
		if _, err := fmt.Fprintln(e.stdout, line); err != nil {
			return err
		}
		if seen++; seen == *n {
			return nil
		}
	}
	return ctx.Err()
}

// eventText is an event in one line.
func eventText(e *client.Event) string {
	words := []string{e.Time.Format("2006-01-02T15:04:05.000Z"), fmt.Sprintf("%-11s", e.Kind)}
	add := func(format, value string) {
		if value != "" {
			words = append(words, fmt.Sprintf(format, value))
		}
	}
	switch e.Kind {
	case client.EventSandbox:
		add("%s", string(e.SandboxID))
		add("%-8s", e.State)
		add("job %s", e.Job)
		add("%s", strings.Join(e.Conditions, " "))
		add("(%s)", e.Reason)
	case client.EventJob:
		add("%s", e.Job)
		add("%s", e.State)
	default:
		add("node %s", e.Node)
		add("%s", e.Reason)
	}
	if e.Repeated {
		words = append(words, "(repeated)")
	}
	return strings.Join(words, " ")
}
