package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/layer/tardir"
	"github.com/opendsec/dsec/internal/units"
)

// ofImport names what the caller gave as it was given: the fields of the call are
// of no use here. Those of an image are told behind its file.
func ofImport(err error, file string) error {
	de, ok := errors.AsType[*dsec.Error](err)
	if !ok {
		return err
	}
	if file == "-" {
		file = "standard input"
	}
	named := *de
	switch de.Field {
	case "":
		return err
	case "name":
		named.Field = "NAME"
	case "select", "kind", "at", "strict", "platform":
		named.Field = "--" + de.Field
	case "archive", "ref":
		named.Field = file
	default:
		named.Field = file + ": " + de.Field
	}
	return &named
}

// openArchive opens a file, a directory as a tar, or standard input.
func openArchive(e *env, name string) (io.ReadCloser, error) {
	if name == "-" {
		return io.NopCloser(e.stdin), nil
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, dsec.Invalid("FILE", "%v", err) // which names it
	}
	if info.IsDir() {
		return tarOf(name), nil
	}
	return os.Open(name)
}

// tarOf is the tree below dir as a tar stream.
func tarOf(dir string) io.ReadCloser {
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(tardir.Write(w, dir)) }()
	return r
}

func runLayerList(ctx context.Context, e *env, args []string) error {
	return list(ctx, e, args, "layer list", "NAME KIND DIGEST SIZE FILES AGE SOURCE", (*client.Client).Layers, func(l client.Layer) []string {
		return []string{l.Name, string(l.Kind), l.Digest[:min(len(l.Digest), 19)], units.Bytes(l.Size), fmt.Sprint(l.Files), age(l.Created), l.Source}
	})
}

func runLayerInspect(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "layer inspect")
	c, args, err := f.connect(args, 1, 1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	l, names, findings, err := c.InspectLayer(ctx, args[0])
	if err != nil {
		return err
	}
	rows := [][]string{
		{"digest", l.Digest}, {"kind", string(l.Kind)}, {"names", strings.Join(names, " ")}, {"size", units.Bytes(l.Size)}, {"files", fmt.Sprint(l.Files)},
		{"created", l.Created.Format(time.RFC3339)}, {"source", l.Source}, {"source digest", l.SourceDigest},
	}
	if from := l.Origin; from != nil {
		rows = append(rows, []string{"from", from.Location}, []string{"revision", from.Revision})
	}
	rows = append(rows, [][]string{
		{"env", strings.Join(l.Env, " ")}, {"user", dash(l.User)}, {"workdir", dash(l.Workdir)},
	}...)
	for _, finding := range findings {
		rows = append(rows, []string{"found", finding})
	}
	return f.print(struct {
		client.Layer
		Names    []string `json:"names"`
		Findings []string `json:"findings,omitempty"`
	}{l, names, findings}, "", rows)
}

func runLayerTag(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "layer tag")
	replace := f.Bool("replace", false, "take the new name from another layer that has it")
	c, args, err := f.connect(args, 2, 2, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := c.TagLayer(ctx, args[0], args[1], *replace)
	if err != nil {
		return err
	}
	return f.print(l, "", [][]string{{l.Name, l.Digest, units.Bytes(l.Size)}})
}

func runLayerRemove(ctx context.Context, e *env, args []string) error {
	return forEach(ctx, e, args, "layer remove", "removed", (*client.Client).RemoveLayer)
}

func runLayerGC(ctx context.Context, e *env, args []string) error {
	f := clientFlags(e, "layer gc")
	minAge := client.DefaultCollectAge
	f.Var(span{&minAge}, "min-age", "layers stored less than `DURATION` ago stay: an import may not have named them yet")
	dry := f.Bool("dry-run", false, "only show what would be removed")
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	removed, kept, err := c.CollectLayers(ctx, minAge, *dry)
	if err != nil {
		return err
	}
	rows, freed := [][]string{}, int64(0)
	for _, l := range removed {
		rows = append(rows, []string{l.Digest, units.Bytes(l.Size), age(l.Created)})
		freed += l.Size
	}
	return f.print(struct {
		Removed []client.StoredLayer `json:"removed"`
		Freed   int64                `json:"freed_bytes"`
		Kept    int64                `json:"kept"`
	}{removed, freed, kept}, "", rows)
}
