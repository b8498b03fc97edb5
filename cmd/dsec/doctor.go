package main

import (
	"context"

	"github.com/opendsec/dsec/internal/doctor"
)

// runDoctor tells what this machine can do. It fails where sandboxes cannot
// run at all.
func runDoctor(ctx context.Context, e *env, args []string) error {
	f := newFlags(e, "doctor")
	f.StringVar(&f.output, "o", "table", "output `format`: table or json")
	if _, err := f.parse(args, 0, 0, 0); err != nil {
		return err
	}
	cfg, err := loadConfig(f.config, true)
	if err != nil {
		return err
	}
	found := doctor.Check(ctx, doctor.Options{Dir: cfg.DataDir, Volumes: cfg.disk(nil), More: layerQuestions(cfg)})
	rows := [][]string{}
	for _, c := range found {
		mark := "ok"
		if !c.OK {
			mark = "missing"
		}
		rows = append(rows, []string{mark, c.Name, string(c.Need), c.Detail})
		if c.Fix != "" {
			rows = append(rows, []string{"", "", "", "-> " + c.Fix})
		}
	}
	if err := f.print(found, " NAME NEED DETAIL", rows); err != nil {
		return err
	}
	if !doctor.OK(found) {
		return exitError{1, "containers cannot run on this machine; see what is required and missing above"}
	}
	return nil
}
