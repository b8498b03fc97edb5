package main

import (
	"context"

	"github.com/opendsec/dsec/internal/layer"
)

// runImportHelper is the process that reads one archive, started by the edge.
// It does not return.
func runImportHelper(context.Context, *env, []string) error {
	layer.HelperMain()
	return nil
}
