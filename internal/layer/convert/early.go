package convert

import (
	"archive/tar"
	"path"
	"reflect"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
)

// early is the image of an OCI layout whose documents came before its layers, which
// are applied as they come: no byte of them is kept in the scratch, and unpacking
// does not wait for the end of the archive. A registry's images are sent like that.
type early struct {
	tries    int // to find out which image is meant
	img      *image
	tree     *tree
	next     int // layer to be applied
	findings findings
}

// earlyTries bounds the work on an archive that does not say in time what it is.
const earlyTries = 32

// applyEarly applies a layer that is about to be read, if its turn has come, instead
// of keeping it.
func (c *converter) applyEarly(t *tree, tr *tar.Reader, hdr *tar.Header) (done bool, err error) {
	digest, ok := strings.CutPrefix(strings.TrimPrefix(path.Clean(hdr.Name), "/"), "blobs/sha256/")
	if !ok || len(digest) != 64 || isSparse(hdr) {
		return false, nil
	}
	e := &c.early
	if e.img == nil {
		if e.tries++; e.tries > earlyTries {
			return false, nil
		}
		if e.img = c.findEarly(t); e.img == nil {
			return false, nil
		}
		c.beginImage(e.img)
	}
	digest = "sha256:" + digest
	for e.next < len(e.img.layers) {
		b := &e.img.layers[e.next]
		if b.digest == digest && b.size == hdr.Size && !e.img.repeats(b.digest) {
			return true, c.applyNext(func(t *tree) error { return c.applyLayer(t, *b, tr) })
		}
		n, err := t.file("blobs/sha256/" + strings.TrimPrefix(b.digest, "sha256:"))
		if err != nil || n == nil || n.size != b.size {
			return false, nil // its turn comes when it is there
		}
		b.file = n
		if err := c.applyNext(func(t *tree) error { return c.mergeLayer(t, *b) }); err != nil {
			return false, err
		}
	}
	return false, nil
}

// findEarly is the image that is meant, as far as the archive has told; or nil.
func (c *converter) findEarly(t *tree) *image {
	source, err := c.sourceOf(t)
	if err != nil || source != SourceOCILayout {
		return nil
	}
	img, err := c.selectOCI(t, c.sel, true)
	if err != nil || len(img.layers) == 0 {
		return nil // it may yet be there; if not, the end of the archive tells why
	}
	return img
}

// repeats reports whether a layer is in the image more than once.
func (img *image) repeats(digest string) bool {
	first := slices.IndexFunc(img.layers, func(b blob) bool { return b.digest == digest })
	return slices.ContainsFunc(img.layers[first+1:], func(b blob) bool { return b.digest == digest })
}

// applyNext applies the next layer of the image.
func (c *converter) applyNext(apply func(t *tree) error) error {
	e := &c.early
	archive := c.findings // of the archive's own files
	c.findings = e.findings
	before := e.tree.root
	c.cuts.placed = c.cuts.placed[:0]
	e.tree.layer = e.next + 1
	err := prefixed(apply(e.tree), e.img.place(e.next))
	c.findings, e.findings = archive, c.findings
	e.next++
	if err == nil {
		err = c.cut(e.tree, before)
	}
	return err
}

// sameAs refuses an archive that says something else at its end than before the
// layers that were applied.
func (e *early) sameAs(img *image) error {
	same := func(a, b blob) bool { return a.digest == b.digest && a.diffID == b.diffID && a.size == b.size }
	if e.next > 0 && (img == nil || !slices.EqualFunc(e.img.layers, img.layers, same) || !reflect.DeepEqual(e.img.config, img.config)) {
		return dsec.Invalid("data", "the documents of the archive change after its layers")
	}
	return nil
}
