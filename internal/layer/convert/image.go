package convert

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
)

// image is one image of an archive that may hold several.
type image struct {
	config Config
	layers []blob
}

// blob is a file of the archive with what its documents say about it. An empty
// digest is not said.
type blob struct {
	what   string // for messages
	file   *inode // nil: not there yet
	size   int64  // of the file
	digest string // of the blob
	diffID string // of the tar stream in it
}

// Names that make an archive more than a root file system.
const (
	layoutFile   = "oci-layout"
	indexFile    = "index.json"
	manifestFile = "manifest.json"
)

// sourceOf tells what the archive's tree is.
func (c *converter) sourceOf(t *tree) (string, error) {
	if doc, err := c.document(t, layoutFile); err == nil && doc != nil {
		var layout struct {
			Version string `json:"imageLayoutVersion"`
		}
		if json.Unmarshal(doc, &layout) == nil && layout.Version != "" {
			if major, _, _ := strings.Cut(layout.Version, "."); major != "1" {
				return "", dsec.Invalid("data", "OCI layout of version %s, want 1", quote(layout.Version))
			}
			return SourceOCILayout, nil
		}
	}
	if doc, err := c.document(t, manifestFile); err == nil && doc != nil {
		var m []dockerManifest
		if json.Unmarshal(doc, &m) == nil && len(m) > 0 && m[0].Config != "" {
			if n, err := t.lookup(documentPath(m[0].Config), true); err == nil && n != nil {
				return SourceDockerArchive, nil
			}
		}
	}
	return SourceRootFS, nil
}

func documentPath(name string) []string {
	parts, err := splitPath(name)
	if err != nil {
		return []string{"\x00"} // no file has that name
	}
	return parts
}

// file finds a regular file of the archive. It returns nil if there is none.
func (t *tree) file(name string) (*inode, error) {
	parts, err := splitPath(name)
	if err != nil {
		return nil, err
	}
	n, err := t.lookup(parts, true)
	if err != nil || n == nil || !n.isRegular() {
		return nil, err
	}
	return n, nil
}

// missing is the error of a file that an image needs: what is in its place, where
// something is.
func (t *tree) missing(what, name string) error {
	if parts, err := splitPath(name); err == nil {
		if n, err := t.lookup(parts, true); err == nil && n != nil {
			kind := "no regular file"
			if n.isDir() {
				kind = "a directory"
			}
			return dsec.Invalid("data", "%s is %s, want a file", what, kind)
		}
	}
	return dsec.Invalid("data", "%s is missing", what)
}

// document reads a small file of the archive; nil if there is none.
func (c *converter) document(t *tree, name string) ([]byte, error) {
	n, err := t.file(name)
	if err != nil || n == nil {
		return nil, err
	}
	return c.readDocument(blob{what: quote(name), file: n, size: n.size})
}

func (c *converter) readDocument(b blob) ([]byte, error) {
	if b.size > c.limits.DocumentBytes {
		return nil, dsec.Invalid("data", "%s has %d bytes, want at most %d", b.what, b.size, c.limits.DocumentBytes)
	}
	if err := c.keepFile(b.file); err != nil {
		return nil, err
	}
	doc, err := c.readFile(b.file, b.size)
	if err != nil {
		return nil, err
	}
	if b.digest != "" {
		if got := digestOf(doc); got != b.digest {
			return nil, dsec.Invalid("data", "%s has digest %s, want %s", b.what, got, b.digest)
		}
	}
	return doc, nil
}

func (c *converter) selectImage(t *tree, source string) (*image, error) {
	if source == SourceOCILayout {
		return c.selectOCI(t, c.sel, false)
	}
	return c.selectDocker(t, c.sel)
}

// dockerManifest is one item of a docker-archive's manifest.json.
type dockerManifest struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (c *converter) selectDocker(t *tree, sel string) (*image, error) {
	doc, err := c.document(t, manifestFile)
	if err != nil {
		return nil, err
	}
	var all []dockerManifest
	if err := json.Unmarshal(doc, &all); err != nil {
		return nil, dsec.Invalid("data", "manifest.json: %v", err)
	}
	names := make([][]string, len(all))
	for i, m := range all {
		names[i] = append([]string{configDigest(m.Config)}, m.RepoTags...)
	}
	i, err := pick(names, sel)
	if err != nil {
		return nil, err
	}
	return c.dockerImage(t, all[i])
}

