package convert

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/opendsec/dsec"
)

// merge applies the layers of an image, lowest first, to a tree of their own. Those
// that were applied early are.
func (c *converter) merge(img *image) (*tree, error) {
	e := &c.early
	if e.next == 0 {
		c.beginImage(img)
	}
	for e.img = img; e.next < len(img.layers); {
		b := img.layers[e.next]
		if err := c.applyNext(func(t *tree) error { return c.mergeLayer(t, b) }); err != nil {
			return nil, err
		}
	}
	c.findings = e.findings
	return e.tree, nil
}

// place is that of a layer in the image, for messages.
func (img *image) place(i int) string { return fmt.Sprintf("layer %d of %d: ", i+1, len(img.layers)) }

func (c *converter) mergeLayer(t *tree, b blob) error {
	if err := c.keepFile(b.file); err != nil {
		return err
	}
	return c.applyLayer(t, b, c.section(b.file, b.size))
}

// applyLayer applies a layer that is read once, by which it is verified too.
func (c *converter) applyLayer(t *tree, b blob, blob io.Reader) error {
	raw := &hashed{r: blob, h: newHasher()}
	defer raw.h.stop()
	src := &source{c: c}
	err := c.applyStream(t, src, raw)
	// A blob that is not what it should be is damaged, whatever its content led to.
	if _, e := io.CopyBuffer(discard{}, raw, make([]byte, copySize)); e != nil {
		return cmp.Or(err, e)
	}
	digest := raw.h.sum()
	switch {
	case b.digest != "" && digest != b.digest:
		return dsec.Invalid("data", "%s has digest %s", b.what, digest)
	case err != nil:
		return err
	case src.hash != nil: // it was compressed
		digest = src.hash.sum()
	}
	if digest != b.diffID {
		return dsec.Invalid("data", "%s unpacks to digest %s, the configuration says %s", b.what, digest, b.diffID)
	}
	c.cuts.last = src.total
	return nil
}

// applyStream applies the tar stream that raw holds, to its end. It returns when
// nothing reads raw any more.
func (c *converter) applyStream(t *tree, src *source, raw io.Reader) error {
	in, done, err := c.open(raw)
	if err != nil {
		return err
	}
	defer done()
	src.r = in
	if _, packed := in.(unpacked); packed {
		src.hash = newHasher()
		defer src.hash.stop()
	}
	if err := c.apply(t, src, true); err != nil {
		return err
	}
	_, err = io.CopyBuffer(discard{}, src, make([]byte, copySize))
	return err
}

func sum(h []byte) string { return "sha256:" + hex.EncodeToString(h) }

func digestOf(doc []byte) string {
	h := sha256.Sum256(doc)
	return sum(h[:])
}

// forThisNode reports whether an image may run here. What says nothing may.
func forThisNode(p *v1.Platform) bool {
	return p == nil || (p.OS == "" || p.OS == "linux") && (p.Architecture == "" || p.Architecture == runtime.GOARCH)
}

func thisPlatform() string { return "linux/" + runtime.GOARCH }

// pick finds the one image meant. names holds for each image its digest and
// its names; select may leave out the registry or all but the tag.
func pick(names [][]string, sel string) (int, error) {
	var found []int
	for i, all := range names {
		again := func(j int) bool { return all[0] != "" && names[j][0] == all[0] } // the same image, listed twice
		if (sel == "" || slices.ContainsFunc(all, func(n string) bool { return n != "" && means(n, sel) })) && !slices.ContainsFunc(found, again) {
			found = append(found, i)
		}
	}
	if len(found) == 1 {
		return found[0], nil
	}
	var have []string
	for _, all := range names {
		for _, n := range slices.Backward(all) {
			if n != "" && len(have) < 20 {
				have = append(have, quote(n))
				break
			}
		}
	}
	list := strings.Join(have, ", ")
	switch {
	case len(names) == 0:
		return 0, dsec.Invalid("data", "the archive holds no image for %s", thisPlatform())
	case sel == "":
		return 0, dsec.Invalid("select", "the archive holds %d images, want one of: %s", len(found), list)
	case len(found) == 0:
		return 0, dsec.Invalid("select", "no image %s, want one of: %s", quote(sel), list)
	}
	return 0, dsec.Invalid("select", "%s means %d images, want one of: %s", quote(sel), len(found), list)
}

// means reports whether sel means the image that name names.
func means(name, sel string) bool {
	return name == sel || strings.HasSuffix(name, "/"+sel) || !strings.Contains(sel, "/") && strings.HasSuffix(name, ":"+sel)
}
