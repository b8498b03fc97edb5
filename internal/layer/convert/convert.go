// Package convert turns an archive of a root file system into one EROFS image
// without ever unpacking it: names, links and attributes are kept in a tree in
// memory, contents of small files in a scratch file that has no names. The content of
// a large file goes to its place in the image as it comes out of the archive, and the
// rest of the image is written from the three: no byte is written twice, unless what
// came before it is hidden by what came later, or belongs beyond a cut.
//
// The words: an archive is the byte stream that came in; its source, which is what
// it is an archive of, is told from its content, never from a name. An entry is one member of a tar stream. A
// layer is one tar stream of an image that has several. The tree is the merged
// root file system: a path in an archive only ever leads through the tree, so
// nothing in an archive can name anything outside the image being made.
//
//	archive --(gzip, zstd)--> tar --> tree + scratch + image     a root file system
//	                                   |
//	                                   +-> index, manifest, config, layers
//	                                       each applied in order, and verified,
//	                                       to a second tree   an OCI layout or a docker-archive
//	tree + scratch --> the rest of the image
//
// Where the documents of a layout come before its layers, these are applied as they
// come; else they wait in the scratch. Nothing is seen of an image one of whose
// layers turns out not to be what the documents say.
//
// An image can become several, each of some of its layers: see cuts.
//
// The same archive gives the same image, byte for byte. Files are in it in the order
// of the archive, and in that of names where they are small.
package convert

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/opendsec/dsec"
)

// The sources.
const (
	SourceRootFS        = "rootfs"
	SourceOCILayout     = "oci-layout"
	SourceDockerArchive = "docker-archive"
	SourcePack          = "pack"
)

// Limits bound what one archive may make of itself. A zero field takes the
// default named beside it.
type Limits struct {
	// ArchiveBytes of the stream as it came in: 32 GiB.
	ArchiveBytes int64 `json:"archive_bytes,omitempty"`
	// ContentBytes of all tar streams read, after decompression; a layer that
	// is listed twice counts twice, holes of sparse files count: 32 GiB.
	ContentBytes int64 `json:"content_bytes,omitempty"`
	// Ratio of bytes after decompression to bytes before, and of sparse files with
	// their holes to the archive, looked at once more than 256 MiB came out: 200.
	Ratio int64 `json:"ratio,omitempty"`
	// Entries of all tar streams together, with the directories they imply:
	// 2,000,000.
	Entries int64 `json:"entries,omitempty"`
	// MetadataBytes of all names, link targets and attributes, and of all
	// paths of the final tree: 512 MiB.
	MetadataBytes int64 `json:"metadata_bytes,omitempty"`
	// Depth of directories: 256.
	Depth int `json:"depth,omitempty"`
	// Layers of one image: 512.
	Layers int `json:"layers,omitempty"`
	// DocumentBytes of one index, manifest or configuration: 4 MiB.
	DocumentBytes int64 `json:"document_bytes,omitempty"`
	// WindowBytes is the largest zstd window: 128 MiB.
	WindowBytes uint64 `json:"window_bytes,omitempty"`
	// MemoryBytes that the process which converts may use, 256 MiB or more:
	// 4 GiB. A file in the tree takes about 1.2 KiB and its path, twice.
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
}

// ratioFloor is how much may come out of a decompressor before Limits.Ratio
// counts: small archives of zeros are ordinary.
const ratioFloor = 256 << 20

// WithDefaults fills the zero fields.
func (l Limits) WithDefaults() Limits {
	def(&l.ArchiveBytes, 32<<30)
	def(&l.ContentBytes, 32<<30)
	def(&l.Ratio, 200)
	def(&l.Entries, 2_000_000)
	def(&l.MetadataBytes, 512<<20)
	def(&l.Depth, 256)
	def(&l.Layers, 512)
	def(&l.DocumentBytes, 4<<20)
	def(&l.WindowBytes, 128<<20)
	def(&l.MemoryBytes, 4<<30)
	return l
}

func def[T int | int64 | uint64](p *T, v T) {
	if *p == 0 {
		*p = v
	}
}

// File is what an image or the scratch is written to; *os.File is one.
type File interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
}