func (c *converter) dockerImage(t *tree, m dockerManifest) (*image, error) {
	n, err := t.file(m.Config)
	if err != nil {
		return nil, err
	}
	if n == nil {
		return nil, t.missing("the configuration "+quote(m.Config), m.Config)
	}
	doc, err := c.readDocument(blob{what: "the configuration " + quote(m.Config), file: n, size: n.size, digest: configDigest(m.Config)})
	if err != nil {
		return nil, err
	}
	img := &image{}
	for _, name := range m.Layers {
		n, err := t.file(name)
		if err != nil {
			return nil, err
		}
		if n == nil {
			return nil, t.missing("the layer "+quote(name), name)
		}
		b := blob{what: "the layer " + quote(name), file: n, size: n.size}
		if hex, ok := strings.CutPrefix(name, "blobs/sha256/"); ok {
			b.digest = "sha256:" + hex
		}
		img.layers = append(img.layers, b)
	}
	return img, c.fill(img, doc)
}

// configDigest is what the name of a docker-archive's configuration says of
// its content: <hex>.json, or blobs/sha256/<hex>.
func configDigest(name string) string {
	h, err := v1.NewHash("sha256:" + strings.TrimSuffix(path.Base(name), ".json"))
	if err != nil {
		return ""
	}
	return h.String()
}

// Names of an image in an OCI layout's index.
const (
	annotationRef  = "org.opencontainers.image.ref.name"
	annotationName = "io.containerd.image.name"
)

// selectOCI finds the image that is meant. Early, its layers may be missing.
func (c *converter) selectOCI(t *tree, sel string, early bool) (*image, error) {
	doc, err := c.document(t, indexFile)
	if err != nil {
		return nil, err
	}
	if doc == nil {
		return nil, t.missing("index.json of the OCI layout", indexFile)
	}
	index, err := v1.ParseIndexManifest(bytes.NewReader(doc))
	if err != nil {
		return nil, dsec.Invalid("data", "index.json: %v", err)
	}
	var names [][]string
	var descs []v1.Descriptor
	for _, d := range index.Manifests {
		if isImage(d.MediaType) && forThisNode(d.Platform) {
			descs = append(descs, d)
			names = append(names, []string{d.Digest.String(), d.Annotations[annotationName], d.Annotations[annotationRef]})
		}
	}
	i, err := pick(names, sel)
	if err != nil {
		return nil, err
	}
	return c.ociImage(t, descs[i], early)
}

// IsLayer reports whether a layer of this type is a tar archive, whose compression its
// content tells: what the type says of it is wrong in images that somebody packed
// anew. A layer that may not be distributed with its image is one like others where
// it is there.
func IsLayer(m types.MediaType) bool {
	base := string(m)
	for _, packed := range []string{"+gzip", "+zstd", ".gzip", ".zstd"} {
		base = strings.TrimSuffix(base, packed)
	}
	switch base {
	case "application/vnd.oci.image.layer.v1.tar", "application/vnd.oci.image.layer.nondistributable.v1.tar",
		"application/vnd.docker.image.rootfs.diff.tar", "application/vnd.docker.image.rootfs.foreign.diff.tar":
		return true
	}
	return false
}

func isImage(m types.MediaType) bool { return m == "" || m.IsImage() || m.IsIndex() }

