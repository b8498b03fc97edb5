package layer

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/layer/export"
	"github.com/opendsec/dsec/internal/layer/upper"
)

// Scrub says what of a sandbox is not packed.
type Scrub = upper.Scrub

// Removal is something that was not packed.
type Removal = upper.Removal

// PackOptions say what is to be made of what a sandbox has written.
type PackOptions struct {
	Parents []string // digests of the sandbox's layers, all of them, lowest first
	Config  Config   // of sandboxes that are made of it
	Origin  *Origin
	Scrub   Scrub
	// Read is called when nothing is read from the directory any more, which then is soon:
	// it is read to a file first. Nil: there is no hurry.
	Read func() error
}

// PackReport tells of one pack.
type PackReport struct {
	upper.Report
	Files, Bytes int64 // of the layer: names, and bytes of the image
	Collapsed    int   // packs that became one with it
}

// A chain of packs grows by one with each: at collapseRun of them, or where there are
// more than collapseAbove layers in all, the next becomes one with all of the run. Until
// then none is read again.
const (
	collapseRun   = 8
	collapseAbove = 24
)

// Pack makes a layer of the upper directory of a sandbox, whose owner is the first ID of
// the sandbox's on the disk. The directory does not change meanwhile. The layer is a
// base that goes on the sandbox's layers, or on those below the packs that became one
// with it. It is durable, and errors are, as with Build, but that the directory's faults
// are unsupported; invalid is a secret that is to be refused. It waits for no turn: who
// calls has its own bound.
func (s *Store) Pack(ctx context.Context, opt PackOptions, dir *os.File, owner uint32) (meta Meta, report PackReport, err error) {
	if len(opt.Parents) >= dsec.MaxLayers {
		return meta, report, dsec.Errorf(dsec.CodeUnsupported, "a sandbox of %d layers, want fewer than %d", len(opt.Parents), dsec.MaxLayers)
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	below, run, release, err := s.holdPacks(ctx, opt.Parents)
	if err != nil {
		return meta, report, err
	}
	defer release()
	image, err := s.imageTemp()
	if err != nil {
		return meta, report, storeError("make image file", err)
	}
	defer func() { _ = image.Close() }()

	pr, pw := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		var err error
		report.Report, err = s.writeDiffs(ctx, pw, run, dir, opt, owner)
		wrote <- err
		_ = pw.CloseWithError(err)
	}()
	src := &sourceReader{r: pr}
	res, err := s.convert(ctx, []*os.File{image}, convert.Options{Diffs: 1 + len(run), Limits: s.opt.Limits}, src)
	_ = pr.CloseWithError(io.ErrClosedPipe) // nobody reads the rest
	if werr := <-wrote; err != nil && werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		err = packError(ctx, werr)
	}
	if err != nil {
		return Meta{}, PackReport{}, err
	}
	report.Files, report.Bytes, report.Collapsed = res.Files, res.Size, len(run)
	about := About{Source: res.Source, SourceSize: src.n, Origin: opt.Origin, Created: time.Now().UTC(), Findings: res.Findings}
	res.Config = opt.Config
	meta, err = s.publishAll(ctx, []*os.File{image}, res, Meta{Manifest: Manifest{Kind: dsec.LayerBase, Parents: below}, About: about})
	return meta, report, err
}

// packError is what users are told of a stream that was not written to its end.
func packError(ctx context.Context, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	if ctx.Err() != nil {
		return canceled(ctx)
	}
	return err
}

// holdPacks splits the layers of a sandbox: those that a pack goes on, and the packs
// above them that become one with it, which are held.
func (s *Store) holdPacks(ctx context.Context, layers []string) (below, run []string, release func(), err error) {
	n := len(layers)
	for ; n > 0; n-- {
		meta, err := s.Get(ctx, layers[n-1])
		if err != nil {
			return nil, nil, nil, err
		}
		if meta.Source != SourcePack {
			break
		}
	}
	if len(layers)-n < collapseRun && len(layers) <= collapseAbove {
		n = len(layers)
	}
	var held []func()
	release = func() {
		for _, f := range held {
			f()
		}
	}
	for _, digest := range layers[n:] {
		free, err := s.Hold(ctx, digest)
		if err != nil {
			release()
			return nil, nil, nil, err
		}
		held = append(held, free)
	}
	return layers[:n], layers[n:], release, nil
}

// writeDiffs writes the packs of a run, lowest first, and the directory over them.
func (s *Store) writeDiffs(ctx context.Context, w io.Writer, run []string, dir *os.File, opt PackOptions, owner uint32) (report upper.Report, err error) {
	write := func(w io.Writer) (upper.Report, error) {
		return upper.Write(ctx, w, dir, upper.Options{Owner: owner, Scrub: opt.Scrub, Limits: s.opt.Limits})
	}
	var spool *os.File
	if opt.Read != nil {
		if spool, err = s.scratchFile(); err != nil {
			return report, storeError("make scratch file", err)
		}
		defer func() { _ = spool.Close() }()
		report, err = write(spool)
		if err = errors.Join(err, opt.Read()); err != nil {
			return report, storeError("keep what was written", err)
		}
	}
	for _, digest := range run {
		err := s.withFS(ctx, digest, func(files fs.FS) error {
			return export.WriteDiff(ctx, w, export.Layer{Digest: digest, FS: files})
		})
		if err != nil {
			return upper.Report{}, err
		}
	}
	if spool == nil {
		return write(w)
	}
	_, err = io.Copy(w, io.NewSectionReader(spool, 0, math.MaxInt64))
	return report, err
}

func (s *Store) withFS(ctx context.Context, digest string, use func(fs.FS) error) error {
	files, closer, err := s.OpenFS(ctx, digest)
	if err != nil {
		return err
	}
	return cmp.Or(use(files), closer.Close())
}
