package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/convert"
)

// Image is one image of a registry, of which only the manifest was fetched.
type Image struct {
	Ref    Reference // in full
	Digest string    // of the manifest, which is of one platform
	Size   int64     // of manifest, configuration and layers as they are sent

	c        *Client
	req      Request
	manifest []byte
	blobs    []v1.Descriptor // configuration and layers, each once
	sources  []*source       // the one that had the manifest first
}

// source is where an image may be had: a mirror or the registry itself. It is
// used by one goroutine at a time.
type source struct {
	mirror
	repo string

	mu     sync.Mutex   // held while one fetch logs in for all
	base   string       // of URLs; set with client, and not changed
	client *http.Client // nil until the first use
}

// accept are the manifests that are read.
var accept = strings.Join([]string{
	string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
}, ", ")

// Resolve finds the image that a reference is for a platform. Errors that the
// registry caused are of the field ref: invalid, unauthenticated, denied,
// not_found, unsupported, exhausted or unavailable.
func (c *Client) Resolve(ctx context.Context, req Request) (*Image, error) {
	ref, err := ParseReference(req.Ref, c.cfg.Default)
	if err != nil {
		return nil, err
	}
	want, err := parsePlatform(req.Platform)
	if err != nil {
		return nil, err
	}
	img := &Image{Ref: ref, c: c, req: req}
	for _, m := range append(slices.Clone(c.mirrors[ref.Host]), mirror{host: ref.Host, plain: c.plain(ref.Host)}) {
		img.sources = append(img.sources, &source{mirror: m, repo: m.repository(ref.Repository)})
	}
	for i, s := range img.sources {
		var doc []byte
		if doc, err = img.pick(ctx, s, want); err != nil {
			if e := typed(s.host, "image "+ref.String(), err); i == len(img.sources)-1 || ctx.Err() != nil {
				return nil, e
			}
			c.log.Info("mirror has not the image", "mirror", s.host, "ref", ref.String(), "err", err)
			continue
		}
		img.sources[0], img.sources[i] = img.sources[i], img.sources[0]
		return img, img.read(doc)
	}
	return nil, err // not reached: there is at least one source
}

// plain reports whether a host may be spoken to without TLS.
func (c *Client) plain(host string) bool {
	name, _, _ := strings.Cut(host, ":")
	return c.policy.insecure[host] || c.policy.insecure[name]
}

func parsePlatform(s string) (v1.Platform, error) {
	if s == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	parts := strings.Split(s, "/")
	if len(parts) < 2 || len(parts) > 3 || slices.Contains(parts, "") || len(s) > 64 {
		return v1.Platform{}, dsec.Invalid("platform", "%.100q: want os/architecture or os/architecture/variant", s)
	}
	p := v1.Platform{OS: parts[0], Architecture: parts[1]}
	if len(parts) == 3 {
		p.Variant = parts[2]
	}
	if p.OS != "linux" || p.Architecture != runtime.GOARCH {
		return p, &dsec.Error{Code: dsec.CodeUnsupported, Field: "platform", Message: fmt.Sprintf("%s does not run here, want linux/%s", p, runtime.GOARCH)}
	}
	return p, nil
}

// pick fetches the manifest for one platform, through an index where there is one.
func (img *Image) pick(ctx context.Context, s *source, want v1.Platform) ([]byte, error) {
	by := img.Ref.Digest
	if by == "" {
		by = img.Ref.Tag
	}
	doc, kind, err := img.document(ctx, s, by)
	if err != nil {
		return nil, err
	}
	if kind.IsIndex() {
		index, err := v1.ParseIndexManifest(bytes.NewReader(doc))
		if err != nil {
			return nil, dsec.Invalid("ref", "its index is damaged: %v", err)
		}
		d, err := choose(index, want)
		if err != nil {
			return nil, err
		}
		if doc, kind, err = img.document(ctx, s, d.Digest.String()); err != nil {
			return nil, err
		}
		if int64(len(doc)) != d.Size {
			return nil, dsec.Invalid("ref", "manifest %s has %d bytes, its index says %d", d.Digest, len(doc), d.Size)
		}
	}
	if !kind.IsImage() {
		return nil, unsupported("its manifest is of type %.100q", kind)
	}
	img.Digest = digestOf(doc)
	return doc, nil
}

func unsupported(format string, args ...any) error {
	return &dsec.Error{Code: dsec.CodeUnsupported, Field: "ref", Message: fmt.Sprintf(format, args...) + ", want an image of Docker's second schema or OCI's"}
}

// choose finds the image of a platform. Of several variants, where none was asked
// for, it is the one that says none, which runs on all.
func choose(index *v1.IndexManifest, want v1.Platform) (v1.Descriptor, error) {
	var found []v1.Descriptor
	for _, d := range index.Manifests {
		if d.MediaType.IsImage() && d.Platform != nil && d.Platform.Satisfies(want) {
			found = append(found, d)
		}
	}
	if len(found) == 0 {
		return v1.Descriptor{}, &dsec.Error{Code: dsec.CodeUnsupported, Field: "ref", Message: fmt.Sprintf("it has no image for %s", want)}
	}
	d := slices.MinFunc(found, func(a, b v1.Descriptor) int { return strings.Compare(a.Platform.Variant, b.Platform.Variant) })
	if d.Digest.Algorithm != "sha256" {
		return d, unsupported("its manifest has digest %.100q", d.Digest)
	}
	return d, nil
}

