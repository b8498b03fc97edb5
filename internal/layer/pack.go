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
	// Unnamed: it is for sandboxes that take the place of this one, or stand beside it. A pack
	// of one of these goes over its content anew, by its own Scrub.
	Unnamed bool
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
	below, run, again, release, err := s.holdPacks(ctx, opt)
	if err != nil {
		return meta, report, err
	}
	defer release()
	first := opt
	if again {
		first.Scrub = upper.Whole
	}
	image, res, size, err := s.merge(ctx, 1+len(run), func(w io.Writer) (err error) {
		report.Report, err = s.writeDiffs(ctx, w, run, dir, first, owner)
		return err
	})
	if err == nil && again {
		image, res, size, err = s.scrubAgain(ctx, image, res.Size, opt.Scrub, &report.Report)
	}
	if err != nil {
		return Meta{}, PackReport{}, err
	}
	defer func() { _ = image.Close() }()
	report.Files, report.Bytes, report.Collapsed = res.Files, res.Size, len(run)
	about := About{Source: res.Source, SourceSize: size, Origin: opt.Origin, Created: time.Now().UTC(), Findings: res.Findings, Unnamed: opt.Unnamed}
	res.Config = opt.Config
	meta, err = s.publishAll(ctx, []*os.File{image}, res, Meta{Manifest: Manifest{Kind: dsec.LayerBase, Parents: below}, About: about})
	return meta, report, err
}

// merge makes an image of diffs that write writes, and tells how many bytes they were.
func (s *Store) merge(ctx context.Context, diffs int, write func(io.Writer) error) (image *os.File, res convert.Result, size int64, err error) {
	if image, err = s.imageTemp(); err != nil {
		return nil, res, 0, storeError("make image file", err)
	}
	pr, pw := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		err := write(pw)
		wrote <- err
		_ = pw.CloseWithError(err)
	}()
	src := &sourceReader{r: pr}
	res, err = s.convert(ctx, []*os.File{image}, convert.Options{Diffs: diffs, Limits: s.opt.Limits}, src)
	_ = pr.CloseWithError(io.ErrClosedPipe) // nobody reads the rest
	if werr := <-wrote; err != nil && werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		err = packError(ctx, werr)
	}
	if err != nil {
		_ = image.Close()
		return nil, res, 0, err
	}
	return image, res, src.n, nil
}

// scrubAgain makes of an image, which it closes, one without what is to be left out.
func (s *Store) scrubAgain(ctx context.Context, whole *os.File, size int64, scrub Scrub, report *upper.Report) (image *os.File, res convert.Result, n int64, err error) {
	defer func() { _ = whole.Close() }()
	image, res, n, err = s.merge(ctx, 1, func(w io.Writer) error {
		files, err := openImage(whole, size)
		if err != nil {
			return err
		}
		more, err := export.WriteDiff(ctx, w, export.Layer{Digest: "that is made", FS: files}, scrub)
		report.Add(more)
		return err
	})
	return image, res, n, err
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
// above them that become one with it, which are held. Where there are unnamed ones among
// these, and the pack is to leave something out, it has to do so of all of them again.
func (s *Store) holdPacks(ctx context.Context, opt PackOptions) (below, run []string, again bool, release func(), err error) {
	layers := opt.Parents
	n, unnamed := len(layers), 0 // packs from there on, and how many of the topmost have no name
	for ; n > 0; n-- {
		meta, err := s.Get(ctx, layers[n-1])
		if err != nil {
			return nil, nil, false, nil, err
		}
		lost := meta.Source == "" && len(meta.Parents) > 0 // it is not known where it is from
		if meta.Source != SourcePack && !lost {
			break
		}
		if (meta.Unnamed || lost) && unnamed == len(layers)-n {
			unnamed++
		}
	}
	again = unnamed > 0 && !opt.Scrub.IsWhole()
	if len(layers)-n < collapseRun && len(layers) <= collapseAbove {
		n = len(layers)
	}
	if again {
		n = min(n, len(layers)-unnamed)
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
			return nil, nil, false, nil, err
		}
		held = append(held, free)
	}
	return layers[:n], layers[n:], again, release, nil
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
			_, err := export.WriteDiff(ctx, w, export.Layer{Digest: digest, FS: files}, upper.Whole)
			return err
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