// ociImage follows a descriptor, through an index of platforms if it is one.
func (c *converter) ociImage(t *tree, d v1.Descriptor, early bool) (*image, error) {
	doc, err := c.ociDocument(t, "manifest", d)
	if err != nil {
		return nil, err
	}
	if d.MediaType.IsIndex() {
		index, err := v1.ParseIndexManifest(bytes.NewReader(doc))
		if err != nil {
			return nil, dsec.Invalid("data", "index %s: %v", d.Digest, err)
		}
		d, err = c.pickPlatform(index)
		if err != nil {
			return nil, err
		}
		if doc, err = c.ociDocument(t, "manifest", d); err != nil {
			return nil, err
		}
	}
	m, err := v1.ParseManifest(bytes.NewReader(doc))
	if err != nil {
		return nil, dsec.Invalid("data", "manifest %s: %v", d.Digest, err)
	}
	config, err := c.ociDocument(t, "configuration", m.Config)
	if err != nil {
		return nil, err
	}
	img := &image{}
	for i, l := range m.Layers {
		if l.MediaType != "" && !IsLayer(l.MediaType) {
			return nil, &dsec.Error{Code: dsec.CodeUnsupported, Field: "data", Message: fmt.Sprintf(
				"layer %d of %d is of type %s, want a tar archive as OCI or Docker has it (plain, gzip or zstd, not encrypted)", i+1, len(m.Layers), quote(string(l.MediaType)))}
		}
		b, err := c.ociBlob(t, "layer", l, early)
		if err != nil {
			return nil, err
		}
		img.layers = append(img.layers, b)
	}
	return img, c.fill(img, config)
}

func (c *converter) pickPlatform(index *v1.IndexManifest) (v1.Descriptor, error) {
	var found []v1.Descriptor
	for _, d := range index.Manifests {
		if d.MediaType.IsImage() && forThisNode(d.Platform) {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return v1.Descriptor{}, dsec.Invalid("data", "the image's index has %d images for %s, want one", len(found), thisPlatform())
	}
	return found[0], nil
}

func (c *converter) ociDocument(t *tree, what string, d v1.Descriptor) ([]byte, error) {
	b, err := c.ociBlob(t, what, d, false)
	if err != nil {
		return nil, err
	}
	return c.readDocument(b)
}

// ociBlob finds a blob of the layout, which early may be missing, and checks its size;
// its digest is checked when it is read.
func (c *converter) ociBlob(t *tree, what string, d v1.Descriptor, early bool) (blob, error) {
	if d.Digest.Algorithm != "sha256" {
		return blob{}, dsec.Invalid("data", "%s with digest %s, want sha256", what, quote(d.Digest.String()))
	}
	name := "blobs/sha256/" + d.Digest.Hex
	n, err := t.file(name)
	if err != nil {
		return blob{}, err
	}
	b := blob{what: what + " " + d.Digest.String(), file: n, size: d.Size, digest: d.Digest.String()}
	switch {
	case n == nil && !early:
		return b, t.missing("the "+b.what, name)
	case n != nil && n.size != d.Size:
		return b, dsec.Invalid("data", "the %s has %d bytes, its descriptor says %d", b.what, n.size, d.Size)
	}
	return b, nil
}

// fill takes what an image's configuration says: defaults of sandboxes and
// the digests of the layers' tar streams.
func (c *converter) fill(img *image, doc []byte) error {
	if len(img.layers) > c.limits.Layers {
		return dsec.Invalid("data", "%d layers, want at most %d", len(img.layers), c.limits.Layers)
	}
	cf, err := v1.ParseConfigFile(bytes.NewReader(doc))
	if err != nil {
		return dsec.Invalid("data", "image configuration: %v", err)
	}
	if !forThisNode(&v1.Platform{OS: cf.OS, Architecture: cf.Architecture}) {
		return dsec.Errorf(dsec.CodeUnsupported, "the image is for %s, this node runs %s", quote(cf.OS+"/"+cf.Architecture), thisPlatform())
	}
	if len(cf.RootFS.DiffIDs) != len(img.layers) {
		return dsec.Invalid("data", "the configuration names %d layers, the manifest %d", len(cf.RootFS.DiffIDs), len(img.layers))
	}
	for i, id := range cf.RootFS.DiffIDs {
		if id.Algorithm != "sha256" {
			return dsec.Invalid("data", "layer %d: diff_id %s, want sha256", i, quote(id.String()))
		}
		img.layers[i].diffID = id.String()
	}
	img.config, err = newConfig(cf.Config)
	return err
}
