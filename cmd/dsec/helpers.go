package main

import (
	"context"

	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/scrub"
)

// runImportHelper is the process that reads one archive, started by the edge.
// It does not return.
func runImportHelper(context.Context, *env, []string) error {
	layer.HelperMain()
	return nil
}

// runScrubReader is the process that reads layers over again for the edge.
func runScrubReader(context.Context, *env, []string) error { return scrub.Main() }
