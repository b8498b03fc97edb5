package layer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// Build makes a layer of an archive: a tar of a root file system, an OCI
// layout or a docker-archive, plain or compressed with gzip or zstd. A layer that
// is no base keeps the whiteouts of its archive, in the form of OCI or of overlayfs,
// and hides by them what is below it in a sandbox. Build returns the layer and the
// findings of this archive. Of an image that becomes several layers it is the topmost,
// whose manifest names those below.
//
// The layer is durable when Build returns. Where the store has it already it stays as
// it is; what is returned tells of this archive. On error it is not visible, and no more space is used
// than before, but for layers below it that were stored already: they go as all that
// no name leads to. Errors that the archive caused are invalid or
// unsupported; exhausted is a full disk, unavailable a stream that broke off
// or a build that took too long.
//
// Build returns once ctx ends; a Read of r that blocks then is left to
// whoever owns r, and nothing is done with what it returns.
func (s *Store) Build(ctx context.Context, opt BuildOptions, r io.Reader) (Meta, []string, error) {
	todo := convert.Options{Select: opt.Select, Kind: opt.Kind, At: opt.At, Strict: opt.Strict, CollapseBytes: s.opt.CollapseBytes, Limits: s.opt.Limits}
	if err := todo.Check(); err != nil {
		return Meta{}, nil, err
	}
	ctx, done, err := s.turn(ctx, opt.Project)
	if err != nil {
		return Meta{}, nil, err
	}
	defer done()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	images, err := s.imageTemps()
	defer func() {
		for _, f := range images {
			_ = f.Close()
		}
	}()
	if err != nil {
		return Meta{}, nil, storeError("make image file", err)
	}
	src := &sourceReader{r: &paced{r: r, most: s.opt.patience, left: s.opt.patience, cancel: end}}
	if opt.SourceDigest == "" {
		src.h = sha256.New()
	}
	res, err := s.convert(ctx, images, todo, src)
	if err != nil {
		return Meta{}, nil, err
	}
	kind := cmp.Or(opt.Kind, dsec.LayerBase)
	if kind == dsec.LayerBase && res.Source == convert.SourceRootFS && res.Files == 0 && res.Size > 0 {
		return Meta{}, nil, dsec.Invalid("data", "nothing is in it, and a base is a whole root file system")
	}
	about := About{Source: res.Source, SourceDigest: opt.SourceDigest, SourceSize: src.n, Origin: opt.Origin, Created: time.Now().UTC()}
	if src.h != nil {
		about.SourceDigest = sumOf(src.h)
	}
	meta, err := s.publishAll(ctx, images, res, Meta{Manifest: Manifest{Kind: kind}, About: about})
	if err != nil {
		return Meta{}, nil, err
	}
	about.Findings = res.Findings
	meta.About = about // the layer may have been there, from elsewhere
	return meta, res.Findings, nil
}

// turn waits for the turn of a build, which ends with done. Its time begins then: others
// can have the turns for as long, and are not to have it fail by that.
func (s *Store) turn(ctx context.Context, project string) (_ context.Context, done func(), err error) {
	if !s.builds.take(ctx, project) {
		return nil, nil, canceled(ctx)
	}
	ctx, cancel := s.bounded(ctx)
	return ctx, func() { cancel(); s.builds.give(project) }, nil
}

func (s *Store) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, s.opt.Timeout, dsec.Errorf(dsec.CodeUnavailable, "the import took more than %s", s.opt.Timeout))
}

// publishAll makes layers of the images that the helper wrote, lowest first, which go on
// the parents of like: all but the topmost say nothing of processes, so that other images may have them too.
func (s *Store) publishAll(ctx context.Context, images []*os.File, res convert.Result, like Meta) (Meta, error) {
	made := append(res.Below, res.Image)
	for i := range made {
		s.beginSync(images[i])
	}
	parents := like.Parents
	for i, img := range made {
		meta := like
		meta.Version, meta.Size, meta.Files, meta.Parents = manifestVersion, img.Size, img.Files, parents
		if i == len(made)-1 {
			meta.Config, meta.Findings = res.Config, res.Findings
		}
		if len(parents) > 0 {
			meta.Version = parentsVersion
		}
		meta, err := s.publish(ctx, images[i], meta)
		if err != nil || i == len(made)-1 {
			return meta, err
		}
		parents = append(slices.Clone(parents), meta.Digest)
	}
	return Meta{}, errors.New("the helper made no image") // there always is the topmost
}

