// Package export makes of layers an image that other tools run: the tar stream of
// an OCI layout, with each layer as one of the image's.
//
// Layers are read twice, once to know digests and sizes, which stand in front of
// what they are of, and once to send them. Nothing is kept in between, and the
// same layers give the same bytes. Tar streams are not compressed: then their
// digests do not depend on a compressor.
//
//	img, err := export.Plan(ctx, layers)
//	err = img.Write(ctx, w) // img.Size bytes
package export

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"runtime"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec/internal/layer/convert"
	"github.com/opendsec/dsec/internal/layer/upper"
)

// Layer is one layer to be exported: a file system as go-erofs shows it, whose
// files tell owner, links and attributes by what Sys gives, an *erofs.Stat.
type Layer struct {
	Digest string
	FS     fs.FS
	Config convert.Config
}

// Image is a layout that can be written.
type Image struct {
	Digest string // sha256:<hex> of the manifest
	Size   int64  // bytes of the stream

	layers []Layer
	descs  []v1.Descriptor
	docs   []document // what is not a layer, in the order of the stream
}

type document struct {
	name string
	data []byte
}

// Plan reads the layers, lowest first, and says what the image will be. An error is
// unsupported where a layer has what a layer of an image cannot have.
func Plan(ctx context.Context, layers []Layer) (*Image, error) {
	img := &Image{layers: layers}
	var cfg convert.Config // of one layer it is to the letter that layer's: a part of what its digest is of
	for _, l := range layers {
		cfg = cfg.Under(l.Config)
	}
	cf := v1.ConfigFile{
		OS: "linux", Architecture: runtime.GOARCH,
		Config: v1.Config{Env: cfg.Env, User: cfg.User, WorkingDir: cfg.Workdir, Entrypoint: cfg.Entrypoint, Cmd: cfg.Cmd},
		RootFS: v1.RootFS{Type: "layers"},
	}
	for _, l := range layers {
		sum := &counter{h: sha256.New()}
		if err := writeLayer(ctx, sum, l); err != nil {
			return nil, err
		}
		h := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.h.Sum(nil))}
		img.descs = append(img.descs, v1.Descriptor{MediaType: types.OCIUncompressedLayer, Digest: h, Size: sum.n})
		cf.RootFS.DiffIDs = append(cf.RootFS.DiffIDs, h)
	}
	config, err := json.Marshal(cf)
	if err != nil {
		return nil, err
	}
	manifest, err := json.Marshal(v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Config: describe(config, types.OCIConfigJSON), Layers: img.descs,
	})
	if err != nil {
		return nil, err
	}
	top := describe(manifest, types.OCIManifestSchema1)
	index, err := json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{top}})
	if err != nil {
		return nil, err
	}
	img.Digest = top.Digest.String()
	img.docs = []document{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", index},
		{blobName(top.Digest), manifest}, {blobName(describe(config, "").Digest), config},
	}
	return img, img.measure()
}

func describe(doc []byte, kind types.MediaType) v1.Descriptor {
	sum := sha256.Sum256(doc)
	return v1.Descriptor{MediaType: kind, Size: int64(len(doc)), Digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}}
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// header is that of a file of the layout.
func header(name string, size int64) *tar.Header {
	return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
}

const tarBlock = 512

// measure adds up the stream.
func (img *Image) measure() error {
	img.Size = 2 * tarBlock // the end
	add := func(name string, size int64) error {
		var b bytes.Buffer
		err := tar.NewWriter(&b).WriteHeader(header(name, size))
		img.Size += int64(b.Len()) + (size+tarBlock-1)/tarBlock*tarBlock
		return err
	}
	for _, d := range img.docs {
		if err := add(d.name, int64(len(d.data))); err != nil {
			return err
		}
	}
	for _, d := range img.unique() {
		if err := add(blobName(img.descs[d].Digest), img.descs[d].Size); err != nil {
			return err
		}
	}
	return nil
}

// unique are the layers, without those whose like is there already.
func (img *Image) unique() (list []int) {
	seen := map[v1.Hash]bool{}
	for i, d := range img.descs {
		if !seen[d.Digest] {
			list = append(list, i)
		}
		seen[d.Digest] = true
	}
	return list
}

// Write writes the layout.
func (img *Image) Write(ctx context.Context, out io.Writer) error {
	w := tar.NewWriter(out)
	for _, d := range img.docs {
		if err := w.WriteHeader(header(d.name, int64(len(d.data)))); err != nil {
			return err
		}
		if _, err := w.Write(d.data); err != nil {
			return err
		}
	}
	for _, i := range img.unique() {
		d := img.descs[i]
		if err := w.WriteHeader(header(blobName(d.Digest), d.Size)); err != nil {
			return err
		}
		sum := &counter{h: sha256.New(), w: w}
		if err := writeLayer(ctx, sum, img.layers[i]); err != nil {
			return err
		}
		if got := hex.EncodeToString(sum.h.Sum(nil)); got != d.Digest.Hex {
			return fmt.Errorf("layer %s is another than it was a moment ago", img.layers[i].Digest)
		}
	}
	return w.Close()
}

// counter hashes and counts what it passes on.
type counter struct {
	h hash.Hash
	w io.Writer // nil: nowhere
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.h.Write(p)
	c.n += int64(len(p))
	if c.w == nil {
		return len(p), nil
	}
	return c.w.Write(p)
}

// WriteDiff writes a layer as a tar stream of the form that package upper has, without
// what is to be left out.
func WriteDiff(ctx context.Context, w io.Writer, l Layer, scrub upper.Scrub) (upper.Report, error) {
	tw := tar.NewWriter(w)
	filter, err := upper.NewFilter(tw, &scrub)
	if err != nil {
		return upper.Report{}, err
	}
	err = (&layerWriter{Filter: filter, tw: tw, diff: true}).write(ctx, l)
	return filter.Report, err
}

// writeLayer writes one layer as a tar stream of an image.
func writeLayer(ctx context.Context, w io.Writer, l Layer) error {
	tw := tar.NewWriter(w)
	all, err := upper.NewFilter(tw, nil)
	if err != nil {
		return err
	}
	return (&layerWriter{Filter: all, tw: tw}).write(ctx, l)
}

// write writes a layer to its end. The file system's library reads what a stranger's
// archive was made into; where it fails in its own way, so does this.
func (t *layerWriter) write(ctx context.Context, l Layer) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("read layer %s: panic: %v", l.Digest, p)
		}
	}()
	t.ctx, t.fs, t.first, t.buf = ctx, l.FS, map[int64]string{}, make([]byte, 256<<10)
	root, err := fs.Stat(l.FS, ".")
	if err == nil && !root.IsDir() {
		err = errors.New("its root is no directory")
	}
	if err == nil {
		err = t.dir(".", root, upper.Inside{})
	}
	if err != nil {
		return fmt.Errorf("read layer %s: %w", l.Digest, err)
	}
	return t.tw.Close()
}
