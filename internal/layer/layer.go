// Package layer keeps the immutable layers that sandboxes are made of.
//
// The words: a layer is one EROFS image, named by the SHA-256 of its bytes. A
// store is a directory of layers that one process owns. Build turns an archive
// (package convert) into a layer: the archive is read by a helper, a process
// of its own without a file system, a network or a right to anything but the
// descriptors it was given, because what it parses was made by strangers.
//
//	store, err := layer.Open(dir, layer.Options{})
//	meta, findings, err := store.Build(ctx, layer.BuildOptions{}, archive) // durable when it returns
//	release, err := store.Hold(meta.Digest)              // not removed until released
//	mount(store.Path(meta.Digest))
//	release()
//	err = store.Remove(meta.Digest)
//
// A layer is visible from the moment its metadata file is: the image is
// written, synced and named first. What a crash leaves of an unfinished build
// or removal has no metadata, and goes when the store is opened again.
package layer

import (
	"log/slog"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// Config is what an image says about the processes made of it.
type Config = convert.Config

// Limits bound what one archive may make of itself.
type Limits = convert.Limits

// What an archive may be of.
const (
	SourceRootFS        = convert.SourceRootFS
	SourceOCILayout     = convert.SourceOCILayout
	SourceDockerArchive = convert.SourceDockerArchive
)

// metaVersion is the version of Meta's file. A store reads this one and the
// one before it, which had no kind and called the source so.
const metaVersion = 2

// Meta is what a store knows of a layer.
type Meta struct {
	Version int            `json:"version"`
	Digest  string         `json:"digest"` // sha256:<hex> of the image
	Size    int64          `json:"size"`   // bytes of the image
	Files   int64          `json:"files"`  // names in it
	Kind    dsec.LayerKind `json:"kind"`
	// Source is rootfs, oci-layout or docker-archive.
	Source       string    `json:"source"`
	SourceDigest string    `json:"source_digest"` // sha256:<hex> of the archive
	SourceSize   int64     `json:"source_size"`
	Created      time.Time `json:"created"` // of the layer in this store
	Config       Config    `json:"config"`
	Findings     []string  `json:"findings,omitempty"`
	// IndexOffset is where the image's own metadata begin (what look-ups
	// read), IndexDigest what the first block and all from there hash to.
	IndexOffset int64  `json:"index_offset"`
	IndexDigest string `json:"index_digest"`
}

// BuildOptions say what is to be made of an archive.
type BuildOptions struct {
	// Select names the image wanted from an archive that holds several: a tag or
	// a digest.
	Select string
	// Kind of the layer; empty is base.
	Kind dsec.LayerKind
	// At is the directory of a sandbox that the root of the archive becomes, of a
	// layer that is no base; empty is the sandbox's root.
	At string
	// Strict makes what the lint finds an error.
	Strict bool
}

// Options of a store. Zero values take the default.
type Options struct {
	// Limits of each build.
	Limits Limits
	// Timeout of one build: 30 min.
	Timeout time.Duration
	// Builds at once: 2. More wait.
	Builds int
	// HelperCommand runs HelperMain: this program with the argument
	// import-helper.
	HelperCommand []string
	// Logger: slog.Default().
	Logger *slog.Logger
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Minute
	}
	if o.Builds == 0 {
		o.Builds = 2
	}
	if len(o.HelperCommand) == 0 {
		o.HelperCommand = []string{"/proc/self/exe", HelperVerb}
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	o.Logger = o.Logger.With("component", "layer")
	return o
}
