package main

import (
	"context"
	"errors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/checkout"
	"github.com/opendsec/dsec/internal/layer/tardir"
)

// ofGit and ofRegistry are the flags that only --git and --image take.
var (
	ofGit      = []string{"ref", "depth", "no-git", "submodules"}
	ofRegistry = []string{"platform", "credentials", "verify"}
)

// checkoutFlags are those of `dsec layer import --git`.
type checkoutFlags struct {
	ref               string
	depth             int
	noGit, submodules bool
}

func (c *checkoutFlags) add(f *flags) {
	f.StringVar(&c.ref, "ref", "", "of --git: `branch`, tag or commit; default what the repository has checked out")
	f.IntVar(&c.depth, "depth", 1, "of --git: `commits` of the history that are kept; 0 is all up to the one that is checked out")
	f.BoolVar(&c.noGit, "no-git", false, "of --git: without .git")
	f.BoolVar(&c.submodules, "submodules", false, "of --git: with submodules")
}

// fromGit checks a commit out with the user's own git and sends it.
func (o *layerImport) fromGit(ctx context.Context, e *env, c *client.Client, name string, m *meter) (client.Layer, []string, error) {
	opt := checkout.Options{From: o.git, Ref: o.checkout.ref, Depth: o.checkout.depth, NoGit: o.checkout.noGit, Submodules: o.checkout.submodules}
	if m != nil {
		opt.Progress = e.stderr
	}
	tree, err := checkout.Make(ctx, opt)
	if err != nil {
		return client.Layer{}, nil, ofCheckout(err)
	}
	defer func() { _ = tree.Remove() }()
	o.Origin = &client.LayerOrigin{Type: "git", Location: tree.From, Revision: tree.Commit}
	r := tarOf(tree.Dir, tardir.WriteAsRoot)
	defer func() { _ = r.Close() }()
	l, findings, err := c.ImportLayer(ctx, name, o.ImportOptions, m.reader(r, 0))
	if err != nil {
		err = ofImport(err, tree.From)
	}
	return l, findings, err
}

// ofCheckout names the flag at fault.
func ofCheckout(err error) error {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.Field == "" {
		return err
	}
	named := *e
	named.Field = "--" + e.Field
	return &named
}
