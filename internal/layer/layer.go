// Package layer keeps the immutable layers that sandboxes are made of.
//
// The words: a layer is one EROFS image in two parts, an index and data, and a
// manifest that says what they hash to; the layer is named by the SHA-256 of its
// manifest. The parts are blobs in a store that all nodes share (package blob); a
// node keeps the index of each layer that it uses, and reads data from where they
// are. Store is a node's view of them, in a directory that one process owns. Build
// turns an archive (package convert) into a layer: the archive is read by a
// helper, a process of its own without a file system, a network or a right to
// anything but the descriptors it was given, because what it parses was made by
// strangers. A large image becomes several layers: the manifest of each names those
// that it goes on, its parents, and to use it is to use all of its chain.
//
//	store, err := layer.Open(dir, layer.Options{})
//	meta, findings, err := store.Build(ctx, layer.BuildOptions{}, archive) // durable when it returns
//	release, err := store.Hold(ctx, meta.Digest)  // not removed until released
//	devices, onRead, err := store.Open(ctx, meta.Digest) // to mount
//	release()
//	err = store.Remove(ctx, meta.Digest)
//
// A layer is visible from the moment its manifest is, on a node from the moment
// its metadata file is: the other parts are stored first. What a crash leaves of
// an unfinished build or removal has none, and is swept.
package layer

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
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
	SourcePack          = convert.SourcePack // what a sandbox has written
)

// Where an archive came from.
const (
	OriginRegistry = "registry"
	OriginGit      = "git"
	OriginSandbox  = "sandbox" // its location is the ID, its revision the time
)

// Origin is where an image, a checkout or a pack came from.
type Origin struct {
	Type     string `json:"type"`     // OriginRegistry, OriginGit or OriginSandbox
	Location string `json:"location"` // reference or URL, without credentials
	Revision string `json:"revision"` // digest of the manifest, or commit
	// Entry is the one of the sandbox's trajectory with which the pack began.
	Entry uint64 `json:"entry,omitempty"`
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
	// Origin is kept with the layer.
	Origin *Origin
	// SourceDigest is that of what the archive was made of, where that is known; empty
	// is the archive's own.
	SourceDigest string
	// Project is whose turn it takes where builds have to wait.
	Project string
}

// Options of a store. Zero values take the default.
type Options struct {
	// Limits of each build.
	Limits Limits
	// Timeout of one build: 30 min.
	Timeout time.Duration
	// Builds at once: 2, and one more of a project that has none of them. More wait,
	// those of each project for its turn.
	Builds int
	// CollapseBytes has the layers of an image become several, each of as many as have
	// no more bytes together when they are unpacked; zero: all become one.
	CollapseBytes int64
	// Blobs is where layers are kept: a directory in the store's own, which no
	// other node sees.
	Blobs blob.Store
	// Own says that nobody else stores anything in Blobs.
	Own bool
	// Lazy offers data that the kernel cannot read from the store by itself; nil:
	// nothing does.
	Lazy Lazy
	// Verify has all data read through Lazy, which checks every byte of them, also
	// where the kernel could read them by itself.
	Verify bool
	// TraceFor has data that are read through Lazy fetched as the layer's trace in the
	// store says. Of a layer without one a trace is made from when it is opened until
	// for so long nothing else is read, or ten times as long. Zero: there are no traces.
	TraceFor time.Duration
	// HelperCommand runs HelperMain: this program with the argument
	// import-helper.
	HelperCommand []string
	// Logger: slog.Default().
	Logger *slog.Logger

	patience time.Duration // of which tests have less
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Minute
	}
	if o.Builds == 0 {
		o.Builds = 2
	}
	if o.patience == 0 {
		o.patience = patience
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

// Lazy offers files whose bytes are fetched from the blob store when they are
// first read.
type Lazy interface {
	// Open gives a file that reads as the blob. Each chunk is held against its hash
	// before any reader sees it.
	Open(ctx context.Context, f LazyFile) (*os.File, error)
	// Prefetch brings spans of the file, all of it where they are nil, to this node,
	// in their order. It need not be open.
	Prefetch(ctx context.Context, f LazyFile, spans []Span, progress func(done, total int64)) error
	// Trace tells what was read of the file, in order of the first read.
	Trace(ctx context.Context, key string) ([]Span, error)
	// Release says that the file is neither open nor mounted any more.
	Release(key string)
	// Served are the keys of files that were opened and not released.
	Served() []string
	// Lost are the keys of files that were open when what filled them died, so that
	// readers may have got other bytes. None can be opened until Settle.
	Lost() []string
	// Settle says that such a file is neither open nor mounted any more.
	Settle(ctx context.Context, key string) error
}

// LazyFile is a blob to be read so.
type LazyFile struct {
	Key       string
	Size      int64  // bytes
	ChunkSize int64  // bytes
	Hashes    []byte // SHA-256 of each chunk, one after another
}