// Options of one conversion.
type Options struct {
	// Select is the image wanted from an archive that holds several: a tag or
	// a digest.
	Select string `json:"select,omitempty"`
	// Kind of the layer; empty is base.
	Kind dsec.LayerKind `json:"kind,omitempty"`
	// At is the directory of a sandbox that the root of the archive becomes, of a
	// layer that is no base; empty is the sandbox's root.
	At string `json:"at,omitempty"`
	// Strict makes what the lint finds an error.
	Strict bool `json:"strict,omitempty"`
	// CollapseBytes has the layers of an image become several, each of as many as have
	// no more bytes together when they are unpacked; zero: they become one.
	CollapseBytes int64 `json:"collapse_bytes,omitempty"`
	// Diffs is how many tar streams of upper directories of overlays the archive is, one
	// after another, lowest first, each over the one before, of what goes on other layers
	// although it is a base: see package upper. Zero: it is none.
	Diffs  int    `json:"diffs,omitempty"`
	Limits Limits `json:"limits"`
}

// Result is what a conversion made.
type Result struct {
	Source string `json:"source"`
	Image
	Below  []Image `json:"below,omitempty"` // those of the layers below, lowest first
	Config Config  `json:"config"`
	// Findings are remarks of the lint and what was left out of the image.
	Findings []string `json:"findings,omitempty"`
}

// Image is what was written to one file.
type Image struct {
	Size  int64 `json:"size"`  // bytes
	Files int64 `json:"files"` // names in it, its root not counted
}

// Convert makes one layer of an archive.
func Convert(archive io.Reader, image, scratch File, opt Options) (Result, error) {
	return Chain(archive, []File{image}, scratch, opt)
}

// Chain reads the archive to its end and writes the image. Errors that the
// archive caused are invalid or unsupported and name the entry at fault; a
// full disk is exhausted. It makes at most as many layers as there are images, which
// are filled from the first on; the last takes all that is left. All files must be
// empty; on error their content means nothing.
func Chain(archive io.Reader, images []File, scratch File, opt Options) (Result, error) {
	if err := opt.Check(); err != nil {
		return Result{}, err
	}
	c := &converter{
		sel: opt.Select, limits: opt.Limits.WithDefaults(), upper: opt.Diffs > 0 || opt.Kind != "" && opt.Kind != dsec.LayerBase, diffs: opt.Diffs,
		kind: opt.Kind, at: opt.At, devices: map[string]func(*tree, *inode, []string) error{}, scratch: newSpool(scratch), cuts: cuts{most: opt.CollapseBytes, images: images[1:]},
	}
	c.newImage(images[0])
	defer func() {
		for _, f := range c.images {
			f.stop()
		}
	}()
	c.findings.init()
	tree, res, err := c.read(archive)
	if err != nil {
		return Result{}, err
	}
	if err := c.writeTop(tree, &res); err != nil {
		return Result{}, err
	}
	if opt.Strict {
		if err := c.findings.refuse(); err != nil {
			return Result{}, err
		}
	}
	res.Findings = c.findings.list(c.at)
	return res, nil
}

// writeTop writes the topmost layer, and looks through all of them.
func (c *converter) writeTop(t *tree, res *Result) error {
	whole, err := t.at(c.at)
	if err == nil {
		err = whole.checkMountPoints()
	}
	if err != nil {
		return err
	}
	if s := &c.cuts; s.below == nil {
		res.Image, err = c.writeLayer(whole, res.Config)
	} else {
		res.Below = s.done
		if res.Image, err = c.writeAbove(s.below, t.root, res.Config); err == nil {
			err = whole.finish()
		}
	}
	if err == nil {
		c.lintTree(whole)
	}
	return err
}

// Check looks at what does not need the archive.
func (o Options) Check() error {
	if o.Kind != "" && !o.Kind.Valid() {
		return dsec.Invalid("kind", "want %s, %s or %s", dsec.LayerBase, dsec.LayerWorkspace, dsec.LayerToolkit)
	}
	if o.At == "" {
		return nil
	}
	if o.Kind == "" || o.Kind == dsec.LayerBase {
		return dsec.Invalid("at", "a base is a whole root file system, want it empty")
	}
	if !strings.HasPrefix(o.At, "/") {
		return dsec.Invalid("at", "want an absolute path")
	}
	parts, err := splitPath(o.At)
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return &dsec.Error{Code: e.Code, Field: "at", Message: e.Message}
	}
	if len(parts) > 0 && slices.Contains(mountPoints, parts[0]) {
		return dsec.Invalid("at", "below /%s nothing of a layer is seen: the platform mounts there", parts[0])
	}
	return err
}