// document fetches a manifest or an index by tag or digest, and tells what it is
// by its own word, which the digest covers, before the answer's header.
func (img *Image) document(ctx context.Context, s *source, by string) (doc []byte, kind types.MediaType, err error) {
	err = img.c.again(ctx, func() error {
		doc, kind, err = nil, "", img.c.login(ctx, img, s)
		if err != nil {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+"/manifests/"+by, nil)
		if err != nil {
			return err
		}
		req.Header.Set("Accept", accept)
		res, err := s.client.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = res.Body.Close() }()
		if res.StatusCode != http.StatusOK {
			return status(res)
		}
		stop := img.c.watch(res.Body)
		doc, err = io.ReadAll(io.LimitReader(res.Body, maxManifest+1))
		stop()
		if err != nil {
			return err
		}
		if len(doc) > maxManifest {
			return dsec.Invalid("ref", "its manifest has more than %d bytes", maxManifest)
		}
		kind, err = kindOf(doc, types.MediaType(res.Header.Get("Content-Type")))
		if err == nil {
			err = sameDigest(doc, by, res.Header.Get("Docker-Content-Digest"))
		}
		return err
	})
	return doc, kind, err
}

// sameDigest checks a document against the digest by which it was asked for, and
// against the one that the registry says it has.
func sameDigest(doc []byte, by, said string) error {
	got := digestOf(doc)
	for _, want := range []string{by, said} {
		if digestForm.MatchString(want) && want != got {
			return dsec.Invalid("ref", "the registry sent a manifest with digest %s, want %s", got, want)
		}
	}
	return nil
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// kindOf tells what a document is. One that could be taken for either of two kinds
// is neither.
func kindOf(doc []byte, header types.MediaType) (types.MediaType, error) {
	var m struct {
		Schema    int             `json:"schemaVersion"`
		MediaType types.MediaType `json:"mediaType"`
		Config    json.RawMessage `json:"config"`
		Layers    json.RawMessage `json:"layers"`
		Manifests json.RawMessage `json:"manifests"`
	}
	if err := json.Unmarshal(doc, &m); err != nil {
		return "", dsec.Invalid("ref", "its manifest is damaged: %v", err)
	}
	kind := m.MediaType
	if kind == "" {
		base, _, _ := strings.Cut(string(header), ";")
		kind = types.MediaType(strings.TrimSpace(base))
	}
	image, index := m.Config != nil || m.Layers != nil, m.Manifests != nil
	switch {
	case m.Schema == 1:
		return "", unsupported("its manifest is of Docker's first schema")
	case image && index, image && !kind.IsImage(), index && !kind.IsIndex(), !image && !index:
		return "", unsupported("its manifest says type %.100q and is another", kind)
	}
	return kind, nil
}

// read takes from the manifest what is to be fetched.
func (img *Image) read(doc []byte) error {
	m, err := v1.ParseManifest(bytes.NewReader(doc))
	if err != nil {
		return dsec.Invalid("ref", "its manifest is damaged: %v", err)
	}
	if !m.Config.MediaType.IsConfig() {
		return unsupported("its configuration is of type %.100q", m.Config.MediaType)
	}
	if len(m.Layers) > maxLayers {
		return dsec.Invalid("ref", "it has %d layers, want at most %d", len(m.Layers), maxLayers)
	}
	img.manifest, img.Size = doc, int64(len(doc))
	seen := map[v1.Hash]int64{}
	for i, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if i > 0 && !convert.IsLayer(d.MediaType) {
			return unsupported("layer %d is of type %.100q", i-1, d.MediaType)
		}
		if d.Digest.Algorithm != "sha256" {
			return unsupported("a layer has digest %.100q", d.Digest)
		}
		if size, ok := seen[d.Digest]; ok && size == d.Size {
			continue
		} else if ok || d.Size < 0 || i == 0 && d.Size > maxManifest {
			return dsec.Invalid("ref", "its manifest says a size of %d bytes for %s", d.Size, d.Digest)
		}
		seen[d.Digest] = d.Size
		if d.Size > img.c.cfg.MaxBytes-img.Size {
			return dsec.Invalid("ref", "the image has more than %d bytes", img.c.cfg.MaxBytes)
		}
		img.Size += d.Size
		img.blobs = append(img.blobs, d)
	}
	return nil
}

// login makes the client of a source, with a token where the registry wants one.
func (c *Client) login(ctx context.Context, img *Image, s *source) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client != nil {
		return nil
	}
	reg, err := s.registry()
	if err != nil {
		return dsec.Invalid("ref", "%v", err)
	}
	auth, err := c.authenticator(s.mirror, img.Ref.Host, s.repo, img.req.Credentials)
	if err != nil {
		return err
	}
	rt, err := transport.NewWithContext(ctx, reg, auth, c.http, []string{"repository:" + s.repo + ":pull"})
	if err != nil {
		return err
	}
	s.base = "https://" + reg.RegistryStr() + "/v2/" + s.repo
	s.client = &http.Client{Transport: rt}
	return nil
}
