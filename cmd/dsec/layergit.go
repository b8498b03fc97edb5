package main

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

type checkoutFlags struct{}

func (c *checkoutFlags) add(*flags) {}

func (o *layerImport) fromGit(context.Context, *env, *client.Client, string, *meter) (client.Layer, []string, error) {
	return client.Layer{}, nil, dsec.Errorf(dsec.CodeUnsupported, "not yet")
}