// read makes the tree of an archive: its own, or that of an image in it.
func (c *converter) read(archive io.Reader) (*tree, Result, error) {
	if len(c.sel) > 512 {
		return nil, Result{}, dsec.Invalid("select", "%d bytes, want a tag or a digest", len(c.sel))
	}
	t := newTree(c, 0)
	if c.diffs > 0 {
		return t, Result{Source: SourcePack}, c.readDiffs(t, archive)
	}
	if err := c.readArchive(t, archive); err != nil {
		return nil, Result{}, err
	}
	source, err := c.sourceOf(t)
	if err != nil {
		return nil, Result{}, err
	}
	if source == SourceRootFS {
		if err := c.early.sameAs(nil); err != nil {
			return nil, Result{}, err
		}
		if c.sel != "" {
			return nil, Result{}, dsec.Invalid("select", "a root file system archive holds no images to select from, want it empty")
		}
		return t, Result{Source: source}, nil
	}
	img, err := c.selectImage(t, source)
	if err == nil {
		err = c.early.sameAs(img)
	}
	if err != nil {
		return nil, Result{}, err
	}
	c.findings.init() // those so far are of the archive's own files
	merged, err := c.merge(img)
	return merged, Result{Source: source, Config: img.config}, err
}

// identity is put into the image as its UUID, so that two images of the same
// files but of another kind or configuration have different digests.
func identity(kind dsec.LayerKind, cfg Config) (id [16]byte) {
	doc, err := json.Marshal(cfg)
	if err != nil {
		panic(err) // strings only
	}
	if kind != "" && kind != dsec.LayerBase {
		doc = append(doc, kind...)
	}
	sum := sha256.Sum256(doc)
	copy(id[:], sum[:])
	return id
}

// converter is the state of one conversion.
type converter struct {
	sel      string // the image wanted
	limits   Limits
	upper    bool // the layer goes on others, and may hide what they have
	diffs    int  // of upper directories, which the archive is
	kind     dsec.LayerKind
	at       string
	scratch  *spool
	image    *imageFile   // that content is placed in
	images   []*imageFile // all that were begun
	cuts     cuts
	findings findings
	early    early
	devices  map[string]func(t *tree, dir *inode, name []string) error // by the names of nodes: what to make of another one
	dirs     int                                                       // made so far
	runs     int                                                       // of finish

	came     atomic.Int64 // bytes of the archive as it came in
	sparse   int64        // bytes of sparse files, holes counted
	content  atomic.Int64 // bytes of tar streams read; a layer's are counted beside those of the archive that it is in
	entries  int64
	metadata int64 // bytes of names, targets, attributes
}

// section is the start of a regular file's content.
func (c *converter) section(n *inode, size int64) *io.SectionReader {
	if n.image != nil {
		return io.NewSectionReader(n.image, n.off, min(n.size, size))
	}
	return io.NewSectionReader(c.scratch, n.off, min(n.size, size))
}

// readFile reads the start of a regular file's content.
func (c *converter) readFile(n *inode, size int64) ([]byte, error) {
	if n.image != nil {
		if err := n.image.sync(); err != nil {
			return nil, err
		}
	}
	b := make([]byte, min(n.size, size))
	_, err := io.ReadFull(c.section(n, size), b)
	return b, err
}

func (c *converter) addEntry(n int64) error {
	if c.entries += n; c.entries > c.limits.Entries {
		return dsec.Invalid("data", "more than %d entries", c.limits.Entries)
	}
	return nil
}

func (c *converter) addMetadata(n int) error {
	if c.metadata += int64(n); c.metadata > c.limits.MetadataBytes {
		return dsec.Invalid("data", "names and attributes take more than %d bytes", c.limits.MetadataBytes)
	}
	return nil
}

// addSparse counts a sparse file that was read: a few bytes can say any number of holes.
func (c *converter) addSparse(n int64) error {
	c.sparse += n
	if came := c.came.Load(); c.sparse > ratioFloor && c.sparse/c.limits.Ratio > came {
		return dsec.Invalid("data", "sparse files of %d bytes in %d bytes of archive, want at most %d times as many", c.sparse, came, c.limits.Ratio)
	}
	return nil
}

func (c *converter) addContent(n int64) error {
	if n < 0 || n > c.limits.ContentBytes || c.content.Add(n) > c.limits.ContentBytes {
		return dsec.Invalid("data", "more than %d bytes after decompression", c.limits.ContentBytes)
	}
	return nil
}
