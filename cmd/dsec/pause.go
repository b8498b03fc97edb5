package main

import (
	"context"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/units"
)

// pauseFlags are those of what pauses.
func pauseFlags(f *flags) func() (client.PauseOptions, error) {
	var o client.PauseOptions
	f.BoolVar(&o.Wait, "wait", false, "return only once the memory was moved out, as far as that goes")
	f.BoolVar(&o.CountLifetime, "count-lifetime", false, "have the maximum lifetime run on meanwhile")
	most := f.String("max-paused", "", "kill what has been paused for that long, for example 12h; 0 is never")
	return func() (_ client.PauseOptions, err error) {
		o.MaxPaused, err = lifetime("--max-paused", *most)
		return o, err
	}
}

func runPause(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "sandbox pause")
	options := pauseFlags(f)
	return eachSandbox(ctx, f, args, "paused", func(s *client.Sandbox, ctx context.Context) error {
		o, err := options()
		if err != nil {
			return err
		}
		info, err := s.Pause(ctx, o)
		if err == nil && o.Wait && info.Pause != nil && f.output != "json" {
			_, err = fmt.Fprintf(e.stdout, "%s  %s\n", s.ID(), pauseText(info.Pause))
		}
		return err
	})
}

func runResume(ctx context.Context, e *env, args []string) error {
	return eachSandbox(ctx, clientFlags(e, "sandbox resume"), args, "resumed", func(s *client.Sandbox, ctx context.Context) error {
		_, err := s.Resume(ctx)
		return err
	})
}

// pauseText tells of a pause in one line.
func pauseText(p *dsec.Pause) string {
	text := "since " + p.Since.Format(time.RFC3339)
	if p.MovedOut {
		text += fmt.Sprintf(", memory %s of %s", units.Bytes(p.Memory), units.Bytes(p.MemoryBefore))
	}
	if p.Note != "" {
		text += " (" + p.Note + ")"
	}
	if !p.Until.IsZero() {
		text += ", is killed " + p.Until.Format(time.RFC3339)
	}
	return text
}
