package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/layer/registry"
	"github.com/opendsec/dsec/internal/units"
)

// layerImport is `dsec layer import`: of a file, an image or a repository.
type layerImport struct {
	client.ImportOptions
	image, platform, credentials string
	verify                       bool
	git                          string
	checkout                     checkoutFlags
	progress                     *string
}

func runLayerImport(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "layer import")
	var o layerImport
	f.StringVar(&o.Select, "select", "", "`tag` or digest of the image wanted from an archive that holds several")
	f.Func("kind", "`KIND`: base (default), workspace (of --git the default) or toolkit", func(s string) error { o.Kind = dsec.LayerKind(s); return nil })
	f.StringVar(&o.At, "at", "", "`directory` of a sandbox that the archive's root becomes, of a workspace or a toolkit; default /")
	f.BoolVar(&o.Strict, "strict", false, "fail where the lint finds something")
	f.StringVar(&o.image, "image", "", "`reference` of an image in a registry, which the server fetches: [HOST/]REPOSITORY[:TAG][@DIGEST]")
	f.StringVar(&o.platform, "platform", "", "of --image: `OS/ARCHITECTURE[/VARIANT]`; default the server's")
	f.StringVar(&o.credentials, "credentials", "", "of --image: `file` such as ~/.docker/config.json with credentials to send along; default the server's own")
	f.BoolVar(&o.verify, "verify", false, "of --image: where the image was imported before, read all of its layer, and import it again where that is damaged")
	f.StringVar(&o.git, "git", "", "`URL` or path of a git repository, of which one commit is checked out")
	o.checkout.add(f)
	o.progress = progressFlag(f)
	args, err := f.parse(args, 1, 2, 0)
	if err != nil {
		return err
	}
	if err := o.check(f, args); err != nil {
		return err
	}
	c, err := f.client()
	if err != nil {
		return err
	}
	defer c.Close()
	m, err := startMeter(e, *o.progress)
	if err != nil {
		return err
	}
	l, findings, err := o.run(ctx, e, c, args, m)
	m.stop()
	if err != nil {
		return err
	}
	for _, finding := range findings {
		_, _ = fmt.Fprintln(e.stderr, "dsec: found: "+finding)
	}
	return f.print(struct {
		client.Layer
		Findings []string `json:"findings,omitempty"`
	}{l, findings}, "", [][]string{{l.Name, l.Digest, units.Bytes(l.Size)}})
}

// check refuses what cannot be meant together, before anything is sent.
func (o *layerImport) check(f *flags, args []string) error {
	from := f.given("image", "git")
	if sources := len(args) - 1 + len(from); sources != 1 {
		return dsec.Invalid("FILE", "want one of FILE, --image REF and --git URL, got %d", sources)
	}
	var wrong error
	if len(from) == 0 || from[0] != "--git" {
		wrong = f.without("without --git", ofGit...)
	} else if o.Kind == "" {
		o.Kind = dsec.LayerWorkspace
	}
	if wrong == nil && (len(from) == 0 || from[0] != "--image") {
		wrong = f.without("without --image", ofRegistry...)
	}
	if wrong == nil && len(from) > 0 {
		wrong = f.without("but for an archive of several images", "select")
	}
	if wrong == nil && o.Kind != "" && !o.Kind.Valid() {
		wrong = dsec.Invalid("--kind", "%.40q: want %s, %s or %s", o.Kind, dsec.LayerBase, dsec.LayerWorkspace, dsec.LayerToolkit)
	}
	if wrong == nil && (o.Kind == "" || o.Kind == dsec.LayerBase) {
		wrong = f.without("for a base, which is a whole root file system: want --kind workspace or toolkit with it", "at")
	}
	return wrong
}

func (o *layerImport) run(ctx context.Context, e *env, c *client.Client, args []string, m *meter) (client.Layer, []string, error) {
	switch {
	case o.image != "":
		return o.fromRegistry(ctx, c, args[0], m)
	case o.git != "":
		return o.fromGit(ctx, e, c, args[0], m)
	}
	archive, left, err := openArchive(ctx, e, args[1], o.At)
	if err != nil {
		return client.Layer{}, nil, err
	}
	defer func() { _ = archive.Close() }()
	size := int64(0)
	if file, ok := archive.(*os.File); ok {
		if fi, err := file.Stat(); err == nil && fi.Mode().IsRegular() {
			size = fi.Size()
		}
	}
	l, findings, err := c.ImportLayer(ctx, args[0], o.ImportOptions, m.reader(archive, size))
	if err != nil {
		return l, nil, ofImport(err, args[1])
	}
	return l, append(findings, left()...), nil
}

func (o *layerImport) fromRegistry(ctx context.Context, c *client.Client, name string, m *meter) (client.Layer, []string, error) {
	opt := client.ImageOptions{Platform: o.platform, Kind: o.Kind, At: o.At, Strict: o.Strict, Verify: o.verify, Progress: m.set}
	if o.credentials != "" {
		var err error
		if opt.Credentials, err = readCredentials(o.credentials, o.image); err != nil {
			return client.Layer{}, nil, err
		}
	}
	l, findings, err := c.ImportImage(ctx, name, o.image, opt)
	if err != nil {
		err = ofImport(err, o.image)
	}
	return l, findings, err
}

// readCredentials finds those for the image's registry in a docker config.json.
func readCredentials(file, ref string) (*client.RegistryCredentials, error) {
	r, err := registry.ParseReference(ref, "docker.io")
	if err != nil {
		return nil, ofImport(err, ref)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, ofSystem("--credentials", err)
	}
	defer func() { _ = f.Close() }()
	doc, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return nil, ofSystem("--credentials", err)
	}
	a, err := registry.FindCredentials(doc, r.Host, r.Repository)
	switch {
	case err != nil:
		return nil, dsec.Invalid("--credentials", "%s: %v", file, err)
	case a == nil:
		return nil, dsec.Invalid("--credentials", "%s has none for %s", file, r.Host)
	}
	return &client.RegistryCredentials{Username: a.Username, Password: a.Password, Token: a.IdentityToken}, nil
}
