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

// openArchive opens a file, a directory as a tar, or standard input, whose root becomes
// the directory at of a sandbox. left is asked at the end for what a directory's tar does
// not have.
func openArchive(ctx context.Context, e *env, name, at string) (r io.ReadCloser, left func() []string, err error) {
	none := func() []string { return nil }
	if name == "-" {
		if isTerminal(e.stdin) {
			return nil, nil, dsec.Invalid("FILE", "standard input is a terminal: want an archive from a pipe or a file")
		}
		return io.NopCloser(e.stdin), none, nil
	}
	info, err := os.Stat(name)
	if err == nil && info.IsDir() {
		t := tarOf(name, tardir.Write)
		return t, func() []string { return t.findings(at) }, nil
	}
	var f *os.File
	if err == nil {
		f, err = openFile(ctx, name)
	}
	if err != nil {
		return nil, nil, ofSystem("FILE", err)
	}
	return f, none, nil
}

// openFile is os.Open, which ctx ends: a named pipe is open once somebody writes to it.
func openFile(ctx context.Context, name string) (*os.File, error) {
	type opened struct {
		f   *os.File
		err error
	}
	done := make(chan opened, 1)
	go func() {
		f, err := os.Open(name)
		done <- opened{f, err}
	}()
	select {
	case o := <-done:
		return o.f, o.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// treeTar is a directory as a tar stream.
type treeTar struct {
	*io.PipeReader
	ended chan struct{} // closed when left is set
	left  tardir.LeftOut
}

func tarOf(dir string, write func(io.Writer, string) (tardir.LeftOut, error)) *treeTar {
	r, w := io.Pipe()
	t := &treeTar{PipeReader: r, ended: make(chan struct{})}
	go func() {
		defer close(t.ended)
		left, err := write(w, dir)
		t.left = left
		_ = w.CloseWithError(err)
	}()
	return t
}

// findings tells what the stream, which was read to its end, does not have.
func (t *treeTar) findings(at string) []string {
	_ = t.Close()
	<-t.ended
	return t.left.Findings(at)
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
		return asGiven(err, "name", "NAME")
	}
	rows := [][]string{
		{"digest", l.Digest}, {"kind", string(l.Kind)}, {"names", strings.Join(names, " ")}, {"size", units.Bytes(l.Size)}, {"files", fmt.Sprint(l.Files)},
		{"created", l.Created.Format(time.RFC3339)}, {"source", l.Source}, {"source digest", l.SourceDigest},
	}
	for _, digest := range l.Parents {
		rows = append(rows, []string{"goes on", digest})
	}
	if from := l.Origin; from != nil {
		rows = append(rows, []string{"from", from.Location}, []string{"revision", from.Revision})
	}
	rows = append(rows, [][]string{
		{"at", dash(l.At)}, {"env", dash(strings.Join(l.Env, " "))}, {"user", dash(l.User)}, {"workdir", dash(l.Workdir)},
		{"entrypoint", words(l.Entrypoint)}, {"cmd", words(l.Cmd)},
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

// words are the arguments of a command, of which each is told apart.
func words(args []string) string {
	if len(args) == 0 {
		return "-"
	}
	return fmt.Sprintf("%q", args)
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
	if err != nil && dsec.CodeOf(err) == dsec.CodeConflict {
		return &dsec.Error{Code: dsec.CodeConflict, Field: "NEW-NAME", Message: args[1] + " names another layer; --replace takes it from there", Err: err}
	}
	if err != nil {
		return asGiven(err, "name", "NAME", "new_name", "NEW-NAME")
	}
	return f.print(l, "", [][]string{{l.Name, l.Digest, units.Bytes(l.Size)}})
}

func runLayerRemove(ctx context.Context, e *env, args []string) error {
	check := func(c *client.Client, ctx context.Context, name string) error {
		_, _, _, err := c.InspectLayer(ctx, name)
		return asGiven(err, "name", "NAME")
	}
	return forEach(ctx, e, args, "layer remove", "removed", check, (*client.Client).RemoveLayer)
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
		return asGiven(err, "min_age", "--min-age")
	}
	if len(removed) == 0 && f.output != "json" {
		why := "the store has no layers"
		if kept > 0 {
			why = fmt.Sprintf("%d stay, each of which has a name, is in use, or was stored less than %s ago", kept, minAge)
		}
		_, err := fmt.Fprintln(e.stdout, "nothing to remove: "+why)
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
	}{removed, freed, kept}, "DIGEST SIZE AGE", rows)
}