// maxCollapsed is the most layers that one image becomes. The topmost takes what would
// be more.
const maxCollapsed = 16

// imageTemps makes the files for the layers that an archive may become; on error those
// that were made.
func (s *Store) imageTemps() (images []*os.File, err error) {
	n := 1
	if s.opt.CollapseBytes > 0 {
		n = maxCollapsed
	}
	for range n {
		f, err := s.imageTemp()
		if err != nil {
			return images, err
		}
		images = append(images, f)
	}
	return images, nil
}

// imageTemp makes the file that the data of an image stay in, where the blob
// store can take it over if it does that.
func (s *Store) imageTemp() (*os.File, error) {
	if l, ok := s.blobs.(blob.Linker); ok {
		return l.Temp()
	}
	return s.scratchFile()
}

// beginSync has the disk write what is going to be synced, while the processors hash it.
func (s *Store) beginSync(image *os.File) {
	if _, ok := s.blobs.(blob.Linker); ok {
		_ = unix.SyncFileRange(int(image.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE) // a refusal only costs time
	}
}

// canceled is the error of a call whose context ended: the cause where there
// is one for users, else that it was given up.
func canceled(ctx context.Context) error {
	if e, ok := errors.AsType[*dsec.Error](context.Cause(ctx)); ok {
		return e
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the import was given up", Err: context.Cause(ctx)}
}

// publish makes a layer of what the helper wrote to image: its parts are stored,
// the manifest last, and its index is kept here.
func (s *Store) publish(ctx context.Context, image *os.File, meta Meta) (Meta, error) {
	index, err := os.CreateTemp(s.tmp(), "index-*")
	if err != nil {
		return Meta{}, storeError("make index file", err)
	}
	// After addLocal the name is gone, and this does nothing.
	defer func() { _ = os.Remove(index.Name()); _ = index.Close() }()
	if meta.DataSize, err = takeIndex(index, image, meta.Size); err != nil {
		return Meta{}, storeError("split image", err)
	}
	if meta.IndexDigest, meta.IndexSize, err = digestIndex(index, meta.Size); err != nil {
		return Meta{}, err
	}
	meta.ChunkSize = chunkSize
	chunks, err := hashChunks(ctx, image, nextData(image), meta.DataSize)
	if err != nil {
		return Meta{}, err
	}
	meta.ChunksDigest = fmt.Sprintf("sha256:%x", sha256.Sum256(chunks))
	manifest, digest, err := meta.encode()
	if err != nil {
		return Meta{}, err
	}
	meta.Digest = digest

	if err := s.upload(ctx, meta, manifest, parts{data: image, chunks: chunks, index: index}); err != nil {
		return Meta{}, err
	}
	// One that is here already is kept, unless what this node has of it went bad.
	if e := s.known(digest); e != nil && s.verify(e.meta) == nil {
		meta = e.meta
	} else if err := s.addLocal(&entry{meta: meta}, index, chunks); err != nil {
		return Meta{}, err
	}
	// What the scrub knew of was of what was there before.
	return meta, s.recheck(ctx, meta)
}

// scratchFile makes a file without a name: it goes with its last descriptor.
func (s *Store) scratchFile() (*os.File, error) {
	fd, err := unix.Open(s.tmp(), unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), "scratch"), nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return nil, err
	}
	f, err := os.CreateTemp(s.tmp(), "scratch-*")
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// sourceReader counts and hashes what came in, and keeps the error it ended
// with: the helper only sees the end of a pipe.
type sourceReader struct {
	r   io.Reader
	h   hash.Hash // nil: nobody asks for it
	n   int64
	err error
}

func (s *sourceReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if s.h != nil {
		s.h.Write(p[:n])
	}
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// brokenOff is the error of a stream that its sender did not end.
func brokenOff(err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return &dsec.Error{Code: dsec.CodeUnavailable, Message: "the archive's stream broke off", Err: err}
}

// killGrace is how long the helper's descriptors may take to close after it
// was killed.
const killGrace = 5 * time.Second
