package layer

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// manifestVersion is that of Manifest and of Meta's file. A store also reads the
// versions 1 and 2, which had the image in one file named by its digest.
const manifestVersion = 3

// parentsVersion is that of a Manifest with parents: nodes that do not know of them
// must not take it for a whole layer.
const parentsVersion = 4

// Manifest is all that a layer is. The SHA-256 of its JSON names the layer: a
// node that trusts the digest can check every byte of it.
type Manifest struct {
	Version int            `json:"version"`
	Kind    dsec.LayerKind `json:"kind"`
	Size    int64          `json:"size"`  // bytes of the image
	Files   int64          `json:"files"` // names in it
	Config  Config         `json:"config"`
	// IndexDigest is of the index without its hole.
	IndexDigest string `json:"index_digest"`
	IndexSize   int64  `json:"index_size"`
	DataSize    int64  `json:"data_size"` // bytes; 0: no file has content
	ChunkSize   int64  `json:"chunk_size"`
	// ChunksDigest is of the SHA-256 of all chunks of data, one after another.
	ChunksDigest string `json:"chunks_digest"`
	// Parents are the layers that it goes on, lowest first, where an image became
	// several: it is what they do not have, and means nothing without them.
	Parents []string `json:"parents,omitempty"`
}

// Chain is the layer with those that it goes on, lowest first.
func (m *Meta) Chain() []string { return append(slices.Clone(m.Parents), m.Digest) }

// About is where a layer came from. It is no part of what the layer is: the same
// layer may come from several places.
type About struct {
	// Source is rootfs, oci-layout or docker-archive.
	Source       string    `json:"source"`
	SourceDigest string    `json:"source_digest"` // sha256:<hex> of the archive
	SourceSize   int64     `json:"source_size"`
	Origin       *Origin   `json:"origin,omitempty"` // where that is known
	Created      time.Time `json:"created"`
	Findings     []string  `json:"findings,omitempty"`
	Unnamed      bool      `json:"unnamed,omitempty"` // a pack that is only of the sandboxes made of it
}

// Meta is what a store knows of a layer.
type Meta struct {
	Digest string `json:"digest"`
	Manifest
	About

	// old is the image in one file, of version 1 or 2.
	old *oldImage
}

// encode gives the JSON whose digest names the layer.
func (m *Manifest) encode() (doc []byte, digest string, err error) {
	doc, err = json.Marshal(m)
	return doc, fmt.Sprintf("sha256:%x", sha256.Sum256(doc)), err
}

// decodeManifest reads a manifest that came from a store.
func decodeManifest(doc []byte, digest string) (m Manifest, err error) {
	if got := fmt.Sprintf("sha256:%x", sha256.Sum256(doc)); got != digest {
		return m, fmt.Errorf("the manifest has digest %s", got)
	}
	if err := json.Unmarshal(doc, &m); err != nil {
		return m, err
	}
	return m, m.check()
}

// check holds what came from a store against what this program can have written.
func (m *Manifest) check() error {
	switch {
	case m.Version != manifestVersion && m.Version != parentsVersion:
		return fmt.Errorf("a manifest of version %d, want %d or %d", m.Version, manifestVersion, parentsVersion)
	case (m.Version == parentsVersion) != (len(m.Parents) > 0) || len(m.Parents) >= dsec.MaxLayers:
		return fmt.Errorf("a manifest of version %d with %d parents", m.Version, len(m.Parents))
	case !m.Kind.Valid():
		return fmt.Errorf("a layer of kind %.40q", m.Kind)
	case m.Files < 0 || m.DataSize < 0 || m.DataSize%firstBlock != 0 || m.IndexSize < firstBlock || m.Size != m.DataSize+m.IndexSize:
		return fmt.Errorf("sizes of %d, %d and %d bytes do not fit", m.Size, m.IndexSize, m.DataSize)
	case m.ChunkSize < 64<<10 || m.ChunkSize > 4<<20 || m.ChunkSize&(m.ChunkSize-1) != 0:
		return fmt.Errorf("chunks of %d bytes", m.ChunkSize)
	}
	for _, d := range append([]string{m.IndexDigest, m.ChunksDigest}, m.Parents...) {
		if _, err := ParseDigest(d); err != nil {
			return fmt.Errorf("a digest %.80q", d)
		}
	}
	return m.Config.Validate()
}

// chunks is how many there are.
func (m *Manifest) chunks() int64 { return (m.DataSize + m.ChunkSize - 1) / m.ChunkSize }

// oldImage are the fields of a file of version 1 or 2 that Meta has no more.
type oldImage struct {
	Version int    `json:"version"`
	Digest  string `json:"digest"`
	Size    int64  `json:"size"`
	Files   int64  `json:"files"`
	Kind    string `json:"kind"` // of version 1: the source
	Config  Config `json:"config"`
	About
	IndexOffset int64  `json:"index_offset"`
	IndexDigest string `json:"index_digest"` // of the first block and all from IndexOffset
}

// metaBytes bounds the metadata file that is read.
const metaBytes = 8 << 20

func readMeta(path string) (Meta, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return Meta{}, err
	}
	if fi.Size() > metaBytes {
		return Meta{}, fmt.Errorf("metadata of %d bytes", fi.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return Meta{}, err
	}
	return decodeMeta(b)
}

func decodeMeta(b []byte) (Meta, error) {
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return Meta{}, err
	}
	if v.Version == 1 || v.Version == 2 {
		return decodeOldMeta(b)
	}
	var m Meta
	if err := json.Unmarshal(b, &m); err != nil {
		return m, err
	}
	if err := m.check(); err != nil {
		return m, err
	}
	_, digest, err := m.encode()
	if err == nil && digest != m.Digest {
		err = errors.New("metadata that do not have their digest")
	}
	return m, err
}

func decodeOldMeta(b []byte) (Meta, error) {
	var o oldImage
	if err := json.Unmarshal(b, &o); err != nil {
		return Meta{}, err
	}
	if o.Version == 1 {
		o.Source, o.Kind = o.Kind, string(dsec.LayerBase)
	}
	m := Meta{
		Digest:   o.Digest,
		Manifest: Manifest{Version: o.Version, Kind: dsec.LayerKind(o.Kind), Size: o.Size, Files: o.Files, Config: o.Config},
		About:    o.About,
		old:      &o,
	}
	if !m.Kind.Valid() {
		return m, fmt.Errorf("metadata of a layer of kind %.40q", o.Kind)
	}
	return m, m.Config.Validate()
}

const layersPrefix = "layers/"

// blobKey is a part of a layer in a blob store.
func blobKey(digest, part string) string {
	return layersPrefix + strings.TrimPrefix(digest, "sha256:") + "/" + part
}

// DigestOf is the layer whose data are the blob with this key, of one that Lazy
// was asked for.
func DigestOf(key string) (digest string, ok bool) {
	key, prefix := strings.CutPrefix(key, layersPrefix)
	hex, data := strings.CutSuffix(key, "/"+partData)
	digest, err := ParseDigest("sha256:" + hex)
	return digest, prefix && data && err == nil
}

// The parts of a layer in a blob store. It is there from the moment its manifest is.
const (
	partData     = "data"
	partChunks   = "chunks"
	partPacked   = "index.zst"
	partIndex    = "index" // as it is, of layers that were stored before
	partAbout    = "about"
	partTrace    = "trace" // may come later, or never
	partManifest = "manifest"
)
